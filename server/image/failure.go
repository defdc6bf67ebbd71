package image

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// Failed is closed when the instance has ended; Err then says why.
func (d *Disk) Failed() <-chan struct{} { return d.failed }

// Err is nil while the instance lives, else what ended it, wrapping ErrIO and no other sentinel.
func (d *Disk) Err() error {
	if !d.dead.Load() {
		return nil
	}
	return d.err
}

// errSync marks a failed sync, after which even ErrNoSpace means lost data.
var errSync = errors.New("sync failed")

// judge is what becomes of a failed write or sync: lack of space passes (each
// block is old or new), everything else ends the instance.
func (d *Disk) judge(err error) error {
	if errors.Is(err, block.ErrNoSpace) && !errors.Is(err, errSync) {
		_, _ = d.space.refresh() // the estimate was too high
		return err
	}
	return d.fail(err)
}

// judgeIO is judge for operations that can be refused for other reasons than the device's.
func (d *Disk) judgeIO(err error) error {
	if errors.Is(err, block.ErrIO) {
		return d.judge(err)
	}
	return err
}

// fail ends the instance. The proof of continuity goes first: nobody hears of
// an error that a restart could forget.
func (d *Disk) fail(cause error) error {
	d.failOnce.Do(func() {
		if err := d.instance.end(); err != nil {
			d.log.Error("the instance file could not be removed; remove it before this server is restarted",
				"disk_id", d.name, "err", err)
		}
		// The cause as text: whoever asks what this error is must find ErrIO and not, say, ErrNoSpace of a sync.
		d.err = fmt.Errorf("disk %s: %w: its open instance has ended: %v", d.name, block.ErrIO, cause)
		d.dead.Store(true)
		close(d.failed)
		d.log.Error("disk failed; its volumes leave until it is opened anew", "disk_id", d.name, "err", cause)
	})
	return d.Err()
}

// doubt remembers a read error: the instance goes on, but no successor may
// claim that nothing was lost.
func (d *Disk) doubt(cause error) {
	if d.readErrors.Add(1) == 1 {
		d.log.Error("a read failed; after a restart this disk counts as rebooted", "disk_id", d.name, "err", cause)
	}
	if err := d.instance.end(); err != nil {
		d.log.Error("the instance file could not be removed; remove it before this server is restarted",
			"disk_id", d.name, "err", err)
	}
}

// Check compares what lies at the path now with what was opened (a lost
// mount, a replaced directory, unlinked files) and ends the instance if it is
// not the same. The owner calls it every few seconds. An error that only says
// that it could not look (too many open files) ends nothing.
func (d *Disk) Check() error {
	if err := d.enter(); err != nil {
		return err
	}
	defer d.leave()
	err := d.compare()
	if err == nil || errors.Is(err, block.ErrUnavailable) {
		return err
	}
	return d.fail(err)
}

func (d *Disk) compare() error {
	dir, err := d.fs.OpenDir(d.path)
	if err != nil {
		return err
	}
	defer dir.Close()
	where, err := dir.Identity()
	if err != nil {
		return err
	}
	if where != d.where {
		return fmt.Errorf("%s leads to another directory or mount than when it was opened", d.path)
	}
	info, err := dir.Stat(diskFile)
	if err != nil {
		return err
	}
	raw, err := vfs.ReadFile(dir, diskFile, jsonLimit)
	if err != nil {
		return err
	}
	if info.Inode != d.inode || !slices.Equal(raw, d.raw) {
		return fmt.Errorf("%s was replaced", diskFile)
	}
	for _, h := range d.all() {
		if err := h.compare(); err != nil {
			return err
		}
	}
	return nil
}

// compare checks that an open image's files are still the ones under their names.
func (h *holder) compare() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.img == nil {
		return nil
	}
	dir, err := h.img.disk.volumes.OpenDir(h.img.name)
	if err != nil {
		return err
	}
	defer dir.Close()
	return errors.Join(
		sameFile(dir, imageFile, h.img.img),
		sameFile(dir, indexFile, h.img.index.file),
	)
}

func sameFile(dir vfs.Dir, name string, f vfs.File) error {
	opened, err := f.Stat()
	if err != nil {
		return err
	}
	named, err := dir.Stat(name)
	if err == nil && named.Inode != opened.Inode {
		err = fmt.Errorf("%s was replaced", name)
	}
	return err
}
