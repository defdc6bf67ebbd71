// Package client reaches the metadata service over a list of addresses: it
// follows whichever server answers, repeats what may be repeated, and returns
// the sentinels of block.
package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// MaxMessage bounds an answer, in bytes: the map of a 64 TiB volume fits.
const MaxMessage = 64 << 20

// Client is the metadata API. Any server of the list will do, since followers
// forward to the leader; one that does not answer is passed over.
//
// Errors of all methods wrap a sentinel of block, with the service's sentence.
// ErrUnavailable: nothing was changed. ErrUnknown: it may have been; only a
// later look tells. A call ends with its context at the latest; while that
// lasts, calls that may be repeated are, with pauses. Safe for concurrent use.
type Client struct {
	metapb.MetadataClient
	list *list
}

// Dial checks the addresses (HOST:PORT, at least one) and returns a client. No
// connection is made before the first call. Further options are for tests.
func Dial(addresses []string, options ...grpc.DialOption) (*Client, error) {
	l := &list{}
	for _, a := range addresses {
		a = strings.TrimSpace(a)
		if _, _, err := net.SplitHostPort(a); err != nil {
			return nil, errors.Join(fmt.Errorf("%w: metadata server %q: want HOST:PORT, such as 127.0.0.1:7400", block.ErrInvalid, a), l.close())
		}
		conn, err := grpc.NewClient("passthrough:///"+a, append(DialOptions(), options...)...)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%w: metadata server %q: %w", block.ErrInvalid, a, err), l.close())
		}
		l.servers = append(l.servers, &server{address: a, conn: conn})
	}
	if len(l.servers) == 0 {
		return nil, fmt.Errorf("%w: no metadata server given", block.ErrInvalid)
	}
	return &Client{MetadataClient: metapb.NewMetadataClient(l), list: l}, nil
}

// Close ends all connections; calls in progress fail.
func (c *Client) Close() error { return c.list.close() }

// DialOptions are those of every connection to a metadata server: one that falls
// silent is noticed, and one that comes back is found within a second.
func DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 2 * time.Second,
		}),
	}
}

// server is one address. Its connection is made when first needed.
type server struct {
	address string
	conn    *grpc.ClientConn
}

// ready returns when the connection can carry a call. An error means that no
// call was sent: the caller may conclude that nothing happened.
func (s *server) ready(ctx context.Context) error {
	s.conn.Connect()
	for {
		state := s.conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.TransientFailure, connectivity.Shutdown:
			return fmt.Errorf("%w: no metadata server answers at %s", block.ErrUnavailable, s.address)
		case connectivity.Idle:
			s.conn.Connect()
		}
		if !s.conn.WaitForStateChange(ctx, state) {
			return fmt.Errorf("%w: no metadata server answers at %s: %w", block.ErrUnavailable, s.address, ctx.Err())
		}
	}
}

// list is the servers as one connection.
type list struct {
	servers []*server
	mu      sync.Mutex
	current int // the one that answered last
}

func (l *list) close() error {
	var errs []error
	for _, s := range l.servers {
		errs = append(errs, s.conn.Close())
	}
	return errors.Join(errs...)
}

func (l *list) pick() (*server, int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.servers[l.current], l.current
}

// pass goes on to the next server, unless somebody else already has.
func (l *list) pass(from int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.current == from {
		l.current = (from + 1) % len(l.servers)
	}
}

const (
	firstPause = 20 * time.Millisecond
	lastPause  = time.Second
)

// Invoke implements grpc.ClientConnInterface.
func (l *list) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if m, ok := args.(proto.Message); ok {
		if _, err := proto.Marshal(m); err != nil { // gRPC's word for it would be that of a server that broke
			return fmt.Errorf("%w: the request cannot be written down: %w", block.ErrInvalid, err)
		}
	}
	kind := kindOf(method)
	var pause time.Duration
	var said error // the last that a server answered
	for {
		s, at := l.pick()
		err := l.once(ctx, s, kind, method, args, reply, opts)
		switch {
		case err != nil && ended(err) && said != nil && kind != once:
			return said // why it is not done yet says more than that the time is up
		case err == nil || !again(err, kind):
			return err
		}
		if answered(err) {
			said = err
		}
		l.pass(at)
		if at != len(l.servers)-1 && ctx.Err() == nil {
			continue // the whole list before a pause
		}
		pause = min(max(2*pause, firstPause), lastPause)
		if !sleep(ctx, pause/2+rand.N(pause/2)) {
			return err
		}
	}
}

// once makes one attempt at one server.
func (l *list) once(ctx context.Context, s *server, kind kind, method string, args, reply any, opts []grpc.CallOption) error {
	if err := s.ready(ctx); err != nil {
		return err
	}
	err := metapb.FromStatus(s.conn.Invoke(ctx, method, args, reply, opts...))
	if err == nil || answered(err) && !ended(err) || refused(err) {
		return err
	}
	if kind == reads {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: no answer from the metadata server: %w", block.ErrUnknown, err)
}

// refused reports whether gRPC itself turned the call down, before the service
// or after it answered: saying it again changes nothing.
func refused(err error) bool {
	var e *metapb.Error
	if !errors.As(err, &e) {
		return false
	}
	switch e.Code() {
	case codes.Unimplemented, codes.ResourceExhausted, codes.Unauthenticated, codes.PermissionDenied, codes.InvalidArgument:
		return true
	}
	return false
}

func answered(err error) bool {
	var e *metapb.Error
	return errors.As(err, &e) && e.Answered()
}

// again reports whether repeating a call after err is right.
func again(err error, kind kind) bool {
	switch {
	case errors.Is(err, block.ErrUnknown):
		return kind != once && !ended(err)
	case errors.Is(err, block.ErrUnavailable), errors.Is(err, block.ErrShutdown):
		return !ended(err)
	}
	return false
}

// ended reports whether the caller's own patience is at an end.
func ended(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// NewStream implements grpc.ClientConnInterface. A stream that breaks ends
// with an error; the caller resumes by index.
func (l *list) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	var last error
	for range l.servers {
		s, at := l.pick()
		if last = s.ready(ctx); last == nil {
			stream, err := s.conn.NewStream(ctx, desc, method, opts...)
			if err == nil {
				return sentinels{stream}, nil
			}
			last = metapb.FromStatus(err)
		}
		l.pass(at)
	}
	return nil, last
}

// sentinels is a stream whose errors wrap the sentinels of block.
type sentinels struct{ grpc.ClientStream }

func (s sentinels) RecvMsg(m any) error { return metapb.FromStatus(s.ClientStream.RecvMsg(m)) }

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
