package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

const (
	connectTimeout  = time.Second // of one address, so that a lost SYN costs little
	greetingTimeout = 2 * time.Second
	pathTimeout     = 3 * time.Second // a path that carries nothing for so long in a handshake is given up
)

// TCP is the Dialer for servers on the network. Kernel devices always use TCP,
// on the server's own host too: only TCP sockets can be ended from outside.
type TCP struct{}

// Dial implements Dialer.
func (TCP) Dial(ctx context.Context, t client.Target) (Socket, client.Export, error) {
	d := net.Dialer{
		Timeout: connectTimeout,
		// During the handshake, while the server may let older sessions drain: a path that died is noticed.
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 3},
	}
	conn, err := d.DialContext(ctx, "tcp", t.Address)
	if err != nil {
		return nil, client.Export{}, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	s := &tcpSocket{TCPConn: conn.(*net.TCPConn)}
	if err := s.control(func(fd int) error { return userTimeout(fd, pathTimeout) }); err != nil {
		_ = s.Close()
		return nil, client.Export{}, err
	}
	export := client.Export{}
	if err = s.awaitGreeting(); err == nil {
		export, err = client.Handshake(ctx, conn, t, false)
	}
	if err == nil {
		err = s.settle()
	}
	if err != nil {
		_ = s.Close()
		return nil, client.Export{}, err
	}
	return s, export, nil
}

type tcpSocket struct {
	*net.TCPConn
	id SocketID
}

// awaitGreeting waits for a server's first byte, which one that is well sends at
// once: a process that was stopped costs no more than this, while a handshake
// may take long.
func (s *tcpSocket) awaitGreeting() error {
	raw, err := s.SyscallConn()
	if err == nil {
		err = s.SetReadDeadline(time.Now().Add(greetingTimeout))
	}
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK)
			return !errors.Is(err, unix.EAGAIN)
		})
	}
	if err == nil {
		err = s.SetReadDeadline(time.Time{})
	}
	if err != nil {
		return fmt.Errorf("%w: the server at %v accepts and does not greet", block.ErrUnavailable, s.RemoteAddr())
	}
	return nil
}

// ID implements Socket.
func (s *tcpSocket) ID() SocketID { return s.id }

// settle makes the connection one that outlives silence: as long as nobody waits
// for an answer it is the peer's end that ends it, and otherwise the driver's
// own timer does.
func (s *tcpSocket) settle() error {
	slow := net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 6}
	if err := s.SetKeepAliveConfig(slow); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return s.control(func(fd int) error {
		cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		s.id = SocketID{
			Local:  unmapped(s.LocalAddr().(*net.TCPAddr).AddrPort()),
			Remote: unmapped(s.RemoteAddr().(*net.TCPAddr).AddrPort()),
			Cookie: cookie,
		}
		return errors.Join(err, userTimeout(fd, 0))
	})
}

func (s *tcpSocket) control(f func(fd int) error) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	var inner error
	if err = raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err == nil {
		err = inner
	}
	if err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return nil
}

func userTimeout(fd int, d time.Duration) error {
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
}
