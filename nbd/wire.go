package nbd

import (
	"encoding/binary"

	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// What go-nbd's protocol package does not have, by the names of the
// specification (doc/proto.md of NetworkBlockDevice/nbd).
const (
	flagNoZeroes  = uint16(1 << 1) // server and client handshake flag
	clientFixed   = uint32(1 << 0)
	clientNoZeros = uint32(1 << 1)

	optExportName      = uint32(1)
	optStartTLS        = uint32(5)
	optStructuredReply = uint32(8)
	optListMetaContext = uint32(9)
	optSetMetaContext  = uint32(10)

	repMetaContext = uint32(4)
	repErrPolicy   = uint32(1<<31 + 2)
	repErrInvalid  = uint32(1<<31 + 3)
	repErrPlatform = uint32(1<<31 + 4)
	repErrShutdown = uint32(1<<31 + 7)
	repErrTooBig   = uint32(1<<31 + 9)

	transReadOnly    = uint16(1 << 1)
	transFlush       = uint16(1 << 2)
	transFUA         = uint16(1 << 3)
	transTrim        = uint16(1 << 5)
	transWriteZeroes = uint16(1 << 6)
	transDF          = uint16(1 << 7)

	cmdFlush       = uint16(3)
	cmdTrim        = uint16(4)
	cmdWriteZeroes = uint16(6)
	cmdBlockStatus = uint16(7)

	cmdFlagFUA    = uint16(1 << 0)
	cmdFlagNoHole = uint16(1 << 1)
	cmdFlagDF     = uint16(1 << 2)
	cmdFlagReqOne = uint16(1 << 3)

	magicStructured = uint32(0x668e33ef)
	chunkDone       = uint16(1 << 0)
	chunkOffsetData = uint16(1)
	chunkStatus     = uint16(5)
	chunkError      = uint16(1<<15 + 1)

	statusHole = uint32(1 << 0)
	statusZero = uint32(1 << 1)
)

const (
	requestHeaderSize = 28
	simpleReplySize   = 16
	chunkHeaderSize   = 20
	offsetDataSize    = chunkHeaderSize + 8 // the chunk header and the offset, before the data
	errorChunkSize    = chunkHeaderSize + 6 // an error chunk without a message
)

const (
	minBlock      = 512
	maxName       = 4096 // bytes of a string, by the specification
	allocation    = "base:allocation"
	allocationID  = uint32(1)
	maxStatus     = 16384 // descriptors in one reply
	maxZeroLength = 1<<32 - minBlock
)

// header is a request as it came off the wire, unchecked.
type header struct {
	flags, command uint16
	cookie, offset uint64
	length         uint32
}

// parseHeader reads the first requestHeaderSize bytes of p. False: the magic is wrong.
func parseHeader(p []byte) (header, bool) {
	_ = p[requestHeaderSize-1]
	return header{
		flags:   binary.BigEndian.Uint16(p[4:]),
		command: binary.BigEndian.Uint16(p[6:]),
		cookie:  binary.BigEndian.Uint64(p[8:]),
		offset:  binary.BigEndian.Uint64(p[16:]),
		length:  binary.BigEndian.Uint32(p[24:]),
	}, binary.BigEndian.Uint32(p) == protocol.TRANSMISSION_MAGIC_REQUEST
}

func putSimpleReply(p []byte, errno uint32, cookie uint64) {
	_ = p[simpleReplySize-1]
	binary.BigEndian.PutUint32(p, protocol.TRANSMISSION_MAGIC_REPLY)
	binary.BigEndian.PutUint32(p[4:], errno)
	binary.BigEndian.PutUint64(p[8:], cookie)
}

// putChunk writes the header of a reply's only chunk; length counts what follows it.
func putChunk(p []byte, kind uint16, cookie uint64, length int) {
	_ = p[chunkHeaderSize-1]
	binary.BigEndian.PutUint32(p, magicStructured)
	binary.BigEndian.PutUint16(p[4:], chunkDone)
	binary.BigEndian.PutUint16(p[6:], kind)
	binary.BigEndian.PutUint64(p[8:], cookie)
	binary.BigEndian.PutUint32(p[16:], uint32(length))
}

func putOffsetData(p []byte, cookie, offset uint64, length int) {
	putChunk(p, chunkOffsetData, cookie, 8+length)
	binary.BigEndian.PutUint64(p[chunkHeaderSize:], offset)
}

func putErrorChunk(p []byte, errno uint32, cookie uint64) {
	putChunk(p, chunkError, cookie, 6)
	binary.BigEndian.PutUint32(p[chunkHeaderSize:], errno)
	binary.BigEndian.PutUint16(p[chunkHeaderSize+4:], 0)
}
