package sim

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

var (
	seedFlag = flag.Int64("seed", -1, "repeat this random run; 0: -runs new ones; -1: the same few every time")
	runsFlag = flag.Int("runs", 300, "with -seed 0 or -base: how many random runs")
	baseFlag = flag.Uint64("base", 0, "with -runs: the first seed; 0: a new one")
)

// TestRandom lets random faults strike a random workload and judges everything
// the clients see. One seed is one run.
func TestRandom(t *testing.T) {
	runs, base := *runsFlag, *baseFlag
	switch {
	case *seedFlag > 0:
		s := randomRun(t, uint64(*seedFlag))
		if testing.Verbose() {
			s.dump()
		}
		return
	case *seedFlag < 0 && base == 0:
		runs, base = fixedRuns, 1
	case base == 0:
		base = rand.Uint64N(1<<32) + 1
	}
	t.Logf("%d runs from seed %d", runs, base)
	for seed := base; seed < base+uint64(runs) && !t.Failed(); seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("repeat with: go test -count=1 ./test/sim -run '^TestRandom$' -seed %d", seed)
				}
			}()
			randomRun(t, seed)
		})
	}
}

// TestSameSeedSameRun: a run is its seed.
func TestSameSeedSameRun(t *testing.T) {
	for seed := uint64(1); seed <= 3; seed++ {
		digests := make([]uint64, 2)
		for i := range digests {
			t.Run(fmt.Sprintf("%d.%d", seed, i), func(t *testing.T) { digests[i] = randomRun(t, seed).digest })
		}
		if digests[0] != digests[1] {
			t.Fatalf("seed %d gave two different runs", seed)
		}
	}
}

func randomRun(t *testing.T, seed uint64) *sim {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0x73657475))
	s := start(t, seed, setup{
		disks: 1 + r.IntN(3), sockets: 1 + r.IntN(4), size: (1 + r.Int64N(3)) * runSize,
		writeThrough: r.IntN(5) == 0, errorOnFull: r.IntN(5) == 0, direct: r.IntN(4) == 0,
		timeout: 1500*time.Millisecond + time.Duration(r.Int64N(int64(2*time.Second))),
	})
	defer func() {
		if p := recover(); p != nil {
			s.dump()
			t.Logf("repeat with: go test -count=1 ./test/sim -run '^TestRandom$' -seed %d", seed)
			panic(p)
		}
	}()
	o := newOwner(s)
	f := newFaults(o)
	end := s.now + s.between(5*time.Second, 40*time.Second)
	o.work(end)
	f.work(end)
	s.run(end - s.now)
	f.heal()
	s.settle(o)
	s.atRest(o)
	return s
}

// settle waits until all is well: nothing waits, nothing is wrong, every wish is fulfilled.
func (s *sim) settle(o *owner) {
	s.t.Helper()
	for flushed := false; !flushed; { // a device may be refused as yet for what has happened before
		s.until("all requests are answered", func() bool {
			return !o.moving && o.dev.broken == nil && len(o.dev.pending) == 0 && o.dev.pick(nil) != nil
		})
		dev := o.dev
		answered := func(k *call) bool {
			dev.submit(k)
			s.until(k.String()+" is answered", func() bool { return k.done || dev != o.dev })
			return k.done && k.err == nil
		}
		flushed = true
		for off := int64(0); off < s.volume().Size; off += runSize { // every run can be born and written
			flushed = flushed && answered(write(off, blockSize))
		}
		flushed = flushed && answered(flush())
	}
	s.until("the wanted size is served", func() bool {
		v := s.server.find(s.id)
		return s.volume().Size == s.volume().WantedSize && v != nil && v.core != nil && v.core.Status().Size == s.volume().Size
	})
	s.until("all is well", func() bool { return s.problem() == "" })
}

// problem is what the server says is wrong with the volume.
func (s *sim) problem() string {
	v := s.server.find(s.id)
	if v == nil || v.core == nil {
		return "not open"
	}
	st := v.core.Status()
	if n := st.InFlight + st.Queued + st.Blocked + st.Births + st.Space + st.Syncing; n > 0 {
		return fmt.Sprintf("%d requests are left over", n)
	}
	return st.Problem
}

// atRest judges what is left when all is quiet, and again after a power cut.
func (s *sim) atRest(o *owner) {
	s.t.Helper()
	s.verify(o.dev)
	if err := s.log.Verify(s, s.volume().Size); err != nil {
		s.failf("the files themselves: %v", err)
	}
	epoch := s.epoch()
	excuses := s.host.excuses
	if s.writeThrough {
		excuses = 0
	}
	if epoch > block.CacheEpoch(1+excuses) {
		s.failf("cache epoch %d for %d reasons at most", epoch, excuses)
	}
	s.run(40 * time.Second) // quiet: the marks are cleared
	s.server.cutPower()
	s.server.start()
	o.dev.connect()
	s.back(o.dev)
	if o.dev.broken != nil || s.epoch() != epoch {
		s.failf("the cache epoch rose to %d although all was flushed and quiet", s.epoch())
	}
	s.verify(o.dev)
}
