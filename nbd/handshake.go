package nbd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
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
