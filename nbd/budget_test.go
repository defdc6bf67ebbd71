package nbd

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/gabion-storage/gabion/server/block"
)

func newShare(p *bytePool) *share { return &share{pool: p, limit: 100, reserve: 10} }

// The first bytes are the connection's own, whatever others hold.
func TestShareReserve(t *testing.T) {
	p := &bytePool{free: 50}
	a, b := newShare(p), newShare(p)
	if !a.try(60) || p.free != 0 {
		t.Fatalf("a has 60 of 50+10; %d are free", p.free)
	}
	if !b.try(10) || b.try(1) || a.try(1) {
		t.Error("b gets its reserve and no more, a nothing more")
	}
	a.put(60)
	b.put(10)
	if p.free != 50 || a.used != 0 || b.used != 0 {
		t.Errorf("at the end %d are free, %d and %d used", p.free, a.used, b.used)
	}
}

// Who waits is served in order, and a small request does not overtake a large one.
func TestShareOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &bytePool{free: 50}
		a, b, c := newShare(p), newShare(p), newShare(p)
		if !a.try(60) {
			t.Fatal("a gets 60")
		}
		var mu sync.Mutex
		var order []string
		var all sync.WaitGroup
		wait := func(name string, s *share, n int64) {
			all.Go(func() {
				if err := s.take(n); err != nil {
					t.Error(err)
				}
				mu.Lock()
				order = append(order, name)
				mu.Unlock()
			})
			synctest.Wait()
		}
		wait("b large", b, 60)
		wait("c small", c, 20)
		if b.try(1) || c.try(11) {
			t.Error("somebody overtook")
		}
		a.put(60) // all for b
		synctest.Wait()
		b.put(60)
		all.Wait()
		if len(order) != 2 || order[0] != "b large" {
			t.Errorf("order %v", order)
		}
		c.put(20)
		if p.free != 50 || len(p.waiting) != 0 {
			t.Errorf("%d free, %d wait", p.free, len(p.waiting))
		}
	})
}

// A connection that ends lets its waiters go, and whoever stood in line behind it.
func TestShareClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &bytePool{free: 50}
		a, b, c := newShare(p), newShare(p), newShare(p)
		a.try(40) // 30 of the pool
		var all sync.WaitGroup
		all.Go(func() {
			if err := b.take(60); !errors.Is(err, block.ErrShutdown) {
				t.Errorf("b: %v", err)
			}
		})
		synctest.Wait()
		all.Go(func() {
			if err := c.take(30); err != nil {
				t.Errorf("c: %v", err)
			}
		})
		synctest.Wait()
		b.close()
		all.Wait()
		if err := b.take(1); !errors.Is(err, block.ErrShutdown) || b.try(1) {
			t.Errorf("a closed share gives: %v", err)
		}
	})
}

// Many connections take and give at random: nobody waits for ever, nothing is lost.
func TestShareRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	p := &bytePool{free: 150}
	var all sync.WaitGroup
	for i := range 8 {
		s := newShare(p)
		for j := range 4 {
			rnd := rand.New(rand.NewPCG(seed, uint64(i*4+j)))
			all.Go(func() {
				for range 500 {
					n := 1 + rnd.Int64N(100)
					if !s.try(n) {
						if err := s.take(n); err != nil {
							t.Error(err)
							return
						}
					}
					s.put(n)
				}
			})
		}
	}
	all.Wait()
	if p.free != 150 || len(p.waiting) != 0 {
		t.Errorf("%d free, %d wait", p.free, len(p.waiting))
	}
}

func TestBuffersAreAligned(t *testing.T) {
	var p pools
	for n := 1; n <= block.MaxPayload; n *= 2 {
		for _, n := range []int{n, n + 1} {
			if n > block.MaxPayload {
				continue
			}
			b := p.get(n)
			if len(b.data) < n || addr(b.data)%4096 != 0 || sizeOf(int64(n)) != int64(len(b.data)) {
				t.Errorf("a buffer for %d bytes has %d at %#x", n, len(b.data), addr(b.data))
			}
			p.put(b)
		}
	}
}
