package nbd

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// The options that name an export: EXPORT_NAME, GO and INFO.

// checkName refuses what cannot be an export name, before anybody is asked about it.
func checkName(name []byte) error {
	switch {
	case len(name) > wire.MaxString:
		return fmt.Errorf("an export name of %d bytes; at most %d are allowed: %w", len(name), wire.MaxString, block.ErrTooLarge)
	case !validText(name):
		return fmt.Errorf("an export name is UTF-8 without NUL: %w", block.ErrInvalid)
	}
	return nil
}

// exportName serves the old option that cannot say why it fails: then the connection is closed.
func (n *negotiation) exportName(length uint32) (bool, error) {
	if length > wire.MaxString {
		return false, fmt.Errorf("%w: an export name of %d bytes", errHandshake, length)
	}
	name := n.data[:length]
	if err := n.receive(name); err != nil {
		return false, err
	}
	if err := checkName(name); err != nil {
		return false, fmt.Errorf("%w: %w", errHandshake, err)
	}
	if err := n.open(string(name)); err != nil {
		return false, err
	}
	p := binary.BigEndian.AppendUint64(nil, uint64(n.info.Size))
	p = binary.BigEndian.AppendUint16(p, n.transmissionFlags(n.info))
	if !n.noZeroes {
		p = append(p, make([]byte, 124)...)
	}
	return true, n.begin(p)
}

// goOrInfo serves OPT_GO and OPT_INFO.
func (n *negotiation) goOrInfo(id uint32, data []byte) (bool, error) {
	name, ok := goData(data)
	if len(data) == 0 {
		var err error
		if name, ok, err = n.lateGoData(); err != nil {
			return false, err
		}
	}
	if !ok {
		return false, n.refuse(id, wire.RepErrInvalid, "the lengths inside the option do not add up")
	}
	if err := checkName(name); err != nil {
		return false, n.refuseErr(id, err)
	}
	if id == protocol.NEGOTIATION_ID_OPTION_INFO {
		info, err := n.describe(string(name))
		if err != nil {
			return false, n.refuseErr(id, err)
		}
		n.appendInfo(id, info)
		return false, n.ack(id)
	}
	if err := n.open(string(name)); err != nil {
		if n.dev != nil || n.why() != nil {
			return false, err
		}
		n.srv.noisy(slog.LevelInfo, "export refused", "volume_id", n.volume, "remote", n.nc.RemoteAddr().String(), "err", err)
		return false, n.refuseErr(id, err)
	}
	n.appendInfo(id, n.info)
	n.appendReply(id, protocol.NEGOTIATION_TYPE_REPLY_ACK, nil)
	return true, n.begin(n.reply)
}

// goData takes the name out of the data of GO and INFO. Which information the
// client asks for does not matter: it gets all there is.
func goData(p []byte) (name []byte, ok bool) {
	if len(p) < 6 {
		return nil, false
	}
	length := binary.BigEndian.Uint32(p)
	if uint64(length) > uint64(len(p)-6) {
		return nil, false
	}
	name, rest := p[4:4+length], p[4+length:]
	return name, len(rest) == 2+2*int(binary.BigEndian.Uint16(rest))
}

// lateGoData reads the data of a GO whose header announced none: see DESIGN.md.
func (n *negotiation) lateGoData() (name []byte, ok bool, err error) {
	n.deadline(lateDataWait)
	_, err = io.ReadFull(n.peeker(), n.data[:4])
	n.deadline(n.srv.cfg.HandshakeTimeout)
	length := binary.BigEndian.Uint32(n.data[:4])
	switch {
	case n.why() != nil:
		return nil, false, n.why()
	case err != nil, length > wire.MaxString: // so is the magic of another option
		return nil, false, nil
	}
	p := n.data[:4+length+2]
	if err := n.receive(p); err != nil {
		return nil, false, err
	}
	if err := n.skip(2 * int(binary.BigEndian.Uint16(p[4+length:]))); err != nil {
		return nil, false, err
	}
	return n.data[4 : 4+length], true, nil
}

// appendInfo appends what is told of an export. The sizes are told unasked,
// because they are enforced.
func (n *negotiation) appendInfo(id uint32, info block.Info) {
	p := binary.BigEndian.AppendUint16(nil, protocol.NEGOTIATION_TYPE_INFO_EXPORT)
	p = binary.BigEndian.AppendUint64(p, uint64(info.Size))
	p = binary.BigEndian.AppendUint16(p, n.transmissionFlags(info))
	n.appendReply(id, protocol.NEGOTIATION_TYPE_REPLY_INFO, p)

	p = binary.BigEndian.AppendUint16(p[:0], protocol.NEGOTIATION_TYPE_INFO_BLOCKSIZE)
	p = binary.BigEndian.AppendUint32(p, minBlock)
	p = binary.BigEndian.AppendUint32(p, uint32(max(info.PreferredBlock, minBlock)))
	p = binary.BigEndian.AppendUint32(p, block.MaxPayload)
	n.appendReply(id, protocol.NEGOTIATION_TYPE_REPLY_INFO, p)
}

func (n *negotiation) transmissionFlags(info block.Info) uint16 {
	f := protocol.NEGOTIATION_REPLY_FLAGS_HAS_FLAGS | wire.TransFlush | wire.TransFUA
	if info.ReadOnly {
		f |= wire.TransReadOnly
	} else {
		f |= wire.TransTrim | wire.TransWriteZeroes
	}
	if info.MultiConn {
		f |= protocol.NEGOTIATION_REPLY_FLAGS_CAN_MULTI_CONN
	}
	if n.structured {
		f |= wire.TransDF
	}
	return f
}

// describe asks Exports about a name without opening it.
func (n *negotiation) describe(name string) (block.Info, error) {
	n.srv.named(n.conn)
	ctx, cancel := n.callContext()
	defer cancel()
	return n.srv.cfg.Exports.Describe(ctx, name)
}

// loggable is what may be said of a name: its volume id. Anything else in it may be a token.
func loggable(name string) string {
	id, _, _ := strings.Cut(name, "/")
	if _, err := block.ParseUUID(id); err != nil {
		return ""
	}
	return id
}

// open asks Exports for the Device. An error with n.dev set means that the connection ended meanwhile.
func (n *negotiation) open(name string) error {
	n.srv.named(n.conn)
	n.volume = loggable(name)
	if err := n.srv.cfg.Fault.Hit("nbd.handshake", n.volume); err != nil {
		return err
	}
	ctx, cancel := n.callContext()
	dev, err := n.srv.cfg.Exports.Open(ctx, name, n.conn)
	cancel()
	if err != nil {
		return err
	}
	n.dev, n.info = dev, dev.Info()
	n.size = n.info.Size
	n.observer, _ = dev.(Observer)
	n.allocation = n.meta && n.metaName == name
	return n.why()
}

// begin sends the last reply of the handshake and enters the transmission phase.
func (n *negotiation) begin(p []byte) error {
	if err := n.send(p); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.slot = wire.SimpleReplySize; n.structured {
		n.slot = wire.OffsetDataSize
	}
	if n.reason == nil {
		_ = n.nc.SetDeadline(time.Time{})
	}
	return n.reason
}

// callContext is the context of a call of Exports: it ends when the client
// leaves, when the connection is ended, or after OpenTimeout. cancel waits for
// the watch it started.
func (n *negotiation) callContext() (context.Context, func()) {
	ctx, cancel := context.WithTimeout(context.Background(), n.srv.cfg.OpenTimeout)
	n.deadline(n.srv.cfg.OpenTimeout + n.srv.cfg.HandshakeTimeout)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		// An error means a deadline: the call is over or the connection is ended.
		if n.raw.Read(hungUp) == nil || n.why() != nil {
			cancel()
		}
	}()
	return ctx, func() {
		n.deadline(-time.Second)
		<-watching
		cancel()
		n.deadline(n.srv.cfg.HandshakeTimeout)
	}
}
