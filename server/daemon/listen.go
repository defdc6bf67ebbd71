package daemon

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"github.com/gabion-storage/gabion/server/block"
)

// ListenTCP binds host:port; port 0 takes a free one. flag is what an operator
// would change, and errors name it. A taken port is ErrInUse.
func ListenTCP(host string, port int, flag string) (net.Listener, error) {
	address := net.JoinHostPort(host, strconv.Itoa(port))
	l, err := net.Listen("tcp", address)
	switch {
	case err == nil:
		return l, nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w: %s: address already in use by another process: end that, or choose another port with %s", block.ErrInUse, address, flag)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("%w: %s is not an address of this machine: correct --listen", block.ErrInvalid, host)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("%w: may not listen on %s: choose a port above 1023 with %s", block.ErrPermission, address, flag)
	}
	return nil, fmt.Errorf("%w: listening on %s (%s): %v", block.ErrUnavailable, address, flag, err)
}

// IsLoopback reports whether only this machine can reach host, an address or "localhost".
func IsLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

// maxSocketPath is what fits into sockaddr_un, less the closing zero.
const maxSocketPath = 107

// ListenUnix binds a UNIX socket at path, which is absolute. A dead socket there
// is replaced; a socket somebody serves is ErrInUse; anything else at the path
// is refused and left alone. flag is what an operator would change. Closing the listener removes the path only while
// it is still this listener's.
//
// Two servers that start at once cannot both find the same dead socket: looking
// and binding happen under a lock on the directory.
func ListenUnix(path, flag string) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("%w: socket path %s has %d bytes, the system takes %d: choose a shorter one with %s",
			block.ErrInvalid, path, len(path), maxSocketPath, flag)
	}
	unlock, err := lockDirectory(filepath.Dir(path), flag)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeDeadSocket(path, flag); err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("%w: listening on socket %s: %v", block.ErrUnavailable, path, err)
	}
	l.SetUnlinkOnClose(false)
	own, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: socket %s vanished: %v", block.ErrUnavailable, path, err), l.Close())
	}
	return &unixListener{UnixListener: l, path: path, own: own}, nil
}

func removeDeadSocket(path, flag string) error {
	found, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: looking at socket path %s: %v", block.ErrUnavailable, path, err)
	}
	if found.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%w: %s exists and is not a socket (%s): move it away, or choose another path with %s",
			block.ErrExists, path, found.Mode(), flag)
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		_ = c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) { // a full backlog (EAGAIN) is a living server too
		return fmt.Errorf("%w: another server serves socket %s: end it, or choose another path with %s", block.ErrInUse, path, flag)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("%w: removing dead socket %s: %v", block.ErrUnavailable, path, err)
	}
	return nil
}

// unixListener removes its path when closed, unless it became somebody else's.
type unixListener struct {
	*net.UnixListener
	path string
	own  os.FileInfo
	once sync.Once
}

// Close looks at the path once only: after that, a file with the same number may be another's.
func (l *unixListener) Close() error {
	l.once.Do(l.remove)
	return l.UnixListener.Close()
}

func (l *unixListener) remove() {
	unlock, err := lockDirectory(filepath.Dir(l.path), "")
	if err != nil {
		return // nobody can say whose it is; the next server finds it dead
	}
	defer unlock()
	if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.own) {
		_ = os.Remove(l.path)
	}
}

// lockDirectory waits for the exclusive lock of a directory; it is held for
// moments only, and ends with the process.
func lockDirectory(dir, flag string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("%w: the directory of the socket: %v: create it, or choose another path with %s", block.ErrNotFound, err, flag)
	}
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: locking %s: %v", block.ErrUnavailable, dir, err), d.Close())
	}
	return func() { _ = d.Close() }, nil
}

// FreePorts finds n ports of loopback that nobody listens on now. They lie below
// those that the kernel gives to connections, which would take them meanwhile.
// ErrUnavailable: there are not so many.
func FreePorts(n int) (ports []int, err error) {
	const first, count, tries = 20000, 12000, 1000
	for try := 0; len(ports) < n; try++ {
		port := first + rand.IntN(count)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil && try >= tries {
			return nil, fmt.Errorf("%w: a free port: %w", block.ErrUnavailable, err)
		}
		if err == nil {
			defer l.Close() // after the last: no two are the same
			ports = append(ports, port)
		}
	}
	return ports, nil
}
