package image

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

func compareVolumes(a, b block.VolumeID) int { return bytes.Compare(a.UUID[:], b.UUID[:]) }

// enter begins an operation on the disk; leave ends it.
func (d *Disk) enter() error {
	d.gate.RLock()
	if !d.closed && !d.dead.Load() {
		return nil
	}
	d.gate.RUnlock()
	if err := d.Err(); err != nil {
		return err
	}
	return fmt.Errorf("disk %s: closed: %w", d.name, block.ErrShutdown)
}

func (d *Disk) leave() { d.gate.RUnlock() }

// holder returns the place of a volume, locked, if it has a directory.
func (d *Disk) holder(id block.VolumeID) (*holder, error) {
	d.mu.Lock()
	h := d.holders[id]
	d.mu.Unlock()
	if h != nil {
		h.mu.Lock()
		if h.exists.Load() {
			return h, nil
		}
		h.mu.Unlock()
	}
	return nil, fmt.Errorf("volume %s: %w on disk %s", id, block.ErrNotFound, d.name)
}

// Images lists the volumes that have a directory here, sorted.
func (d *Disk) Images() []block.VolumeID {
	d.mu.Lock()
	ids := make([]block.VolumeID, 0, len(d.holders))
	for id, h := range d.holders {
		if h.exists.Load() {
			ids = append(ids, id)
		}
	}
	d.mu.Unlock()
	slices.SortFunc(ids, compareVolumes)
	return ids
}

// Image opens a volume's image, once; later calls return the same.
// ErrNotFound: none here. ErrCorrupt, ErrFormat: it cannot be opened.
func (d *Disk) Image(id block.VolumeID) (*Image, error) {
	if err := d.enter(); err != nil {
		return nil, err
	}
	defer d.leave()
	h, err := d.holder(id)
	if err != nil {
		return nil, err
	}
	defer h.mu.Unlock()
	return h.open(d, id)
}

// open is called with the holder's lock.
func (h *holder) open(d *Disk, id block.VolumeID) (_ *Image, err error) {
	if h.img == nil {
		h.img, err = openImage(d, id)
	}
	return h.img, err
}

// CreateImage makes an empty image durable (no extent born, generation 0) and
// opens it. An image that exists is returned as it is.
func (d *Disk) CreateImage(desc Description) (*Image, error) {
	if err := block.ValidateSize(desc.Size); err != nil {
		return nil, err
	}
	if err := d.enter(); err != nil {
		return nil, err
	}
	defer d.leave()
	d.mu.Lock()
	h := d.holders[desc.ID]
	if h == nil {
		h = newHolder()
		d.holders[desc.ID] = h
	}
	d.mu.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.exists.Load() {
		if err := createImage(d, desc); err != nil {
			return nil, fmt.Errorf("create volume %s on disk %s: %w", desc.ID, d.name, d.judgeIO(err))
		}
		h.exists.Store(true)
	}
	return h.open(d, desc.ID)
}

type reasonJSON struct {
	Type   string `json:"type"`
	Format int    `json:"format"`
	Reason string `json:"reason"`
}

// Quarantine closes an image, waiting for what runs on it, and moves its files
// durably to quarantine/. ErrNotFound: none here.
func (d *Disk) Quarantine(id block.VolumeID, reason string) error {
	if err := d.enter(); err != nil {
		return err
	}
	defer d.leave()
	h, err := d.holder(id)
	if err != nil {
		return err
	}
	defer h.mu.Unlock()
	if h.img != nil {
		_ = h.img.close(false) // deleted volumes need no sync, and others' unflushed data no promise
		h.img = nil
	}
	if err := d.moveAway(id.String(), reason); err != nil {
		return fmt.Errorf("quarantine volume %s on disk %s: %w", id, d.name, d.judgeIO(err))
	}
	h.exists.Store(false)
	d.log.Warn("image quarantined", "disk_id", d.name, "volume_id", id.String(), "reason", reason)
	return nil
}

func (d *Disk) moveAway(name, reason string) error {
	dir, err := d.volumes.OpenDir(name)
	if err != nil {
		return err
	}
	// For the operator only: a full disk must not keep an image from being moved away.
	err = vfs.Replace(dir, reasonFile, encodeJSON(reasonJSON{"gabion-quarantine", jsonFormat, reason}))
	_ = dir.Close()
	if err != nil && !errors.Is(err, block.ErrNoSpace) {
		return err
	}
	taken, err := d.quarantined(name)
	if err != nil {
		return err
	}
	n := 1
	for slices.Contains(taken, name+"."+strconv.Itoa(n)) {
		n++
	}
	if err := d.volumes.Rename(name, d.quarantine, name+"."+strconv.Itoa(n)); err != nil {
		return err
	}
	return errors.Join(d.quarantine.Sync(), d.volumes.Sync())
}

// quarantined lists the directories of a volume in quarantine, or of all.
func (d *Disk) quarantined(name string) (list []string, err error) {
	entries, err := d.quarantine.ReadDir()
	for _, e := range entries {
		if e.Dir && strings.HasPrefix(e.Name, name) {
			list = append(list, e.Name)
		}
	}
	return list, err
}

// Quarantined lists the volumes that have something in quarantine, sorted. If
// the directory cannot be read it says so in the log and lists none.
func (d *Disk) Quarantined() []block.VolumeID {
	if d.enter() != nil {
		return nil
	}
	defer d.leave()
	list, err := d.quarantined("")
	if err != nil {
		d.log.Warn("quarantine cannot be listed", "disk_id", d.name, "err", err)
	}
	var ids []block.VolumeID
	for _, name := range list {
		text, _, _ := strings.Cut(name, ".")
		if id, err := block.ParseUUID(text); err == nil {
			ids = append(ids, block.VolumeID{UUID: id})
		}
	}
	slices.SortFunc(ids, compareVolumes)
	return slices.Compact(ids)
}

// Purge deletes everything of a volume that is in quarantine; nothing there is
// a success. The caller holds the proof that nobody needs it.
func (d *Disk) Purge(id block.VolumeID) error {
	if err := d.enter(); err != nil {
		return err
	}
	defer d.leave()
	list, err := d.quarantined(id.String() + ".")
	for _, name := range list {
		err = errors.Join(err, removeDir(d.quarantine, name))
	}
	if err != nil {
		return fmt.Errorf("purge volume %s on disk %s: %w", id, d.name, err)
	}
	return nil
}

// removeDir deletes a flat directory and its files, durably.
func removeDir(parent vfs.Dir, name string) error {
	dir, err := parent.OpenDir(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	files, err := dir.ReadDir()
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := dir.Unlink(f.Name); err != nil && !errors.Is(err, block.ErrNotFound) {
			return err
		}
	}
	if err := parent.Rmdir(name); err != nil && !errors.Is(err, block.ErrNotFound) {
		return err
	}
	return parent.Sync()
}
