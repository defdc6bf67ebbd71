// Package wire has the numbers and the layouts of the NBD protocol that
// go-nbd's protocol package does not have, by the names of the specification
// (doc/proto.md of NetworkBlockDevice/nbd). All fields are big-endian.
package wire

import (
	"encoding/binary"

	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// The handshake.
const (
	FlagNoZeroes   = uint16(1 << 1)
	ClientFixed    = uint32(1 << 0)
	ClientNoZeroes = uint32(1 << 1)

	OptExportName      = uint32(1)
	OptStartTLS        = uint32(5)
	OptStructuredReply = uint32(8)
	OptListMetaContext = uint32(9)
	OptSetMetaContext  = uint32(10)

	RepMetaContext = uint32(4)
	RepErr         = uint32(1 << 31) // the bit of all refusals
	RepErrPolicy   = RepErr + 2
	RepErrInvalid  = RepErr + 3
	RepErrPlatform = RepErr + 4
	RepErrTLS      = RepErr + 5
	RepErrShutdown = RepErr + 7
	RepErrTooBig   = RepErr + 9
)

// Transmission flags: what an export offers.
const (
	TransReadOnly    = uint16(1 << 1)
	TransFlush       = uint16(1 << 2)
	TransFUA         = uint16(1 << 3)
	TransTrim        = uint16(1 << 5)
	TransWriteZeroes = uint16(1 << 6)
	TransDF          = uint16(1 << 7)
)

// Commands and their flags.
const (
	CmdFlush       = uint16(3)
	CmdTrim        = uint16(4)
	CmdWriteZeroes = uint16(6)
	CmdBlockStatus = uint16(7)

	CmdFlagFUA    = uint16(1 << 0)
	CmdFlagNoHole = uint16(1 << 1)
	CmdFlagDF     = uint16(1 << 2)
	CmdFlagReqOne = uint16(1 << 3)
)

// Structured replies.
const (
	MagicStructured = uint32(0x668e33ef)
	ChunkDone       = uint16(1 << 0) // a flag: the reply's last chunk

	ChunkNone       = uint16(0)
	ChunkOffsetData = uint16(1)
	ChunkOffsetHole = uint16(2)
	ChunkStatus     = uint16(5)
	ChunkErrorBit   = uint16(1 << 15) // the bit of all errors
	ChunkError      = ChunkErrorBit + 1

	StatusHole = uint32(1 << 0)
	StatusZero = uint32(1 << 1)
)

// Errnos.
const (
	EPERM     = uint32(1)
	EIO       = uint32(5)
	ENOMEM    = uint32(12)
	EINVAL    = uint32(22)
	ENOSPC    = uint32(28)
	EOVERFLOW = uint32(75)
	ENOTSUP   = uint32(95)
	ESHUTDOWN = uint32(108)
)

// Sizes in bytes.
const (
	RequestSize     = 28
	SimpleReplySize = 16
	ChunkHeaderSize = 20
	OffsetDataSize  = ChunkHeaderSize + 8 // the chunk header and the offset, before the data
	ErrorChunkSize  = ChunkHeaderSize + 6 // an error chunk without a message
	MaxString       = 4096                // of a name, a query, a message
)

// Allocation is the metadata context that says what is allocated.
const Allocation = "base:allocation"

// Request is a request's header, unchecked.
type Request struct {
	Flags, Command uint16
	Cookie, Offset uint64
	Length         uint32
}

// ParseRequest reads the first RequestSize bytes of p. False: the magic is wrong.
func ParseRequest(p []byte) (Request, bool) {
	_ = p[RequestSize-1]
	return Request{
		Flags:   binary.BigEndian.Uint16(p[4:]),
		Command: binary.BigEndian.Uint16(p[6:]),
		Cookie:  binary.BigEndian.Uint64(p[8:]),
		Offset:  binary.BigEndian.Uint64(p[16:]),
		Length:  binary.BigEndian.Uint32(p[24:]),
	}, binary.BigEndian.Uint32(p) == protocol.TRANSMISSION_MAGIC_REQUEST
}

// Append appends the header as it is sent.
func (r Request) Append(p []byte) []byte {
	p = binary.BigEndian.AppendUint32(p, protocol.TRANSMISSION_MAGIC_REQUEST)
	p = binary.BigEndian.AppendUint16(p, r.Flags)
	p = binary.BigEndian.AppendUint16(p, r.Command)
	p = binary.BigEndian.AppendUint64(p, r.Cookie)
	p = binary.BigEndian.AppendUint64(p, r.Offset)
	return binary.BigEndian.AppendUint32(p, r.Length)
}

// PutSimpleReply fills the first SimpleReplySize bytes of p.
func PutSimpleReply(p []byte, errno uint32, cookie uint64) {
	_ = p[SimpleReplySize-1]
	binary.BigEndian.PutUint32(p, protocol.TRANSMISSION_MAGIC_REPLY)
	binary.BigEndian.PutUint32(p[4:], errno)
	binary.BigEndian.PutUint64(p[8:], cookie)
}

// PutChunk fills the first ChunkHeaderSize bytes of p with the header of a reply's only chunk; length counts what
// follows them.
func PutChunk(p []byte, kind uint16, cookie uint64, length int) {
	_ = p[ChunkHeaderSize-1]
	binary.BigEndian.PutUint32(p, MagicStructured)
	binary.BigEndian.PutUint16(p[4:], ChunkDone)
	binary.BigEndian.PutUint16(p[6:], kind)
	binary.BigEndian.PutUint64(p[8:], cookie)
	binary.BigEndian.PutUint32(p[16:], uint32(length))
}

// PutOffsetData fills the first OffsetDataSize bytes of p; length bytes of data follow.
func PutOffsetData(p []byte, cookie, offset uint64, length int) {
	PutChunk(p, ChunkOffsetData, cookie, 8+length)
	binary.BigEndian.PutUint64(p[ChunkHeaderSize:], offset)
}

// PutErrorChunk fills the first ErrorChunkSize bytes of p.
func PutErrorChunk(p []byte, errno uint32, cookie uint64) {
	PutChunk(p, ChunkError, cookie, 6)
	binary.BigEndian.PutUint32(p[ChunkHeaderSize:], errno)
	binary.BigEndian.PutUint16(p[ChunkHeaderSize+4:], 0)
}
