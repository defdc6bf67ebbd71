package kerneltest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// socket is a TCP connection to a server. Its fields are under Fake.mu.
type socket struct {
	f           *Fake
	id          kernel.SocketID
	server      *Server
	volume      *Volume
	session     block.SessionNumber
	established bool
	refs        int
	taken       uint64
	untaken     uint32
	deaf        bool // the driver does not receive from it
	device      *device
}

// SyscallConn implements kernel.Socket.
func (s *socket) SyscallConn() (syscall.RawConn, error) { return nil, errors.ErrUnsupported }

// ID implements kernel.Socket.
func (s *socket) ID() kernel.SocketID { return s.id }

// Close implements kernel.Socket.
func (s *socket) Close() error {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.f.unref(s)
	return nil
}

// unsent is what waits in the send buffer. f.mu is held.
func (s *socket) unsent() uint32 {
	if s.server.state == dropping && s.device != nil && s.device.inflight > 0 || s.server.full {
		return 1 << 16
	}
	return 0
}

// unref gives a reference up; the last one ends the connection. f.mu is held.
func (f *Fake) unref(s *socket) {
	if s.refs--; s.refs == 0 {
		f.endSocket(s)
	}
}

// endSocket ends a connection. f.mu is held.
func (f *Fake) endSocket(s *socket) {
	if !s.established {
		return
	}
	s.established = false
	delete(f.sockets, s.id.Cookie)
	if s.device != nil {
		f.notice(s.device, s)
	}
	f.change()
}

// Socket implements kernel.Kernel.
func (f *Fake) Socket(id kernel.SocketID) (kernel.SocketInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.sockets[id.Cookie]
	if s == nil || s.id != id {
		return kernel.SocketInfo{}, fmt.Errorf("%w: socket", block.ErrNotFound)
	}
	return kernel.SocketInfo{Established: true, Taken: s.taken, Untaken: s.untaken, Unsent: s.unsent()}, nil
}

// Destroy implements kernel.Kernel.
func (f *Fake) Destroy(id kernel.SocketID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.sockets[id.Cookie]; s != nil && s.id == id {
		f.endSocket(s)
	}
	return nil
}

// Established counts the connections there are.
func (f *Fake) Established() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.sockets)
}

// Server is a server that devices connect to.
type Server struct {
	f        *Fake
	address  string
	state    serverState
	full     bool
	slow     time.Duration
	mutate   func(*client.Export)
	volumes  map[block.VolumeID]*Volume
	requests int
	sessions int
}

type serverState uint8

const (
	serving  serverState = iota
	down                 // connections are refused
	silent               // stopped: the host takes connections, nobody answers
	dropping             // packets vanish
)

// Volume is what servers say of a volume. Several may share one, as primaries do one after the other.
type Volume struct {
	kernel.Identity
	Token    kernel.Token
	Size     int64
	Flags    uint16
	ReadOnly bool
	Revoked  bool
	parked   bool
	broken   bool
	Newest   block.SessionNumber // session that was opened
}

// DefaultFlags are those of a Gabion server.
const DefaultFlags = 1 | wire.TransFlush | wire.TransFUA | wire.TransTrim | wire.TransWriteZeroes | wire.TransDF |
	protocol.NEGOTIATION_REPLY_FLAGS_CAN_MULTI_CONN

// Server adds a server.
func (f *Fake) Server(address string, volumes ...*Volume) *Server {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &Server{f: f, address: address, volumes: make(map[block.VolumeID]*Volume)}
	for _, v := range volumes {
		s.volumes[v.Volume] = v
	}
	f.servers[address] = s
	return s
}

// Add has it serve a volume too.
func (s *Server) Add(v *Volume) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.volumes[v.Volume] = v
}

// Kill ends a server: its connections end, new ones are refused.
func (s *Server) Kill() { s.become(down) }

// Stop stops a server's process; its host goes on.
func (s *Server) Stop() { s.become(silent) }

// Drop loses all packets to and from a server.
func (s *Server) Drop() { s.become(dropping) }

// Serve makes it a server again. One that was stopped closes its connections.
func (s *Server) Serve() { s.become(serving) }

func (s *Server) become(state serverState) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	was := s.state
	s.state = state
	if state == down || state == serving && was == silent {
		s.closeAll(func(*socket) bool { return true })
	}
	s.f.change()
}

// Fill makes send buffers towards the server full.
func (s *Server) Fill(full bool) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.full = full
}

// Slow makes each handshake take a time.
func (s *Server) Slow(d time.Duration) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.slow = d
}

// Say changes what handshakes say of exports; nil: the truth.
func (s *Server) Say(mutate func(*client.Export)) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.mutate = mutate
}

// Park makes a server answer nothing of a volume, although it takes sessions.
func (s *Server) Park(v *Volume, on bool) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	v.parked = on
	s.f.change()
}

// Break makes servers answer all requests of a volume with an error: its disk cannot be read.
func (s *Server) Break(v *Volume, on bool) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	v.broken = on
	s.f.change()
}

// Requests counts the requests that were answered.
func (s *Server) Requests() int {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	return s.requests
}

// Sessions counts the connections that were opened.
func (s *Server) Sessions() int {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	return s.sessions
}

// CloseOne ends one connection of a volume, as a server may for reasons of its own.
func (s *Server) CloseOne(v *Volume) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	one := false
	s.closeAll(func(k *socket) bool {
		mine := k.volume == v && !one
		one = one || mine
		return mine
	})
}

// Change lets a test change volumes; what it revokes, or what is of an older epoch then, loses its connections.
func (f *Fake) Change(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	for _, s := range f.servers {
		if s.state == serving {
			s.closeAll(func(k *socket) bool { return k.volume.Revoked })
		}
	}
}

// closeAll ends connections from the server's side. f.mu is held.
func (s *Server) closeAll(which func(*socket) bool) {
	for _, k := range s.f.sockets {
		if k.server == s && which(k) {
			s.f.endSocket(k)
		}
	}
}

// Dial implements kernel.Dialer.
func (f *Fake) Dial(ctx context.Context, t client.Target) (kernel.Socket, client.Export, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	refused := fmt.Errorf("%w: %s: connection refused", block.ErrUnavailable, t.Address)
	s := f.servers[t.Address]
	if s == nil || s.state == down {
		return nil, client.Export{}, refused
	}
	patience := time.Second // for a lost SYN
	if s.state == silent {
		patience = 2 * time.Second // for a greeting
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	expired := make(chan time.Time)
	defer context.AfterFunc(ctx, func() { close(expired) })()
	for s.state == silent || s.state == dropping {
		f.await(expired)
		if ctx.Err() != nil {
			return nil, client.Export{}, fmt.Errorf("%w: %s: %w", block.ErrUnavailable, t.Address, ctx.Err())
		}
	}
	if s.slow > 0 {
		late := time.After(s.slow)
		f.mu.Unlock()
		select {
		case <-late:
		case <-ctx.Done():
		}
		f.mu.Lock()
	}
	if s.state != serving || f.closed || ctx.Err() != nil {
		return nil, client.Export{}, refused
	}
	return s.open(t)
}

// open is the handshake. f.mu is held.
func (s *Server) open(t client.Target) (kernel.Socket, client.Export, error) {
	refuse := func(code uint32, text string) (kernel.Socket, client.Export, error) {
		return nil, client.Export{}, &client.RefusedError{Code: code, Text: text}
	}
	part := strings.Split(t.Export, "/")
	var v *Volume
	for _, o := range s.volumes {
		if len(part) == 4 && o.Volume.String() == part[0] {
			v = o
		}
	}
	if v == nil || v.Revoked || !v.opens(part[1]) {
		return refuse(protocol.NEGOTIATION_TYPE_REPLY_ERR_UNKNOWN, "no such volume")
	}
	epoch, _ := strconv.ParseUint(part[2], 10, 64)
	number, _ := strconv.ParseUint(part[3], 10, 64)
	switch {
	case block.CacheEpoch(epoch) < v.Epoch:
		return refuse(wire.RepErrPolicy, "unflushed data was lost")
	case block.SessionNumber(number) < v.Newest:
		return refuse(wire.RepErrInvalid, "superseded")
	}
	v.Newest = block.SessionNumber(number)
	for _, o := range s.f.servers { // older sessions are closed, wherever it can be done
		if o.state == serving {
			o.closeAll(func(k *socket) bool { return k.volume == v && k.session < v.Newest })
		}
	}
	s.f.cookies++
	s.sessions++
	k := &socket{f: s.f, server: s, volume: v, session: v.Newest, established: true, refs: 1, id: kernel.SocketID{
		Local:  netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(1024+s.f.cookies%60000)),
		Remote: netip.MustParseAddrPort(s.address), Cookie: s.f.cookies,
	}}
	s.f.sockets[k.id.Cookie] = k
	e := client.Export{Size: v.Size, Flags: v.Flags, MinBlock: 512, PreferredBlock: 4096, MaxPayload: 32 << 20}
	if v.Flags == 0 {
		e.Flags = DefaultFlags
	}
	if v.ReadOnly {
		e.Flags |= wire.TransReadOnly
	}
	if s.mutate != nil {
		s.mutate(&e)
	}
	return k, e, nil
}

// opens compares without showing: a Token does not print itself.
func (v *Volume) opens(token string) bool { return kernel.Token(token) == v.Token }
