package nbd

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"
	"unsafe"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

const (
	maxBatch      = 64                   // requests per Submit
	maxBatchBytes = chunkSize            // of read data and payloads per Submit, so that the first reply need not wait for the last
	maxSpare      = 64                   // requests an idle connection keeps
	maxRecv       = 256 << 10            // of one read, in which the thread can't be stopped for the garbage collector
	maxDrain      = 2 * block.MaxPayload // the longest payload of a refused write that is read and thrown away
)

var (
	errDisconnect = errors.New("nbd: the client disconnected")
	errMagic      = errors.New("nbd: the client sent something that is not a request")
	errFault      = errors.New("nbd: a fault was injected into the replies")
	errTakenOver  = errors.New("nbd: another goroutine reads this connection now")
)

// reader is what only the goroutine with the role of reading touches.
type reader struct {
	in     *buffer // nil while the connection is idle
	r, w   int     // in.data[r:w] is received and not parsed
	readAt time.Duration
	spare  []*request
	batch  []*block.Request
	bytes  int64 // of the batch

	// Of one read, for readable, which is made once so that reads allocate nothing.
	readable func(fd uintptr) bool
	dst      []byte // what is missing of a payload; what comes behind it goes into the read buffer
	pieces   [2]unix.Iovec
	err      error
	limited  bool // the read deadline is set
	spin     spin

	// ahead: the client had sent its next request by the time the last batch was done. Then replies wait for those of
	// one more batch, but not for the client. unsent: some do.
	ahead, unsent bool
}

// transmit serves requests until the connection ends, and says why.
func (c *conn) transmit() error {
	rd := &c.reader
	for {
		for rd.w-rd.r >= wire.RequestSize {
			if err := c.parse(); err != nil {
				return err
			}
			if len(rd.batch) >= min(maxBatch, c.srv.cfg.MaxRequests) || rd.bytes >= maxBatchBytes {
				if err := c.submit(between); err != nil {
					return err
				}
			}
		}
		if err := c.submit(between); err != nil {
			return err
		}
		if err := c.fill(); err != nil {
			return err
		}
	}
}

// fill waits until more bytes are in the read buffer.
func (c *conn) fill() error {
	rd := &c.reader
	if rd.r > 0 {
		rd.w = copy(rd.in.data, rd.in.data[rd.r:rd.w]) // less than a header
		rd.r = 0
	}
	return c.read(nil)
}

// read waits for bytes. It fills p, and takes along what is there behind it, for the read buffer: a client that sends
// one large write after the other can then send while this one is done, instead of waiting for room in the socket. If
// p is nil it waits until something is in the read buffer.
func (c *conn) read(p []byte) error {
	rd := &c.reader
	rd.dst, rd.err = p, nil
	err := c.link.in.pass(rd.readable)
	rd.dst, rd.pieces = nil, [2]unix.Iovec{}
	if c.idle {
		c.mu.Lock()
		c.idle = false
		c.mu.Unlock()
	}
	if rd.limited {
		c.readDeadline(time.Time{})
	}
	if why := c.why(); why != nil {
		return why
	}
	if err == nil {
		err = rd.err
	}
	if errors.Is(err, io.EOF) {
		return io.EOF
	}
	if err != nil {
		return fmt.Errorf("nbd: read: %w", err)
	}
	if c.srv.stalled(c.born) {
		return errStalled
	}
	rd.readAt = c.srv.now()
	return nil
}

// readable reads until what read was asked for is there. False: wait until
// the socket has something, with no memory held if nothing is under way.
func (c *conn) readable(fd uintptr) bool {
	rd := &c.reader
	if rd.in == nil {
		rd.in = c.srv.pools.get(chunkSize)
	}
	payload, progress := len(rd.dst) > 0, false
	for {
		n, errno := rd.recv(fd)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			if !payload {
				rd.ahead = false
			}
			if rd.unsent {
				c.flush()
				continue
			}
			if rd.spin.more(c.srv.spinners, payload) {
				continue
			}
			if !payload && rd.w == 0 {
				c.rest()
			} else if progress || !rd.limited {
				c.readDeadline(time.Now().Add(c.srv.cfg.StallTimeout))
			}
			return false
		case errno != 0:
			rd.err = errno
		case n == 0:
			rd.err = io.EOF
		}
		rd.spin.found(c.srv.spinners)
		if rd.err != nil || rd.received(n) {
			return true
		}
		progress = true
	}
}

// recv reads once: into dst, then into the read buffer.
func (rd *reader) recv(fd uintptr) (int, syscall.Errno) {
	dst := rd.dst[:min(len(rd.dst), maxRecv)]
	in := rd.in.data[rd.w:]
	in = in[:min(len(in), maxRecv-len(dst))]
	if len(dst) == 0 {
		return read(fd, in)
	}
	rd.pieces[0].Base, rd.pieces[1].Base = unsafe.SliceData(dst), unsafe.SliceData(in)
	rd.pieces[0].SetLen(len(dst))
	rd.pieces[1].SetLen(len(in))
	return readv(fd, rd.pieces[:])
}

// received takes note of n bytes and reports whether that is enough.
func (rd *reader) received(n int) bool {
	rest := min(n, len(rd.dst))
	rd.dst = rd.dst[rest:]
	rd.w += n - rest
	if n > rest {
		rd.ahead = true // also after a sleep: one more look costs a single reply little, and lets many leave together
	}
	return len(rd.dst) == 0
}

// readDeadline bounds how long the rest of a request may take; the zero time ends that.
func (c *conn) readDeadline(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reader.limited = !t.IsZero()
	if c.reason == nil {
		_ = c.wait.SetReadDeadline(t)
	}
}

// rest gives back what an idle connection does not need.
func (c *conn) rest() {
	rd := &c.reader
	if rd.in != nil {
		c.srv.pools.put(rd.in)
		rd.in = nil
	}
	c.mu.Lock()
	c.idle = true
	if c.arena != nil && c.arena.refs == 0 {
		c.retireArena()
	}
	c.mu.Unlock()
}

// readFull fills p: first from the read buffer, then from the socket.
func (c *conn) readFull(p []byte) error {
	rd := &c.reader
	n := copy(p, rd.in.data[rd.r:rd.w])
	rd.r += n
	if n == len(p) {
		return nil
	}
	rd.r, rd.w = 0, 0
	return c.read(p[n:])
}

// discard throws n bytes of payload away.
func (c *conn) discard(n int64) error {
	b := c.srv.pools.get(chunkSize)
	defer c.srv.pools.put(b)
	for n > 0 {
		part := b.data[:min(n, chunkSize)]
		if err := c.readFull(part); err != nil {
			return err
		}
		n -= int64(len(part))
	}
	return nil
}

// where in the stream of requests a batch is submitted.
type where bool

const (
	between where = true  // every request in the buffer is untouched or in the batch: anybody can read on
	within  where = false // a request is parsed in part
)

// submit hands the batch to the Device and sends what is finished, or leaves that to the next time.
// errTakenOver: the role of reading is another goroutine's.
func (c *conn) submit(at where) error {
	rd := &c.reader
	if len(rd.batch) == 0 {
		if rd.unsent && at == within {
			c.flush()
		}
		return nil
	}
	if err := c.srv.cfg.Fault.Hit("nbd.parse", c.volume); err != nil {
		return err
	}
	if err := c.enter(len(rd.batch), true); err != nil {
		return err
	}
	if c.observer != nil {
		c.observer.Started(len(rd.batch))
	}
	if !c.deliver(rd.batch, at) {
		return errTakenOver
	}
	clear(rd.batch)
	rd.batch, rd.bytes = rd.batch[:0], 0
	if rd.ahead && !rd.unsent && at == between {
		rd.unsent = true
		return c.heldUp(c.srv.now())
	}
	return c.heldUp(c.flush())
}

// enter counts n requests as in flight, once so many may be. With gather, what
// is finished from now on waits for flush.
func (c *conn) enter(n int, gather bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inflight+n > c.srv.cfg.MaxRequests {
		c.handReplies()
		for c.inflight+n > c.srv.cfg.MaxRequests && c.reason == nil {
			c.room.Wait()
		}
	}
	if c.reason != nil {
		return c.reason
	}
	if err := c.tooLate(c.srv.now()); err != nil { // whatever held it up since it has read
		return err
	}
	c.inflight += n
	c.gathering = gather
	return nil
}

// tooLate is errHeldUp if the reader has not read for longer than the patience of clients.
func (c *conn) tooLate(now time.Duration) error {
	if now-c.reader.readAt > patience {
		return errHeldUp
	}
	return nil
}

// heldUp ends the connection if the reader comes back late and bytes were waiting meanwhile.
func (c *conn) heldUp(now time.Duration) error {
	rd := &c.reader
	if c.tooLate(now) != nil && (rd.w > rd.r || waitingBytes(c.link.fd) > 0) {
		return errHeldUp
	}
	rd.readAt = now
	return nil
}

// request takes a free request.
func (c *conn) request() *request {
	rd := &c.reader
	if len(rd.spare) == 0 {
		c.mu.Lock()
		rd.spare, c.free = c.free, rd.spare
		c.mu.Unlock()
	}
	if n := len(rd.spare); n > 0 {
		r := rd.spare[n-1]
		rd.spare = rd.spare[:n-1]
		return r
	}
	return c.srv.requests.Get().(*request)
}

// drop takes back what was parsed and not submitted, and the read buffer.
func (rd *reader) drop(c *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, br := range rd.batch {
		r := c.own(br)
		c.inflight++ // recycle counts it down
		r.observed = false
		c.recycle(r)
	}
	rd.batch = nil
	if rd.in != nil {
		c.srv.pools.put(rd.in)
		rd.in = nil
	}
}
