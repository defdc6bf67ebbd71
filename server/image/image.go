package image

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

const (
	imageFile = "head.img"
	indexFile = "head.idx"
)

// Image is one volume's copy on a disk. Safe for concurrent use, but the
// caller orders what touches the same 4 KiB block: no Write, Birth or
// DropBirths runs while another operation runs on a block of its range.
//
// ErrIO or ErrCorrupt from a mutating operation or Sync means that the disk's
// open instance has ended. After Quarantine or Disk.Close everything returns ErrShutdown.
type Image struct {
	disk  *Disk
	id    block.VolumeID
	name  string // the volume's id as text
	img   vfs.File
	index index

	// gate is held shared by every operation, and exclusively by close, so that
	// no descriptor is closed, and its number reused, under a running operation.
	gate   sync.RWMutex
	closed bool

	size       atomic.Int64 // as index.header has it
	generation atomic.Uint64
	noTry      atomic.Bool // head.img cannot be written without blocking
	syncs      rounds
	edges      [64]sync.Mutex // direct disks: one for every 64th block, held across read-modify-write

	fileSize int64 // how long head.img durably is, at least; guarded by index.turn

	descMu sync.Mutex
	desc   Description
	descOK bool
}

// createImage makes a whole image directory appear at once.
func createImage(d *Disk, desc Description) error {
	tmp := unfinished + desc.ID.String()
	if err := removeDir(d.volumes, tmp); err != nil && !errors.Is(err, block.ErrNotFound) {
		return err
	}
	if err := d.volumes.Mkdir(tmp); err != nil {
		return err
	}
	err := d.fill(tmp, desc)
	if err == nil {
		err = d.volumes.Rename(tmp, d.volumes, desc.ID.String())
	}
	if err != nil {
		_ = removeDir(d.volumes, tmp)
		return err
	}
	if err := d.volumes.Sync(); err != nil {
		return d.fail(err)
	}
	return nil
}

// fill writes the files of a new image and syncs all of it.
func (d *Disk) fill(tmp string, desc Description) error {
	dir, err := d.volumes.OpenDir(tmp)
	if err != nil {
		return err
	}
	defer dir.Close()
	text, err := desc.encode()
	if err != nil {
		return err
	}
	h := header{extentSize: d.identity.Geometry.ExtentSize, volume: desc.ID, size: desc.Size, counter: 1}
	pages := make([]byte, headerSize)
	copy(pages[h.offset():], h.encode())
	h.counter++
	copy(pages[h.offset():], h.encode())
	return errors.Join(
		writeNew(dir, imageFile, func(f vfs.File) error {
			err := f.Truncate(desc.Size)
			if errors.Is(err, block.ErrTooLarge) {
				return nil // as far as the file system goes; Birth extends it
			}
			return err
		}),
		writeNew(dir, indexFile, func(f vfs.File) error { return writeAll(f, pages) }),
		writeNew(dir, volumeFile, func(f vfs.File) error { return writeAll(f, text) }),
		dir.Sync(),
	)
}

func writeAll(f vfs.File, p []byte) error {
	_, err := f.WriteAt(p, 0)
	return err
}

func writeNew(dir vfs.Dir, name string, write func(vfs.File) error) error {
	f, err := dir.Open(name, vfs.Create|vfs.Exclusive)
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func openImage(d *Disk, id block.VolumeID) (_ *Image, err error) {
	i := &Image{disk: d, id: id, name: id.String(), syncs: rounds{turn: newTurn()}}
	defer func() {
		if err != nil {
			if errors.Is(err, block.ErrIO) && d.Err() == nil {
				d.doubt(err)
			}
			i.closeFiles()
			err = fmt.Errorf("volume %s on disk %s: %w", id, d.name, err)
		}
	}()
	dir, err := d.volumes.OpenDir(i.name)
	if err != nil {
		return nil, missingIsCorrupt(err)
	}
	defer dir.Close()
	var flag vfs.Flag
	if d.mode == Direct {
		flag = vfs.Direct
	}
	if i.img, err = dir.Open(imageFile, flag); err != nil {
		return nil, missingIsCorrupt(err)
	}
	if i.index.file, err = dir.Open(indexFile, 0); err != nil {
		return nil, missingIsCorrupt(err)
	}
	if err := i.settle(); err != nil {
		return nil, err
	}
	if err := i.openIndex(); err != nil {
		return nil, err
	}
	i.readDescription(dir)
	return i, nil
}

// missingIsCorrupt: an image directory is made as a whole, so what is missing in it was lost.
func missingIsCorrupt(err error) error {
	if errors.Is(err, block.ErrNotFound) {
		return fmt.Errorf("%w: %w", block.ErrCorrupt, err)
	}
	return err
}

// settle makes what is about to be read of the index durable: a process that
// was killed may have left records that it had not synced yet, and everything
// that follows takes them for durable.
func (i *Image) settle() error {
	if err := i.index.file.Datasync(); err != nil {
		return i.disk.judge(fmt.Errorf("%s: %w: %w", indexFile, errSync, err))
	}
	if !i.disk.instance.fresh {
		return nil
	}
	return errors.Join(i.index.file.Evict(), i.img.Evict())
}

func (i *Image) openIndex() error {
	x := &i.index
	x.geometry = i.disk.identity.Geometry
	x.failed = i.disk.judge
	x.inject = func() error { return i.disk.fault.Hit("disk.record", i.name) }
	x.syncs = &i.disk.recordSyncs
	x.turn, x.commits.turn = newTurn(), newTurn()
	x.completed.Store(1)
	pages := make([]byte, headerSize)
	if err := readUpTo(x.file, pages, 0); err != nil {
		return err
	}
	h, err := newestHeader(pages)
	if err != nil {
		return fmt.Errorf("%s: %w", indexFile, err)
	}
	if h.volume != i.id || h.extentSize != x.geometry.ExtentSize {
		return fmt.Errorf("%s: %w: it belongs to volume %s with extents of %d bytes", indexFile, block.ErrCorrupt, h.volume, h.extentSize)
	}
	x.header = h
	x.resize(h.size)
	info, err := i.img.Stat()
	if err != nil {
		return err
	}
	damage, err := x.scan(info.Size)
	if err != nil {
		return fmt.Errorf("%s: %w", indexFile, err)
	}
	if damage > 0 {
		i.disk.log.Error("records are damaged: extents are lost on this disk", "disk_id", i.disk.name, "volume_id", i.name, "extents", damage)
	}
	i.size.Store(h.size)
	i.generation.Store(uint64(h.generation))
	// What is proven of head.img's length, since it came before the header or the last record.
	if i.fileSize = h.size; info.Size < h.size {
		i.fileSize = i.lastPresent(h.size)
	}
	return nil
}

// readDescription takes volume.json as it is; a damaged one harms nobody but its readers.
func (i *Image) readDescription(dir vfs.Dir) {
	p, err := vfs.ReadFile(dir, volumeFile, jsonLimit)
	if err == nil {
		i.desc, err = decodeDescription(p)
	}
	i.descOK = err == nil && i.desc.ID == i.id
	if !i.descOK {
		i.disk.log.Warn("volume.json is missing or damaged; it will be written anew", "disk_id", i.disk.name, "volume_id", i.name, "err", err)
	}
}

// enter begins an operation; leave ends it.
func (i *Image) enter() error {
	i.gate.RLock()
	if !i.closed && !i.disk.dead.Load() {
		return nil
	}
	i.gate.RUnlock()
	if err := i.disk.Err(); err != nil {
		return err
	}
	return fmt.Errorf("volume %s: image closed: %w", i.name, block.ErrShutdown)
}

func (i *Image) leave() { i.gate.RUnlock() }

// close waits for running operations and closes the files, synced or not.
func (i *Image) close(sync bool) (err error) {
	if sync {
		if err = i.Sync(); errors.Is(err, block.ErrIO) {
			err = nil // the instance has ended, and everybody was told
		}
	}
	i.gate.Lock()
	defer i.gate.Unlock()
	i.closed = true
	i.closeFiles()
	return err
}

func (i *Image) closeFiles() {
	for _, f := range []vfs.File{i.img, i.index.file} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// ID is the volume.
func (i *Image) ID() block.VolumeID { return i.id }

// Size is the volume's size as durably known here, in bytes.
func (i *Image) Size() int64 { return i.size.Load() }

// Generation is the highest generation durably sealed here.
func (i *Image) Generation() block.Generation { return block.Generation(i.generation.Load()) }

// Description is volume.json as last read or written; ok is false if the file
// is missing or damaged (SetDescription restores it).
func (i *Image) Description() (d Description, ok bool) {
	i.descMu.Lock()
	defer i.descMu.Unlock()
	return i.desc, i.descOK
}

// SetDescription replaces volume.json, with the image's own size; durable on return: old or new, whole.
func (i *Image) SetDescription(d Description) error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	return i.describe(d)
}

func (i *Image) describe(d Description) error {
	if d.ID != i.id {
		return fmt.Errorf("describe volume %s: %w: the description is of %s", i.name, block.ErrInvalid, d.ID)
	}
	i.descMu.Lock()
	defer i.descMu.Unlock()
	d.Size = i.size.Load()
	p, err := d.encode()
	if err != nil {
		return err
	}
	dir, err := i.disk.volumes.OpenDir(i.name)
	if err != nil {
		return fmt.Errorf("describe volume %s: %w", i.name, err)
	}
	defer dir.Close()
	if err := vfs.Replace(dir, volumeFile, p); err != nil {
		err = i.disk.judgeIO(err)
		return fmt.Errorf("describe volume %s: %w", i.name, err)
	}
	i.desc, i.descOK = d, true
	return nil
}

// Seal raises the generation; durable on return. The same again is a no-op,
// a lower one ErrStale. The caller has drained writes of older generations.
func (i *Image) Seal(g block.Generation) error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	x := &i.index
	x.turn.Lock()
	defer x.turn.Unlock()
	switch h := x.header; {
	case g < h.generation:
		return fmt.Errorf("seal volume %s at generation %d: %w: disk %s has seen %d", i.name, g, block.ErrStale, i.disk.name, h.generation)
	case g > h.generation:
		h.generation = g
		if err := x.writeHeader(h); err != nil {
			return fmt.Errorf("seal volume %s: %w", i.name, err)
		}
		x.sealed()
		i.generation.Store(uint64(g))
	}
	return nil
}

// Grow raises the size; durable on return, new space reads as zeros. The same
// again is a no-op, a smaller one ErrInvalid.
func (i *Image) Grow(size int64) error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	if err := block.ValidateSize(size); err != nil {
		return fmt.Errorf("grow volume %s: %w", i.name, err)
	}
	if err := i.grow(size); err != nil {
		return fmt.Errorf("grow volume %s: %w", i.name, err)
	}
	if d, ok := i.Description(); ok && d.Size != size {
		return i.describe(d)
	}
	return nil
}

func (i *Image) grow(size int64) error {
	x := &i.index
	x.turn.Lock()
	defer x.turn.Unlock()
	switch now := i.size.Load(); {
	case size < now:
		return fmt.Errorf("%w: from %d to %d bytes; a volume cannot shrink", block.ErrInvalid, now, size)
	case size == now:
		return nil
	}
	if err := i.extend(size, i.lastPresent(size)); err != nil {
		return err
	}
	h := x.header
	h.size = size
	if err := x.writeHeader(h); err != nil {
		return err
	}
	x.mu.Lock()
	x.resize(size)
	x.mu.Unlock()
	i.size.Store(size)
	return nil
}

// lastPresent is the end of the last extent that is present, at most size.
func (i *Image) lastPresent(size int64) int64 {
	x := &i.index
	for e := int64(x.nodesFor(i.size.Load()))*groupsPerNode*slotsPerPage - 1; e >= 0; e-- {
		if x.group(block.ExtentIndex(e)) == nil {
			e -= e % (groupsPerNode * slotsPerPage) // nothing in the whole node
			continue
		}
		if x.present(block.ExtentIndex(e)) {
			return min(size, (e+1)*x.geometry.ExtentSize)
		}
	}
	return 0
}

// extend makes head.img size bytes long, durably, or at least need bytes if
// the file system has no files of that size. Called in the index's turn.
func (i *Image) extend(size, need int64) error {
	if size <= i.fileSize {
		return nil
	}
	err := i.img.Truncate(size)
	if errors.Is(err, block.ErrTooLarge) {
		if size = need; size <= i.fileSize {
			return nil
		}
		if err = i.img.Truncate(size); errors.Is(err, block.ErrTooLarge) {
			return fmt.Errorf("%w; the file system of disk %s limits files, XFS does not", err, i.disk.name)
		}
	}
	if err == nil {
		err = i.syncAll()
	}
	if err != nil {
		return i.disk.judge(err)
	}
	i.fileSize = size
	return nil
}

// syncAll is fsync of head.img, for what fdatasync does not cover.
func (i *Image) syncAll() error {
	i.disk.syncs.Add(1)
	if err := i.img.Sync(); err != nil {
		return fmt.Errorf("%w: %w", errSync, err)
	}
	return nil
}

// Lost lists the extents of the runs, below Size, that have no good record or
// no file behind them: if the runs were committed here, they are lost here.
func (i *Image) Lost(runs []block.RunIndex) []block.ExtentIndex {
	var lost []block.ExtentIndex
	extents := i.disk.identity.Geometry.Extents(i.Size())
	for _, r := range runs {
		for e := r.First(); e < r.First()+block.ExtentsPerRun && int64(e) < extents; e++ {
			if !i.index.present(e) {
				lost = append(lost, e)
			}
		}
	}
	return lost
}

// Strangers lists, in order, the extents outside the runs that were ever
// written. A write comes after its run was committed, so whoever names the
// committed runs and finds strangers knows less than this disk does.
func (i *Image) Strangers(runs []block.RunIndex) ([]block.ExtentIndex, error) {
	if err := i.enter(); err != nil {
		return nil, err
	}
	defer i.leave()
	known := make(map[block.RunIndex]bool, len(runs))
	for _, r := range runs {
		known[r] = true
	}
	strangers, err := i.index.writtenOutside(known)
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", i.name, i.disk.judge(err))
	}
	return strangers, nil
}

// Unflushed reports whether any region is marked unflushed.
func (i *Image) Unflushed() bool { return i.index.anyUnflushed() }

// ClearMarks clears the marks of kinds in extents whose newest write has a
// sequence ≤ upto (of the sealed generation; older generations' count as
// lower) and is covered by a completed Sync; the others stay marked. Durable
// on return.
func (i *Image) ClearMarks(upto block.Sequence, kinds Marks) error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	if err := i.index.clear(upto, kinds); err != nil {
		return fmt.Errorf("clear marks of volume %s: %w", i.name, err)
	}
	return nil
}

// Allocated is the space the image takes on the disk, in bytes.
func (i *Image) Allocated() (int64, error) {
	if err := i.enter(); err != nil {
		return 0, err
	}
	defer i.leave()
	img, err := i.img.Stat()
	if err != nil {
		return 0, fmt.Errorf("volume %s: %w", i.name, err)
	}
	idx, err := i.index.file.Stat()
	if err != nil {
		return 0, fmt.Errorf("volume %s: %w", i.name, err)
	}
	return img.Allocated + idx.Allocated, nil
}
