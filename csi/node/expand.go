package node

import (
	"fmt"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// expandRequest is how large a volume is to be.
type expandRequest struct {
	id              block.VolumeID
	paths           []string // where it may be mounted, the likeliest first
	required, limit int64    // bytes; 0: none
	raw             bool     // said to be
}

func (s *Service) parseExpand(in *csispec.NodeExpandVolumeRequest) (r expandRequest, err error) {
	if in.GetVolumeId() == "" {
		return r, missing("volume id")
	}
	if in.GetVolumePath() == "" {
		return r, missing("volume path")
	}
	c := in.GetCapacityRange()
	r.required, r.limit = c.GetRequiredBytes(), c.GetLimitBytes()
	if r.required < 0 || r.limit < 0 || r.limit > 0 && r.limit < r.required {
		return r, fmt.Errorf("%w: capacity range from %d to %d", block.ErrInvalid, r.required, r.limit)
	}
	if in.GetVolumeCapability() != nil {
		a, err := parseCapability(in.GetVolumeCapability(), "")
		if err != nil {
			return r, err
		}
		r.raw = a.raw
	}
	if r.id, err = parseID(in.GetVolumeId()); err != nil {
		return r, err
	}
	r.paths = s.resolvable(in.GetVolumePath(), in.GetStagingTargetPath())
	return r, nil
}

// resolvable are the paths that something can be mounted at.
func (s *Service) resolvable(paths ...string) (list []string) {
	for _, p := range paths {
		if p == "" {
			continue
		}
		if p, err := s.cfg.Mounter.Resolve(p); err == nil {
			list = append(list, p)
		}
	}
	return list
}

// find returns the first mount of the volume's device among some paths. A raw
// volume's staging path stands for the node in it.
func (f facts) find(paths []string) (mount.Entry, bool) {
	for _, p := range paths {
		for _, p := range []string{p, stageRequest{point: p}.marker()} {
			e, mounted := f.table.At(p)
			if mounted && f.attached && (e.Node == f.device.Number && !e.Orphaned() || e.Node == mount.Number{} && e.Number == f.device.Number) {
				return e, true
			}
		}
	}
	return mount.Entry{}, false
}

// expand makes the device as large as asked, then the file system as large as the device.
func (s *Service) expand(f *flight, r expandRequest) error {
	now, err := s.look(f.ctx, r.id)
	if err != nil {
		return err
	}
	if !now.attached {
		return fmt.Errorf("%w: volume %s is not staged on this node", block.ErrNotFound, r.id)
	}
	e, mounted := now.find(r.paths)
	isNode := e.Node != mount.Number{}
	switch {
	case !mounted:
		return fmt.Errorf("%w: volume %s is not mounted at %q", block.ErrNotFound, r.id, r.paths)
	case r.raw && !isNode:
		return fmt.Errorf("%w: volume %s is mounted as a file system, not as raw block", block.ErrInvalid, r.id)
	case now.device.Condition.State == Failed:
		return fmt.Errorf("%w: volume %s: its device has failed (%s)", block.ErrPrecondition, r.id, now.device.Condition.Message)
	}
	dev := now.device
	// Only what the kernel shows counts. The server has grown before, or this fails and is repeated.
	if r.required == 0 || dev.Size < r.required {
		if dev, err = s.cfg.Attacher.Resize(f.ctx, r.id, r.required); err != nil {
			return fmt.Errorf("volume %s: its device does not grow: %w", r.id, err)
		}
	}
	b, err := s.cfg.Mounter.Inspect(dev.Path)
	switch {
	case err != nil:
		return err
	case dev.Volume != r.id || b.Number != now.device.Number || dev.Number != now.device.Number:
		return fmt.Errorf("%w: %s is not the device of volume %s any more", block.ErrCorrupt, dev.Path, r.id)
	case b.Size < r.required:
		return fmt.Errorf("%w: volume %s: the kernel shows %d bytes, not %d yet", block.ErrUnavailable, r.id, b.Size, r.required)
	case r.limit > 0 && b.Size > r.limit:
		return fmt.Errorf("%w: volume %s has %d bytes already, more than the limit of %d", block.ErrTooLarge, r.id, b.Size, r.limit)
	case isNode || dev.ReadOnly:
		return nil // what a raw volume holds is the user's; a read-only one stays as it is
	}
	if err := f.commit(); err != nil {
		return err
	}
	if err := s.cfg.Mounter.Grow(dev.Path, e.Point, mount.FS(e.Type)); err != nil {
		return fmt.Errorf("volume %s: %w", r.id, err)
	}
	return nil
}
