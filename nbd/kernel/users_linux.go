package kernel

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

// Users implements Kernel. Mounts are those of this process's namespace, openers
// those whose descriptors it may look at.
func (l *Linux) Users(index int) (Users, error) {
	n, err := l.Node(index)
	if errors.Is(err, block.ErrNotFound) {
		n.Index = index // its device node may still be bound somewhere
	} else if err != nil {
		return Users{}, err
	}
	table, err := os.ReadFile(filepath.Join(l.proc, "self/mountinfo"))
	if err != nil {
		return Users{}, fmt.Errorf("%w: reading the mount table: %w", block.ErrUnavailable, err)
	}
	u := Users{Mounts: mountsOf(table, n)}
	if n.Major == 0 {
		return u, nil
	}
	d := l.device(index)
	if u.Holders = d.list("holders"); d.err != nil {
		return Users{}, fmt.Errorf("%w: what is built upon nbd%d: %w", block.ErrUnavailable, index, d.err)
	}
	u.Openers = l.openers(n)
	return u, nil
}

// mountsOf finds the mount points of a device: of a file system on it, and of
// its device node, which raw block volumes are bound by. A bound node outlives
// the device and would open the next one of its number.
func mountsOf(mountinfo []byte, n Node) []string {
	var points []string
	lines := bufio.NewScanner(bytes.NewReader(mountinfo))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		before, after, ok := strings.Cut(lines.Text(), " - ")
		f := strings.Fields(before)
		kind := strings.Fields(after)
		if !ok || len(f) < 5 || len(kind) == 0 {
			continue
		}
		name := strings.TrimSuffix(f[3], "//deleted")
		fileSystem := n.Major != 0 && f[2] == fmt.Sprintf("%d:%d", n.Major, n.Minor)
		node := (kind[0] == "devtmpfs" || kind[0] == "tmpfs") && filepath.Base(name) == devicePrefix+strconv.Itoa(n.Index)
		if fileSystem || node {
			points = append(points, unescape(f[4]))
		}
	}
	return points
}

// unescape undoes the octal escapes of the mount table.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// openers finds the processes that have the device open.
func (l *Linux) openers(n Node) []string {
	var found []string
	processes, _ := os.ReadDir(l.proc)
	for _, p := range processes {
		if pid, err := strconv.Atoi(p.Name()); err != nil || pid == os.Getpid() {
			continue
		}
		dir := filepath.Join(l.proc, p.Name(), "fd")
		fds, _ := os.ReadDir(dir)
		for _, fd := range fds {
			if opens(filepath.Join(dir, fd.Name()), n) {
				comm, _ := os.ReadFile(filepath.Join(l.proc, p.Name(), "comm"))
				found = append(found, fmt.Sprintf("process %s (%s)", p.Name(), strings.TrimSpace(string(comm))))
				break
			}
		}
	}
	return found
}

// opens tells whether a descriptor is of the device. It waits for no file
// server: what is not on a path is passed over, and attributes may be old.
func opens(fd string, n Node) bool {
	target, err := os.Readlink(fd)
	if err != nil || !strings.HasPrefix(target, "/") {
		return false
	}
	var st unix.Statx_t
	err = unix.Statx(unix.AT_FDCWD, fd, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev_major == n.Major && st.Rdev_minor == n.Minor
}

// Claim implements Kernel.
func (l *Linux) Claim(ctx context.Context, index int) (release func(), err error) {
	fd, err := l.open(ctx, index, unix.O_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return nil, fmt.Errorf("%w: nbd%d is mounted or held, perhaps in another mount namespace", block.ErrInUse, index)
	}
	if err != nil {
		return nil, fmt.Errorf("claiming nbd%d: %w", index, refused(err))
	}
	return func() { _ = unix.Close(fd) }, nil
}

// open opens a device for reading. If ctx ends before the kernel is done, what
// it opens is closed when it is.
func (l *Linux) open(ctx context.Context, index int, flags int) (int, error) {
	type result struct {
		fd  int
		err error
	}
	done := make(chan result)
	go func() {
		fd, err := unix.Open(filepath.Join(l.dev, devicePrefix+strconv.Itoa(index)), unix.O_RDONLY|unix.O_CLOEXEC|flags, 0)
		select {
		case done <- result{fd, err}:
		case <-ctx.Done():
			if err == nil {
				_ = unix.Close(fd)
			}
		}
	}()
	select {
	case r := <-done:
		if errors.Is(r.err, unix.ENOENT) || errors.Is(r.err, unix.ENXIO) {
			r.err = fmt.Errorf("%w: no usable %s/%s%d: this process needs the host's devices", block.ErrPrecondition, l.dev, devicePrefix, index)
		}
		return r.fd, r.err
	case <-ctx.Done():
		return -1, ctx.Err()
	}
}
