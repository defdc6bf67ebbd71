package controller

import (
	"fmt"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/server/block"
)

// mode is how a volume may be used: one node or several, writing or reading.
type mode struct {
	single bool // one node at a time
	reads  bool // no node writes
}

// modes are the access modes that there are, for mounted and for raw volumes
// alike. Storage lets one node write, so several writing nodes are not among them.
var modes = map[csispec.VolumeCapability_AccessMode_Mode]mode{
	csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        {single: true},
	csispec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: {single: true},
	csispec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  {single: true},
	csispec.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   {single: true, reads: true},
	csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:    {reads: true},
}

// fsTypes are the file systems that volumes are formatted with, and how small one may be.
var fsTypes = map[string]int64{"ext4": minExt4, "xfs": minXFS}

const defaultFSType = "ext4"

// supported returns the mode of a capability, or ErrInvalid, saying what is
// not had and what is. Create, Publish and Validate all ask it and nothing else.
func supported(c *csispec.VolumeCapability) (mode, error) {
	if c == nil {
		return mode{}, fmt.Errorf("%w: the request has no volume capability", block.ErrInvalid)
	}
	switch access := c.GetAccessType().(type) {
	case *csispec.VolumeCapability_Block:
	case *csispec.VolumeCapability_Mount:
		if fs := access.Mount.GetFsType(); fs != "" && fsTypes[fs] == 0 {
			return mode{}, fmt.Errorf("%w: file system %.40q: volumes are formatted with ext4 or xfs", block.ErrInvalid, fs)
		}
		if access.Mount.GetVolumeMountGroup() != "" {
			return mode{}, fmt.Errorf("%w: a mount group is not supported: ext4 and xfs are mounted without one", block.ErrInvalid)
		}
	default:
		return mode{}, fmt.Errorf("%w: a volume capability has no access type: it is block or mount", block.ErrInvalid)
	}
	wanted := c.GetAccessMode().GetMode()
	m, ok := modes[wanted]
	switch {
	case ok:
		return m, nil
	case wanted == csispec.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER, wanted == csispec.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:
		return mode{}, fmt.Errorf("%w: access mode %s: a volume is written from one node at a time (ReadWriteOnce, ReadWriteOncePod) or read from several (ReadOnlyMany)",
			block.ErrInvalid, wanted)
	}
	return mode{}, fmt.Errorf("%w: access mode %s is unknown to this driver", block.ErrInvalid, wanted)
}

// allSupported is supported for a list that must have something in it.
func allSupported(list []*csispec.VolumeCapability) error {
	if len(list) == 0 {
		return fmt.Errorf("%w: the request names no volume capability", block.ErrInvalid)
	}
	for _, c := range list {
		if _, err := supported(c); err != nil {
			return err
		}
	}
	return nil
}

// minimum is the smallest volume that has all these capabilities, with fsType where one names none.
func minimum(list []*csispec.VolumeCapability, fsType string) int64 {
	size := int64(minRaw)
	for _, c := range list {
		if m := c.GetMount(); m != nil {
			size = max(size, fsTypes[firstOf(m.GetFsType(), fsType, defaultFSType)])
		}
	}
	return size
}

func firstOf(words ...string) string {
	for _, w := range words {
		if w != "" {
			return w
		}
	}
	return ""
}
