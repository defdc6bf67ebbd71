package image

import (
	"errors"
	"fmt"
	"io"

	"github.com/gabion-storage/gabion/server/block"
)

// minPunch is the shortest trim that makes a hole, in bytes. Shorter ones
// write zeros, so that small trims do not break a file into a million pieces.
const minPunch = 16 << 10

// checkRange accepts a range of at least one byte inside the volume.
func (i *Image) checkRange(op string, off, length int64) error {
	if size := i.size.Load(); off < 0 || length <= 0 || length > size || off > size-length {
		return fmt.Errorf("%s volume %s: %w: %d bytes at %d of %d", op, i.name, block.ErrInvalid, length, off, size)
	}
	return nil
}

func (i *Image) errorAt(op string, off, length int64, err error) error {
	return fmt.Errorf("%s volume %s, %d bytes at %d: %w", op, i.name, length, off, err)
}

// ReadAt fills p from off. ErrCorrupt: an extent is not present. May block.
// On a direct disk a p aligned to 4 KiB in memory, offset and length is used
// as it is; anything else goes through a bounded pool of aligned buffers.
func (i *Image) ReadAt(p []byte, off int64) error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	if len(p) == 0 {
		return nil
	}
	length := int64(len(p))
	if err := i.checkRange("read", off, length); err != nil {
		return err
	}
	if e, ok := i.index.absent(off, length); !ok {
		return i.errorAt("read", off, length, fmt.Errorf("%w: extent %d has no record on disk %s", block.ErrCorrupt, e, i.disk.name))
	}
	err := i.disk.fault.Hit("disk.read", i.name)
	if err == nil {
		err = i.readData(p, off)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, io.EOF):
		return i.errorAt("read", off, length, fmt.Errorf("%w: head.img ends before it", block.ErrCorrupt))
	}
	i.disk.doubt(err)
	if !errors.Is(err, block.ErrIO) {
		err = fmt.Errorf("%w: %w", block.ErrIO, err)
	}
	return i.errorAt("read", off, length, err)
}

// TryReadAt is ReadAt if that does not block. done false: p is undefined, use
// ReadAt, which also finds out about errors; err is not nil only if the image
// is closed or its disk has failed.
func (i *Image) TryReadAt(p []byte, off int64) (done bool, err error) {
	if err := i.enter(); err != nil {
		return false, err
	}
	defer i.leave()
	length := int64(len(p))
	if length == 0 || i.disk.fault != nil || i.checkRange("read", off, length) != nil {
		return false, nil
	}
	if _, ok := i.index.absent(off, length); !ok {
		return false, nil
	}
	n, err := i.img.TryReadAt(p, off)
	return err == nil && n == len(p), nil
}

// Write carries out an OpWrite, OpTrim or OpZero whose marks it makes durable
// first; with Durable it syncs. It gives the credit back in any case.
// ErrNoSpace: each 4 KiB block is old or new, the instance goes on.
// ErrPrecondition: an extent is not present.
func (i *Image) Write(w *block.IO) error {
	if err := i.enter(); err != nil {
		i.Release(w)
		return err
	}
	defer i.leave()
	err := i.write(w)
	i.disk.space.give(credit(w), err == nil)
	if err != nil {
		return i.errorAt(w.Op.String(), w.Offset, w.Length, err)
	}
	if w.Durable {
		return i.sync()
	}
	return nil
}

func (i *Image) write(w *block.IO) error {
	if !w.Op.Mutates() || w.Op == block.OpWrite && int64(len(w.Data)) != w.Length {
		return fmt.Errorf("%w: %d bytes of data", block.ErrInvalid, len(w.Data))
	}
	if err := i.checkRange(w.Op.String(), w.Offset, w.Length); err != nil {
		return err
	}
	if err := i.prepare(w); err != nil {
		return err
	}
	defer i.index.finish(w.Offset, w.Length)
	err := i.disk.fault.Hit("disk.write", i.name)
	if err == nil {
		err = i.apply(w)
	}
	if err != nil {
		return i.disk.judge(err)
	}
	return nil
}

// prepare starts a write, after it has made the marks durable that it needs.
func (i *Image) prepare(w *block.IO) error {
	x := &i.index
	var err error
	for {
		state, e := x.begin(w.Offset, w.Length, w.Sequence)
		switch {
		case state == ready:
			return nil
		case err != nil:
			return err
		case state == missing:
			return fmt.Errorf("%w: extent %d has no record on disk %s; it must be born first", block.ErrPrecondition, e, i.disk.name)
		case state == unloaded:
			if err = x.load(e); err != nil {
				return i.disk.judge(err)
			}
		default:
			x.want(w.Offset, w.Length)
			err = x.commit()
		}
	}
}

func (i *Image) apply(w *block.IO) error {
	switch {
	case w.Op == block.OpWrite:
		return i.writeData(w.Data, w.Offset)
	case w.Op == block.OpZero && w.NoHole:
		err := i.img.ZeroRange(w.Offset, w.Length)
		if errors.Is(err, block.ErrUnsupported) {
			return i.writeZeros(w.Offset, w.Length)
		}
		return err
	case w.Length < minPunch:
		return i.zeroAllocated(w.Offset, w.Length)
	}
	return i.trim(w.Offset, w.Length)
}

// trim makes a range read as zeros and, where it can, a hole.
func (i *Image) trim(off, length int64) error {
	err := i.img.PunchHole(off, length)
	if errors.Is(err, block.ErrUnsupported) {
		i.disk.trimsWritten.Add(1)
		return i.zeroAllocated(off, length)
	}
	return err
}

// zeroAllocated writes zeros over what is not a hole.
func (i *Image) zeroAllocated(off, length int64) error {
	for end := off + length; off < end; {
		data, err := i.img.SeekData(off)
		if errors.Is(err, io.EOF) || err == nil && data >= end {
			return nil
		}
		if err != nil {
			return err
		}
		hole, err := i.img.SeekHole(data)
		if errors.Is(err, io.EOF) {
			return nil // punched meanwhile, to the end
		}
		if err != nil {
			return err
		}
		if hole = min(hole, end); hole > data {
			if err := i.writeZeros(data, hole-data); err != nil {
				return err
			}
		}
		off = max(hole, data)
	}
	return nil
}

// TryWrite is Write if that does not block. done false, err nil: use Write;
// the credit is still held. Only an OpWrite that is not Durable, to marked
// regions, on a file system that can, is ever done.
func (i *Image) TryWrite(w *block.IO) (done bool, err error) {
	if err := i.enter(); err != nil {
		i.Release(w)
		return true, err
	}
	defer i.leave()
	if i.noTry.Load() || !i.beginQuick(w) {
		return false, nil
	}
	n, err := i.img.TryWriteAt(w.Data, w.Offset)
	i.index.finish(w.Offset, w.Length)
	if err != nil || n < len(w.Data) {
		// Written in part is as good as not: Write does it all again under the same range lock.
		i.noTry.Store(errors.Is(err, block.ErrUnsupported))
		return false, nil
	}
	i.disk.space.give(credit(w), true)
	return true, nil
}

// WriteCached is Write if that is a copy into the page cache, which may wait
// for memory, or for a device that is behind, but not for a sync. done false,
// err nil: use Write; the credit is still held.
func (i *Image) WriteCached(w *block.IO) (done bool, err error) {
	if err := i.enter(); err != nil {
		i.Release(w)
		return true, err
	}
	defer i.leave()
	if i.disk.mode == Direct || !i.beginQuick(w) {
		return false, nil
	}
	defer i.index.finish(w.Offset, w.Length)
	err = i.writeData(w.Data, w.Offset)
	i.disk.space.give(credit(w), err == nil)
	if err != nil {
		err = i.errorAt("write", w.Offset, w.Length, i.disk.judge(err))
	}
	return true, err
}

// beginQuick starts a plain write that needs nothing to be made durable first
// or afterwards; index.finish must follow. False: nothing happened.
func (i *Image) beginQuick(w *block.IO) bool {
	if w.Op != block.OpWrite || w.Durable || i.disk.fault != nil ||
		int64(len(w.Data)) != w.Length || i.checkRange("write", w.Offset, w.Length) != nil {
		return false
	}
	state, _ := i.index.begin(w.Offset, w.Length, w.Sequence)
	return state == ready
}

// Sync makes every write completed before the call durable. Concurrent calls
// share syncs, but a call is covered only by a sync that started after it. A
// failed sync is never repeated: it ends the disk's instance.
func (i *Image) Sync() error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	return i.sync()
}

func (i *Image) sync() error {
	if i.index.completed.Load() == i.index.synced.Load() {
		return nil
	}
	err := i.syncs.do(i.syncOnce)
	if err == nil {
		err = i.disk.Err() // ended meanwhile, by another image: then nothing counts
	}
	if err != nil {
		return fmt.Errorf("sync volume %s: %w", i.name, err)
	}
	return nil
}

func (i *Image) syncOnce() error {
	covered := i.index.completed.Load()
	err := i.disk.fault.Hit("disk.sync", i.name)
	if err == nil {
		i.disk.syncs.Add(1)
		err = i.img.Datasync()
	}
	if err != nil {
		return i.disk.judge(fmt.Errorf("%w: %w", errSync, err))
	}
	i.index.synced.Store(covered)
	return nil
}
