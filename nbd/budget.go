package nbd

import (
	"fmt"
	"slices"
	"sync"

	"github.com/gabion-storage/gabion/server/block"
)

// bytePool is what all connections of a server share of one direction's
// bytes. Connections that wait are served first come, first served, so a large
// request is not starved by small ones.
type bytePool struct {
	mu      sync.Mutex // a leaf below a share's mu
	free    int64
	waiting []*share // each at most once
}

// take gives n bytes to s, or remembers that s waits.
func (p *bytePool) take(s *share, n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := len(p.waiting) == 0 || p.waiting[0] == s
	if !first || n > p.free {
		if !slices.Contains(p.waiting, s) {
			p.waiting = append(p.waiting, s)
		}
		return false
	}
	p.free -= n
	if len(p.waiting) > 0 {
		p.waiting = slices.Delete(p.waiting, 0, 1)
	}
	return true
}

// try is take without waiting.
func (p *bytePool) try(n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.waiting) > 0 || n > p.free {
		return false
	}
	p.free -= n
	return true
}

// put gives n bytes back and lets go who can. Called without locks of this file.
func (p *bytePool) put(n int64) {
	if n == 0 {
		return
	}
	p.mu.Lock()
	p.free += n
	p.mu.Unlock()
	p.wake()
}

// leave takes s out of the line. Whoever stood behind it needs a wake.
func (p *bytePool) leave(s *share) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiting = slices.DeleteFunc(p.waiting, func(w *share) bool { return w == s })
}

// wake lets the first in line try until one has to go on waiting. Called
// without locks.
func (p *bytePool) wake() {
	var last *share
	for {
		p.mu.Lock()
		var head *share
		if len(p.waiting) > 0 {
			head = p.waiting[0]
		}
		p.mu.Unlock()
		if head == nil || head == last {
			return
		}
		head.mu.Lock()
		head.grant()
		head.mu.Unlock()
		last = head
	}
}

// share is one connection's part of a budget: the first reserve bytes are its
// own, what it uses above them is taken from the server's pool. So a
// connection with small requests never waits for others.
type share struct {
	pool    *bytePool
	limit   int64 // of used
	reserve int64

	mu      sync.Mutex
	used    int64 // including the reserve
	closed  bool
	waiting []*waiter
}

type waiter struct {
	n    int64
	done chan error
}

// beyond is how much of used counts against the pool.
func (s *share) beyond(used int64) int64 { return max(0, used-s.reserve) }

// try takes n bytes if it need not wait.
func (s *share) try(n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.waiting) > 0 || s.used+n > s.limit {
		return false
	}
	if more := s.beyond(s.used+n) - s.beyond(s.used); more > 0 && !s.pool.try(more) {
		return false
	}
	s.used += n
	return true
}

// take waits for n bytes, in order. It fails with block.ErrShutdown once the share is closed.
func (s *share) take(n int64) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return fmt.Errorf("nbd: the connection is closing: %w", block.ErrShutdown)
	}
	w := &waiter{n: n, done: make(chan error, 1)}
	s.waiting = append(s.waiting, w)
	s.grant()
	s.mu.Unlock()
	s.pool.wake()
	return <-w.done
}

// put gives n bytes back.
func (s *share) put(n int64) {
	s.mu.Lock()
	back := s.beyond(s.used) - s.beyond(s.used-n)
	s.used -= n
	waits := len(s.waiting) > 0
	if waits {
		s.grant()
	}
	s.mu.Unlock()
	s.pool.put(back)
	if waits {
		s.pool.wake()
	}
}

// grant serves waiters in order as far as bytes go. Called with mu held; the
// caller wakes the pool afterwards, because s may have left its line.
func (s *share) grant() {
	for {
		if len(s.waiting) == 0 {
			s.pool.leave(s)
			return
		}
		w := s.waiting[0]
		if s.used+w.n > s.limit {
			return
		}
		if more := s.beyond(s.used+w.n) - s.beyond(s.used); more > 0 && !s.pool.take(s, more) {
			return
		}
		s.used += w.n
		s.waiting = slices.Delete(s.waiting, 0, 1)
		w.done <- nil
	}
}

// close fails everybody who waits, now and later.
func (s *share) close() {
	s.mu.Lock()
	s.closed = true
	for _, w := range s.waiting {
		w.done <- fmt.Errorf("nbd: the connection is closing: %w", block.ErrShutdown)
	}
	s.waiting = nil
	s.pool.leave(s)
	s.mu.Unlock()
	s.pool.wake()
}
