package nbd

import (
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// link is a connection's socket for the transmission phase, outside of the runtime's poller.
//
// The poller is told of all that happens to a socket that it has, whether somebody waits or not: each piece that a
// client sends, and each that it takes, wakes a thread, at the client's cost, which then finds nothing to do. A link is
// watched through gates instead, which are open only while somebody waits.
type link struct {
	fd      int
	in, out gate
}

// newLink makes a link to a socket that the runtime's poller has, until its own descriptor is closed.
func newLink(raw syscall.RawConn) (l *link, err error) {
	l = &link{fd: -1}
	cerr := raw.Control(func(fd uintptr) { l.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(cerr, err); err == nil {
		err = errors.Join(l.in.build(l.fd, unix.EPOLLIN), l.out.build(l.fd, unix.EPOLLOUT))
	}
	if err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// SetReadDeadline ends what waits for the gate in at t; zero: never.
func (l *link) SetReadDeadline(t time.Time) error { return l.in.file.SetReadDeadline(t) }

// SetWriteDeadline ends what waits for the gate out at t; zero: never.
func (l *link) SetWriteDeadline(t time.Time) error { return l.out.file.SetReadDeadline(t) }

// Close closes the socket. Nobody may be using it.
func (l *link) Close() error {
	err := errors.Join(l.in.close(), l.out.close())
	if l.fd >= 0 {
		err = errors.Join(err, unix.Close(l.fd))
	}
	return err
}

// gate is an epoll instance that is itself watched by the runtime's poller. While it is open, a socket is in it.
type gate struct {
	file   *os.File // the epoll instance
	raw    syscall.RawConn
	ep     int // its descriptor
	socket int
	event  unix.EpollEvent
	open   bool

	// Of one pass.
	try     func(fd uintptr) bool
	err     error
	attempt func(uintptr) bool // made once, so that waiting allocates nothing
}

// build makes a gate that waits for events of a socket.
func (g *gate) build(socket int, events uint32) (err error) {
	g.socket, g.event.Events = socket, events
	if g.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	if err = unix.SetNonblock(g.ep, true); err != nil {
		return errors.Join(os.NewSyscallError("fcntl", err), unix.Close(g.ep))
	}
	g.file = os.NewFile(uintptr(g.ep), "epoll")
	g.attempt = g.attempts
	if g.raw, err = g.file.SyscallConn(); err != nil {
		return err
	}
	return g.file.SetReadDeadline(time.Time{}) // an error if the runtime's poller has not taken it
}

func (g *gate) close() error {
	if g.file == nil {
		return nil
	}
	return g.file.Close()
}

// pass calls try until it returns true, and waits in between until the socket is ready, or the deadline is over. A
// socket that was ready all the time does not let try wait.
func (g *gate) pass(try func(fd uintptr) bool) error {
	g.try, g.err = try, nil
	if err := g.raw.Read(g.attempt); err != nil {
		return err
	}
	return g.err
}

func (g *gate) attempts(uintptr) bool {
	if g.open {
		g.set(unix.EPOLL_CTL_DEL)
	}
	if g.err == nil && !g.try(uintptr(g.socket)) {
		g.set(unix.EPOLL_CTL_ADD)
		return g.err != nil
	}
	return true
}

// set opens or closes the gate. Taking the socket out and putting it in again, unlike a change of its events, leaves no
// event behind in the instance that would keep the next one from being passed on.
func (g *gate) set(op int) {
	if err := unix.EpollCtl(g.ep, op, g.socket, &g.event); err != nil {
		g.err = os.NewSyscallError("epoll_ctl", err)
	}
	g.open = op == unix.EPOLL_CTL_ADD
}
