package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/test/checker"
)

// device is a client like the kernel's: several connections that make one
// session, requests that wait out a timeout and are sent again under a new
// cookie on a sibling or in a new session, until they are answered. It outlives
// the servers. What it is told goes into the volume's log.
type device struct {
	*world
	server *server
	log    *checker.Log
	node   string
	name   name // volume, token, epoch, newest session

	socks   []*conn
	want    int           // how many sockets
	size    int64         // as told, bytes
	timeout time.Duration // T: how long a request on a socket waits
	slow    time.Duration // what handshakes take longer
	cookies uint64
	pending []*call // not answered, in order of submission
	broken  error   // permanent: nothing is sent any more
	over    bool    // the last word has been spoken: nothing of it can reach a disk any more
	closing bool    // no new session is opened

	errors int // answers that were errors
}

// call is one request of the device, however often it is sent.
type call struct {
	op          block.Op
	off, length int64
	fua, noHole bool

	write *checker.Write
	flush *checker.Flush
	read  *checker.Read

	conn   *conn // it was sent on last; nil: it waits for one
	cookie uint64
	sent   int
	parsed int
	done   bool
	err    error  // done: the error it was answered with
	data   []byte // done: what was read
	then   func() // called when it is done
}

func (k *call) String() string {
	s := fmt.Sprintf("%s [%d, +%d)", k.op, k.off, k.length)
	if k.write != nil {
		s += fmt.Sprintf(" x=%d", k.write.Count())
	}
	if k.fua {
		s += " fua"
	}
	return s
}

func (d *device) cookie() uint64 {
	d.cookies++
	return d.cookies
}

// connect opens the next session with all its sockets.
func (d *device) connect() {
	if d.broken != nil || d.closing {
		return
	}
	for _, c := range d.socks {
		c.close(true) // the plugin ends the old sockets first
	}
	d.name.session++
	d.socks = nil
	for range d.want {
		d.socks = append(d.socks, d.server.dial(d, d.name, d.slow))
	}
	session := d.name.session
	d.after(handshakeTimeout, func() {
		if d.name.session != session {
			return
		}
		for _, c := range d.socks {
			if c.up && !c.ready {
				d.giveUp(c)
			}
		}
	})
}

const handshakeTimeout = 2 * time.Second

func (d *device) reconnectSoon() {
	session := d.name.session
	d.after(d.between(10*time.Millisecond, 300*time.Millisecond), func() {
		if d.name.session == session && !d.anyUp() {
			d.connect()
		}
	})
}

func (d *device) anyUp() bool {
	return slices.ContainsFunc(d.socks, func(c *conn) bool { return c.up })
}

// opened is a socket of the session that the server answers; the size is the server's word, too.
func (d *device) opened(c *conn, size int64) {
	if !slices.Contains(d.socks, c) {
		return
	}
	d.size = size
	for _, k := range d.pending {
		if k.conn == nil {
			d.send(k, c)
		}
	}
}

func (d *device) refused(c *conn, err error) {
	if !slices.Contains(d.socks, c) || d.broken != nil {
		return
	}
	switch outcome(err) {
	case block.ErrCacheLost.Error(), block.ErrPermission.Error():
		d.fail(err)
		return
	case block.ErrStale.Error():
		d.name.session++
	}
	if !d.anyUp() {
		d.reconnectSoon()
	}
}

// fail is the permanent refusal: the device is gone for whoever used it.
func (d *device) fail(err error) {
	d.tracef("dev %s: broken: %s", d.node, outcome(err))
	d.broken = err
	for _, c := range d.socks {
		c.close(true)
	}
	d.socks = nil
}

func (d *device) lostConn(c *conn) {
	if slices.Contains(d.socks, c) && !d.anyUp() {
		d.reconnectSoon()
	}
}

// submit starts a request, on a random socket of those that are ready.
func (d *device) submit(k *call) *call { return d.submitOn(k, nil) }

func (d *device) submitOn(k *call, c *conn) *call {
	switch k.op {
	case block.OpWrite:
		k.write = d.log.Write(k.off, k.length, k.fua)
	case block.OpTrim, block.OpZero:
		k.write = d.log.Zero(k.off, k.length, k.fua)
	case block.OpFlush:
		k.flush = d.log.Flush()
	case block.OpRead:
		k.read = d.log.Read(k.off)
	}
	d.pending = append(d.pending, k)
	if c == nil {
		c = d.pick(nil)
	}
	if c != nil {
		d.send(k, c)
	}
	return k
}

// pick is a socket to send on, not the one given; nil if there is none.
func (d *device) pick(not *conn) *conn {
	var ready []*conn
	for _, c := range d.socks {
		if c.ready && c != not {
			ready = append(ready, c)
		}
	}
	if len(ready) == 0 {
		return nil
	}
	return ready[d.rand.IntN(len(ready))]
}

// send sends a request, for the first time or again; then its bytes may have changed.
func (d *device) send(k *call, c *conn) {
	if k.sent > 0 && k.op == block.OpWrite && d.chance(50) {
		k.write = k.write.Resend()
	}
	c.send(k)
	sent := k.sent
	d.after(d.timeout, func() { d.expire(k, sent) })
}

// expire is the request timeout: the socket is given up and the request sent
// elsewhere. Requests on a dead socket wait it out, too.
func (d *device) expire(k *call, sent int) {
	if k.done || k.sent != sent || d.broken != nil {
		return
	}
	old := k.conn
	if old.up {
		d.tracef("dev %s: conn %d is given up: %s timed out", d.node, old.n, k)
		d.giveUp(old)
	}
	k.conn = nil
	if c := d.pick(old); c != nil {
		d.send(k, c)
	}
}

// giveUp closes a socket on which nothing came.
func (d *device) giveUp(c *conn) {
	c.close(d.chance(50))
	d.lostConn(c)
}

// replied is an answer. Answers to a request that was sent again since, or on
// a socket that was given up, reach nobody.
func (d *device) replied(c *conn, cookie uint64, data []byte, err error) {
	i := slices.IndexFunc(d.pending, func(k *call) bool { return k.conn == c && k.cookie == cookie })
	if i < 0 || d.broken != nil {
		return
	}
	k := d.pending[i]
	d.pending = slices.Delete(d.pending, i, i+1)
	k.done, k.err, k.data = true, err, data
	d.tracef("dev %s: %s: %s", d.node, k, outcome(err))
	d.judge(k)
	if k.then != nil {
		k.then()
	}
}

func (d *device) judge(k *call) {
	if k.err != nil {
		d.errors++
		switch {
		case k.read != nil:
			k.read.Failed()
		case k.write != nil:
			k.write.Ended()
		}
		return
	}
	switch {
	case k.write != nil:
		k.write.Acked()
	case k.flush != nil:
		k.flush.Acked()
	case k.read != nil:
		if err := k.read.Returned(k.data); err != nil {
			d.failf("%s on %s: %v", k, d.node, err)
		}
	}
}

// end says that nothing the device sent can reach a disk any more: a newer
// session was answered, its detach was, or its cache epoch is over.
func (d *device) end() {
	d.over = true
	for _, k := range d.pending {
		switch {
		case k.read != nil:
			k.read.Failed()
		case k.write != nil:
			k.write.Ended()
		}
	}
	d.pending = nil
	if d.broken == nil {
		d.fail(errGone)
	}
}

// Requests, as scripts and workloads name them.

func write(off, length int64) *call { return &call{op: block.OpWrite, off: off, length: length} }
func read(off, length int64) *call  { return &call{op: block.OpRead, off: off, length: length} }
func trim(off, length int64) *call  { return &call{op: block.OpTrim, off: off, length: length} }
func zero(off, length int64) *call  { return &call{op: block.OpZero, off: off, length: length} }
func flush() *call                  { return &call{op: block.OpFlush} }

func (k *call) withFUA() *call {
	k.fua = true
	return k
}
