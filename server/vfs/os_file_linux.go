package vfs

import (
	"errors"
	"io"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

// osFile does its own system calls: os.File has no try-variants, and its
// poller bookkeeping is a good part of a cached 4 KiB read.
type osFile struct {
	fd     int
	name   string
	direct bool // RWF_NOWAIT does not keep direct I/O from waiting for the device
	// The kernel refused RWF_NOWAIT on this file once, so it always will.
	noTryRead, noTryWrite atomic.Bool
}

func (f *osFile) ReadAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(f.fd, p[done:], off+int64(done))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return done, wrap("read", f.name, err)
		}
		if n == 0 {
			return done, io.EOF
		}
		done += n
		if f.direct && done < len(p) && done%DirectAlign != 0 {
			return done, io.EOF // only the end of the file cuts a direct read off the grid
		}
	}
	return done, nil
}

func (f *osFile) WriteAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pwrite(f.fd, p[done:], off+int64(done))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 0 {
			err = io.ErrShortWrite
		}
		if err != nil {
			return done, wrap("write", f.name, err)
		}
		done += n
	}
	return done, nil
}

func (f *osFile) TryReadAt(p []byte, off int64) (int, error) {
	return f.try(unix.SYS_PREADV2, &f.noTryRead, p, off)
}

func (f *osFile) TryWriteAt(p []byte, off int64) (int, error) {
	return f.try(unix.SYS_PWRITEV2, &f.noTryWrite, p, off)
}

// rawLimit is how much is copied without telling Go's scheduler about the
// system call: with RWF_NOWAIT it is a copy from or to the page cache, a few
// microseconds, and the hand-shake with the scheduler would be a tenth of it.
const rawLimit = 64 << 10

func (f *osFile) try(call uintptr, refused *atomic.Bool, p []byte, off int64) (int, error) {
	if f.direct || refused.Load() {
		return 0, block.ErrUnsupported
	}
	if len(p) == 0 {
		return 0, nil
	}
	iov := unix.Iovec{Base: &p[0]}
	iov.SetLen(len(p))
	var n uintptr
	var errno unix.Errno
	if len(p) <= rawLimit {
		n, _, errno = unix.RawSyscall6(call, uintptr(f.fd), uintptr(unsafe.Pointer(&iov)), 1, uintptr(off), 0, unix.RWF_NOWAIT)
	} else {
		n, _, errno = unix.Syscall6(call, uintptr(f.fd), uintptr(unsafe.Pointer(&iov)), 1, uintptr(off), 0, unix.RWF_NOWAIT)
	}
	runtime.KeepAlive(p)
	switch errno {
	case 0:
		return int(n), nil
	case unix.EAGAIN, unix.EINTR:
		return 0, ErrWouldBlock
	case unix.EOPNOTSUPP, unix.ENOSYS, unix.EINVAL:
		refused.Store(true)
		return 0, block.ErrUnsupported
	}
	if call == unix.SYS_PREADV2 {
		return 0, wrap("read", f.name, errno)
	}
	return 0, wrap("write", f.name, errno)
}

func (f *osFile) Datasync() error {
	return wrap("datasync", f.name, retry(func() error { return unix.Fdatasync(f.fd) }))
}

func (f *osFile) Sync() error {
	return wrap("sync", f.name, retry(func() error { return unix.Fsync(f.fd) }))
}

func (f *osFile) PunchHole(off, length int64) error {
	return wrap("punch", f.name, f.fallocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, length))
}

func (f *osFile) ZeroRange(off, length int64) error {
	return wrap("zero", f.name, f.fallocate(unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, off, length))
}

func (f *osFile) fallocate(mode uint32, off, length int64) error {
	return retry(func() error { return unix.Fallocate(f.fd, mode, off, length) })
}

func (f *osFile) Truncate(size int64) error {
	return wrap("truncate", f.name, retry(func() error { return unix.Ftruncate(f.fd, size) }))
}

func (f *osFile) Evict() error {
	return wrap("evict", f.name, retry(func() error { return unix.Fadvise(f.fd, 0, 0, unix.FADV_DONTNEED) }))
}

func (f *osFile) SeekData(off int64) (int64, error) { return f.seek(off, unix.SEEK_DATA) }
func (f *osFile) SeekHole(off int64) (int64, error) { return f.seek(off, unix.SEEK_HOLE) }

func (f *osFile) seek(off int64, whence int) (int64, error) {
	n, err := unix.Seek(f.fd, off, whence)
	if errors.Is(err, unix.ENXIO) {
		return 0, io.EOF
	}
	return n, wrap("seek", f.name, err)
}

func (f *osFile) CloneFrom(src File) error {
	s, ok := src.(*osFile)
	if !ok {
		return &OpError{Op: "clone", Name: f.name, Kind: block.ErrUnsupported}
	}
	return wrap("clone", f.name, retry(func() error { return unix.IoctlFileClone(f.fd, s.fd) }))
}

func (f *osFile) Stat() (Info, error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return Info{}, wrap("stat", f.name, err)
	}
	return info(&st), nil
}

func (f *osFile) Close() error { return wrap("close", f.name, unix.Close(f.fd)) }

// The kernel's struct fiemap with room for some extents (linux/fiemap.h).
type fiemap struct {
	start, length           uint64
	flags, mapped, count, _ uint32
	extents                 [16]fiemapExtent
}

type fiemapExtent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

const (
	fsIocFiemap        = 0xC020660B
	fiemapExtentLast   = 0x1
	fiemapExtentShared = 0x2000
)

// Mapped asks for the extent map, because SEEK_HOLE calls a preallocated range a hole.
func (f *osFile) Mapped(off, length int64) (bool, error) {
	pos, end := uint64(off), uint64(off+length)
	for pos < end {
		m := fiemap{start: pos, length: end - pos}
		m.count = uint32(len(m.extents))
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(f.fd), fsIocFiemap, uintptr(unsafe.Pointer(&m)))
		if errno == unix.EOPNOTSUPP || errno == unix.ENOTTY {
			return false, nil
		}
		if errno != 0 {
			return false, wrap("map", f.name, errno)
		}
		if m.mapped == 0 {
			return false, nil
		}
		for _, e := range m.extents[:min(m.mapped, m.count)] {
			if e.logical > pos || e.flags&fiemapExtentShared != 0 {
				return false, nil
			}
			pos = max(pos, e.logical+e.length)
			if pos < end && e.flags&fiemapExtentLast != 0 {
				return false, nil
			}
		}
	}
	return true, nil
}
