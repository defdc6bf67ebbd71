package consensus

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"

	hraft "github.com/hashicorp/raft"
)

// fsm is the machine as the library drives it, from its FSM goroutine.
type fsm struct {
	machine Machine
	applied watermark
	count   atomic.Int64 // commands applied by this process
	nudge   func()       // called after each batch
	// fail is told the first error that ends everything.
	fail func(error)

	mu  sync.Mutex
	err error // set once: nothing is applied, snapshot or restored any more
}

// halted is the response to a command that was committed and not applied.
type halted struct{ err error }

func (f *fsm) failure() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *fsm) halt(err error) {
	f.mu.Lock()
	first := f.err == nil
	if first {
		f.err = err
	}
	f.mu.Unlock()
	if first {
		f.fail(err)
	}
}

// Apply implements hraft.FSM; the library calls ApplyBatch instead.
func (f *fsm) Apply(l *hraft.Log) any { return f.ApplyBatch([]*hraft.Log{l})[0] }

// ApplyBatch implements hraft.BatchingFSM. Configuration entries come along,
// so that the applied index has no gaps.
func (f *fsm) ApplyBatch(logs []*hraft.Log) []any {
	responses := make([]any, len(logs))
	for i, l := range logs {
		if err := f.failure(); err != nil {
			responses[i] = halted{err}
			continue
		}
		if l.Type == hraft.LogCommand {
			responses[i] = f.apply(l)
		}
		if f.failure() == nil {
			f.applied.advance(l.Index)
		}
	}
	f.nudge()
	return responses
}

func (f *fsm) apply(l *hraft.Log) any {
	command, err := unseal(l.Index, l.Data)
	var response any
	if err == nil {
		response, err = f.machine.Apply(l.Index, command)
	}
	if err != nil {
		f.halt(err)
		return halted{err}
	}
	f.count.Add(1)
	return response
}

// Snapshot implements hraft.FSM.
func (f *fsm) Snapshot() (hraft.FSMSnapshot, error) {
	if err := f.failure(); err != nil {
		return nil, err
	}
	return image{f.machine.Snapshot()}, nil
}

// Restore implements hraft.FSM. The file's checksum held, so an error here is
// a newer format or a defect: falling back would only hide it.
func (f *fsm) Restore(r io.ReadCloser) error {
	if err := f.failure(); err != nil {
		return err
	}
	err := errors.Join(f.machine.Restore(r), r.Close())
	if err != nil {
		f.halt(err)
	}
	f.nudge()
	return err
}

type image struct{ write func(io.Writer) error }

// Persist implements hraft.FSMSnapshot; the library closes or cancels the sink.
func (i image) Persist(sink hraft.SnapshotSink) error { return i.write(sink) }

// Release implements hraft.FSMSnapshot.
func (i image) Release() {}

// watermark is an index that only grows, and can be waited for. It is that of
// the newest entry the machine has seen, or of a barrier: raft's own entries
// at a follower do not count.
type watermark struct {
	mu      sync.Mutex
	index   uint64
	changed chan struct{} // closed at the next change, nil while nobody waits
}

func (w *watermark) advance(index uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if index <= w.index {
		return
	}
	w.index = index
	if w.changed != nil {
		close(w.changed)
		w.changed = nil
	}
}

// wait returns when the index has reached at least index, or ctx or quit ended.
func (w *watermark) wait(ctx context.Context, index uint64, quit <-chan struct{}) bool {
	for {
		w.mu.Lock()
		if w.index >= index {
			w.mu.Unlock()
			return true
		}
		if w.changed == nil {
			w.changed = make(chan struct{})
		}
		changed := w.changed
		w.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		case <-quit:
			return false
		}
	}
}
