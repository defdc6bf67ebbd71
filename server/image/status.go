package image

import (
	"errors"
	"fmt"
	"io"

	"github.com/gabion-storage/gabion/server/block"
)

// statusGrain is what boundaries inside a status are rounded to, in bytes:
// the smallest minimum block. A part that is not wholly hole counts as data.
const statusGrain = 512

// Status appends descriptors of [off, off+length) to dst, at most limit,
// covering at least its beginning; boundaries are multiples of 512 bytes
// except the range's own ends. ErrCorrupt: an extent is not present.
func (i *Image) Status(dst []block.Status, off, length int64, limit int) ([]block.Status, error) {
	if err := i.enter(); err != nil {
		return dst, err
	}
	defer i.leave()
	if err := i.checkRange("status", off, length); err != nil {
		return dst, err
	}
	if e, ok := i.index.absent(off, length); !ok {
		return dst, i.errorAt("status", off, length, fmt.Errorf("%w: extent %d has no record on disk %s", block.ErrCorrupt, e, i.disk.name))
	}
	begun := len(dst)
	for end := off + length; off < end; {
		next, hole, err := i.piece(off, end)
		if err != nil {
			i.disk.doubt(err)
			return dst, i.errorAt("status", off, end-off, err)
		}
		if n := len(dst); n > begun && dst[n-1].Hole == hole {
			dst[n-1].Length += next - off
		} else if n-begun == limit {
			break
		} else {
			dst = append(dst, block.Status{Length: next - off, Hole: hole, Zero: hole})
		}
		off = next
	}
	return dst, nil
}

// piece is how far the hole or the data at off reaches.
func (i *Image) piece(off, end int64) (next int64, hole bool, err error) {
	data, err := i.img.SeekData(off)
	if errors.Is(err, io.EOF) {
		return end, true, nil
	}
	if err != nil {
		return 0, false, err
	}
	if data = data / statusGrain * statusGrain; data > off {
		return min(data, end), true, nil
	}
	at, err := i.img.SeekHole(off)
	if errors.Is(err, io.EOF) {
		return end, true, nil // punched meanwhile
	}
	if err != nil {
		return 0, false, err
	}
	// A writer may have made a hole here since: still go on.
	at = max(at, off+1)
	return min((at+statusGrain-1)/statusGrain*statusGrain, end), false, nil
}
