package client

import (
	"bufio"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// smallPayload is what is copied behind its header to go out with others in one write.
const smallPayload = 16 << 10

// link is one connection: a writer goroutine sends what is queued, a reader
// goroutine takes replies, and a third, when both have ended, fails what is
// left: not before, because they read and write the calls' memory.
type link struct {
	nc     net.Conn
	export Export
	cfg    Config
	in     *bufio.Reader // the reader's
	ended  chan struct{} // all goroutines have

	mu       sync.Mutex
	changed  sync.Cond // of mu
	slots    []slot    // by the low half of a cookie
	free     []uint32  // slots not in use
	queue    []uint32  // slots to send
	round    uint32    // the high half of the next cookie, so that a late or double reply is found out
	closing  bool      // no new calls
	byeReady bool      // nothing is in flight: the writer says goodbye
	err      error     // why the link ended
}

type slot struct {
	call   *Call
	cookie uint64
	got    int64 // bytes of a structured read that have come
	failed error // an error chunk of a reply that goes on
}

// outgoing is what the writer needs of a slot.
type outgoing struct {
	call   *Call
	cookie uint64
}

func newLink(nc net.Conn, export Export, cfg Config) *link {
	l := &link{nc: nc, export: export, cfg: cfg, in: bufio.NewReaderSize(nc, 256<<10), ended: make(chan struct{}), slots: make([]slot, cfg.Depth)}
	l.changed.L = &l.mu
	for i := range l.slots {
		l.free = append(l.free, uint32(i))
	}
	go l.run()
	return l
}

func (l *link) run() {
	defer close(l.ended)
	var w sync.WaitGroup
	w.Go(l.write)
	l.fail(l.read())
	w.Wait()
	_ = l.nc.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.slots {
		if l.slots[i].call != nil {
			l.finish(uint32(i), l.lost())
		}
	}
}

// lost is the error of a call that will get no reply. Called with mu held.
func (l *link) lost() error {
	return fmt.Errorf("%w: the connection ended: %w", block.ErrUnavailable, l.err)
}

// fail ends the link; the first reason stays.
func (l *link) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
	_ = l.nc.SetDeadline(time.Unix(1, 0))
	l.changed.Broadcast()
}

// start queues a call.
func (l *link) start(call *Call) {
	if call.Op == block.OpRead || call.Op == block.OpWrite {
		call.Length = int64(len(call.Data))
	}
	call.Err = nil
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.free) == 0 && l.err == nil && !l.closing {
		l.changed.Wait()
	}
	if err := l.refuse(call); err != nil {
		call.Err = err
		call.Done <- call
		return
	}
	i := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	l.round++
	l.slots[i] = slot{call: call, cookie: uint64(l.round)<<32 | uint64(i)}
	l.queue = append(l.queue, i)
	if len(l.free) == len(l.slots)-1 {
		l.due(true)
	}
	l.changed.Broadcast()
}

// refuse says why a call cannot be sent. Called with mu held.
func (l *link) refuse(call *Call) error {
	payload := call.Op == block.OpRead || call.Op == block.OpWrite
	switch {
	case l.err != nil:
		return l.lost()
	case l.closing:
		return fmt.Errorf("%w: the client is closed", block.ErrShutdown)
	case call.Offset < 0 || call.Length < 0 || call.Length > maxRange || payload && call.Length > l.export.MaxPayload:
		return fmt.Errorf("%w: offset %d, length %d", block.ErrInvalid, call.Offset, call.Length)
	}
	return nil
}

// due sets the deadline of the next reply, or none. Called with mu held.
func (l *link) due(is bool) {
	var t time.Time
	if is && l.cfg.Timeout > 0 {
		t = time.Now().Add(l.cfg.Timeout)
	}
	if l.err == nil {
		_ = l.nc.SetReadDeadline(t)
	}
}

// finish hands a call back. Called with mu held.
func (l *link) finish(i uint32, err error) {
	call := l.slots[i].call
	l.slots[i] = slot{}
	l.free = append(l.free, i)
	l.due(len(l.free) < len(l.slots))
	l.changed.Broadcast()
	call.Err = err
	call.Done <- call
}

// write is the writer goroutine.
func (l *link) write() {
	var buf []byte
	var batch []uint32
	var calls []outgoing
	for {
		l.mu.Lock()
		for len(l.queue) == 0 && l.err == nil && !l.byeReady {
			l.changed.Wait()
		}
		batch, l.queue = l.queue, batch[:0]
		calls = calls[:0]
		for _, i := range batch {
			calls = append(calls, outgoing{l.slots[i].call, l.slots[i].cookie})
		}
		over, bye := l.err != nil, l.byeReady
		l.mu.Unlock()
		if over {
			return
		}
		var err error
		if buf, err = l.send(buf[:0], calls); err != nil {
			l.fail(err)
			return
		}
		if bye {
			_, _ = l.nc.Write(wire.Request{Command: protocol.TRANSMISSION_TYPE_REQUEST_DISC}.Append(nil))
			return
		}
	}
}

// send writes calls in as few pieces as their payloads allow.
func (l *link) send(buf []byte, calls []outgoing) ([]byte, error) {
	if l.cfg.Timeout > 0 {
		l.mu.Lock()
		if l.err == nil {
			_ = l.nc.SetWriteDeadline(time.Now().Add(l.cfg.Timeout))
		}
		l.mu.Unlock()
	}
	for _, s := range calls {
		buf = request(s).Append(buf)
		if s.call.Op != block.OpWrite || s.call.isQuery {
			continue
		}
		if len(s.call.Data) <= smallPayload {
			buf = append(buf, s.call.Data...)
			continue
		}
		pieces := net.Buffers{buf, s.call.Data}
		if _, err := pieces.WriteTo(l.nc); err != nil {
			return buf, err
		}
		buf = buf[:0]
	}
	if len(buf) == 0 {
		return buf, nil
	}
	_, err := l.nc.Write(buf)
	return buf, err
}

func request(s outgoing) wire.Request {
	r := wire.Request{Cookie: s.cookie, Offset: uint64(s.call.Offset), Length: uint32(s.call.Length)}
	switch s.call.Op {
	case block.OpRead:
		r.Command = protocol.TRANSMISSION_TYPE_REQUEST_READ
	case block.OpWrite:
		r.Command = protocol.TRANSMISSION_TYPE_REQUEST_WRITE
	case block.OpTrim:
		r.Command = wire.CmdTrim
	case block.OpZero:
		r.Command = wire.CmdWriteZeroes
	case block.OpFlush:
		r.Command, r.Offset, r.Length = wire.CmdFlush, 0, 0
	}
	if s.call.isQuery {
		r.Command = wire.CmdBlockStatus
	}
	if s.call.FUA {
		r.Flags |= wire.CmdFlagFUA
	}
	if s.call.NoHole {
		r.Flags |= wire.CmdFlagNoHole
	}
	return r
}

// close ends the link in order.
func (l *link) close() error {
	l.mu.Lock()
	l.closing = true
	l.changed.Broadcast()
	for len(l.free) < len(l.slots) && l.err == nil {
		l.changed.Wait()
	}
	err := l.err
	l.byeReady = true
	if err == nil && l.cfg.Timeout > 0 { // for the server's end of stream
		_ = l.nc.SetReadDeadline(time.Now().Add(l.cfg.Timeout))
	}
	l.changed.Broadcast()
	l.mu.Unlock()
	<-l.ended
	return err
}
