package image

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/gabion-storage/gabion/server/block"
)

// The layout of head.idx; DESIGN.md has the table.
const (
	idxVersion    = 1
	pageSize      = 4096
	slotSize      = 64
	slotsPerPage  = pageSize / slotSize // extents per group
	groupSize     = 2 * pageSize
	headerSize    = 2 * pageSize
	headerSlot    = 512
	headerPayload = 68 // bytes before the CRC
)

var (
	idxMagic   = [8]byte{'G', 'A', 'B', 'I', 'O', 'N', 'I', 'X'}
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian
)

// header is what head.idx says of the image as a whole.
type header struct {
	extentSize int64
	volume     block.VolumeID
	generation block.Generation // only grows
	size       int64            // of the volume, bytes; only grows
	counter    uint64           // odd: in page 0, even: in page 1
}

func (h *header) offset() int64 { return int64((h.counter+1)%2) * pageSize }

func (h *header) encode() []byte {
	p := make([]byte, headerSlot)
	copy(p, idxMagic[:])
	le.PutUint32(p[8:], idxVersion)
	le.PutUint64(p[12:], uint64(h.extentSize))
	copy(p[20:36], h.volume.UUID[:])
	le.PutUint64(p[36:], uint64(h.generation))
	le.PutUint64(p[44:], uint64(h.size))
	le.PutUint64(p[52:], h.counter)
	le.PutUint32(p[headerPayload:], crc32.Checksum(p[:headerPayload], castagnoli))
	return p
}

// decodeHeader reads one header slot. ErrFormat: intact, of a newer version. ErrCorrupt: not intact.
func decodeHeader(p []byte) (header, error) {
	if len(p) < headerSlot || [8]byte(p[:8]) != idxMagic ||
		le.Uint32(p[headerPayload:]) != crc32.Checksum(p[:headerPayload], castagnoli) {
		return header{}, fmt.Errorf("%w: no valid header", block.ErrCorrupt)
	}
	if v := le.Uint32(p[8:]); v != idxVersion {
		return header{}, fmt.Errorf("%w: index version %d, this server knows %d; use a newer server", block.ErrFormat, v, idxVersion)
	}
	h := header{
		extentSize: int64(le.Uint64(p[12:])),
		generation: block.Generation(le.Uint64(p[36:])),
		size:       int64(le.Uint64(p[44:])),
		counter:    le.Uint64(p[52:]),
	}
	copy(h.volume.UUID[:], p[20:36])
	if err := (block.Geometry{ExtentSize: h.extentSize}).Validate(); err != nil {
		return header{}, fmt.Errorf("%w: %w", block.ErrCorrupt, err)
	}
	if err := block.ValidateSize(h.size); err != nil {
		return header{}, fmt.Errorf("%w: %w", block.ErrCorrupt, err)
	}
	return h, nil
}

// newestHeader is the answer of both header slots: the newer good one.
func newestHeader(p []byte) (header, error) {
	a, errA := decodeHeader(p[:headerSlot])
	b, errB := decodeHeader(p[pageSize : pageSize+headerSlot])
	switch {
	case errA != nil && errB != nil:
		return header{}, errA
	case errA != nil:
		return b, nil
	case errB != nil || a.counter > b.counter:
		return a, nil
	}
	return b, nil
}

type slotFlags uint32

const (
	present slotFlags = 1 << iota
	written           // a mark was set since the birth: data may be there
)

// slot is one extent's record as it is on disk.
type slot struct {
	counter   uint64 // 0: never written; odd: page A, even: page B
	extent    block.ExtentIndex
	flags     slotFlags
	born      block.Generation
	behind    uint64 // bit r: region r may differ from other copies
	unflushed uint64 // bit r: region r may not survive a reboot
}

// offset is where the slot belongs in head.idx.
func (s *slot) offset() int64 {
	page := int64((s.counter + 1) % 2)
	return groupOffset(int64(s.extent)/slotsPerPage) + page*pageSize + int64(s.extent)%slotsPerPage*slotSize
}

func groupOffset(k int64) int64 { return headerSize + k*groupSize }

func (s *slot) encode(p []byte) {
	clear(p[:slotSize])
	le.PutUint64(p, s.counter)
	le.PutUint32(p[8:], uint32(s.extent))
	le.PutUint32(p[12:], uint32(s.flags))
	le.PutUint64(p[16:], uint64(s.born))
	le.PutUint64(p[24:], s.behind)
	le.PutUint64(p[32:], s.unflushed)
	le.PutUint32(p[60:], crc32.Checksum(p[:60], castagnoli))
}

type slotState uint8

const (
	blank slotState = iota
	good
	damaged
)

var blankSlot [slotSize]byte

// decodeSlot reads the slot of extent e in page 0 (A) or 1 (B) of its group.
func decodeSlot(p []byte, e block.ExtentIndex, page int) (slot, slotState) {
	if [slotSize]byte(p[:slotSize]) == blankSlot {
		return slot{}, blank
	}
	s := slot{
		counter:   le.Uint64(p),
		extent:    block.ExtentIndex(le.Uint32(p[8:])),
		flags:     slotFlags(le.Uint32(p[12:])),
		born:      block.Generation(le.Uint64(p[16:])),
		behind:    le.Uint64(p[24:]),
		unflushed: le.Uint64(p[32:]),
	}
	if le.Uint32(p[60:]) != crc32.Checksum(p[:60], castagnoli) ||
		s.extent != e || s.counter == 0 || int((s.counter+1)%2) != page || s.flags&^(present|written) != 0 {
		return slot{}, damaged
	}
	return s, good
}

// decodeRecord is the answer of both slots of an extent, as DESIGN.md has it.
// state is good, blank (never written), or damaged (no good slot is left).
func decodeRecord(a, b []byte, e block.ExtentIndex) (s slot, state slotState) {
	sa, stateA := decodeSlot(a, e, 0)
	sb, stateB := decodeSlot(b, e, 1)
	switch {
	case stateA == good && (stateB != good || sa.counter > sb.counter):
		s = sa
	case stateB == good:
		s = sb
	case stateA == damaged && stateB == damaged:
		return slot{extent: e}, damaged
	default:
		// A birth that was torn before it was ever confirmed, or nothing at all.
		return slot{extent: e}, blank
	}
	if (stateA == damaged || stateB == damaged) && s.flags&present != 0 {
		// The lost slot may have been the newer one: it may have had any mark.
		s.flags |= written
		s.behind, s.unflushed = ^uint64(0), ^uint64(0)
	}
	return s, good
}
