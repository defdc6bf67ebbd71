package consensus

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	envelopeFormat = 1
	envelopeSize   = 5
)

func castagnoli(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// seal wraps a command as it is stored in the log.
func seal(command []byte) []byte {
	b := make([]byte, envelopeSize+len(command))
	b[0] = envelopeFormat
	binary.LittleEndian.PutUint32(b[1:], castagnoli(command))
	copy(b[envelopeSize:], command)
	return b
}

// unseal is the command in a log entry, checked.
func unseal(index uint64, b []byte) ([]byte, error) {
	if len(b) < envelopeSize {
		return nil, fmt.Errorf("%w: log entry %d has %d bytes", block.ErrCorrupt, index, len(b))
	}
	if b[0] != envelopeFormat {
		return nil, fmt.Errorf("%w: log entry %d has envelope %d, this binary knows %d: start the newer binary",
			block.ErrFormat, index, b[0], envelopeFormat)
	}
	command := b[envelopeSize:]
	if castagnoli(command) != binary.LittleEndian.Uint32(b[1:]) {
		return nil, fmt.Errorf("%w: log entry %d does not match its checksum", block.ErrCorrupt, index)
	}
	return command, nil
}
