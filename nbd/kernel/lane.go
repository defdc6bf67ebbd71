package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

// lanes let one at a time work on a volume, among all processes that share a
// state directory.
type lanes struct {
	dir string

	mu sync.Mutex
	of map[block.VolumeID]*lane // those that are used or waited for
}

type lane struct {
	turn  chan struct{} // cap 1
	users int           // who has or wants the turn; under lanes.mu
	yield func()        // asks background work that has the turn to give it up; under lanes.mu
}

// enter waits for the volume's turn, and asks who has it to yield. Work that
// yields does so when others want the turn: then the returned context ends.
func (ls *lanes) enter(ctx context.Context, id block.VolumeID, yields bool) (_ context.Context, leave func(), err error) {
	ls.mu.Lock()
	l := ls.of[id]
	if l == nil {
		l = &lane{turn: make(chan struct{}, 1)}
		ls.of[id] = l
	}
	l.users++
	if l.yield != nil {
		l.yield()
	}
	ls.mu.Unlock()
	forget := func() {
		ls.mu.Lock()
		defer ls.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(ls.of, id)
		}
	}
	select {
	case l.turn <- struct{}{}:
	case <-ctx.Done():
		forget()
		return nil, nil, fmt.Errorf("%w: another call works on volume %s: %w", block.ErrUnavailable, id, ctx.Err())
	}
	unlock, err := lockByte(ctx, filepath.Join(ls.dir, "lock"), id)
	if err != nil {
		<-l.turn
		forget()
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	if yields {
		ls.mu.Lock()
		l.yield = cancel
		if l.users > 1 {
			cancel()
		}
		ls.mu.Unlock()
	}
	return ctx, func() {
		ls.mu.Lock()
		l.yield = nil
		ls.mu.Unlock()
		cancel()
		unlock()
		<-l.turn
		forget()
	}, nil
}

const lockLook = 20 * time.Millisecond

// lockByte holds one byte of a file for a volume, until unlock or the process's
// death. Two volumes may share a byte, which only makes them wait for each other.
func lockByte(ctx context.Context, path string, id block.VolumeID) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) { // somebody has cleaned up
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	byteRange := unix.Flock_t{
		Type: unix.F_WRLCK, Len: 1,
		Start: int64(binary.BigEndian.Uint64(id.UUID[8:]) & (1<<62 - 1)),
	}
	for {
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &byteRange)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			_ = f.Close()
			return nil, fmt.Errorf("%w: locking %s: %w", block.ErrUnavailable, path, err)
		}
		if err := pause(ctx, lockLook); err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("%w: another process works on volume %s: %w", block.ErrUnavailable, id, err)
		}
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
