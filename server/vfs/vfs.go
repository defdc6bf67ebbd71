// Package vfs is the seam between Gabion and the file system under a disk:
// the operations an image store needs and no more, with their durability
// spelt out. OS is the real one; Mem is a memory file system that can show the
// disk as a power cut might leave it; Inject makes named operations fail.
//
// Everything is opened relative to a directory that was pinned when its
// identity was checked, one path component at a time and never through a
// symbolic link: a mount that disappears, or a path that is replaced, can
// never redirect a write.
//
// Errors wrap a sentinel of package block (errno.go holds the table) and name
// the operation and the file.
package vfs

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/gabion-storage/gabion/server/block"
)

// ErrWouldBlock is returned, bare, by TryReadAt and TryWriteAt.
var ErrWouldBlock = errors.New("operation would block")

// DirectAlign is what offset, length and memory of direct I/O are aligned to, in bytes.
const DirectAlign = 4096

// Flag says how to open a file.
type Flag uint8

const (
	ReadOnly  Flag = 1 << iota // without it: reading and writing
	Create                     // made if it is not there
	Exclusive                  // with Create: ErrExists if it is there
	Direct                     // O_DIRECT; ErrUnsupported where the file system has none
)

// FS is where directories are found by path.
type FS interface {
	// OpenDir pins a directory. path is the operator's, so symbolic links in it count.
	OpenDir(path string) (Dir, error)
}

// Dir is a pinned directory. Names are single components. Safe for concurrent use, except Close.
type Dir interface {
	Open(name string, flag Flag) (File, error)
	OpenDir(name string) (Dir, error)
	// Mkdir, Rename, Unlink and Rmdir are durable after Sync of every directory involved.
	// Rename replaces a file at its target, atomically, also across a power cut.
	Mkdir(name string) error
	Rename(name string, to Dir, newName string) error
	Unlink(name string) error
	Rmdir(name string) error
	// ReadDir lists the directory, sorted by name.
	ReadDir() ([]Entry, error)
	Stat(name string) (Info, error)
	Sync() error
	// Lock takes the exclusive advisory lock of the directory until Close; ErrInUse if another handle has it.
	Lock() error
	Space() (Space, error)
	Identity() (Identity, error)
	Close() error
}

// File is an open regular file. Safe for concurrent use, except Close, which
// must come after every other call has returned.
type File interface {
	// ReadAt fills p. At the end of the file it returns what there is and io.EOF.
	ReadAt(p []byte, off int64) (int, error)
	// WriteAt writes p. On an error the first n bytes are written and, after ErrNoSpace, nothing behind them.
	WriteAt(p []byte, off int64) (n int, err error)
	// TryReadAt and TryWriteAt never wait for a device: they may do a part, and return ErrWouldBlock
	// (perhaps later) or ErrUnsupported (here never), both bare, if they did nothing.
	TryReadAt(p []byte, off int64) (int, error)
	TryWriteAt(p []byte, off int64) (int, error)
	// Datasync makes written data durable, and the size as far as that data needs it. After an error the
	// data may be gone although a later call succeeds: never retry.
	Datasync() error
	// Sync is Datasync and everything else about the file, but not its name: that is its directory's.
	Sync() error
	// PunchHole makes a range read as zeros and frees the blocks wholly inside; ErrUnsupported where there are no holes.
	PunchHole(off, length int64) error
	// ZeroRange makes a range read as zeros and keeps or makes it allocated; ErrUnsupported where only writing zeros does.
	ZeroRange(off, length int64) error
	Truncate(size int64) error
	// Evict drops cached content that is not waiting to be written, so that what is read next is what the
	// device holds: after a failed sync the two may differ. As far as the system can.
	Evict() error
	// SeekData is the first offset ≥ off with data, io.EOF if there is none; SeekHole the first in a hole: the file's end is one.
	SeekData(off int64) (int64, error)
	SeekHole(off int64) (int64, error)
	// Mapped reports whether the whole range is allocated and not shared with another file: overwriting takes no space.
	Mapped(off, length int64) (bool, error)
	// CloneFrom makes the file share the whole content of src; ErrUnsupported without reflink.
	CloneFrom(src File) error
	Stat() (Info, error)
	Close() error
}

// Info describes a file or directory.
type Info struct {
	Size      int64 // bytes
	Allocated int64 // bytes
	Inode     uint64
	Device    uint64
	Links     uint64 // 0: unlinked
	Dir       bool
}

// Entry is a name in a directory.
type Entry struct {
	Name string
	Dir  bool
}

// Space is a file system's, in bytes. Available is what an unprivileged writer could take.
type Space struct{ Capacity, Available int64 }

// Identity says which directory, on which mounting of which file system, a path led to.
type Identity struct {
	Device uint64
	Inode  uint64
	// Mount is new for every mounting of the superblock, so that an equal one proves that no cached
	// write was dropped by an unmount in between. See os_identity_linux.go.
	Mount string
	Type  string // "xfs", "ext4", …
}

// ReadFile returns the whole of a small file; ErrTooLarge beyond limit bytes.
func ReadFile(d Dir, name string, limit int64) ([]byte, error) {
	f, err := d.Open(name, ReadOnly)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size > limit {
		return nil, fmt.Errorf("read %s: %w: %d bytes, at most %d expected", name, block.ErrTooLarge, info.Size, limit)
	}
	p := make([]byte, info.Size)
	n, err := f.ReadAt(p, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return p[:n], nil
}

// NewSuffix ends the names of files that Replace has not finished; they may be removed.
const NewSuffix = ".new"

// Replace writes a small file as a whole; durable on return. After a power cut
// the old or the new content is there, never a mixture.
func Replace(d Dir, name string, data []byte) error {
	tmp := name + NewSuffix
	if err := d.Unlink(tmp); err != nil && !errors.Is(err, block.ErrNotFound) {
		return err
	}
	f, err := d.Open(tmp, Create|Exclusive)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = d.Rename(tmp, d, name)
	}
	if err != nil {
		_ = d.Unlink(tmp)
		return err
	}
	return d.Sync()
}

// checkName refuses what is not one plain path component.
func checkName(op, name string) error {
	if name == "" || name == "." || name == ".." || len(name) > 255 || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("%s %.80q: %w: not a file name", op, name, block.ErrInvalid)
	}
	return nil
}
