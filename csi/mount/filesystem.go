package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

// Format makes a file system; it is durable on return. What the device held
// is lost.
func (l *Linux) Format(f Format) error {
	mkfs := func(tool string, args ...string) error {
		o, err := run(tool, append(args, f.Device)...)
		if err == nil && o.code != 0 {
			err = fmt.Errorf("%w: %s %s: %s (exit code %d)", block.ErrIO, tool, f.Device, o.text, o.code)
		}
		return err
	}
	b, err := l.Inspect(f.Device)
	switch {
	case err != nil:
	case f.Type == Ext4:
		err = formatExt4(f.Blank, mkfs)
	case f.Type == XFS:
		err = formatXFS(f.Blank, b.Size, mkfs)
	default:
		err = fmt.Errorf("%w: file system %.40q", block.ErrInvalid, f.Type)
	}
	if err != nil {
		return err
	}
	_, err = apart(task{Do: doSync, Device: f.Device})
	return err
}

func formatExt4(blank bool, mkfs func(string, ...string) error) error {
	args := []string{"-q", "-F", "-b", "4096", "-m", "0", "-E"}
	if blank {
		err := mkfs("mkfs.ext4", append(args, ext4Layout+",nodiscard,assume_storage_prezeroed=1")...)
		if err == nil || errors.Is(err, block.ErrUnavailable) { // the latter: it was killed, and so would be the next
			return err
		}
	} // before e2fsprogs 1.47 there was no such option
	return mkfs("mkfs.ext4", append(args, ext4Layout+",discard")...)
}

func formatXFS(blank bool, size int64, mkfs func(string, ...string) error) error {
	args := []string{"-q", "-f"}
	switch {
	case size < xfsLeast:
		return fmt.Errorf("%w: XFS takes %d MiB or more, and the device has %d: use ext4, or a larger volume", block.ErrPrecondition, xfsLeast>>20, size>>20)
	case size >= xfsLargeLog:
		args = append(args, "-l", xfsLog)
	}
	if blank {
		args = append(args, "-K")
	}
	return mkfs("mkfs.xfs", args...)
}

// ext4Layout keeps what mkfs writes together and short: see the package's documentation.
const ext4Layout = "packed_meta_blocks=1,lazy_itable_init=1,lazy_journal_init=1"

// mkfs.xfs fills the log with zeros. From xfsLargeLog bytes on it would make it
// larger than xfsLog, up to 2 GiB, which costs more than it gains.
const (
	xfsLeast    = 300 << 20
	xfsLargeLog = 512 << 30
	xfsLog      = "size=256m"
)

func syncDevice(device string) error {
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer f.Close()
		err = f.Sync()
	}
	if err != nil {
		return fmt.Errorf("%w: device %s: %w", block.ErrIO, device, err)
	}
	return nil
}

// Check repairs what can be repaired without a question. XFS repairs itself
// when it is mounted, by its log, which nothing here ever clears.
func (l *Linux) Check(device string, t FS) error {
	if t != Ext4 {
		return nil
	}
	const corrected, left, refused = 1 | 2, 4, 8
	o, err := run("e2fsck", "-p", device)
	switch {
	case err != nil:
		return err
	case o.code&^corrected == 0:
		return nil
	case o.code&left != 0:
		return fmt.Errorf("%w: %s has faults that cannot be repaired without a person: attach the volume elsewhere and run e2fsck: %s",
			block.ErrCorrupt, device, o.text)
	case o.code&refused != 0:
		return fmt.Errorf("%w: e2fsck could not work on %s: %s", block.ErrIO, device, o.text)
	}
	return fmt.Errorf("%w: e2fsck %s: %s (exit code %d)", block.ErrIO, device, o.text, o.code)
}

// Grow makes a mounted file system as large as its device: ext4 by the device,
// XFS by the mount point, as each tool wants it. It has nothing to do if it is that large.
func (l *Linux) Grow(device, point string, t FS) error {
	tool, args := "resize2fs", []string{device}
	if t == XFS {
		tool, args = "xfs_growfs", []string{"-d", point}
	}
	o, err := run(tool, args...)
	if err != nil {
		return err
	}
	if o.code != 0 {
		return fmt.Errorf("%w: %s %s: %s (exit code %d)", block.ErrIO, tool, args[len(args)-1], o.text, o.code)
	}
	return nil
}

// Writable begins and ends a change of a mounted file system. ErrReadOnly: it
// takes none, because it is mounted read-only or has turned so after an error,
// which newer kernels show nowhere else. It may wait for ever.
func (l *Linux) Writable(point string) error {
	_, err := apart(task{Do: doWritable, Point: point})
	return err
}

func writable(point string) error {
	f, err := os.OpenFile(point, unix.O_TMPFILE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	switch {
	case err == nil:
		return f.Close()
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return nil
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: %s", block.ErrReadOnly, point)
	}
	return fmt.Errorf("%w: %s: %w", block.ErrIO, point, err)
}

// ErrShutDown, which comes with block.ErrIO: an error has shut the file system
// down, and nothing can be written or read there until it is mounted anew.
var ErrShutDown = errors.New("the file system was shut down by an error")

// Usage asks a mounted file system how full it is. It may wait for ever.
func (l *Linux) Usage(point string) (Usage, error) {
	root, err := lookAtRoot(point)
	if err != nil {
		return Usage{}, err
	}
	var s unix.Statfs_t
	for {
		err := unix.Statfs(point, &s)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return Usage{}, fmt.Errorf("%w: %s: %w", block.ErrIO, point, err)
		}
	}
	unit := s.Frsize
	if unit == 0 {
		unit = s.Bsize
	}
	return Usage{
		Total: int64(s.Blocks) * unit, Used: int64(s.Blocks-s.Bfree) * unit, Available: int64(s.Bavail) * unit,
		Inodes: int64(s.Files), InodesUsed: int64(s.Files - s.Ffree), InodesAvail: int64(s.Ffree),
		Errors: errorsOf(number(root.Dev)),
	}, nil
}

// lookAtRoot looks at the root of what is mounted at point. XFS goes on to say how
// full it is after it was shut down; here it tells. An error on the way to the
// point is another file system's.
func lookAtRoot(point string) (root unix.Stat_t, err error) {
	fd, err := unix.Open(point, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return root, fmt.Errorf("%w: %s: %w", block.ErrIO, point, err)
	}
	defer unix.Close(fd)
	err = unix.Fstat(fd, &root)
	switch {
	case errors.Is(err, unix.EIO):
		return root, fmt.Errorf("%w: %w: %s", block.ErrIO, ErrShutDown, point)
	case err != nil:
		return root, fmt.Errorf("%w: %s: %w", block.ErrIO, point, err)
	}
	return root, nil
}

// errorsOf is what the ext4 on a device has counted, 0 for what is none. Some
// kernels show nowhere else that it has stopped taking changes.
func errorsOf(n Number) int64 {
	device, err := os.Readlink("/sys/dev/block/" + n.String())
	if err != nil {
		return 0
	}
	b, err := os.ReadFile("/sys/fs/ext4/" + filepath.Base(device) + "/errors_count")
	if err != nil {
		return 0
	}
	count, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return count
}
