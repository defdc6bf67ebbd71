package consensus

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	greeting       = "GABRAFT1"
	greetDeadline  = 5 * time.Second
	greetingAtOnce = 64 // connections that have not greeted yet; more are closed

	// A server that starts again is found as soon as it listens if it was away for
	// seconds: raft counts failures, and with ten of them pauses for seconds, too.
	redialFor   = 2 * time.Second
	redialEvery = 50 * time.Millisecond
)

// stream is the raft port. A connection opens with the greeting and the
// cluster id; until both were read it costs a goroutine and 24 bytes, and
// nothing of it reaches raft: neither a scanner nor another cluster's server
// on a reused address.
type stream struct {
	listener  net.Listener
	advertise net.Addr
	hello     []byte
	log       *slog.Logger
	quiet     quiet

	accepted chan net.Conn
	closed   chan struct{}
	once     sync.Once
	leaving  chan struct{} // nobody is dialled again
	leave    func()
	wait     sync.WaitGroup
	tokens   chan struct{}

	mu     sync.Mutex
	peers  map[*peer]struct{} // accepted and open
	served sync.WaitGroup     // the library's handlers of peers; each closes its own at its end
}

// peer is an accepted connection.
type peer struct {
	net.Conn
	stream *stream
	once   sync.Once
}

func (p *peer) Close() (err error) {
	p.once.Do(func() {
		p.stream.mu.Lock()
		delete(p.stream.peers, p)
		p.stream.mu.Unlock()
		err = p.Conn.Close()
		p.stream.served.Done()
	})
	return err
}

func newStream(listener net.Listener, advertise net.Addr, cluster block.ClusterID, log *slog.Logger) *stream {
	s := &stream{
		listener: listener, advertise: advertise, log: log,
		hello:    append([]byte(greeting), cluster.UUID[:]...),
		quiet:    quiet{seen: map[string]seen{}},
		accepted: make(chan net.Conn),
		closed:   make(chan struct{}),
		leaving:  make(chan struct{}),
		tokens:   make(chan struct{}, greetingAtOnce),
		peers:    map[*peer]struct{}{},
	}
	s.leave = sync.OnceFunc(func() { close(s.leaving) })
	s.wait.Go(s.accept)
	return s
}

// accept takes connections from the listener until it is closed.
func (s *stream) accept() {
	for {
		conn, err := s.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, most likely
			s.warn("the raft port cannot accept", "err", err)
			select {
			case <-time.After(100 * time.Millisecond):
				continue
			case <-s.closed:
				return
			}
		}
		select {
		case s.tokens <- struct{}{}:
			s.wait.Go(func() { s.greet(conn) })
		default:
			_ = conn.Close()
		}
	}
}

// greet reads the opening of a connection and passes it on, or closes it.
func (s *stream) greet(conn net.Conn) {
	stop := make(chan struct{})
	defer close(stop)
	s.wait.Go(func() { // Close must not wait for the deadline
		select {
		case <-s.closed:
			_ = conn.SetReadDeadline(time.Now())
		case <-stop:
		}
	})
	got := make([]byte, len(s.hello))
	_ = conn.SetReadDeadline(time.Now().Add(greetDeadline))
	_, err := io.ReadFull(conn, got)
	<-s.tokens
	if err != nil || !bytes.Equal(got, s.hello) {
		s.warn("closed a connection on the raft port that is not from this cluster", "remote", conn.RemoteAddr().String())
		_ = conn.Close()
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	p := &peer{Conn: conn, stream: s}
	s.served.Add(1)
	s.mu.Lock()
	s.peers[p] = struct{}{}
	s.mu.Unlock()
	select {
	case s.accepted <- p:
	case <-s.closed:
		_ = p.Close()
	}
}

func (s *stream) warn(msg string, args ...any) {
	if ok, suppressed := s.quiet.pass(msg, time.Now()); ok {
		s.log.Warn(msg, append(args, "suppressed", suppressed)...)
	}
}

// Accept implements net.Listener.
func (s *stream) Accept() (net.Conn, error) {
	select {
	case conn := <-s.accepted:
		return conn, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. It cuts the peers, which the library leaves
// open, and waits for their handlers: a heartbeat is handled there and may be
// about to write a term to the log that is closed next.
func (s *stream) Close() error {
	var err error
	s.once.Do(func() {
		s.leave()
		close(s.closed)
		err = s.listener.Close()
		s.wait.Wait()
		s.mu.Lock()
		for p := range s.peers {
			_ = p.Conn.Close()
		}
		s.mu.Unlock()
		s.served.Wait()
	})
	return err
}

// Addr implements net.Listener: where others reach this node.
func (s *stream) Addr() net.Addr { return s.advertise }

// Dial implements hraft.StreamLayer.
func (s *stream) Dial(address hraft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	conn, err := s.reach(string(address), timeout)
	if err != nil {
		return nil, err
	}
	_ = conn.SetWriteDeadline(time.Now().Add(timeout))
	if _, err := conn.Write(s.hello); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, conn.SetWriteDeadline(time.Time{})
}

// reach connects, and goes on for a while when nobody listens.
func (s *stream) reach(address string, timeout time.Duration) (net.Conn, error) {
	for end := time.Now().Add(min(timeout, redialFor)); ; {
		conn, err := net.DialTimeout("tcp", address, timeout)
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(end) {
			return conn, err
		}
		select {
		case <-time.After(redialEvery):
		case <-s.leaving:
			return nil, err
		}
	}
}

// transport is the library's over stream. It sends nothing to followers while
// the log disk hangs: heartbeats run beside raft's main loop, so a leader that
// can store nothing would otherwise keep its followers waiting for ever.
type transport struct {
	*hraft.NetworkTransport
	hangs func() bool
}

var errHangs = errors.New("withheld: the log disk hangs")

// AppendEntries implements hraft.Transport.
func (t *transport) AppendEntries(id hraft.ServerID, target hraft.ServerAddress, args *hraft.AppendEntriesRequest, resp *hraft.AppendEntriesResponse) error {
	if t.hangs() {
		return errHangs
	}
	return t.NetworkTransport.AppendEntries(id, target, args, resp)
}
