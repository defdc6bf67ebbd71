package sim

import (
	"container/heap"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/primary"
)

// world is the scheduler of one run: a clock, a queue of events in order of
// (time, order of scheduling), one source of randomness. Everything happens on
// the test's goroutine.
type world struct {
	t       testing.TB
	seed    uint64
	dials   int             // connections made
	reports []primary.Event // of all cores
	effects int             // writes, trims and zeroes that reached a disk
	rand    *rand.Rand
	now     time.Duration
	queue   events
	order   uint64

	trace  [traceKept]string // the newest, as a ring
	traced uint64
	digest uint64 // of everything traced
	aloud  bool   // print all of it
}

const traceKept = 256

func newWorld(t testing.TB, seed uint64) *world {
	return &world{t: t, seed: seed, rand: rand.New(rand.NewPCG(seed, 0x6761626e)), digest: fnvOffset}
}

type event struct {
	at    time.Duration
	order uint64
	do    func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	(*e)[len(*e)-1] = event{}
	*e = (*e)[:len(*e)-1]
	return last
}

// at schedules an event; a time that has passed is now.
func (w *world) at(t time.Duration, do func()) {
	w.order++
	heap.Push(&w.queue, event{max(t, w.now), w.order, do})
}

func (w *world) after(d time.Duration, do func()) { w.at(w.now+d, do) }

// step lets the next event happen.
func (w *world) step() {
	e := heap.Pop(&w.queue).(event)
	w.now = e.at
	e.do()
}

// run lets d pass.
func (w *world) run(d time.Duration) {
	end := w.now + d
	for len(w.queue) > 0 && w.queue[0].at <= end {
		w.step()
	}
	w.now = end
}

// patience is how long until waits before it calls the run stuck.
const patience = 3 * time.Minute

// until lets time pass until the condition holds, and fails the run if it never does.
func (w *world) until(what string, done func() bool) {
	w.t.Helper()
	w.within(patience, what, done)
}

func (w *world) within(limit time.Duration, what string, done func() bool) {
	w.t.Helper()
	end := w.now + limit
	for !done() {
		if len(w.queue) == 0 || w.queue[0].at > end {
			w.failf("stuck: %s did not come within %v", what, limit)
		}
		w.step()
	}
}

// between is a random duration in [lo, hi).
func (w *world) between(lo, hi time.Duration) time.Duration {
	if hi <= lo {
		return lo
	}
	return lo + time.Duration(w.rand.Int64N(int64(hi-lo)))
}

// chance is true in p of 100 cases.
func (w *world) chance(p int) bool { return w.rand.IntN(100) < p }

// The trace is what happened, in words; two runs of one seed have the same digest.

const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

func (w *world) tracef(format string, args ...any) {
	line := fmt.Sprintf("%12.6f  ", w.now.Seconds()) + fmt.Sprintf(format, args...)
	h := fnv.New64a()
	h.Write([]byte(line))
	w.digest = w.digest*fnvPrime ^ h.Sum64()
	w.trace[w.traced%traceKept] = line
	w.traced++
	if w.aloud {
		fmt.Println(line)
	}
}

// failf ends the run with what led to it.
func (w *world) failf(format string, args ...any) {
	w.t.Helper()
	w.dump()
	w.t.Fatalf("at %v: %s", w.now, fmt.Sprintf(format, args...))
}

func (w *world) dump() {
	w.t.Helper()
	var text string
	for i := max(w.traced, traceKept) - traceKept; i < w.traced; i++ {
		text += w.trace[i%traceKept] + "\n"
	}
	w.t.Logf("the last of %d lines of the trace of seed %d:\n%s", w.traced, w.seed, text)
}
