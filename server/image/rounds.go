package image

import "sync/atomic"

// turn is a lock that is held across I/O. It is a channel and not a mutex, so
// that waiting for it is visible to testing/synctest: whoever has the turn may
// be waiting for a clock.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

func (t turn) Lock()   { t <- struct{}{} }
func (t turn) Unlock() { <-t }

// rounds lets concurrent callers share one run of an expensive operation, of
// which only one happens at a time: each is covered by a run that started
// after it called, and no run is made for a caller that has been covered.
type rounds struct {
	begun atomic.Uint64 // runs started; raised only with turn held

	turn turn
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
