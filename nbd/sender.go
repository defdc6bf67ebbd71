package nbd

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
	"golang.org/x/sys/unix"
)

const (
	maxPieces    = 256     // of one writev
	maxSendBytes = 1 << 20 // of one writev: its memory is given back when all of it is sent
	maxRounds    = 4       // that the reader sends before it leaves the rest to the writer
)

// sender is what only the holder of the role of sending touches: replies laid
// out for one writev, and how far they are sent.
type sender struct {
	pieces []unix.Iovec
	sent   int      // pieces[:sent] are
	arena  *buffer  // that the last piece is of, or nil
	reqs   *request // what the pieces belong to, linked by next

	writable func(fd uintptr) bool
	wait     bool // writable waits until the socket takes something
	err      error
}

func (s *sender) done() bool { return s.sent == len(s.pieces) }

// add appends p, joined with the last piece if it lies behind it in the same arena a.
func (s *sender) add(p []byte, a *buffer) {
	base := unsafe.SliceData(p)
	if n := len(s.pieces); n > 0 && a != nil && a == s.arena {
		last := &s.pieces[n-1]
		if uintptr(unsafe.Pointer(last.Base))+uintptr(last.Len) == uintptr(unsafe.Pointer(base)) {
			last.Len += uint64(len(p))
			return
		}
	}
	s.arena = a
	s.pieces = append(s.pieces, unix.Iovec{Base: base, Len: uint64(len(p))})
}

// flush ends gathering and sends what is finished, as far as that is possible
// at once. It returns the time.
func (c *conn) flush() time.Duration {
	now := c.srv.now()
	c.reader.unsent = false
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gathering = false
	for round := 0; c.first != nil && !c.sending; round++ {
		if round == maxRounds || c.srv.cfg.Fault != nil { // a delayed reply must not delay the reader
			c.wakeWriter()
			break
		}
		c.sending = true
		c.layOut(now)
		c.mu.Unlock()
		done := c.send(false)
		c.mu.Lock()
		if !done {
			c.wake <- struct{}{} // the role goes to the writer
			break
		}
		c.sent()
		c.sending = false
	}
	return now
}

// write is the writer goroutine.
func (c *conn) write() {
	defer close(c.writerDone)
	for range c.wake {
		c.sendAll()
	}
}

// sendAll has the role of sending until nothing is left to send.
func (c *conn) sendAll() {
	for {
		if !c.sender.done() {
			if c.srv.cfg.Fault.Hit("nbd.reply", c.volume) != nil {
				c.abort(errFault)
			}
			if !c.send(false) {
				c.sendWaiting()
			}
		}
		c.mu.Lock()
		c.sent()
		if c.first == nil {
			c.sending = false
			c.mu.Unlock()
			return
		}
		c.layOut(c.srv.now())
		c.mu.Unlock()
	}
}

// sendWaiting sends the rest, however slowly the client takes it, unless it takes nothing for StallTimeout.
func (c *conn) sendWaiting() {
	defer c.writeDeadline(time.Time{})
	for {
		c.writeDeadline(time.Now().Add(c.srv.cfg.StallTimeout))
		if c.send(true) {
			return
		}
	}
}

// writeDeadline sets the deadline of writes, unless a closing connection has set its last.
func (c *conn) writeDeadline(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.dead && !c.draining {
		_ = c.wait.SetWriteDeadline(t)
	}
}

// send sends as much as the socket takes; if wait, after waiting until it
// takes something. True: nothing is left to do, because all is sent or because
// the connection ends.
func (c *conn) send(wait bool) bool {
	s := &c.sender
	s.wait, s.err = wait, nil
	err := c.link.out.pass(s.writable)
	if err == nil {
		err = s.err
	}
	if err != nil {
		c.abort(fmt.Errorf("nbd: send replies: %w", err))
		return true
	}
	return s.done()
}

// writable sends until all is sent or the socket is full. False: wait and come again.
func (c *conn) writable(fd uintptr) bool {
	s := &c.sender
	for !s.done() {
		n, errno := writev(fd, s.pieces[s.sent:])
		switch errno {
		case 0:
			s.advance(n)
			s.wait = false // one step was made, which is what was waited for
		case unix.EINTR:
		case unix.EAGAIN:
			return !s.wait
		default:
			s.err = errno
			return true
		}
	}
	return true
}

// advance notes that n bytes more are sent.
func (s *sender) advance(n uint64) {
	for n > 0 {
		p := &s.pieces[s.sent]
		if n < p.Len {
			p.Base = (*byte)(unsafe.Add(unsafe.Pointer(p.Base), n))
			p.Len -= n
			return
		}
		n -= p.Len
		s.sent++
	}
}

// sent gives back what the pieces held. Called with mu held and the role of sending.
func (c *conn) sent() {
	s := &c.sender
	for s.reqs != nil {
		r := s.reqs
		s.reqs = r.next
		c.recycle(r)
	}
	clear(s.pieces)
	s.pieces, s.sent = s.pieces[:0], 0
}

// layOut takes finished requests from the queue and lays their replies out.
// Called with mu held and the role of sending.
func (c *conn) layOut(now time.Duration) {
	s := &c.sender
	var tail *request
	for bytes := 0; c.first != nil && len(s.pieces) < maxPieces-1 && bytes < maxSendBytes; {
		r := c.first
		if c.first = r.next; c.first == nil {
			c.last = nil
		}
		r.next = nil
		if tail == nil {
			s.reqs = r
		} else {
			tail.next = r
		}
		tail = r
		c.observe(r, now, r.Err)
		head, data := c.reply(r)
		s.add(head, r.arena)
		switch {
		case len(data) == 0:
		case r.buf != nil:
			s.add(data, nil)
		default:
			s.add(data, r.arena)
		}
		bytes += len(head) + len(data)
	}
}

// reply writes a finished request's header and returns it and what follows it.
func (c *conn) reply(r *request) (head, data []byte) {
	structured := c.structured &&
		(r.command == protocol.TRANSMISSION_TYPE_REQUEST_READ || r.command == wire.CmdBlockStatus)
	errno := errnoOf(r.Err)
	switch {
	case structured && errno != 0:
		head = c.headerSpace(r, wire.ErrorChunkSize)
		wire.PutErrorChunk(head, errno, r.Cookie)
	case structured && r.command == wire.CmdBlockStatus:
		head = c.headerSpace(r, wire.ChunkHeaderSize)
		wire.PutChunk(head, wire.ChunkStatus, r.Cookie, len(r.Data))
		data = r.Data
	case structured:
		head = c.headerSpace(r, wire.OffsetDataSize)
		wire.PutOffsetData(head, r.Cookie, uint64(r.Offset), len(r.Data))
		data = r.Data
	default:
		head = c.headerSpace(r, wire.SimpleReplySize)
		wire.PutSimpleReply(head, errno, r.Cookie)
		if errno == 0 && r.Op == block.OpRead {
			data = r.Data
		}
	}
	return head, data
}

// headerSpace is n bytes for r's header: before its data if that lies in an
// arena, else behind the last reply in the arena, so that replies without data
// lie back to back too.
func (c *conn) headerSpace(r *request, n int) []byte {
	if r.arena != nil || c.reserve(r, n) {
		return r.arena.data[r.at : r.at+n]
	}
	return r.head[:n]
}
