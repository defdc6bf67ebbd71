package image

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

const (
	// nearlyFull is how little free space makes every credit ask the file system, in bytes.
	nearlyFull = 1 << 30
	// trustSpent is how much may be written on the strength of one answer, in bytes.
	trustSpent = 64 << 20
)

// space is an estimate of a disk's free space that errs on the small side. A
// credit costs two atomic operations while there is plenty.
type space struct {
	dir     vfs.Dir
	reserve int64

	mu        sync.Mutex   // one refresh at a time
	available atomic.Int64 // as the file system last said, less the reserve
	held      atomic.Int64 // credits outstanding
	spent     atomic.Int64 // written since the file system was asked
}

// take holds a credit of n bytes and reports whether there is room for it; it
// is held in any case.
func (s *space) take(n int64) bool {
	held := s.held.Add(n)
	spent := s.spent.Load()
	left := s.available.Load() - spent - held
	if left >= nearlyFull && spent < trustSpent {
		return true
	}
	_, _ = s.refresh() // if it fails, the estimate stands
	return s.available.Load()-s.spent.Load()-s.held.Load() >= 0
}

// give ends a credit; used says that its bytes were written.
func (s *space) give(n int64, used bool) {
	if used {
		s.spent.Add(n) // first, so that the bytes are counted twice for a moment and not never
	}
	s.held.Add(-n)
}

func (s *space) refresh() (vfs.Space, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	spent := s.spent.Load() // what is added from here on may or may not be in the answer
	now, err := s.dir.Space()
	if err != nil {
		return now, err
	}
	s.available.Store(now.Available - s.reserve)
	s.spent.Add(-spent)
	return now, nil
}

// Usage is a disk's space in bytes, both less the reserve.
type Usage struct{ Capacity, Available int64 }

func (s *space) usage() (Usage, error) {
	now, err := s.refresh()
	if err != nil {
		return Usage{}, err
	}
	return Usage{Capacity: max(0, now.Capacity-s.reserve), Available: max(0, now.Available-s.reserve)}, nil
}

// credit is what an operation may take of the disk, in bytes.
func credit(w *block.IO) int64 {
	if w.Op == block.OpWrite || w.Op == block.OpZero && w.NoHole {
		const grain = block.LockGrain
		return (w.Offset+w.Length+grain-1)/grain*grain - w.Offset/grain*grain
	}
	return 0
}

// Reserve takes space credit for w: its length rounded out to 4 KiB, for a
// write or a zero with NoHole; other operations need none. ErrNoSpace: not
// available, and the range is not fully allocated already. Every successful
// Reserve is followed by exactly one of Release, Write, or a TryWrite that did it.
func (i *Image) Reserve(w *block.IO) error {
	if err := i.enter(); err != nil {
		return err
	}
	defer i.leave()
	if err := i.checkRange(w.Op.String(), w.Offset, w.Length); err != nil {
		return err
	}
	n := credit(w)
	if n == 0 {
		return nil
	}
	d := i.disk
	err := d.fault.Hit("disk.space", i.name)
	if d.space.take(n) && err == nil {
		return nil
	}
	if err == nil {
		if mapped, e := i.img.Mapped(w.Offset, w.Length); e == nil && mapped {
			return nil // overwriting works on a full disk
		}
		err = block.ErrNoSpace
	}
	d.space.give(n, false)
	return fmt.Errorf("volume %s: %d bytes at %d: disk %s: %w", i.name, w.Length, w.Offset, d.name, err)
}

// Release gives back the credit of an operation that will not be carried out.
func (i *Image) Release(w *block.IO) { i.disk.space.give(credit(w), false) }
