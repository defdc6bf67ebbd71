package image

import (
	"github.com/gabion-storage/gabion/server/block"
)

// Description is volume.json: what the file is, for a reader without the
// metadata service. It decides nothing while the service is there.
type Description struct {
	ID      block.VolumeID
	Name    string
	Size    int64 // bytes
	Version block.Version
	Policy  map[string]string // as the volume was created: "replicas", "durability", …
}

// Marks chooses mark masks.
type Marks uint8

const (
	Behind    Marks = 1 << iota // written since all disks of the run were equal
	Unflushed                   // written since the last recorded flush
)

// Image is one volume's copy on a disk. Safe for concurrent use, but the
// caller orders what touches the same 4 KiB block: no Write, Birth or Grow may
// run while another operation runs on a block of its range.
//
// ErrIO from a mutating operation means that the disk's open instance has ended.
type Image struct{}

// ID is the volume.
func (i *Image) ID() block.VolumeID { return block.VolumeID{} }

// Size is the volume's size as durably known here, in bytes.
func (i *Image) Size() int64 { return 0 }

// Description is volume.json as last read or written; ok is false if the file
// is missing or damaged (SetDescription restores it).
func (i *Image) Description() (d Description, ok bool) { return Description{}, false }

// SetDescription replaces volume.json; durable on return: old or new, whole.
func (i *Image) SetDescription(d Description) error { return block.ErrUnsupported }

// Generation is the highest generation durably sealed here.
func (i *Image) Generation() block.Generation { return 0 }

// Seal raises the generation; durable on return. The same again is a no-op,
// a lower one ErrStale. The caller has drained writes of older generations.
func (i *Image) Seal(g block.Generation) error { return block.ErrUnsupported }

// Grow raises the size; durable on return, new space reads as zeros. The same
// again is a no-op, a smaller one ErrInvalid.
func (i *Image) Grow(size int64) error { return block.ErrUnsupported }

// Birth makes every extent of the runs present, zero, born at g; durable on
// return. Repeats are no-ops. An extent that was written since it was born in
// an older generation is never touched: ErrPrecondition. ErrStale: g is below
// the sealed generation. ErrNoSpace: nothing was born.
func (i *Image) Birth(g block.Generation, runs []block.RunIndex) error { return block.ErrUnsupported }

// DropBirths forgets births below g that were never written: orphans, on the
// caller's proof that no commit of theirs can succeed any more.
func (i *Image) DropBirths(g block.Generation, runs []block.RunIndex) error {
	return block.ErrUnsupported
}

// Lost lists the extents of the runs, below Size, that have no good record or
// no file behind them: if the runs were committed here, they are lost here.
func (i *Image) Lost(runs []block.RunIndex) []block.ExtentIndex { return nil }

// ReadAt fills p from off. ErrCorrupt: an extent is not present. May block.
// On a direct disk a p aligned to 4 KiB in memory, offset and length is used
// as it is; anything else goes through a bounded pool of aligned buffers.
func (i *Image) ReadAt(p []byte, off int64) error { return block.ErrUnsupported }

// TryReadAt is ReadAt if that does not block. done false, err nil: p is
// undefined, use ReadAt.
func (i *Image) TryReadAt(p []byte, off int64) (done bool, err error) {
	return false, block.ErrUnsupported
}

// Reserve takes space credit for io: its length rounded out to 4 KiB, for a
// write or a zero with NoHole; other operations need none. ErrNoSpace: not
// available, and the range is not fully allocated already. Every successful
// Reserve is followed by exactly one of Release, Write, or TryWrite that did it.
func (i *Image) Reserve(io *block.IO) error { return block.ErrUnsupported }

// Release gives back the credit of an io that will not be written.
func (i *Image) Release(io *block.IO) {}

// Write carries out an OpWrite, OpTrim or OpZero whose marks it makes durable
// first; with Durable it syncs. It gives the credit back in any case.
// ErrNoSpace: each 4 KiB block is old or new, the instance goes on.
// ErrPrecondition: an extent is not present.
func (i *Image) Write(io *block.IO) error { return block.ErrUnsupported }

// TryWrite is Write if that does not block. done false, err nil: use Write;
// the credit is still held.
func (i *Image) TryWrite(io *block.IO) (done bool, err error) { return false, block.ErrUnsupported }

// Sync makes every write completed before the call durable. Concurrent calls
// share syncs, but a call is covered only by a sync that started after it.
func (i *Image) Sync() error { return block.ErrUnsupported }

// ClearMarks clears the marks of kinds in extents whose newest write has a
// sequence ≤ upto (of the sealed generation) and is covered by a completed
// Sync; the others stay marked. Durable on return.
func (i *Image) ClearMarks(upto block.Sequence, kinds Marks) error { return block.ErrUnsupported }

// Unflushed reports whether any region is marked unflushed.
func (i *Image) Unflushed() bool { return false }

// Status appends descriptors of [off, off+length) to dst, at most limit,
// covering at least its beginning; boundaries are multiples of 512 bytes
// except the range's own ends.
func (i *Image) Status(dst []block.Status, off, length int64, limit int) ([]block.Status, error) {
	return dst, block.ErrUnsupported
}

// Allocated is the space the image takes on the disk, in bytes.
func (i *Image) Allocated() (int64, error) { return 0, block.ErrUnsupported }
