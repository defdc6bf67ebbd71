package nbdtest

import (
	"fmt"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// Stream is a block.Stream without a connection: it hands out memory and keeps
// what is completed.
type Stream struct {
	mu      sync.Mutex
	changed sync.Cond
	pending map[*block.Request]bool // submitted, not completed
	twice   int                     // completions of what was not pending
	closed  error
}

// NewStream returns an open stream.
func NewStream() *Stream {
	s := &Stream{pending: map[*block.Request]bool{}}
	s.changed.L = &s.mu
	return s
}

// ReadBuffer implements block.Stream.
func (s *Stream) ReadBuffer(r *block.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed != nil {
		return s.closed
	}
	r.Data = make([]byte, r.Length)
	return nil
}

// TryReadBuffer implements block.Stream: there is always memory.
func (s *Stream) TryReadBuffer(r *block.Request) bool { return s.ReadBuffer(r) == nil }

// Blocking implements block.Stream: nobody else submits meanwhile.
func (s *Stream) Blocking(func()) bool { return true }

// Complete implements block.Stream.
func (s *Stream) Complete(r *block.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.pending[r] {
		s.twice++
	}
	delete(s.pending, r)
	s.changed.Broadcast()
}

// Close implements block.Stream. The owner of the stream still has to call Device.Disconnect.
func (s *Stream) Close(reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed == nil {
		s.closed = fmt.Errorf("%w: %w", block.ErrShutdown, reason)
	}
	s.changed.Broadcast()
}

// Closed is the reason the stream was closed for, nil while it is open.
func (s *Stream) Closed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Submit hands requests to d as this stream's.
func (s *Stream) Submit(d block.Device, batch ...*block.Request) {
	s.mu.Lock()
	for _, r := range batch {
		r.Stream, r.Start = s, int64(time.Now().Nanosecond())
		s.pending[r] = true
	}
	s.mu.Unlock()
	d.Submit(batch)
	clear(batch) // a Device keeps no reference to the slice
}

// Wait returns when nothing is pending.
func (s *Stream) Wait() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.pending) > 0 {
		s.changed.Wait()
	}
}

// Pending is how many requests are not completed.
func (s *Stream) Pending() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pending)
}

// Do submits requests, waits for them and returns the first error.
func (s *Stream) Do(d block.Device, batch ...*block.Request) error {
	all := append([]*block.Request(nil), batch...)
	s.Submit(d, batch...)
	s.Wait()
	for _, r := range all {
		if r.Err != nil {
			return r.Err
		}
	}
	return nil
}
