package checker

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/gabion-storage/gabion/server/block"
)

// A block is a header and a fill that the header determines, so that every
// byte of it is checked and a mixture of two writes is never taken for one:
//
//	magic 8 · volume 16 · offset 8 · count 8 · fill
const (
	magic      = "GABCHECK"
	headerSize = 40
	minGrain   = 512
)

// putBlock fills p, one block, with the content of a write.
func putBlock(p []byte, volume block.VolumeID, off int64, count uint64) {
	copy(p, magic)
	copy(p[8:], volume.UUID[:])
	binary.LittleEndian.PutUint64(p[24:], uint64(off))
	binary.LittleEndian.PutUint64(p[32:], count)
	x := binary.LittleEndian.Uint64(volume.UUID[:]) ^ uint64(off)*0x9e3779b97f4a7c15 ^ count*0xd1342543de82ef95
	for i := headerSize; i+8 <= len(p); i += 8 {
		x += 0x9e3779b97f4a7c15 // splitmix64
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		binary.LittleEndian.PutUint64(p[i:], z^z>>31)
	}
}

// content is what a block says of itself.
type content struct {
	zero   bool
	whole  bool // every byte is as the header says
	magic  bool
	volume block.VolumeID
	off    int64
	count  uint64
}

// parse reads a block; scratch has its size.
func parse(p, scratch []byte) content {
	if string(p[:8]) != magic {
		clear(scratch)
		return content{zero: bytes.Equal(p, scratch)}
	}
	c := content{magic: true, off: int64(binary.LittleEndian.Uint64(p[24:])), count: binary.LittleEndian.Uint64(p[32:])}
	copy(c.volume.UUID[:], p[8:])
	putBlock(scratch, c.volume, c.off, c.count)
	c.whole = bytes.Equal(p, scratch)
	return c
}

// tell says what was found at off of volume.
func (c content) tell(volume block.VolumeID, off int64) string {
	switch {
	case c.zero:
		return "zeros"
	case !c.magic:
		return "bytes that no write made"
	case !c.whole:
		return fmt.Sprintf("a damaged or torn block that begins like write %d of offset %d of volume %s", c.count, c.off, c.volume)
	case c.volume != volume:
		return fmt.Sprintf("write %d of offset %d of volume %s", c.count, c.off, c.volume)
	case c.off != off:
		return fmt.Sprintf("write %d of offset %d", c.count, c.off)
	}
	return fmt.Sprintf("write %d", c.count)
}
