package sim

import (
	"crypto/sha256"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
)

// stallLimit is how long the server's reader may be held up before it closes
// its connection unparsed (design: 1 s).
const stallLimit = time.Second

// name is what a connection asks for, with the digest of its token.
type name struct {
	volume  block.VolumeID
	digest  [32]byte
	epoch   block.CacheEpoch
	session block.SessionNumber
}

func digestOf(token []byte) [32]byte { return sha256.Sum256(token) }

// conn is one connection: two FIFO pipes, and what each end thinks of it. It
// stands for the NBD server too: what it parses it submits, what closes it drops.
type conn struct {
	*world
	n      int
	dev    *device
	server *server
	life   int
	name   name

	up      bool // the client's end is open
	ready   bool // the client was told that the session is open
	silent  bool // nothing passes in either direction any more
	toThere time.Duration
	toHere  time.Duration

	served bool          // the server's end is open
	opened bool          // its place was given to it
	drag   time.Duration // what its writes take longer on their way to the disk
	held   time.Duration
	unread []*message // arrived, not parsed: the reader is held up
	volume *volume    // set when it asked for its place
	core   primary.Conn
}

// message is a request on its way, or waiting to be parsed.
type message struct {
	arrived time.Duration
	req     *block.Request
	call    *call
}

// dial connects; the handshake takes that much longer to arrive.
func (s *server) dial(dev *device, n name, longer time.Duration) *conn {
	s.dials++
	c := &conn{world: s.world, n: s.dials, dev: dev, server: s, life: s.life, name: n, up: true}
	c.tracef("conn %d: dialled, epoch %d, session %d", c.n, n.epoch, n.session)
	c.toThere = c.now + longer
	c.there(func() {
		if !s.up {
			c.here(func() { c.refused(errGone) })
			return
		}
		s.conns = append(s.conns, c)
		c.served = true
		s.handshake(c)
	})
	return c
}

// there delivers f to the server's host in order; here to the client.
func (c *conn) there(f func()) {
	c.toThere = max(c.toThere, c.now+c.latency())
	c.at(c.toThere, func() {
		if !c.silent {
			c.server.postConn(c, f)
		}
	})
}

func (c *conn) here(f func()) {
	c.toHere = max(c.toHere, c.now+c.latency())
	c.at(c.toHere, func() {
		if !c.silent && c.up {
			f()
		}
	})
}

func (c *conn) latency() time.Duration {
	if c.chance(1) {
		return c.between(0, 200*time.Millisecond)
	}
	return c.between(20*time.Microsecond, 300*time.Microsecond)
}

// postConn is post for a connection of this process; a first message may also meet the next one.
func (s *server) postConn(c *conn, f func()) {
	if !c.served && c.volume == nil {
		c.life = s.life
		if !s.up {
			f()
			return
		}
	}
	s.post(c.life, f)
}

// The server's end.

// refuse ends a connection in its handshake.
func (c *conn) refuse(err error) {
	if !c.served {
		return
	}
	c.tracef("conn %d: refused: %s", c.n, outcome(err))
	c.forget()
	c.here(func() { c.refused(err) })
}

func (c *conn) forget() {
	c.served, c.unread = false, nil
	c.server.conns = slices.DeleteFunc(c.server.conns, func(o *conn) bool { return o == c })
}

// answer is the core's answer to Connect.
func (c *conn) answer(err error) {
	switch {
	case err != nil:
		c.refuse(err)
	case c.served:
		c.opened = true
		size := c.volume.core.Info(&c.core).Size
		c.tracef("conn %d: open", c.n)
		c.here(func() {
			c.ready = true
			c.dev.opened(c, size)
		})
	}
}

// arrive is a request in the receive buffer.
func (c *conn) arrive(m *message) {
	if !c.served {
		return
	}
	if c.held > c.now || len(c.unread) > 0 {
		c.unread = append(c.unread, m)
		return
	}
	c.parse(m)
}

func (c *conn) parse(m *message) {
	m.call.parsed++
	c.tracef("conn %d: parsed %s", c.n, m.call)
	c.volume.event(func(core *primary.Core) { core.Submit(&c.core, m.req) })
}

// holdUp lets the server's reader of this connection do nothing for d.
func (c *conn) holdUp(d time.Duration) {
	if !c.served {
		return
	}
	c.tracef("conn %d: reader held up for %v", c.n, d)
	c.held = c.now + d
	c.after(d, func() { c.server.post(c.life, c.resume) })
}

// resume reads on, unless what waits has waited too long.
func (c *conn) resume() {
	if !c.served || c.held > c.now {
		return
	}
	if len(c.unread) > 0 && c.now-c.unread[0].arrived > stallLimit && !c.server.switches.parseLate {
		c.tracef("conn %d: closed unparsed after a stall", c.n)
		c.serverClose()
		return
	}
	list := c.unread
	c.unread = nil
	for _, m := range list {
		if c.served {
			c.parse(m)
		}
	}
}

// complete hands a finished request back. Without the connection nobody hears
// of it; nor does a client that sends again hear of what its closing dropped.
func (c *conn) complete(r *block.Request) {
	m := r.Slot.(*conn)
	if m != c {
		c.failf("sim: a request of another connection")
	}
	err, data, cookie := r.Err, r.Data, r.Cookie
	if !c.served || outcome(err) == block.ErrShutdown.Error() {
		return
	}
	c.here(func() { c.dev.replied(c, cookie, data, err) })
}

// serverClose is the server's end closing.
func (c *conn) serverClose() {
	if !c.served {
		return
	}
	c.forget()
	c.disconnect()
	c.here(c.closed)
}

// disconnect tells the core, once, that the connection has ended.
func (c *conn) disconnect() {
	if c.volume != nil {
		c.volume.event(func(core *primary.Core) { core.Disconnect(&c.core) })
	}
}

// serverGone is the end of the server's process, with told: the kernel says so to the client.
func (c *conn) serverGone(told bool) {
	c.served, c.unread = false, nil
	if told {
		c.here(c.closed)
	}
}

// The client's end.

// send puts a request on the wire.
func (c *conn) send(k *call) {
	k.cookie = c.dev.cookie()
	k.conn, k.sent = c, k.sent+1
	r := &block.Request{Op: k.op, FUA: k.fua, NoHole: k.noHole, Offset: k.off, Length: k.length, Cookie: k.cookie, Slot: c}
	if k.op == block.OpWrite {
		r.Data = make([]byte, k.length)
		k.write.Fill(r.Data)
	}
	c.tracef("dev: conn %d sends %s", c.n, k)
	m := &message{req: r, call: k}
	c.toThere = max(c.toThere, c.now+c.latency())
	c.at(c.toThere, func() {
		m.arrived = c.now // in the receive buffer, also of a process that is stopped
		if !c.silent {
			c.server.post(c.life, func() { c.arrive(m) })
		}
	})
}

// close is the client's end closing: in order (FIN), or at once (RST), which also drops what is unread.
func (c *conn) close(reset bool) {
	if !c.up {
		return
	}
	c.tracef("conn %d: closed by the client, reset %t", c.n, reset)
	c.up, c.ready = false, false
	c.there(func() {
		if !c.served {
			return
		}
		if reset {
			c.unread = nil
		}
		if len(c.unread) > 0 { // the end comes behind them
			c.after(c.held-c.now, func() { c.server.post(c.life, c.ended) })
			return
		}
		c.ended()
	})
}

// ended is the server's reader seeing the end.
func (c *conn) ended() {
	if c.served {
		c.forget()
		c.disconnect()
	}
}

// closed is the client seeing the server's end closed.
func (c *conn) closed() {
	c.up, c.ready = false, false
	c.dev.lostConn(c)
}

// refused is the client seeing its handshake refused.
func (c *conn) refused(err error) {
	c.up, c.ready = false, false
	c.dev.refused(c, err)
}

// cut lets nothing pass any more, and tells nobody: the network between them is gone.
func (c *conn) cut() {
	c.tracef("conn %d: cut", c.n)
	c.silent = true
}
