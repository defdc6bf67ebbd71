package checker

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
)

var seedFlag = flag.Uint64("seed", 0, "repeat one random run; 0: many, each prints its seed when it fails")

// seeds runs f with many seeds, or the one that was asked for.
func seeds(t *testing.T, n int, f func(t *testing.T, r *rand.Rand)) {
	t.Helper()
	from, to := uint64(1), uint64(n)
	if *seedFlag != 0 {
		from, to = *seedFlag, *seedFlag
	}
	for seed := from; seed <= to && !t.Failed(); seed++ {
		f(t, rand.New(rand.NewPCG(seed, 0)))
		if t.Failed() {
			t.Logf("repeat with: go test ./test/checker -run '^%s$' -seed %d", t.Name(), seed)
		}
	}
}

// TestNaiveModel compares the log, for a client with one write to a block at a
// time, with the rule in its shortest form: any count from the minimum to the current one.
func TestNaiveModel(t *testing.T) {
	seeds(t, 2000, func(t *testing.T, r *rand.Rand) {
		l := New(volume, grain, false)
		var lo, cur, flushed uint64 // the naive model
		var w *Write
		var f *Flush
		var flushLo uint64
		lost := false
		for range 60 {
			switch k := r.IntN(12); {
			case k < 4 && w == nil:
				w = write(l)
				cur++
			case k < 5 && w != nil:
				w = w.Resend()
				cur++
			case k < 8 && w != nil:
				w.Acked()
				w, lo = nil, cur
			case k == 8:
				n := lo + r.Uint64N(cur-lo+1)
				p := zeros
				if n > 0 {
					p = shown(&Write{l: l, counts: []uint64{n}})
				}
				if err := see(l, p); err != nil {
					t.Errorf("accused: %v", err)
					return
				}
				if lo = n; lost {
					return // the first read after a loss decides what it left, which is more than the naive model knows
				}
			case k == 9 && f == nil:
				f, flushLo = l.Flush(), lo
			case k == 10 && f != nil:
				f.Acked()
				f, flushed = nil, max(flushed, flushLo)
			case k == 11 && r.IntN(4) == 0:
				l.Lost()
				w, f, lo, lost = nil, nil, flushed, true
			}
			want := []uint64{}
			for n := lo; n <= cur; n++ {
				want = append(want, n)
			}
			if got := l.Allowed(0); !slices.Equal(got, want) {
				t.Errorf("allowed %v, the naive model says %v", got, want)
				return
			}
		}
	})
}

// register is a disk of one block that does everything at one instant between
// beginning and end, and forgets unflushed states when it loses power.
type register struct {
	states [][]byte // since the newest flush, the last is the present one
}

type step struct{ land, end func() }

// TestNeverAccusesARegister lets clients overlap as they like on a block that
// behaves: nothing may be found.
func TestNeverAccusesARegister(t *testing.T) {
	seeds(t, 3000, func(t *testing.T, r *rand.Rand) {
		l := New(volume, grain, false)
		disk := &register{states: [][]byte{zeros}}
		var landing, ending []step
		take := func(list *[]step) step {
			i := r.IntN(len(*list))
			s := (*list)[i]
			*list = slices.Delete(*list, i, i+1)
			return s
		}
		for range 80 {
			switch k := r.IntN(10); {
			case k < 5 && len(landing)+len(ending) < 6:
				landing = append(landing, disk.begin(t, l, r))
			case k < 7 && len(landing) > 0:
				s := take(&landing)
				s.land()
				ending = append(ending, s)
			case k < 9 && len(ending) > 0:
				take(&ending).end()
			case k == 9 && r.IntN(6) == 0:
				disk.states = disk.states[r.IntN(len(disk.states)):][:1]
				landing, ending = nil, nil
				l.Lost()
			}
		}
	})
}

func (d *register) begin(t *testing.T, l *Log, r *rand.Rand) step {
	set := func(w *Write, p []byte, durable bool) step {
		return step{func() {
			d.states = append(d.states, p)
			if durable {
				d.states = d.states[len(d.states)-1:]
			}
		}, w.Acked}
	}
	switch r.IntN(6) {
	case 0:
		return set(l.Zero(0, grain, false), zeros, false)
	case 1:
		w := l.Write(0, grain, true)
		return set(w, shown(w), true)
	case 2, 3:
		w := l.Write(0, grain, false)
		return set(w, shown(w), false)
	case 4:
		f := l.Flush()
		return step{func() { d.states = d.states[len(d.states)-1:] }, f.Acked}
	}
	read, found := l.Read(0), []byte(nil)
	return step{func() { found = d.states[len(d.states)-1] }, func() {
		if err := read.Returned(found); err != nil {
			t.Errorf("accused: %v", err)
		}
	}}
}
