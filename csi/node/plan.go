package node

import (
	"fmt"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// defaultFS is what a blank volume becomes if nobody says what.
const defaultFS = mount.Ext4

// plan is what is done to a device before its file system is mounted.
type plan struct {
	fs     mount.FS
	format bool // make it
	blank  bool // with format: no extent was ever born
	resume bool // with format: what is there may be what an earlier mkfs finished; if it can be mounted it is taken
}

// decide is the only place that allows a format. It goes by what the metadata
// service recorded; what the device shows can only forbid. asked may be "".
func decide(v Volume, found string, asked mount.FS, readOnly bool) (plan, error) {
	fs := asked
	if fs == "" {
		fs = defaultFS
	}
	isFS := found == string(mount.Ext4) || found == string(mount.XFS)
	never := v.Format == FormatNone && !v.Born // anything was written
	switch {
	case found != "" && !isFS:
		return plan{}, fmt.Errorf("%w: it holds %s, which is neither ext4 nor XFS and is never overwritten: use the volume as raw block, or another volume",
			block.ErrPrecondition, found)
	case isFS && never:
		return plan{}, fmt.Errorf("%w: it holds %s, and the metadata service says that nothing was ever written to the volume: it is not this volume's device",
			block.ErrCorrupt, found)
	case readOnly && (never || v.Format == FormatStarted):
		return plan{}, fmt.Errorf("%w: it has no file system yet and is attached read-only: publish it for writing first", block.ErrPrecondition)
	case v.Format == FormatStarted:
		return plan{fs: fs, format: true, resume: found == string(fs)}, nil
	case never:
		return plan{fs: fs, format: true, blank: true}, nil
	case isFS && asked != "" && found != string(asked):
		return plan{}, fmt.Errorf("%w: it holds %s, and %s is asked for: ask for %s, or for no type", block.ErrPrecondition, found, asked, found)
	case isFS:
		return plan{fs: mount.FS(found)}, nil
	case v.Format == FormatDone:
		return plan{}, fmt.Errorf("%w: a file system was made on it, or others may have written to it, and its signature is gone: nothing was changed; "+
			"attach the volume elsewhere and repair it (e2fsck -b, xfs_repair), or format it there if nothing on it is needed",
			block.ErrCorrupt)
	}
	return plan{}, fmt.Errorf("%w: it holds data and no file system that is known: it is never overwritten; use the volume as raw block, or another volume",
		block.ErrPrecondition)
}
