package vfs

import (
	"errors"
	"syscall"

	"github.com/gabion-storage/gabion/server/block"
)

// OpError is a failed operation: what was asked, of which file, what the
// system said, and which sentinel that is.
type OpError struct {
	Op, Name string
	Kind     error // a sentinel of package block, or ErrWouldBlock
	Cause    error
}

func (e *OpError) Error() string {
	if e.Cause == nil {
		return e.Op + " " + e.Name + ": " + e.Kind.Error()
	}
	return e.Op + " " + e.Name + ": " + e.Cause.Error()
}

// Unwrap lets errors.Is find both the sentinel and the errno.
func (e *OpError) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Cause}
}

// kinds is the one table from errno to sentinel; what is not in it is ErrIO.
var kinds = map[syscall.Errno]error{
	syscall.ENOENT:     block.ErrNotFound,
	syscall.ENOTDIR:    block.ErrNotFound,
	syscall.EEXIST:     block.ErrExists,
	syscall.ENOTEMPTY:  block.ErrExists,
	syscall.ENOSPC:     block.ErrNoSpace,
	syscall.EDQUOT:     block.ErrNoSpace,
	syscall.EFBIG:      block.ErrTooLarge,
	syscall.EINVAL:     block.ErrInvalid,
	syscall.ELOOP:      block.ErrInvalid,
	syscall.EOPNOTSUPP: block.ErrUnsupported,
	syscall.ENOSYS:     block.ErrUnsupported,
	syscall.EXDEV:      block.ErrUnsupported,
	syscall.ENOTTY:     block.ErrUnsupported,
	syscall.EAGAIN:     ErrWouldBlock,
	syscall.EMFILE:     block.ErrUnavailable,
	syscall.ENFILE:     block.ErrUnavailable,
}

// wrap is nil for nil; an errno becomes an OpError.
func wrap(op, name string, err error) error {
	if err == nil {
		return nil
	}
	kind := block.ErrIO
	var errno syscall.Errno
	if errors.As(err, &errno) {
		if k, ok := kinds[errno]; ok {
			kind = k
		}
	}
	return &OpError{Op: op, Name: name, Kind: kind, Cause: err}
}
