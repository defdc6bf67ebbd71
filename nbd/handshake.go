package nbd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

const (
	maxOptions   = 128
	maxOption    = 8 << 10  // option data that is read
	maxSkip      = 64 << 10 // option data that is read and thrown away
	lateDataWait = 250 * time.Millisecond
)

var (
	errAborted   = errors.New("nbd: the client ended the handshake")
	errHandshake = errors.New("nbd: the client does not speak the handshake")
)

// negotiation is the state of one handshake.
type negotiation struct {
	*conn
	noZeroes bool
	metaName string // the export that the metadata context was chosen for
	meta     bool
	data     [maxOption]byte
	reply    []byte // of the option in hand; sent in one piece
}

// handshake talks until an export is open: then c.dev is set and the client
// waits for the transmission phase. Any other end is an error; with c.dev set
// too if the connection ended while the export was opened.
func (c *conn) handshake() error {
	n := &negotiation{conn: c}
	if err := n.greet(); err != nil {
		return err
	}
	for range maxOptions {
		open, err := n.option()
		if open || err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: %d options", errHandshake, maxOptions)
}

// deadline gives the client its time for the next step. The clock does not run
// while Exports is asked. A connection that was ended keeps its deadline.
func (n *negotiation) deadline(d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.reason == nil {
		_ = n.nc.SetDeadline(time.Now().Add(d))
	}
}

func (n *negotiation) greet() error {
	n.deadline(n.srv.cfg.HandshakeTimeout)
	var p []byte
	p = binary.BigEndian.AppendUint64(p, protocol.NEGOTIATION_MAGIC_OLDSTYLE)
	p = binary.BigEndian.AppendUint64(p, protocol.NEGOTIATION_MAGIC_OPTION)
	p = binary.BigEndian.AppendUint16(p, protocol.NEGOTIATION_HANDSHAKE_FLAG_FIXED_NEWSTYLE|wire.FlagNoZeroes)
	if err := n.send(p); err != nil {
		return err
	}
	var flags [4]byte
	if err := n.receive(flags[:]); err != nil {
		return err
	}
	f := binary.BigEndian.Uint32(flags[:])
	if f&^(wire.ClientFixed|wire.ClientNoZeroes) != 0 {
		return fmt.Errorf("%w: client flags %#x", errHandshake, f)
	}
	n.noZeroes = f&wire.ClientNoZeroes != 0
	return nil
}

// option reads and answers one option. True: the transmission phase begins.
func (n *negotiation) option() (open bool, err error) {
	var h [16]byte
	if err := n.receive(h[:]); err != nil {
		return false, err
	}
	if binary.BigEndian.Uint64(h[:]) != protocol.NEGOTIATION_MAGIC_OPTION {
		return false, fmt.Errorf("%w: it sent %q", errHandshake, h[:8])
	}
	id, length := binary.BigEndian.Uint32(h[8:]), binary.BigEndian.Uint32(h[12:])
	n.reply = n.reply[:0]
	if id == wire.OptExportName {
		return n.exportName(length)
	}
	data, ok, err := n.optionData(id, length)
	if err != nil || !ok {
		return false, err
	}
	switch id {
	case protocol.NEGOTIATION_ID_OPTION_GO, protocol.NEGOTIATION_ID_OPTION_INFO:
		return n.goOrInfo(id, data)
	case protocol.NEGOTIATION_ID_OPTION_LIST:
		err = n.list(id, data)
	case wire.OptStructuredReply:
		err = n.structuredReply(id, data)
	case wire.OptListMetaContext, wire.OptSetMetaContext:
		err = n.metaContext(id, data)
	case protocol.NEGOTIATION_ID_OPTION_ABORT:
		return false, errors.Join(n.ack(id), errAborted)
	case wire.OptStartTLS:
		err = n.refuse(id, protocol.NEGOTIATION_TYPE_REPLY_ERR_UNSUPPORTED, "this server does not offer TLS yet")
	default:
		err = n.refuse(id, protocol.NEGOTIATION_TYPE_REPLY_ERR_UNSUPPORTED, fmt.Sprintf("option %d is not known", id))
	}
	return false, err
}

// optionData reads an option's data, bounded before anything else. False: the
// option was refused for its length, or skipped over and refused as unknown.
func (n *negotiation) optionData(id, length uint32) (data []byte, ok bool, err error) {
	switch {
	case length <= maxOption:
		data = n.data[:length]
		return data, true, n.receive(data)
	case length > maxSkip:
		text := fmt.Sprintf("%d bytes of option data; at most %d are read", length, maxOption)
		return nil, false, errors.Join(n.refuse(id, wire.RepErrTooBig, text), fmt.Errorf("%w: %s", errHandshake, text))
	}
	if err := n.skip(int(length)); err != nil {
		return nil, false, err
	}
	if slices.Contains(known(), id) {
		return nil, false, n.refuse(id, wire.RepErrTooBig, fmt.Sprintf("%d bytes of option data; at most %d are read", length, maxOption))
	}
	return nil, false, n.refuse(id, protocol.NEGOTIATION_TYPE_REPLY_ERR_UNSUPPORTED, fmt.Sprintf("option %d is not known", id))
}

// known is the options that are served.
func known() []uint32 {
	return []uint32{
		protocol.NEGOTIATION_ID_OPTION_ABORT, protocol.NEGOTIATION_ID_OPTION_LIST,
		protocol.NEGOTIATION_ID_OPTION_INFO, protocol.NEGOTIATION_ID_OPTION_GO,
		wire.OptStructuredReply, wire.OptListMetaContext, wire.OptSetMetaContext,
	}
}

// skip throws option data away.
func (n *negotiation) skip(length int) error {
	_, err := io.CopyN(io.Discard, n.nc, int64(length))
	return n.broken(err)
}

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

func (n *negotiation) list(id uint32, data []byte) error {
	if len(data) != 0 {
		return n.refuse(id, wire.RepErrInvalid, "LIST takes no data")
	}
	ctx, cancel := n.callContext()
	defer cancel()
	names, err := n.srv.cfg.Exports.List(ctx)
	if err != nil {
		return n.refuseErr(id, err)
	}
	for _, name := range names {
		p := binary.BigEndian.AppendUint32(nil, uint32(len(name)))
		n.appendReply(id, protocol.NEGOTIATION_TYPE_REPLY_SERVER, append(p, name...))
	}
	return n.ack(id)
}

func (n *negotiation) structuredReply(id uint32, data []byte) error {
	if len(data) != 0 {
		return n.refuse(id, wire.RepErrInvalid, "STRUCTURED_REPLY takes no data")
	}
	n.structured = true
	return n.ack(id)
}

// metaContext serves LIST_META_CONTEXT and SET_META_CONTEXT.
func (n *negotiation) metaContext(id uint32, data []byte) error {
	set := id == wire.OptSetMetaContext
	if set {
		n.meta, n.metaName = false, "" // also if the option fails
	}
	if !n.structured {
		return n.refuse(id, wire.RepErrInvalid, "structured replies must be negotiated first")
	}
	name, queries, ok := metaData(data)
	if !ok {
		return n.refuse(id, wire.RepErrInvalid, "the lengths inside the option do not add up")
	}
	if err := checkName(name); err != nil {
		return n.refuseErr(id, err)
	}
	if _, err := n.describe(string(name)); err != nil {
		return n.refuseErr(id, err)
	}
	chosen := len(queries) == 0 && !set
	for _, q := range queries {
		chosen = chosen || q == wire.Allocation || q == "base:" && !set
	}
	if !chosen {
		return n.ack(id)
	}
	context := uint32(0)
	if set {
		n.meta, n.metaName, context = true, string(name), allocationID
	}
	n.appendReply(id, wire.RepMetaContext, append(binary.BigEndian.AppendUint32(nil, context), wire.Allocation...))
	return n.ack(id)
}

// metaData takes the name and the queries out of the data of the metadata context options.
func metaData(p []byte) (name []byte, queries []string, ok bool) {
	text := func() (t []byte, ok bool) {
		if len(p) < 4 || uint64(binary.BigEndian.Uint32(p)) > uint64(len(p)-4) {
			return nil, false
		}
		length := binary.BigEndian.Uint32(p)
		t, p = p[4:4+length], p[4+length:]
		return t, true
	}
	if name, ok = text(); !ok || len(p) < 4 {
		return nil, nil, false
	}
	count := binary.BigEndian.Uint32(p)
	p = p[4:]
	for range count {
		q, ok := text()
		if !ok {
			return nil, nil, false
		}
		queries = append(queries, string(q))
	}
	return name, queries, len(p) == 0
}

// describe asks Exports about a name without opening it.
func (n *negotiation) describe(name string) (block.Info, error) {
	n.srv.named(n.conn)
	ctx, cancel := n.callContext()
	defer cancel()
	return n.srv.cfg.Exports.Describe(ctx, name)
}

// open asks Exports for the Device. An error with n.dev set means that the connection ended meanwhile.
func (n *negotiation) open(name string) error {
	n.srv.named(n.conn)
	n.volume, _, _ = strings.Cut(name, "/")
	n.volume = n.volume[:min(len(n.volume), 64)]
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
