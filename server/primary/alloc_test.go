package primary

import (
	"sync/atomic"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

// syncStream completes on the spot and counts.
type syncStream struct {
	n    atomic.Int64
	wake chan struct{}
}

func (s *syncStream) ReadBuffer(*block.Request) error   { return nil }
func (s *syncStream) TryReadBuffer(*block.Request) bool { return true }
func (s *syncStream) Blocking(func()) bool              { return true }
func (s *syncStream) Complete(*block.Request) {
	if s.n.Add(-1) == 0 {
		s.wake <- struct{}{}
	}
}
func (s *syncStream) Close(error) {}

// batches returns a function that submits one batch of the operation and waits for it.
func batches(tb testing.TB, r *rig, op block.Op, fua bool, depth int) func() {
	s := &syncStream{wake: make(chan struct{}, 1)}
	d, err := r.m.Open(tb.Context(), r.name(""), s)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(d.Disconnect)
	reqs := make([]*block.Request, depth)
	for i := range reqs {
		reqs[i] = &block.Request{Op: op, FUA: fua, Length: 4096, Offset: int64(i*7%depth) * 65536, Data: make([]byte, 4096), Stream: s}
		if op == block.OpFlush {
			reqs[i].Length = 0
		}
	}
	return func() {
		s.n.Store(int64(depth))
		d.Submit(reqs)
		<-s.wake
	}
}

func TestNothingIsAllocatedPerRequest(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes pools forget")
	}
	r := newRig(t, nil)
	c := r.open("")
	c.must(c.write(0, make([]byte, 16<<20)))
	for name, test := range map[string]struct {
		op   block.Op
		fua  bool
		slow bool
	}{
		"read":       {op: block.OpRead},
		"write":      {op: block.OpWrite},
		"trim":       {op: block.OpTrim},
		"flush":      {op: block.OpFlush},
		"fua":        {op: block.OpWrite, fua: true},
		"slow write": {op: block.OpWrite, slow: true},
		"slow read":  {op: block.OpRead, slow: true},
	} {
		t.Run(name, func(t *testing.T) {
			r.disk.set(func() { r.disk.slow = test.slow })
			run := batches(t, r, test.op, test.fua, 32)
			for range 10 {
				run()
			}
			if n := testing.AllocsPerRun(200, run); n >= 1 {
				t.Errorf("%.2f allocations per 32 requests", n)
			}
		})
	}
}

func BenchmarkRead(b *testing.B) {
	r := newRig(b, nil)
	c := r.open("")
	c.must(c.write(0, make([]byte, 16<<20)))
	run := batches(b, r, block.OpRead, false, 32)
	b.ReportAllocs()
	for b.Loop() {
		run()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/32, "ns/request")
}
