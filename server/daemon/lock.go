package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/gabion-storage/gabion/server/block"
)

// LockDir takes a directory for this process, until unlock or its death,
// whichever way it dies. ErrInUse names the process that has it.
//
// What proves a death must not be able to lie: a server holds this lock before
// it touches anything, so a second one beside a stopped first gets nowhere.
func LockDir(dir string) (unlock func() error, err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: locking %s: %w", block.ErrUnavailable, dir, err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder := make([]byte, 20)
		n, _ := f.ReadAt(holder, 0)
		_ = f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: locking %s: %w", block.ErrUnavailable, dir, err)
		}
		return nil, fmt.Errorf("%w: another server (process %s) uses %s: end it, or choose another directory",
			block.ErrInUse, strings.TrimSpace(string(holder[:n])), dir)
	}
	if err := f.Truncate(0); err == nil {
		_, _ = fmt.Fprintln(f, os.Getpid()) // for people only: a full disk is no reason not to start
	}
	return f.Close, nil
}
