package kernel

import (
	"errors"
	"fmt"

	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

// Linux is the kernel this process runs on.
type Linux struct {
	sys  string // where sysfs is mounted
	proc string // where proc is mounted
	dev  string // where the device nodes are
	diag sockDiag
}

// NewLinux returns the kernel this process runs on. Close it.
func NewLinux() *Linux { return &Linux{sys: "/sys", proc: "/proc", dev: "/dev"} }

// Close gives back what the calls before have kept open.
func (l *Linux) Close() error { return l.diag.close() }

// refused is the error of a system call with the sentinel that stands for it.
// A call says itself what EINVAL and EBUSY mean to it.
func refused(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, block.ErrPrecondition):
		return err
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: CAP_SYS_ADMIN and CAP_NET_ADMIN are needed: %w", block.ErrPrecondition, err)
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w: %w", block.ErrNotFound, err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: %w", block.ErrInUse, err)
	}
	return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
}
