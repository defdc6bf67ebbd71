package node

import (
	"cmp"
	"fmt"
	"strings"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// pathRequest is a volume and a place. id is zero for what is no volume id:
// nothing of it can be attached, but something may be mounted.
type pathRequest struct {
	id   block.VolumeID
	path string // as the mount table spells it; "" if its parent does not exist
}

// stageRequest is what a volume is to be staged as.
type stageRequest struct {
	id         block.VolumeID
	attachment block.AttachmentID // that the caller means; zero: whichever there is
	point      string             // the staging path
	access
}

// publishRequest is what is to be shown where.
type publishRequest struct {
	stageRequest
	target string
	alone  bool // no other target may have the volume
}

// access is a volume capability.
type access struct {
	raw      bool     // the device itself, else a file system
	fs       mount.FS // "": whatever there is
	flags    []string // mount options, checked
	readOnly bool
	shown    bool // read-only by a mount option: each target is, the file system is not
}

// marker is where a raw volume's node is bound while it is staged.
func (r stageRequest) marker() string { return r.point + "/device" }

func missing(what string) error { return fmt.Errorf("%w: %s is missing", block.ErrInvalid, what) }

func parseID(id string) (block.VolumeID, error) {
	if id == "" {
		return block.VolumeID{}, missing("volume id")
	}
	u, err := block.ParseUUID(id)
	if err != nil {
		return block.VolumeID{}, fmt.Errorf("%w: there is no volume %.60q", block.ErrNotFound, id) // not ErrInvalid as well
	}
	return block.VolumeID{UUID: u}, nil
}

func (s *Service) parsePath(id, path, what string) (r pathRequest, err error) {
	switch {
	case id == "":
		return r, missing("volume id")
	case path == "":
		return r, missing(what)
	}
	if u, err := block.ParseUUID(id); err == nil {
		r.id = block.VolumeID{UUID: u}
	}
	r.path, err = s.cfg.Mounter.Resolve(path)
	if isNotFound(err) {
		return r, nil
	}
	return r, err
}

// existing resolves a path whose parent must be there.
func (s *Service) existing(path, what string) (string, error) {
	if path == "" {
		return "", missing(what)
	}
	p, err := s.cfg.Mounter.Resolve(path)
	if isNotFound(err) {
		return "", fmt.Errorf("%w: %s %s: its parent directory does not exist", block.ErrPrecondition, what, path)
	}
	return p, err
}

func (s *Service) parseStage(in *csispec.NodeStageVolumeRequest) (r stageRequest, err error) {
	if in.GetVolumeId() == "" {
		return r, missing("volume id")
	}
	if in.GetStagingTargetPath() == "" {
		return r, missing("staging target path")
	}
	return s.parseStaged(in)
}

// stagedRequest is what the requests to stage and to publish have in common.
type stagedRequest interface {
	GetVolumeId() string
	GetPublishContext() map[string]string
	GetStagingTargetPath() string
	GetVolumeCapability() *csispec.VolumeCapability
	GetVolumeContext() map[string]string
}

func (s *Service) parseStaged(in stagedRequest) (r stageRequest, err error) {
	if r.access, err = parseCapability(in.GetVolumeCapability(), in.GetVolumeContext()[driver.FSTypeKey]); err != nil {
		return r, err
	}
	if in.GetStagingTargetPath() == "" {
		return r, fmt.Errorf("%w: staging target path is missing: stage the volume first", block.ErrPrecondition)
	}
	if r.id, err = parseID(in.GetVolumeId()); err != nil {
		return r, err
	}
	if r.attachment, err = parseContext(in.GetPublishContext()); err != nil {
		return r, err
	}
	r.point, err = s.existing(in.GetStagingTargetPath(), "staging target path")
	return r, err
}

func (s *Service) parsePublish(in *csispec.NodePublishVolumeRequest) (r publishRequest, err error) {
	if in.GetVolumeId() == "" {
		return r, missing("volume id")
	}
	if in.GetTargetPath() == "" {
		return r, missing("target path")
	}
	if r.stageRequest, err = s.parseStaged(in); err != nil {
		return r, err
	}
	r.readOnly = r.readOnly || r.shown || in.GetReadonly()
	r.alone = in.GetVolumeCapability().GetAccessMode().GetMode() == csispec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	r.target, err = s.existing(in.GetTargetPath(), "target path")
	if err == nil && (r.target == r.point || strings.HasPrefix(r.target, r.point+"/")) {
		err = fmt.Errorf("%w: target path %s lies in the staging target path", block.ErrInvalid, r.target)
	}
	return r, err
}

// parseCapability checks a capability and its mount options. wished is the file
// system of the volume's parameters, for a capability that names none.
func parseCapability(c *csispec.VolumeCapability, wished string) (a access, err error) {
	if c == nil {
		return a, missing("volume capability")
	}
	switch mode := c.GetAccessMode().GetMode(); mode {
	case csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csispec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csispec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	case csispec.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		a.readOnly = true
	default:
		return a, fmt.Errorf("%w: access mode %s: a volume is written to on one node only", block.ErrInvalid, mode)
	}
	switch {
	case c.GetBlock() != nil:
		a.raw = true
		return a, nil
	case c.GetMount() == nil:
		return a, missing("access type of the volume capability")
	case c.GetMount().GetVolumeMountGroup() != "":
		return a, fmt.Errorf("%w: volume mount group: this driver does not announce it", block.ErrInvalid)
	}
	a.fs, a.flags = mount.FS(strings.ToLower(cmp.Or(c.GetMount().GetFsType(), wished))), c.GetMount().GetMountFlags()
	o, err := a.options(a.fs)
	a.shown = o.ReadOnly()
	return a, err
}

// options are the mount options as a file system takes them.
func (a access) options(fs mount.FS) (mount.Options, error) {
	if fs == "" {
		fs = defaultFS
	}
	return mount.ParseOptions(fs, a.flags)
}

// parseContext reads the attachment from a publish context. Who does not pass it on means whichever there is.
func parseContext(c map[string]string) (block.AttachmentID, error) {
	text := c[driver.AttachmentKey]
	if text == "" {
		return block.AttachmentID{}, nil
	}
	u, err := block.ParseUUID(text)
	if err != nil {
		return block.AttachmentID{}, fmt.Errorf("%w: %s in the publish context is no attachment's id", block.ErrInvalid, driver.AttachmentKey)
	}
	return block.AttachmentID{UUID: u}, nil
}
