package nbd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/pojntfx/go-nbd/pkg/protocol"
	"golang.org/x/sys/unix"
)

// validText reports whether p is a string as the protocol has them.
func validText(p []byte) bool { return utf8.Valid(p) && bytes.IndexByte(p, 0) < 0 }

// receive fills p. The handshake reads no byte more than it needs, so that the
// transmission phase starts where it ends.
func (n *negotiation) receive(p []byte) error {
	_, err := io.ReadFull(n.nc, p)
	return n.broken(err)
}

func (n *negotiation) send(p []byte) error {
	_, err := n.nc.Write(p)
	return n.broken(err)
}

// broken is why the connection was ended, or else what its reads and writes say.
func (n *negotiation) broken(err error) error {
	if err == nil {
		return nil
	}
	if why := n.why(); why != nil {
		return why
	}
	if errors.Is(err, io.EOF) {
		return errAborted
	}
	return fmt.Errorf("nbd: handshake: %w", err)
}

// appendReply appends one option reply; the text or data is cut at what a string may be long.
func (n *negotiation) appendReply(id, kind uint32, data []byte) {
	n.reply = binary.BigEndian.AppendUint64(n.reply, protocol.NEGOTIATION_MAGIC_REPLY)
	n.reply = binary.BigEndian.AppendUint32(n.reply, id)
	n.reply = binary.BigEndian.AppendUint32(n.reply, kind)
	n.reply = binary.BigEndian.AppendUint32(n.reply, uint32(len(data)))
	n.reply = append(n.reply, data...)
}

// ack ends an option's replies with success.
func (n *negotiation) ack(id uint32) error {
	n.appendReply(id, protocol.NEGOTIATION_TYPE_REPLY_ACK, nil)
	return n.send(n.reply)
}

// refuse answers an option with an error and the reason in a sentence, and nothing else.
func (n *negotiation) refuse(id, kind uint32, text string) error {
	n.reply = n.reply[:0]
	n.appendReply(id, kind, []byte(text[:min(len(text), wire.MaxString)]))
	return n.send(n.reply)
}

func (n *negotiation) refuseErr(id uint32, err error) error {
	if why := n.why(); why != nil {
		return why
	}
	kind, text := refusalOf(err)
	return n.refuse(id, kind, text)
}

// peeker reads without taking anything out of the socket.
func (n *negotiation) peeker() io.Reader { return peeker{n.conn} }

type peeker struct{ c *conn }

// Read waits until len(p) bytes have come, so that a second Read is never behind the first.
func (k peeker) Read(p []byte) (int, error) {
	var got int
	var failure error
	err := k.c.raw.Read(func(fd uintptr) bool {
		got, _, failure = unix.Recvfrom(int(fd), p, unix.MSG_PEEK)
		if failure == unix.EAGAIN || failure == unix.EINTR {
			return false
		}
		return failure != nil || got == 0 || got == len(p)
	})
	switch {
	case err != nil:
		return 0, err
	case failure != nil:
		return 0, failure
	case got == 0:
		return 0, io.EOF
	}
	return got, nil
}
