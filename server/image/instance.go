package image

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// instance is the proof, kept in the server's state directory, that a
// successor in the same boot finds everything this process wrote: the file is
// there as long as no error was seen, and counts only under the same mount.
type instance struct {
	dir  vfs.Dir // nil: nothing is kept, every open is a new instance
	name string
	uuid block.UUID
	// Drawn at this open. Then something may have been lost without a reboot, by
	// a failed sync, and the page cache may show what the device does not have.
	fresh bool
	once  sync.Once
}

type instanceJSON struct {
	Type      string       `json:"type"`
	Format    int          `json:"format"`
	Disk      block.DiskID `json:"disk"`
	Boot      block.UUID   `json:"boot"`
	Mount     string       `json:"mount"`
	Device    uint64       `json:"device"`
	Directory uint64       `json:"directory"`
	Instance  block.UUID   `json:"instance"`
}

const instanceType = "gabion-instance"

// openInstance keeps the instance of the last open if nothing can have been
// lost since, else draws a new one and makes that durable.
//
// ended: the last one ended in this process. Then the file proves nothing, if
// it is still there because it could not be removed.
func openInstance(fs vfs.FS, path string, disk block.DiskID, boot block.UUID, where vfs.Identity, ended bool) (*instance, error) {
	if path == "" {
		return &instance{uuid: block.NewUUID(), fresh: true}, nil
	}
	dir, err := fs.OpenDir(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("disk %s: instance file: %w", disk, err)
	}
	i := &instance{dir: dir, name: filepath.Base(path)}
	now := instanceJSON{
		Type: instanceType, Format: jsonFormat, Disk: disk, Boot: boot,
		Mount: where.Mount, Device: where.Device, Directory: where.Inode,
	}
	if before, ok := i.read(); ok && !ended {
		now.Instance = before.Instance
		if before == now && !now.Instance.IsZero() {
			i.uuid = now.Instance
			return i, nil
		}
	}
	now.Instance = block.NewUUID()
	if err := vfs.Replace(dir, i.name, encodeJSON(now)); err != nil {
		_ = dir.Close()
		return nil, fmt.Errorf("disk %s: instance file: %w", disk, err)
	}
	i.uuid, i.fresh = now.Instance, true
	return i, nil
}

// read is not ok for a file that is missing or damaged: nothing is proven then.
func (i *instance) read() (j instanceJSON, ok bool) {
	p, err := vfs.ReadFile(i.dir, i.name, jsonLimit)
	if err != nil || decodeJSON(p, instanceType, &j) != nil {
		return instanceJSON{}, false
	}
	return j, true
}

// end removes the proof, durably, once. Callers after the first wait for it.
func (i *instance) end() (err error) {
	i.once.Do(func() {
		if i.dir == nil {
			return
		}
		err = i.dir.Unlink(i.name)
		if errors.Is(err, block.ErrNotFound) {
			err = nil
		}
		err = errors.Join(err, i.dir.Sync())
	})
	return err
}

func (i *instance) close() {
	if i.dir != nil {
		_ = i.dir.Close()
	}
}
