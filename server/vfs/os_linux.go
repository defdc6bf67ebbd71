package vfs

import (
	"errors"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

// OS is the real file system.
type OS struct{}

// OpenDir implements FS.
func (OS) OpenDir(path string) (Dir, error) {
	fd, err := openat(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, wrap("open directory", path, err)
	}
	return &osDir{fd: fd, name: path}, nil
}

type osDir struct {
	fd   int
	name string
}

// retry repeats a call that a signal interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func openat(dir int, name string, flags int, mode uint32) (fd int, err error) {
	err = retry(func() (e error) {
		fd, e = unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode)
		return e
	})
	return fd, err
}

func (d *osDir) Open(name string, flag Flag) (File, error) {
	if err := checkName("open", name); err != nil {
		return nil, err
	}
	flags := unix.O_RDWR
	if flag&ReadOnly != 0 {
		flags = unix.O_RDONLY
	}
	if flag&Create != 0 {
		flags |= unix.O_CREAT
	}
	if flag&Exclusive != 0 {
		flags |= unix.O_EXCL
	}
	if flag&Direct != 0 {
		flags |= unix.O_DIRECT
	}
	// O_NONBLOCK: a fifo that a stranger put here must not hang the open; it has no effect on a regular file.
	fd, err := openat(d.fd, name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		if flag&Direct != 0 && errors.Is(err, unix.EINVAL) {
			err = unix.EOPNOTSUPP
		}
		return nil, wrap("open", name, err)
	}
	f := &osFile{fd: fd, name: name, direct: flag&Direct != 0}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		_ = unix.Close(fd)
		if err != nil {
			return nil, wrap("open", name, err)
		}
		return nil, &OpError{Op: "open", Name: name, Kind: block.ErrInvalid, Cause: errors.New("not a regular file")}
	}
	return f, nil
}

func (d *osDir) OpenDir(name string) (Dir, error) {
	if err := checkName("open directory", name); err != nil {
		return nil, err
	}
	fd, err := openat(d.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, wrap("open directory", name, err)
	}
	return &osDir{fd: fd, name: name}, nil
}

func (d *osDir) Mkdir(name string) error {
	if err := checkName("mkdir", name); err != nil {
		return err
	}
	return wrap("mkdir", name, unix.Mkdirat(d.fd, name, 0o700))
}

func (d *osDir) Rename(name string, to Dir, newName string) error {
	if err := errors.Join(checkName("rename", name), checkName("rename", newName)); err != nil {
		return err
	}
	target, ok := to.(*osDir)
	if !ok {
		return &OpError{Op: "rename", Name: name, Kind: block.ErrInvalid, Cause: errors.New("target is on another file system")}
	}
	return wrap("rename", name, unix.Renameat(d.fd, name, target.fd, newName))
}

func (d *osDir) Unlink(name string) error {
	if err := checkName("unlink", name); err != nil {
		return err
	}
	return wrap("unlink", name, unix.Unlinkat(d.fd, name, 0))
}

func (d *osDir) Rmdir(name string) error {
	if err := checkName("rmdir", name); err != nil {
		return err
	}
	return wrap("rmdir", name, unix.Unlinkat(d.fd, name, unix.AT_REMOVEDIR))
}

func (d *osDir) ReadDir() ([]Entry, error) {
	// A descriptor of its own: the position in a directory belongs to the descriptor.
	fd, err := openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, wrap("read directory", d.name, err)
	}
	f := os.NewFile(uintptr(fd), d.name)
	defer f.Close()
	list, err := f.ReadDir(-1)
	if err != nil {
		return nil, wrap("read directory", d.name, err)
	}
	entries := make([]Entry, len(list))
	for i, e := range list {
		entries[i] = Entry{Name: e.Name(), Dir: e.IsDir()}
	}
	slices.SortFunc(entries, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return entries, nil
}

func (d *osDir) Stat(name string) (Info, error) {
	if err := checkName("stat", name); err != nil {
		return Info{}, err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return Info{}, wrap("stat", name, err)
	}
	return info(&st), nil
}

func info(st *unix.Stat_t) Info {
	return Info{
		Size: st.Size, Allocated: st.Blocks * 512, Inode: st.Ino, Device: uint64(st.Dev), //nolint:unconvert // width differs by platform
		Links: uint64(st.Nlink), Dir: st.Mode&unix.S_IFMT == unix.S_IFDIR, //nolint:unconvert // likewise
	}
}

func (d *osDir) Sync() error {
	return wrap("sync directory", d.name, retry(func() error { return unix.Fsync(d.fd) }))
}

func (d *osDir) Lock() error {
	err := retry(func() error { return unix.Flock(d.fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		return &OpError{Op: "lock", Name: d.name, Kind: block.ErrInUse, Cause: errors.New("another process holds the lock")}
	}
	return wrap("lock", d.name, err)
}

func (d *osDir) Space() (Space, error) {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(d.fd, &st) }); err != nil {
		return Space{}, wrap("statfs", d.name, err)
	}
	return Space{Capacity: int64(st.Blocks) * st.Frsize, Available: int64(st.Bavail) * st.Frsize}, nil
}

func (d *osDir) Close() error { return wrap("close", d.name, unix.Close(d.fd)) }
