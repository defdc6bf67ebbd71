package nbd

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A TCP client that vanished without a word is found by keepalive when idle
// and by unacknowledged replies otherwise; both within vanishAfter.
const (
	keepaliveIdle     = 15 * time.Second
	keepaliveInterval = 5 * time.Second
	keepaliveCount    = 5
	vanishAfter       = 40 * time.Second
)

// sendBuffer is asked for on UNIX sockets, whose default takes less than one batch of replies. TCP sizes its own.
const sendBuffer = 1 << 20

// prepareSocket sets the options of a served connection.
func prepareSocket(nc net.Conn) (syscall.RawConn, error) {
	switch s := nc.(type) {
	case *net.TCPConn:
		err := errors.Join(s.SetNoDelay(true), s.SetKeepAliveConfig(net.KeepAliveConfig{
			Enable: true, Idle: keepaliveIdle, Interval: keepaliveInterval, Count: keepaliveCount,
		}))
		if err != nil {
			return nil, err
		}
		raw, err := s.SyscallConn()
		if err != nil {
			return nil, err
		}
		return raw, setInt(raw, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(vanishAfter.Milliseconds()))
	case *net.UnixConn:
		raw, err := s.SyscallConn()
		if err != nil {
			return nil, err
		}
		if setInt(raw, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) != nil {
			_ = setInt(raw, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer) // as much as the system allows
		}
		return raw, nil
	}
	return nil, fmt.Errorf("a connection of type %T is neither TCP nor UNIX", nc)
}

func setInt(raw syscall.RawConn, level, option, value int) error {
	var err error
	if cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, value) }); cerr != nil {
		return cerr
	}
	return err
}

// waitingBytes is how much the socket has received and nobody has read.
func waitingBytes(fd int) int {
	n, _ := unix.IoctlGetInt(fd, unix.TIOCINQ)
	return n
}

// hungUp reports whether the peer has closed its side or the connection broke.
func hungUp(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0
}

// isExhaustion reports whether accept failed for want of resources.
func isExhaustion(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) ||
		errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM)
}

// read, readv and writev are the system calls of the request path, without the
// wrapping of errors that comes with the library's. The sockets do not block,
// so a call is a short copy, and the hand-shake with Go's scheduler, which
// would free the processor for others meanwhile, is left out where it is.
func read(fd uintptr, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	return int(n), errno
}

// readv fills one piece after the other.
func readv(fd uintptr, pieces []unix.Iovec) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(pieces))), uintptr(len(pieces)))
	return int(n), errno
}

// rawLimit is the longest write that is a short copy, in bytes.
const rawLimit = 64 << 10

// writev writes pieces; a single one goes by write.
func writev(fd uintptr, pieces []unix.Iovec) (uint64, syscall.Errno) {
	var n uintptr
	var errno syscall.Errno
	switch {
	case len(pieces) == 1 && pieces[0].Len <= rawLimit:
		n, _, errno = syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(pieces[0].Base)), uintptr(pieces[0].Len))
	case len(pieces) == 1:
		n, _, errno = syscall.Syscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(pieces[0].Base)), uintptr(pieces[0].Len))
	default:
		n, _, errno = syscall.Syscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&pieces[0])), uintptr(len(pieces)))
	}
	return uint64(n), errno
}
