package client

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"net"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

const (
	maxReply   = 64 << 10 // data of one option reply
	maxReplies = 1 << 10  // to one option
)

// Export is what a handshake agreed on.
type Export struct {
	Size           int64  // bytes
	Flags          uint16 // the transmission flags as they came, for a kernel device
	MinBlock       int64  // bytes, a power of two; 1 if the server does not say
	PreferredBlock int64  // bytes, a power of two
	MaxPayload     int64  // bytes: the longest READ or WRITE
	Structured     bool   // structured replies are agreed on
	Allocation     bool   // so is base:allocation, BLOCK_STATUS can be asked

	contextID uint32 // of base:allocation
}

// ReadOnly reports whether the export takes no changes.
func (e Export) ReadOnly() bool { return e.Flags&wire.TransReadOnly != 0 }

// MultiConn reports whether a flush on one connection covers all.
func (e Export) MultiConn() bool {
	return e.Flags&protocol.NEGOTIATION_REPLY_FLAGS_CAN_MULTI_CONN != 0
}

// Handshake opens t.Export on conn, which the caller owns and which is in the
// transmission phase when Handshake returns nil. A kernel device wants simple
// replies: structured false. ctx bounds the handshake; conn has no deadline
// afterwards. Errors wrap *RefusedError, ErrProtocol, or
// block.ErrUnavailable with what conn said.
func Handshake(ctx context.Context, conn net.Conn, t Target, structured bool) (Export, error) {
	h := handshake{conn: conn, target: t}
	cancelled := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(cancelled)
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	export, err := h.run(structured)
	if !stop() {
		<-cancelled
		err = ctx.Err()
	}
	if err != nil {
		return Export{}, fmt.Errorf("nbd handshake for %s: %w", t, err)
	}
	return export, conn.SetDeadline(time.Time{})
}

type handshake struct {
	conn   net.Conn
	target Target
	export Export
}

func (h *handshake) run(structured bool) (Export, error) {
	if len(h.target.Export) > wire.MaxString {
		return Export{}, fmt.Errorf("%w: an export name of %d bytes; at most %d are allowed", block.ErrInvalid, len(h.target.Export), wire.MaxString)
	}
	if err := h.greet(); err != nil {
		return Export{}, err
	}
	if structured {
		if err := h.askStructured(); err != nil {
			return Export{}, err
		}
	}
	h.export.MinBlock, h.export.PreferredBlock, h.export.MaxPayload = 1, 4096, block.MaxPayload
	p := binary.BigEndian.AppendUint32(nil, uint32(len(h.target.Export)))
	p = append(p, h.target.Export...)
	p = binary.BigEndian.AppendUint16(p, 1)
	p = binary.BigEndian.AppendUint16(p, protocol.NEGOTIATION_TYPE_INFO_BLOCKSIZE)
	told := false
	err := h.option(protocol.NEGOTIATION_ID_OPTION_GO, p, func(kind uint32, data []byte) error {
		isExport, err := h.info(kind, data)
		told = told || isExport
		return err
	})
	if err != nil {
		return Export{}, err
	}
	if !told {
		return Export{}, fmt.Errorf("%w: it did not tell the export's size", ErrProtocol)
	}
	return h.export, h.check()
}

func (h *handshake) greet() error {
	var p [18]byte
	if err := h.receive(p[:]); err != nil {
		return err
	}
	if binary.BigEndian.Uint64(p[:]) != protocol.NEGOTIATION_MAGIC_OLDSTYLE ||
		binary.BigEndian.Uint64(p[8:]) != protocol.NEGOTIATION_MAGIC_OPTION {
		return fmt.Errorf("%w: it does not greet like an NBD server (or in the old style)", ErrProtocol)
	}
	flags := binary.BigEndian.Uint16(p[16:])
	if flags&protocol.NEGOTIATION_HANDSHAKE_FLAG_FIXED_NEWSTYLE == 0 {
		return fmt.Errorf("%w: it does not speak fixed newstyle", block.ErrUnsupported)
	}
	answer := wire.ClientFixed | uint32(flags&wire.FlagNoZeroes)
	return h.send(binary.BigEndian.AppendUint32(nil, answer))
}

// askStructured asks for structured replies and base:allocation. A server that
// has neither is served without.
func (h *handshake) askStructured() error {
	err := h.option(wire.OptStructuredReply, nil, nothing)
	if refused(err) {
		return nil
	}
	if err != nil {
		return err
	}
	h.export.Structured = true
	p := binary.BigEndian.AppendUint32(nil, uint32(len(h.target.Export)))
	p = append(p, h.target.Export...)
	p = binary.BigEndian.AppendUint32(p, 1)
	p = binary.BigEndian.AppendUint32(p, uint32(len(wire.Allocation)))
	p = append(p, wire.Allocation...)
	err = h.option(wire.OptSetMetaContext, p, func(kind uint32, data []byte) error {
		if kind != wire.RepMetaContext || len(data) < 4 {
			return fmt.Errorf("%w: reply %#x of %d bytes to a metadata context", ErrProtocol, kind, len(data))
		}
		if string(data[4:]) == wire.Allocation {
			h.export.Allocation, h.export.contextID = true, binary.BigEndian.Uint32(data)
		}
		return nil
	})
	if refused(err) { // GO says why, or it works without
		h.export.Allocation = false
		return nil
	}
	return err
}

func refused(err error) bool {
	var r *RefusedError
	return errors.As(err, &r)
}

func nothing(kind uint32, data []byte) error {
	return fmt.Errorf("%w: an unexpected reply %#x of %d bytes", ErrProtocol, kind, len(data))
}

// info takes one NBD_REP_INFO.
func (h *handshake) info(kind uint32, data []byte) (isExport bool, err error) {
	if kind != protocol.NEGOTIATION_TYPE_REPLY_INFO || len(data) < 2 {
		return false, nothing(kind, data)
	}
	be := binary.BigEndian
	switch info := be.Uint16(data); {
	case info == protocol.NEGOTIATION_TYPE_INFO_EXPORT && len(data) == 12:
		size := be.Uint64(data[2:])
		if size > math.MaxInt64 {
			return false, fmt.Errorf("%w: an export of %d bytes", ErrProtocol, size)
		}
		h.export.Size, h.export.Flags = int64(size), be.Uint16(data[10:])
		return true, nil
	case info == protocol.NEGOTIATION_TYPE_INFO_BLOCKSIZE && len(data) == 14:
		h.export.MinBlock = int64(be.Uint32(data[2:]))
		h.export.PreferredBlock = int64(be.Uint32(data[6:]))
		h.export.MaxPayload = min(int64(be.Uint32(data[10:])), block.MaxPayload)
	case info == protocol.NEGOTIATION_TYPE_INFO_EXPORT, info == protocol.NEGOTIATION_TYPE_INFO_BLOCKSIZE:
		return false, fmt.Errorf("%w: information %d of %d bytes", ErrProtocol, info, len(data))
	}
	return false, nil
}

// check refuses numbers that no export can have.
func (h *handshake) check() error {
	e := h.export
	power := func(n int64) bool { return n > 0 && bits.OnesCount64(uint64(n)) == 1 }
	switch {
	case !power(e.MinBlock) || e.MinBlock > 1<<16 || !power(e.PreferredBlock) || e.PreferredBlock < e.MinBlock || e.MaxPayload < e.MinBlock:
		return fmt.Errorf("%w: block sizes %d, %d and %d", ErrProtocol, e.MinBlock, e.PreferredBlock, e.MaxPayload)
	case e.Size == 0:
		return fmt.Errorf("%w: the export is empty", ErrProtocol)
	case e.Size%e.MinBlock != 0:
		return fmt.Errorf("%w: the export's size %d is not a multiple of its block size %d", ErrProtocol, e.Size, e.MinBlock)
	}
	return nil
}

// option sends an option and hands its replies to each, until ACK or a refusal.
func (h *handshake) option(id uint32, data []byte, each func(kind uint32, data []byte) error) error {
	p := binary.BigEndian.AppendUint64(nil, protocol.NEGOTIATION_MAGIC_OPTION)
	p = binary.BigEndian.AppendUint32(p, id)
	p = binary.BigEndian.AppendUint32(p, uint32(len(data)))
	if err := h.send(append(p, data...)); err != nil {
		return err
	}
	for range maxReplies {
		kind, data, err := h.reply(id)
		if err != nil {
			return err
		}
		switch {
		case kind&wire.RepErr != 0:
			return &RefusedError{Code: kind, Text: h.target.redact(printable(string(data)))}
		case kind == protocol.NEGOTIATION_TYPE_REPLY_ACK:
			return nil
		}
		if err := each(kind, data); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: more than %d replies to one option", ErrProtocol, maxReplies)
}

func (h *handshake) reply(id uint32) (kind uint32, data []byte, err error) {
	var p [20]byte
	if err := h.receive(p[:]); err != nil {
		return 0, nil, err
	}
	be := binary.BigEndian
	if be.Uint64(p[:]) != protocol.NEGOTIATION_MAGIC_REPLY || be.Uint32(p[8:]) != id {
		return 0, nil, fmt.Errorf("%w: a reply that belongs to no option", ErrProtocol)
	}
	kind = be.Uint32(p[12:])
	length := be.Uint32(p[16:])
	if length > maxReply {
		return 0, nil, fmt.Errorf("%w: an option reply of %d bytes", ErrProtocol, length)
	}
	data = make([]byte, length)
	return kind, data, h.receive(data)
}

func (h *handshake) receive(p []byte) error {
	_, err := io.ReadFull(h.conn, p)
	return broken(err)
}

func (h *handshake) send(p []byte) error {
	_, err := h.conn.Write(p)
	return broken(err)
}

// broken is the end of a connection that had not said why.
func broken(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: the connection: %w", block.ErrUnavailable, err)
}
