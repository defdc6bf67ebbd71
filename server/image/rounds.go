package image

import (
	"sync"
	"sync/atomic"
)

// rounds lets concurrent callers share one run of an expensive operation, of
// which only one happens at a time: each is covered by a run that started
// after it called, and no run is made for a caller that has been covered.
type rounds struct {
	begun atomic.Uint64 // runs started; raised only with turn held

	turn sync.Mutex
	// Guarded by turn: the last finished run and its result.
	done uint64
	err  error
}

// do returns the result of a run that started after the call. If several did,
// it is the last one's.
func (r *rounds) do(run func() error) error {
	ticket := r.begun.Load() + 1 // the first run that has not started yet
	r.turn.Lock()
	defer r.turn.Unlock()
	if r.done >= ticket {
		return r.err
	}
	n := r.begun.Add(1)
	r.err = run()
	r.done = n
	return r.err
}
