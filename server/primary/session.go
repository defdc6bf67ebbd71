package primary

import (
	"bytes"
	"crypto/subtle"
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/server/block"
)

// Conn is one connection. Its exported fields are set before Connect.
type Conn struct {
	Stream     block.Stream
	Attachment block.AttachmentID
	Epoch      block.CacheEpoch    // numbered sessions
	Number     block.SessionNumber // 0: plain
	Tag        any                 // the driver's own

	state           connState
	readOnly        bool
	silent          bool // the stream needs no telling: it said so itself
	running         int  // of its requests: in flight
	firstOp, lastOp *Op
	in              *attachment // nil once it is forgotten
}

type connState uint8

const (
	connWaiting connState = iota // for its Answer
	connOpen
	connClosed // and, while it is listed, not drained
)

// attachment is one consumer's right to connect, with its connections.
type attachment struct {
	id       block.AttachmentID
	node     string
	readOnly bool
	revoked  bool // being detached, or gone from the map
	gone     bool // gone from the map: nothing to confirm
	digest   [32]byte
	newest   session // the highest seen
	conns    []*Conn // in order of Connect; closed ones until they are drained
}

// session names one of an attachment's; its connections share its fate. Each
// cache epoch has a device of its own, which counts from 1. The zero session is
// that of all plain clients, older than any.
type session struct {
	epoch  block.CacheEpoch
	number block.SessionNumber
}

func (cn *Conn) session() session {
	if cn.Number == 0 {
		return session{}
	}
	return session{cn.Epoch, cn.Number}
}

func (s session) before(o session) bool {
	return s.epoch < o.epoch || s.epoch == o.epoch && s.number < o.number
}

// Authorize finds the attachment whose token has this SHA-256 digest. How long
// it takes does not depend on the digest.
func (c *Core) Authorize(digest [32]byte) (block.AttachmentID, bool) {
	var id block.AttachmentID
	found := 0
	for _, a := range c.attachments {
		if same := subtle.ConstantTimeCompare(a.digest[:], digest[:]); same == 1 && !a.revoked {
			id, found = a.id, 1
		}
	}
	return id, found == 1
}

// Connect asks for a place in a session; Answer follows. A newer session ends
// older ones at once and is answered when they are drained.
func (c *Core) Connect(cn *Conn) {
	if err := c.admit(cn); err != nil {
		cn.state = connClosed
		c.act(Answer{cn, err})
		return
	}
	a := c.attachment(cn.Attachment)
	if a.newest.before(cn.session()) {
		a.newest = cn.session()
		for _, o := range slices.Clone(a.conns) {
			if o.session().before(a.newest) {
				c.close(o, fmt.Errorf("%w: session %d was opened", block.ErrStale, cn.Number))
			}
		}
	}
	cn.in, cn.readOnly = a, a.readOnly
	a.conns = append(a.conns, cn)
}

// admit decides whether a connection may wait for its place.
func (c *Core) admit(cn *Conn) error {
	a := c.attachment(cn.Attachment)
	switch {
	case c.over != nil:
		return c.over
	case a == nil || a.revoked:
		return fmt.Errorf("%w: the attachment was revoked", block.ErrPermission)
	case cn.Number == 0:
		if slices.ContainsFunc(a.conns, func(o *Conn) bool { return o.Number > 0 && o.state != connClosed }) {
			return fmt.Errorf("%w: the volume is in use as a device on %s", block.ErrInUse, a.node)
		}
	case cn.Epoch < c.info.CacheEpoch:
		return cacheLost(cn.Epoch, c.info.CacheEpoch)
	case cn.Epoch > c.info.CacheEpoch:
		c.reads.want()
		return fmt.Errorf("%w: cache epoch %d is not known here", block.ErrUnavailable, cn.Epoch)
	case cn.session().before(a.newest):
		return fmt.Errorf("%w: session %d is older than session %d", block.ErrStale, cn.Number, a.newest.number)
	}
	return nil
}

// Disconnect says that a connection has ended, or that nobody waits for its
// Answer any more. What of it is not in flight is dropped.
func (c *Core) Disconnect(cn *Conn) {
	cn.silent = true
	c.close(cn, errConnClosed)
}

// close takes nothing from a connection any more: it drops, in order, all that
// is not in flight, and tells the stream. Once what is in flight is answered
// the connection is forgotten.
func (c *Core) close(cn *Conn, reason error) {
	was := cn.state
	if was == connClosed {
		return
	}
	cn.state = connClosed
	for op := cn.firstOp; op != nil; {
		next := op.nextConn
		if op.state != opRunning {
			c.finish(op, errConnClosed)
		}
		op = next
	}
	if !cn.silent {
		if was == connWaiting {
			c.act(Answer{cn, reason})
		} else {
			c.act(CloseConn{cn, reason})
		}
	}
	c.drained(cn)
}

// drained forgets a closed connection of which nothing is in flight.
func (c *Core) drained(cn *Conn) {
	a := cn.in
	if a == nil || cn.state != connClosed || cn.running > 0 {
		return
	}
	cn.in = nil
	if i := slices.Index(a.conns, cn); i >= 0 {
		a.conns = slices.Delete(a.conns, i, i+1)
	}
	if a.gone && len(a.conns) == 0 {
		c.forget(a.id)
	}
}

// settleSessions answers who need not wait any more: the volume serves, and
// nothing of another session is in flight.
func (c *Core) settleSessions() {
	if !c.serving {
		return
	}
	for _, a := range c.attachments {
		for _, cn := range a.conns {
			if cn.state != connWaiting {
				continue
			}
			others := slices.ContainsFunc(a.conns, func(o *Conn) bool { return o.state == connClosed && o.session() != cn.session() })
			if !others {
				cn.state = connOpen
				c.act(Answer{Conn: cn})
			}
		}
	}
}

// raiseEpoch ends every session of before the cache epoch. A plain client
// carries no epoch: it only loses its connection.
func (c *Core) raiseEpoch() {
	for _, a := range c.attachments {
		for _, cn := range slices.Clone(a.conns) {
			if cn.Number == 0 && cn.state == connWaiting || cn.Number > 0 && cn.Epoch >= c.info.CacheEpoch {
				continue
			}
			c.close(cn, cacheLost(cn.Epoch, c.info.CacheEpoch))
		}
	}
}

func cacheLost(old, served block.CacheEpoch) error {
	return fmt.Errorf("%w: cache epoch %d is over, %d is served; the device must be made anew", block.ErrCacheLost, old, served)
}

func (c *Core) attachment(id block.AttachmentID) *attachment {
	for _, a := range c.attachments {
		if a.id == id {
			return a
		}
	}
	return nil
}

// adoptAttachments takes the map's list. Who is revoked, or not in it any more, loses its connections.
func (c *Core) adoptAttachments(list []Attachment) {
	for _, m := range list {
		a := c.attachment(m.ID)
		if a == nil {
			a = &attachment{id: m.ID}
			c.attachments = append(c.attachments, a)
		}
		a.node, a.readOnly, a.digest = m.Node, m.ReadOnly, m.TokenDigest
		if m.Revoking {
			c.revoke(a)
		}
	}
	for _, a := range slices.Clone(c.attachments) {
		if !slices.ContainsFunc(list, func(m Attachment) bool { return m.ID == a.id }) {
			a.gone = true
			c.revoke(a)
			if len(a.conns) == 0 {
				c.forget(a.id)
			}
		}
	}
	slices.SortFunc(c.attachments, func(a, b *attachment) int { return bytes.Compare(a.id.UUID[:], b.id.UUID[:]) })
}

func (c *Core) revoke(a *attachment) {
	a.revoked = true
	for _, cn := range slices.Clone(a.conns) {
		c.close(cn, fmt.Errorf("%w: the attachment was revoked", block.ErrPermission))
	}
}

// revoked is an attachment whose end is to be confirmed: closed, drained, and not yet gone.
func (c *Core) revoked() *attachment {
	for _, a := range c.attachments {
		if a.revoked && !a.gone && len(a.conns) == 0 {
			return a
		}
	}
	return nil
}

func (c *Core) forget(id block.AttachmentID) {
	c.attachments = slices.DeleteFunc(c.attachments, func(a *attachment) bool { return a.id == id })
}
