package image

import (
	"errors"
	"io"

	"github.com/gabion-storage/gabion/server/vfs"
)

const grain = vfs.DirectAlign

func down(off int64) int64 { return off / grain * grain }
func up(off int64) int64   { return (off + grain - 1) / grain * grain }

// asItIs reports whether p can be read or written at off without a bounce buffer.
func (i *Image) asItIs(p []byte, off int64) bool {
	return i.disk.mode == Buffered || off%grain == 0 && vfs.Aligned(p)
}

func (i *Image) readData(p []byte, off int64) error {
	if i.asItIs(p, off) {
		_, err := i.img.ReadAt(p, off)
		return err
	}
	buf := i.disk.buffers.get()
	defer i.disk.buffers.put(buf)
	for len(p) > 0 {
		start := down(off)
		window := (*buf)[:min(up(off+int64(len(p)))-start, bounceSize)]
		if _, err := i.img.ReadAt(window, start); err != nil {
			return err
		}
		n := copy(p, window[off-start:])
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (i *Image) writeData(p []byte, off int64) error {
	if i.asItIs(p, off) {
		_, err := i.img.WriteAt(p, off)
		return err
	}
	buf := i.disk.buffers.get()
	defer i.disk.buffers.put(buf)
	for len(p) > 0 {
		n := min(int64(len(p)), bounceSize-off%grain)
		if err := i.writeBlocks(*buf, p[:n], off); err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}

// writeBlocks writes p as whole blocks of 4 KiB put together in buf: what p
// leaves of the first and the last one is read first. Two that share such a
// block take turns.
func (i *Image) writeBlocks(buf, p []byte, off int64) error {
	start, end := down(off), up(off+int64(len(p)))
	window := buf[:end-start]
	defer i.lockEdges(start, end-grain)()
	headPart, tailPart := off > start, off+int64(len(p)) < end
	if headPart || tailPart && len(window) == grain {
		if err := i.readBlock(window[:grain], start); err != nil {
			return err
		}
	}
	if tailPart && len(window) > grain {
		if err := i.readBlock(window[len(window)-grain:], end-grain); err != nil {
			return err
		}
	}
	copy(window[off-start:], p)
	_, err := i.img.WriteAt(window, start)
	return err
}

func (i *Image) readBlock(p []byte, off int64) error {
	_, err := i.img.ReadAt(p, off)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF // sizes are whole blocks
	}
	return err
}

// lockEdges takes the turns of two blocks, in an order that all share.
func (i *Image) lockEdges(first, last int64) (unlock func()) {
	n := int64(len(i.edges))
	a, b := first/grain%n, last/grain%n
	if a == b {
		i.edges[a].Lock()
		return i.edges[a].Unlock
	}
	i.edges[min(a, b)].Lock()
	i.edges[max(a, b)].Lock()
	return func() {
		i.edges[a].Unlock()
		i.edges[b].Unlock()
	}
}

// writeZeros writes zeros over a range.
func (i *Image) writeZeros(off, length int64) error {
	zeros := i.disk.buffers.zeros()
	for length > 0 {
		n := min(length, int64(len(zeros))-off%grain) // the pieces after the first are aligned
		if err := i.writeData(zeros[:n], off); err != nil {
			return err
		}
		off, length = off+n, length-n
	}
	return nil
}
