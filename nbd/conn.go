package nbd

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
)

// request is a block.Request with what the connection needs to answer it.
type request struct {
	block.Request // first: Complete finds the request by it
	next          *request
	command       uint16
	reqOne        bool
	observed      bool // passed validation: the Observer was told

	buf   *buffer                   // pooled payload, read data or status descriptors, or nil
	arena *buffer                   // holds the reply's header, and a small read's data behind it, or nil
	at    int                       // where in arena
	head  [wire.OffsetDataSize]byte // the header, if no arena had room
	// taken is what the request holds of the share of its direction.
	taken int64
}

// conn is one client connection. The reader goroutine owns it but for what mu guards.
type conn struct {
	srv    *Server
	nc     net.Conn
	raw    syscall.RawConn // of the handshake
	link   *link           // of the transmission phase: made before any Device is opened, so that no opened one is lost for want of descriptors
	wait   deadlines       // nc, then link; guarded by mu
	born   uint64          // the stall number at its beginning
	volume string          // the export name without its token, for logs and fault points

	// Set by the handshake.
	dev        block.Device
	observer   Observer // or nil
	size       int64    // what the Device last said
	info       block.Info
	structured bool
	allocation bool // base:wire.Allocation is negotiated
	slot       int  // bytes of a read's reply before its data

	payloads, replies share

	reader reader // of whoever has the role of reading
	sender sender
	status statusQueue

	wake       chan struct{} // to the writer, with the role of sending; capacity 1, sent to with mu held
	writerDone chan struct{}

	mu        sync.Mutex
	room      sync.Cond // of mu: a request was recycled, or the connection ends
	idle      bool      // the reader waits for the client and has nothing in hand
	draining  bool      // the last write deadline is set
	reason    error     // why the connection ends; nil while it lives
	ended     chan struct{}
	dead      bool   // no reply is sent any more
	gathering bool   // Submit runs, or reader.unsent: the reader will send what finishes meanwhile
	sending   bool   // somebody has the role of sending
	inflight  int    // requests not recycled
	between   bool   // Submit runs, and what was read and is not in its batch is untouched
	blocking  bool   // Submit said that it may wait: the role of reading can be taken
	handOff   func() // what it wants to be called then
	reads     int    // how often it was taken
	takeover  *time.Timer
	first     *request
	last      *request // of the queue of finished requests
	arena     *buffer  // current, or nil
	arenas    int      // live ones
	free      []*request
}

// deadlines is what a net.Conn and a link have in common.
type deadlines interface {
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

func newConn(s *Server, nc net.Conn) (*conn, error) {
	raw, err := prepareSocket(nc)
	if err != nil {
		return nil, fmt.Errorf("nbd: %w", err)
	}
	link, err := newLink(raw)
	if err != nil {
		return nil, fmt.Errorf("nbd: %w", err)
	}
	c := &conn{
		srv: s, nc: nc, raw: raw, link: link, wait: nc, born: s.stall.Load(),
		wake:       make(chan struct{}, 1),
		writerDone: make(chan struct{}),
		ended:      make(chan struct{}),
		payloads:   share{pool: &s.payloads, limit: s.cfg.ConnectionBytes, reserve: chunkSize},
		replies:    share{pool: &s.replies, limit: s.cfg.ConnectionBytes, reserve: chunkSize},
	}
	c.room.L = &c.mu
	c.reader.readable = c.readable
	c.sender.writable = c.writable
	return c, nil
}

// serve is the reader goroutine: handshake, transmission, closing.
func (c *conn) serve() {
	err := c.handshake()
	switch {
	case c.dev == nil:
		c.stop(err, true)
		c.closeSocket()
		c.over()
	case err != nil:
		close(c.writerDone)
		c.finish(err)
		c.over()
	default:
		c.relink()
		c.srv.running.Go(c.write)
		c.readOn(nil)
	}
}

// readOn does the reader's work until the connection ends, which it then
// closes, or until another goroutine has taken the role of reading. With an
// error it only closes.
func (c *conn) readOn(err error) {
	if err == nil {
		err = c.transmit()
	}
	if errors.Is(err, errTakenOver) {
		return
	}
	if c.reader.unsent {
		c.flush()
	}
	c.finish(err)
	c.over()
}

// relink takes the socket from the runtime's poller: from now on the link waits for it.
func (c *conn) relink() {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.nc.Close()
	c.wait = c.link
	if c.reason != nil {
		_ = c.link.SetReadDeadline(past())
	}
	if c.dead {
		_ = c.link.SetWriteDeadline(past())
	}
}

// closeSocket closes both descriptors of the socket. Nobody may be using the link.
func (c *conn) closeSocket() {
	_ = c.nc.Close()
	_ = c.link.Close()
}

// over is the last thing a connection does.
func (c *conn) over() {
	c.logEnd()
	c.srv.gone(c)
}

// Close implements block.Stream.
func (c *conn) Close(reason error) { c.abort(reason) }

// end asks for an orderly end: finished requests are still answered. In the
// handshake there are none.
func (c *conn) end(reason error) { c.stop(reason, c.handshaking()) }

// abort asks for the end without further replies.
func (c *conn) abort(reason error) { c.stop(reason, true) }

func (c *conn) handshaking() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.slot == 0
}

// stop begins the end of the connection: whoever reads, or waits for bytes or
// requests, is woken and finds the reason. The first reason stays. It does not
// wait, and our FIN does not leave before Disconnect has returned.
func (c *conn) stop(reason error, dead bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason == nil {
		if reason == nil {
			reason = io.EOF
		}
		c.reason = reason
		close(c.ended)
		_ = c.wait.SetReadDeadline(past())
	}
	if dead && !c.dead {
		c.dead = true
		_ = c.wait.SetWriteDeadline(past())
		c.dropQueue()
	}
	c.payloads.close()
	c.replies.close()
	c.room.Broadcast()
}

// why is the reason for the end of the connection, nil while it lives.
func (c *conn) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reason
}

// finish ends the connection from its reader: see DESIGN.md, Closing.
func (c *conn) finish(reason error) {
	orderly := errors.Is(reason, io.EOF) || errors.Is(reason, errDisconnect) || errors.Is(reason, errShutdown)
	c.stop(reason, !orderly)
	c.reader.drop(c)
	c.dev.Disconnect()
	c.status.wait()

	c.mu.Lock()
	if !c.dead {
		c.draining = true
		_ = c.wait.SetWriteDeadline(time.Now().Add(drainTime))
	}
	for c.inflight > 0 && !c.dead {
		c.room.Wait()
	}
	c.mu.Unlock()
	close(c.wake)
	<-c.writerDone
	c.mu.Lock()
	c.dead = true
	c.dropQueue()
	left := c.inflight
	c.retireArena()
	c.mu.Unlock()
	if left != 0 {
		panic(fmt.Sprintf("nbd: Disconnect returned with %d requests not completed", left))
	}
	c.closeSocket()
}

// drainTime bounds how long a closing connection waits for a client to take its last replies.
const drainTime = 5 * time.Second

// past is a deadline that ends what waits now.
func past() time.Time { return time.Unix(1, 0) }

func (c *conn) logEnd() {
	reason := c.why()
	attrs := []any{"volume_id", c.volume, "remote", c.nc.RemoteAddr().String(), "err", reason}
	switch {
	case errors.Is(reason, io.EOF), errors.Is(reason, errDisconnect), errors.Is(reason, errShutdown), errors.Is(reason, errAborted):
		c.srv.cfg.Log.Debug("connection closed", attrs...)
	default:
		c.srv.noisy(slog.LevelWarn, "connection closed", attrs...)
	}
}

// own finds the request that a Device hands back.
func (c *conn) own(r *block.Request) *request {
	if r.Stream != c {
		panic("nbd: a request was handed to a stream that does not own it")
	}
	return (*request)(unsafe.Pointer(r)) // a conn's block.Requests are all the first field of a request
}

// ReadBuffer implements block.Stream.
func (c *conn) ReadBuffer(br *block.Request) error {
	if c.TryReadBuffer(br) {
		return nil
	}
	// Replies that wait for the end of Submit hold the bytes that are waited for.
	c.mu.Lock()
	c.handReplies()
	c.mu.Unlock()
	r := c.own(br)
	weight := sizeOf(r.Length)
	if err := c.replies.take(weight); err != nil {
		return err
	}
	c.place(r, weight)
	return nil
}

// TryReadBuffer implements block.Stream.
func (c *conn) TryReadBuffer(br *block.Request) bool {
	r := c.own(br)
	weight := sizeOf(r.Length)
	if !c.replies.try(weight) {
		return false
	}
	c.place(r, weight)
	return true
}

// place gives a read whose bytes were taken its memory. While Submit runs, a
// small read gets space in the arena behind the space of its header.
func (c *conn) place(r *request, weight int64) {
	n := int(r.Length)
	r.taken = weight
	if n <= maxSmall {
		c.mu.Lock()
		if c.gathering && c.reserve(r, c.slot+n) {
			r.Data = r.arena.data[r.at+c.slot : r.at+c.slot+n : r.at+c.slot+n]
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
	}
	r.buf = c.srv.pools.get(n)
	r.Data = r.buf.data[:n:n]
}

// Complete implements block.Stream.
func (c *conn) Complete(br *block.Request) {
	r := c.own(br)
	if r.Op == block.OpRead && r.Err == nil && int64(len(r.Data)) != r.Length {
		panic("nbd: a read was completed without its data")
	}
	c.complete(r)
}

func (c *conn) complete(r *request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	dropped := c.reason != nil && c.info.Resends && errors.Is(r.Err, block.ErrShutdown)
	if c.dead || dropped {
		c.observe(r, c.srv.now(), errShutdown)
		c.recycle(r)
		return
	}
	r.next = nil
	if c.first == nil {
		c.first = r
	} else {
		c.last.next = r
	}
	c.last = r
	if !c.gathering {
		c.wakeWriter()
	}
}

// wakeWriter gives the role of sending to the writer, if there is something to
// send and nobody sends. Called with mu held: the channel has room, because
// only who gives the role away sends on it.
func (c *conn) wakeWriter() {
	if c.first != nil && !c.sending {
		c.sending = true
		c.wake <- struct{}{}
	}
}

// handReplies ends gathering and leaves what is finished to the writer. Called with mu held.
func (c *conn) handReplies() {
	c.gathering = false
	c.wakeWriter()
}

// observe tells the Observer that a request is done. Called with mu held.
func (c *conn) observe(r *request, now time.Duration, err error) {
	if r.observed {
		r.observed = false
		c.observer.Finished(r.Op, r.Length, now-time.Duration(r.Start), err)
	}
}

// dropQueue recycles what is finished and will not be sent. Called with mu held.
func (c *conn) dropQueue() {
	now := c.srv.now()
	for c.first != nil {
		r := c.first
		c.first = r.next
		c.observe(r, now, errShutdown)
		c.recycle(r)
	}
	c.last = nil
}

// recycle takes back a request and what it held. Called with mu held.
func (c *conn) recycle(r *request) {
	if r.buf != nil {
		c.srv.pools.put(r.buf)
	}
	if r.arena != nil {
		c.releaseArena(r.arena)
	}
	if r.taken > 0 {
		if r.Op == block.OpWrite {
			c.payloads.put(r.taken)
		} else {
			c.replies.put(r.taken)
		}
	}
	*r = request{}
	if len(c.free) < maxSpare {
		c.free = append(c.free, r)
	} else {
		c.srv.requests.Put(r)
	}
	c.inflight--
	c.room.Signal() // to the reader; free when it does not wait
}
