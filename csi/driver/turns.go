package driver

import (
	"context"
	"sync"
	"time"
)

const (
	// turnPatience is how long a call waits for its turn before it is told to come again.
	turnPatience = 5 * time.Second
	// maxInLine bounds the calls that wait for, or have, one turn.
	maxInLine = 64
)

// turns gives each key to one call at a time.
type turns struct {
	mu    sync.Mutex
	lines map[string]*line // of the keys that somebody has or waits for
}

type line struct {
	taken  chan struct{} // full while somebody has the turn
	inLine int
}

func newTurns() *turns { return &turns{lines: map[string]*line{}} }

// take waits for the turn; done ends it. ErrPending: not in time, or too many wait already.
func (t *turns) take(ctx context.Context, key string) (done func(), err error) {
	l := t.join(key)
	if l == nil {
		return nil, ErrPending
	}
	patience := time.NewTimer(turnPatience)
	defer patience.Stop()
	select {
	case l.taken <- struct{}{}:
		return func() { <-l.taken; t.leave(key, l) }, nil
	case <-patience.C:
	case <-ctx.Done():
	}
	t.leave(key, l)
	return nil, ErrPending
}

func (t *turns) join(key string) *line {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lines[key]
	if l == nil {
		l = &line{taken: make(chan struct{}, 1)}
		t.lines[key] = l
	}
	if l.inLine == maxInLine {
		return nil
	}
	l.inLine++
	return l
}

func (t *turns) leave(key string, l *line) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l.inLine--; l.inLine == 0 {
		delete(t.lines, key)
	}
}

const (
	// repeatWindow is how long the same failure is not told again.
	repeatWindow = time.Minute
	// maxRepeats bounds the failures that are remembered.
	maxRepeats = 512
)

// repeats remembers which failures were told lately.
type repeats struct {
	mu   sync.Mutex
	told map[string]*repeat
}

type repeat struct {
	at    time.Time // when it was told
	since int       // how often it came since then
}

func newRepeats() *repeats { return &repeats{told: map[string]*repeat{}} }

// seen reports whether a failure is to be told, and how often it came since it was last.
func (r *repeats) seen(what string) (since int, fresh bool) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.told[what]; known != nil {
		if now.Sub(known.at) < repeatWindow {
			known.since++
			return 0, false
		}
		since = known.since
		known.at, known.since = now, 0
		return since, true
	}
	if len(r.told) >= maxRepeats {
		for k, v := range r.told {
			if now.Sub(v.at) >= repeatWindow {
				delete(r.told, k)
			}
		}
	}
	if len(r.told) >= maxRepeats {
		return 0, false // so many different ones: the oldest are about to be told again
	}
	r.told[what] = &repeat{at: now}
	return 0, true
}
