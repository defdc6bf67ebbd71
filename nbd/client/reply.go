package client

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

const maxDescriptors = 1 << 20 // in one reply, by the specification

// read is the reader: it takes replies until the connection ends.
func (l *link) read() error {
	for {
		p, err := l.in.Peek(4)
		if err != nil {
			return err
		}
		switch magic := binary.BigEndian.Uint32(p); {
		case magic == protocol.TRANSMISSION_MAGIC_REPLY:
			err = l.simple()
		case magic == wire.MagicStructured && l.export.Structured:
			err = l.chunk()
		default:
			err = fmt.Errorf("%w: a reply begins with %#x", ErrProtocol, magic)
		}
		if err != nil {
			return err
		}
	}
}

// find is the slot that a cookie belongs to. Only the reader ends a call while
// it runs, so what it points to stays.
func (l *link) find(cookie uint64) (uint32, *slot, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := uint32(cookie)
	if uint64(i) >= uint64(len(l.slots)) || l.slots[i].call == nil || l.slots[i].cookie != cookie {
		return 0, nil, fmt.Errorf("%w: a reply to no request, or a second one (cookie %#x)", ErrProtocol, cookie)
	}
	return i, &l.slots[i], nil
}

func (l *link) done(i uint32, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finish(i, err)
}

func (l *link) simple() error {
	var p [wire.SimpleReplySize]byte
	if _, err := io.ReadFull(l.in, p[:]); err != nil {
		return err
	}
	i, s, err := l.find(binary.BigEndian.Uint64(p[8:]))
	if err != nil {
		return err
	}
	errno := binary.BigEndian.Uint32(p[4:])
	if s.call.isQuery && errno == 0 || s.call.Op == block.OpRead && l.export.Structured {
		return fmt.Errorf("%w: a simple reply to a %s", ErrProtocol, s.call.name())
	}
	if s.call.Op == block.OpRead && errno == 0 {
		if _, err := io.ReadFull(l.in, s.call.Data); err != nil {
			return err
		}
	}
	l.done(i, errnoError(errno))
	return nil
}

// chunk takes one chunk of a structured reply.
func (l *link) chunk() error {
	var p [wire.ChunkHeaderSize]byte
	if _, err := io.ReadFull(l.in, p[:]); err != nil {
		return err
	}
	be := binary.BigEndian
	flags, kind, length := be.Uint16(p[4:]), be.Uint16(p[6:]), be.Uint32(p[16:])
	i, s, err := l.find(be.Uint64(p[8:]))
	if err != nil {
		return err
	}
	switch {
	case kind&wire.ChunkErrorBit != 0:
		err = l.errorChunk(s, length)
	case kind == wire.ChunkNone && length == 0 && flags&wire.ChunkDone != 0:
	case kind == wire.ChunkOffsetData && s.call.Op == block.OpRead && length > 8:
		err = l.offsetData(s, length)
	case kind == wire.ChunkOffsetHole && s.call.Op == block.OpRead && length == 12:
		err = l.offsetHole(s)
	case kind == wire.ChunkStatus && s.call.isQuery && length >= 12 && length%8 == 4 && length <= 4+8*maxDescriptors:
		err = l.status(s, int(length-4)/8)
	default:
		err = fmt.Errorf("%w: a chunk of kind %d with %d bytes in the reply to a %s", ErrProtocol, kind, length, s.call.name())
	}
	if err != nil || flags&wire.ChunkDone == 0 {
		return err
	}
	failed := s.failed
	if failed == nil && (s.call.Op == block.OpRead && s.got != s.call.Length || s.call.isQuery && len(s.call.status) == 0) {
		return fmt.Errorf("%w: the reply to a %s ends early", ErrProtocol, s.call.name())
	}
	l.done(i, failed)
	return nil
}

func (l *link) errorChunk(s *slot, length uint32) error {
	var p [6]byte
	if length < 6 || length > 6+wire.MaxString+64 {
		return fmt.Errorf("%w: an error chunk of %d bytes", ErrProtocol, length)
	}
	if _, err := io.ReadFull(l.in, p[:]); err != nil {
		return err
	}
	errno, text := binary.BigEndian.Uint32(p[:]), binary.BigEndian.Uint16(p[4:])
	if errno == 0 || uint32(text) > length-6 {
		return fmt.Errorf("%w: an error chunk with error %d and a message of %d of %d bytes", ErrProtocol, errno, text, length-6)
	}
	if s.failed == nil {
		s.failed = errnoError(errno)
	}
	_, err := l.in.Discard(int(length - 6))
	return err
}

// part is the piece of a read's memory that a chunk claims to be for.
func (l *link) part(s *slot, length int64) ([]byte, error) {
	var p [8]byte
	if _, err := io.ReadFull(l.in, p[:]); err != nil {
		return nil, err
	}
	at := binary.BigEndian.Uint64(p[:]) - uint64(s.call.Offset)
	if length > s.call.Length || at > uint64(s.call.Length-length) || s.got+length > s.call.Length {
		return nil, fmt.Errorf("%w: data outside of the read it answers", ErrProtocol)
	}
	return s.call.Data[at : at+uint64(length)], nil
}

func (l *link) offsetData(s *slot, length uint32) error {
	p, err := l.part(s, int64(length)-8)
	if err != nil {
		return err
	}
	_, err = io.ReadFull(l.in, p)
	s.got += int64(len(p))
	return err
}

func (l *link) offsetHole(s *slot) error {
	head, err := l.in.Peek(12)
	if err != nil {
		return err
	}
	p, err := l.part(s, int64(binary.BigEndian.Uint32(head[8:])))
	if err != nil {
		return err
	}
	clear(p)
	s.got += int64(len(p))
	_, err = l.in.Discard(4)
	return err
}

func (l *link) status(s *slot, count int) error {
	var p [8]byte
	if _, err := io.ReadFull(l.in, p[:4]); err != nil {
		return err
	}
	if id := binary.BigEndian.Uint32(p[:]); id != l.export.contextID || len(s.call.status) > 0 {
		return fmt.Errorf("%w: block status for context %d", ErrProtocol, id)
	}
	left := s.call.Length
	for range count {
		if _, err := io.ReadFull(l.in, p[:]); err != nil {
			return err
		}
		length, flags := int64(binary.BigEndian.Uint32(p[:])), binary.BigEndian.Uint32(p[4:])
		if length == 0 || left == 0 {
			return fmt.Errorf("%w: a block status descriptor of %d bytes with %d left to describe", ErrProtocol, length, left)
		}
		length = min(length, left) // the last may reach further
		left -= length
		s.call.status = append(s.call.status, block.Status{
			Length: length, Hole: flags&wire.StatusHole != 0, Zero: flags&wire.StatusZero != 0,
		})
	}
	return nil
}
