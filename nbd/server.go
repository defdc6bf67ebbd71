package nbd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
	"golang.org/x/time/rate"
)

// Config is what a Server needs. Exports is required; a zero number means its default.
type Config struct {
	Exports Exports
	Log     *slog.Logger // default: discards
	Fault   *fault.Set   // default: no fault points

	MaxConnections int // default 4096
	MaxHandshakes  int // half-open connections, default 256
	MaxRequests    int // in flight per connection, default 1024

	HandshakeTimeout time.Duration // of the client's part of a handshake, default 10 s
	OpenTimeout      time.Duration // of one call of Exports, default 30 s
	StallTimeout     time.Duration // without a byte of a waiting reply being taken or of a payload being sent, default 60 s

	ConnectionBytes int64 // in flight per connection and direction, default 128 MiB, at least block.MaxPayload
	ServerBytes     int64 // in flight of all connections, default 512 MiB, at least 2*block.MaxPayload

	// BootTime is a clock that only grows and counts the time the host was
	// suspended. Default: CLOCK_BOOTTIME.
	BootTime func() time.Duration
}

func (c *Config) defaults() error {
	if c.Exports == nil {
		return fmt.Errorf("nbd: %w: Config.Exports is required", block.ErrInvalid)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.BootTime == nil {
		c.BootTime = bootTime
	}
	c.MaxConnections = cmp.Or(c.MaxConnections, 4096)
	c.MaxHandshakes = cmp.Or(c.MaxHandshakes, 256)
	c.MaxRequests = cmp.Or(c.MaxRequests, 1024)
	c.HandshakeTimeout = cmp.Or(c.HandshakeTimeout, 10*time.Second)
	c.OpenTimeout = cmp.Or(c.OpenTimeout, 30*time.Second)
	c.StallTimeout = cmp.Or(c.StallTimeout, 60*time.Second)
	c.ConnectionBytes = cmp.Or(c.ConnectionBytes, 128<<20)
	c.ServerBytes = cmp.Or(c.ServerBytes, 512<<20)
	if c.ConnectionBytes < block.MaxPayload || c.ServerBytes < 2*block.MaxPayload {
		return fmt.Errorf("nbd: %w: ConnectionBytes must be at least %d and ServerBytes %d, or the largest request would wait for ever",
			block.ErrInvalid, block.MaxPayload, 2*block.MaxPayload)
	}
	if min(c.MaxConnections, c.MaxHandshakes, c.MaxRequests) < 1 ||
		min(c.HandshakeTimeout, c.OpenTimeout, c.StallTimeout) < 0 {
		return fmt.Errorf("nbd: %w: a limit of Config is negative", block.ErrInvalid)
	}
	return nil
}

// Server serves exports to any number of connections from any number of
// listeners. Create it with New, end it with Shutdown. Safe for concurrent use.
type Server struct {
	cfg      Config
	now      func() time.Duration // the monotonic clock of requests
	payloads bytePool             // what write payloads of all connections may use
	replies  bytePool             // what read data of all connections may use
	pools    pools
	requests sync.Pool // of *request
	noise    *rate.Limiter
	quiet    atomic.Int64 // log lines that noise kept back

	spinners *spinners

	beat  atomic.Int64  // boot time of the last heartbeat, nanoseconds
	stall atomic.Uint64 // stalls so far; see heartbeat.go

	mu        sync.Mutex
	listeners map[net.Listener]struct{}
	conns     map[*conn]struct{}
	halfOpen  []*conn // oldest first, at most MaxHandshakes
	started   bool    // the heartbeat runs
	closing   bool
	stop      chan struct{} // ends the heartbeat

	running   sync.WaitGroup // readers, and what they started
	heartbeat sync.WaitGroup
}

// New checks the configuration. Nothing runs before Serve.
func New(c Config) (*Server, error) {
	if err := c.defaults(); err != nil {
		return nil, err
	}
	start := time.Now()
	s := &Server{
		cfg:       c,
		now:       func() time.Duration { return time.Since(start) },
		payloads:  bytePool{free: c.ServerBytes / 2},
		replies:   bytePool{free: c.ServerBytes / 2},
		requests:  sync.Pool{New: func() any { return new(request) }},
		noise:     rate.NewLimiter(rate.Every(time.Second), 10),
		listeners: map[net.Listener]struct{}{},
		conns:     map[*conn]struct{}{},
		stop:      make(chan struct{}),
		spinners:  newSpinners(),
	}
	return s, nil
}

// Serve accepts connections (TCP or UNIX) until ctx ends or Shutdown is called
// and returns nil then; connections live on until Shutdown. It closes ln. Any
// other end is an error.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	defer func() { _ = ln.Close() }()
	if !s.enter(ln) {
		return fmt.Errorf("nbd: serve %s: %w", ln.Addr(), block.ErrShutdown)
	}
	defer s.leave(ln)
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()

	for {
		nc, err := ln.Accept()
		switch {
		case err == nil:
			s.accepted(nc)
		case ctx.Err() != nil || s.isClosing():
			return nil
		case isExhaustion(err):
			// No descriptor is free. Waiting costs the new client a moment, giving up would cost everybody the server.
			s.cfg.Log.Warn("cannot accept a connection; raise the limit of open files", "err", err)
			if !pause(ctx, s.stop, time.Second) {
				return nil
			}
		default:
			return fmt.Errorf("nbd: accept on %s: %w", ln.Addr(), err)
		}
	}
}

// pause waits for d, less if ctx or stop end: then false.
func pause(ctx context.Context, stop <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
	case <-stop:
	}
	return false
}

func (s *Server) enter(ln net.Listener) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.listeners[ln] = struct{}{}
	if !s.started {
		s.started = true
		s.beat.Store(int64(s.cfg.BootTime()))
		s.heartbeat.Go(s.beats)
	}
	return true
}

func (s *Server) leave(ln net.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.listeners, ln)
}

func (s *Server) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

// accepted registers a connection and starts its reader. Too many half-open
// ones push out the oldest: a stranger that says nothing must not keep out one
// that does.
func (s *Server) accepted(nc net.Conn) {
	c, err := newConn(s, nc)
	if err != nil {
		_ = nc.Close()
		s.noisy(slog.LevelWarn, "connection not served", "remote", nc.RemoteAddr().String(), "err", err)
		return
	}
	var oldest *conn
	s.mu.Lock()
	if len(s.halfOpen) >= s.cfg.MaxHandshakes || len(s.conns) >= s.cfg.MaxConnections && len(s.halfOpen) > 0 {
		oldest, s.halfOpen = s.halfOpen[0], s.halfOpen[1:]
	}
	full := s.closing || oldest == nil && len(s.conns) >= s.cfg.MaxConnections
	if !full {
		s.conns[c] = struct{}{}
		s.halfOpen = append(s.halfOpen, c)
		s.running.Go(c.serve)
	}
	s.mu.Unlock()
	if oldest != nil {
		oldest.abort(errPushedOut)
	}
	if full {
		c.closeSocket()
		s.noisy(slog.LevelWarn, "connection refused: as many are open as may be", "limit", s.cfg.MaxConnections)
	}
}

// named ends c's time as half-open: it has sent a complete name.
func (s *Server) named(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, h := range s.halfOpen {
		if h == c {
			s.halfOpen = append(s.halfOpen[:i:i], s.halfOpen[i+1:]...)
			return
		}
	}
}

func (s *Server) gone(c *conn) {
	s.named(c)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

func (s *Server) snapshot() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		all = append(all, c)
	}
	return all
}

// Shutdown ends the server in order: no new connections, half-open ones are
// closed, the others stop reading; what was handed to a Device is finished and
// answered, the rest dropped (see DESIGN.md, Closing), and every connection is
// closed. When ctx ends first, replies that clients do not take are given up,
// and the error names what still runs: a Device that does not finish. Further
// calls do the same again.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	if !s.closing {
		s.closing = true
		close(s.stop)
	}
	for ln := range s.listeners {
		_ = ln.Close()
	}
	s.mu.Unlock()
	for _, c := range s.snapshot() {
		c.end(errShutdown)
	}
	done := make(chan struct{})
	go func() { // ends with the last connection
		s.running.Wait()
		s.heartbeat.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	for _, c := range s.snapshot() {
		c.abort(errShutdown)
	}
	t := time.NewTimer(time.Second)
	defer t.Stop()
	select {
	case <-done:
		return nil
	case <-t.C:
		return fmt.Errorf("nbd: shutdown: %d connections wait for their devices to finish: %w", len(s.snapshot()), ctx.Err())
	}
}

// Stats is a moment's picture of a server.
type Stats struct {
	Connections   int   // all, with HalfOpen
	HalfOpen      int   // without a complete name so far
	PayloadBytes  int64 // write payloads in flight beyond the connections' own shares
	ReplyBytes    int64 // read data in flight beyond the connections' own shares
	Stalls        uint64
	SilencedLines int64 // log lines held back because too many came
}

// Stats may be called at any time.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	st := Stats{Connections: len(s.conns), HalfOpen: len(s.halfOpen)}
	s.mu.Unlock()
	st.PayloadBytes = s.payloads.inUse(s.cfg.ServerBytes / 2)
	st.ReplyBytes = s.replies.inUse(s.cfg.ServerBytes / 2)
	st.Stalls, st.SilencedLines = s.stall.Load(), s.quiet.Load()
	return st
}

func (p *bytePool) inUse(limit int64) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return limit - p.free
}

// noisy logs what strangers can cause as often as they like: ten lines at once, one a second.
func (s *Server) noisy(level slog.Level, msg string, args ...any) {
	if s.noise.Allow() {
		s.cfg.Log.Log(context.Background(), level, msg, args...)
	} else {
		s.quiet.Add(1)
	}
}

// The reasons for which a server itself ends a connection.
var (
	errShutdown  = fmt.Errorf("nbd: %w", block.ErrShutdown)
	errPushedOut = errors.New("nbd: half-open for longer than all others while too many are")
)
