package sim

import (
	"fmt"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// The hazards of flushes, durability and what a takeover must tell.

func TestH15FlushAfterNewPrimary(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	w := write(X, blockSize)
	s.do(n1, w)
	s.killed()
	s.do(n1, flush()) // of the next generation, which wrote nothing
	s.powerCut()
	n1 = s.afresh(n1)
	s.shows(n1, w)
}

func TestH16FlushCoversAllConnections(t *testing.T) {
	t.Run("flush", func(t *testing.T) {
		s := start(t, 1, setup{sockets: 5, disks: 2})
		n1 := s.device("n1")
		var all []*call
		for i := range 100 {
			all = append(all, n1.submitOn(write(int64(i)*64<<10, blockSize), n1.socks[i%4]))
		}
		s.done(all...)
		s.done(n1.submitOn(flush(), n1.socks[4]))
		s.powerCut()
		n1 = s.afresh(n1)
		for _, w := range all {
			s.shows(n1, w)
		}
	})
	t.Run("two disks, one away", func(t *testing.T) {
		s, n1, _, far := onTwoDisks(t)
		w1, w2 := write(X, blockSize), write(2*runSize+X, blockSize)
		s.do(n1, w1, w2)
		s.do(n1, flush())
		s.powerCut()
		n1 = s.afresh(n1)
		s.shows(n1, w1)
		s.shows(n1, w2)
		w1, w2 = write(X, blockSize), write(2*runSize+X, blockSize)
		s.do(n1, w1, w2)
		far.missing = true
		s.killed()
		f := n1.submit(flush()) // w2 is acknowledged, and on the far disk only
		s.waits(time.Minute, f)
		far.missing = false
		s.done(f)
		s.powerCut()
		n1 = s.afresh(n1)
		s.shows(n1, w1)
		s.shows(n1, w2)
	})
	t.Run("flush during writes", func(t *testing.T) { // a sync that began earlier covers nothing
		for seed := range uint64(20) {
			s := start(t, 100+seed, setup{sockets: 5})
			n1 := s.device("n1")
			s.do(n1, write(0, blockSize))
			var all []*call
			var flushes []*call
			for i := range 30 {
				all = append(all, write(int64(1+i)*blockSize, blockSize))
				s.do(n1, all[i])
				flushes = append(flushes, n1.submitOn(flush(), n1.socks[4]))
			}
			s.done(flushes...)
			s.powerCut()
			n1 = s.afresh(n1)
			for _, w := range all {
				s.shows(n1, w)
			}
		}
	})
	t.Run("fua", func(t *testing.T) {
		s := start(t, 1, setup{})
		n1 := s.device("n1")
		w := write(X, blockSize).withFUA()
		s.do(n1, write(0, blockSize), w, write(2*X, blockSize))
		s.powerCut()
		n1 = s.afresh(n1)
		s.shows(n1, w)
		s.verify(n1)
	})
}

func TestH19FsyncFailsOnce(t *testing.T) {
	s := start(t, 1, setup{})
	var volumes []*sim
	var devices []*device
	for i := range 10 {
		v := s.another(fmt.Sprintf("v%d", i))
		d := v.device("n1")
		v.do(d, write(X, blockSize))
		volumes, devices = append(volumes, v), append(devices, d)
	}
	s.disk(0).failSync() // one sync of one image; the next would succeed
	f := devices[3].submit(flush())
	s.run(time.Second)
	for i, v := range volumes { // all ten have left and came back by a takeover
		devices[i].submit(flush()) // whoever is idle hears of it by its next request
		d := v.afresh(devices[i])
		v.do(d, read(X, blockSize), write(X, blockSize), flush())
	}
	if f.done {
		t.Fatalf("the flush over a failed sync was answered: %v", f.err)
	}
}

func TestH21CacheLostClientAlive(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(X, blockSize))
	s.powerCut()
	f := n1.submit(flush())
	n2 := s.afresh(n1)
	if f.done || s.epoch() != 2 {
		t.Fatalf("flush answered %t, cache epoch %d", f.done, s.epoch())
	}
	s.do(n2, read(X, blockSize))
}

func TestH22CacheKept(t *testing.T) {
	for _, c := range []struct {
		name  string
		setup setup
		what  func(s *sim, d *device)
	}{
		{"processes killed", setup{}, func(s *sim, _ *device) { s.killed() }},
		{"process stopped", setup{}, func(s *sim, _ *device) { s.server.stop(5 * time.Second) }},
		{"write-through", setup{writeThrough: true}, func(s *sim, _ *device) { s.powerCut() }},
		{"all flushed and quiet", setup{}, func(s *sim, d *device) {
			s.do(d, flush())
			s.run(time.Minute)
			s.powerCut()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t, 1, c.setup)
			n1 := s.device("n1")
			w := write(X, blockSize)
			s.do(n1, w)
			c.what(s, n1)
			s.shows(n1, w)
			s.do(n1, write(X, blockSize), flush())
			s.unbroken(n1, 1)
		})
	}
}

func TestH23OlderCacheEpochReturns(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(X, blockSize))
	s.server.cutPower()
	s.disk(0).hold(seals)
	s.restart()
	n1.connect() // during the rise
	s.waits(5 * time.Second)
	s.disk(0).release(seals)
	fresh := s.afresh(n1) // beside it
	for range 3 {
		n1.broken = nil // the plugin has forgotten everything, and tries with ever higher numbers
		n1.name.session += 100
		n1.over = false
		n1.connect()
		s.broken(n1, block.ErrCacheLost)
		s.do(fresh, write(X, blockSize), flush())
	}
	s.killed()
	n1.broken = nil
	n1.connect()
	s.broken(n1, block.ErrCacheLost)
	s.do(fresh, read(X, blockSize))
	s.unbroken(fresh, 2)
}

// TestH27RecordBeforeData cuts power before every file operation of a first
// write to an extent and of one into another region of it.
func TestH27RecordBeforeData(t *testing.T) {
	for _, first := range []bool{true, false} {
		for n := 1; n < 500; n++ {
			s := start(t, uint64(1000+n), setup{})
			n1 := s.device("n1")
			s.do(n1, write(runSize-blockSize, blockSize)) // the run is born
			if !first {
				s.do(n1, write(0, blockSize))
			}
			s.do(n1, flush())
			s.run(time.Minute)
			struck := false
			s.host.strike(n, func() {
				struck = true
				s.server.cutPower()
				s.restart()
			})
			w := n1.submit(write(10*blockSize, 4*blockSize))
			s.until("an answer, or the end", func() bool { return w.done || n1.broken != nil })
			if !struck {
				if n < 4 {
					t.Fatalf("only %d operations", n-1)
				}
				break
			}
			if n1.broken != nil {
				n1 = s.afresh(n1)
			}
			s.verify(n1)
			// What is found now is what stays: another cut takes nothing of it.
			s.do(n1, flush())
			s.powerCut()
			n1.connect()
			s.back(n1)
			if n1.broken != nil {
				n1 = s.afresh(n1)
			}
			s.verify(n1)
		}
	}
}

func TestH28ClearRacesWithAWrite(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(X, blockSize))
	s.do(n1, flush())
	s.disk(0).hold(clears)
	s.until("a clear is on its way", func() bool { return len(s.disk(0).held[clears]) > 0 })
	s.do(n1, write(X, blockSize)) // overtakes it
	s.disk(0).release(clears)
	s.run(time.Second)
	s.powerCut()
	n1 = s.afresh(n1) // the region was marked: the client is told
	s.verify(n1)
}

// TestH31MemberBlinks: the only member's disk comes back as another instance while its primary serves.
func TestH31MemberBlinks(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(X, blockSize))
	d := s.disk(0)
	d.tears = true // what was not synced may be gone
	d.arm("punch head.img #1 eio")
	k := n1.submit(trim(2*X, 4*64<<10))
	fresh := s.afresh(n1)
	if k.done || s.status().Generation != 1 || s.epoch() != 2 {
		t.Fatalf("answered %t, generation %d, cache epoch %d", k.done, s.status().Generation, s.epoch())
	}
	s.verify(fresh)
	s.do(fresh, write(X, blockSize), flush())
}

// TestH92TakeoverInPieces: whatever becomes of the takeover that follows a loss, the refusal comes.
func TestH92TakeoverInPieces(t *testing.T) {
	for f := range fates {
		for _, end := range []string{"kill", "power", ""} {
			t.Run(fmt.Sprintf("%s, %s", f, end), func(t *testing.T) {
				s := start(t, 1, setup{})
				n1 := s.device("n1")
				s.do(n1, write(X, blockSize))
				s.cell.next("takeover", f)
				s.powerCut()
				n1.connect()
				s.until("the takeover is under way", func() bool { return len(s.cell.fates["takeover"]) == 0 })
				s.run(20 * time.Millisecond)
				switch end {
				case "kill":
					s.killed()
				case "power":
					s.powerCut()
				}
				n1 = s.afresh(n1)
				s.verify(n1)
			})
		}
	}
}
