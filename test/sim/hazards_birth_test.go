package sim

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
)

// The hazards of growth, births and space.

func TestH64GrowInterrupted(t *testing.T) {
	const size, larger = 2 * runSize, 3*runSize + 5*blockSize
	steps := map[string]func(s *sim){
		"wish not heard":    func(s *sim) { s.server.kill() },
		"copies hang":       func(s *sim) { s.disk(0).hold(grows) },
		"confirmation lost": func(s *sim) { s.cell.next("confirm-size", lost, late) },
		"answer lost":       func(s *sim) { s.cell.next("confirm-size", unanswered) },
		"no majority":       func(s *sim) { s.cell.next("confirm-size", unavailable, unavailable, unavailable) },
		"disk fails":        func(s *sim) { s.disk(0).arm("truncate head.img #1 eio") },
	}
	for _, name := range sortedKeys(steps) {
		for _, end := range []string{"", "kill", "power"} {
			t.Run(name+", "+end, func(t *testing.T) {
				s := start(t, 1, setup{size: size})
				n1 := s.device("n1")
				w := write(size-blockSize, blockSize)
				s.do(n1, w)
				s.do(n1, flush())
				s.run(time.Minute)
				steps[name](s)
				if err := s.resize(larger); err != nil {
					t.Fatal(err)
				}
				s.run(50 * time.Millisecond)
				switch end {
				case "kill":
					s.killed()
				case "power":
					s.powerCut()
				}
				s.restart()
				s.disk(0).release(grows)
				s.until("the growth is confirmed", func() bool { return s.volume().Size == larger })
				if err := s.resize(larger); err != nil { // a retry
					t.Fatal(err)
				}
				if err := s.resize(size); !errors.Is(err, block.ErrInvalid) {
					t.Fatalf("shrinking: %v", err)
				}
				n1.connect() // the size comes from the server
				s.connected(n1)
				s.until("the new size is served", func() bool { return s.status().Size == larger })
				s.verify(n1) // the new space reads as zeros
				s.shows(n1, w)
				s.do(n1, write(larger-blockSize, blockSize))
				s.unbroken(n1, 1)
			})
		}
	}
}

func TestH65BornAndNeverWritten(t *testing.T) {
	for _, end := range []string{"kill", "power"} {
		for n := 1; n < 500; n += birthStep { // at file operations of the birth, and after it
			s := start(t, uint64(n), setup{})
			n1 := s.device("n1")
			struck := false
			s.host.strike(n, func() {
				struck = true
				if end == "kill" {
					s.server.kill()
				} else {
					s.server.cutPower()
				}
				s.restart()
			})
			s.disk(0).hold(writes) // born and committed, and not written before the end
			w := n1.submit(write(X, blockSize))
			s.until("the birth, or the end", func() bool { return struck || s.status().InFlight == 1 })
			if !struck {
				s.powerCut()
			}
			s.disk(0).release(writes)
			s.until("an answer", func() bool { return w.done || n1.broken != nil })
			if n1.broken != nil { // a power cut at the write itself may be taken for a loss
				t.Fatalf("strike %d: nothing was ever acknowledged, yet: %v", n, n1.broken)
			}
			s.shows(n1, w)
			s.verify(n1)
			if lost := countEvents(s, "ExtentsLost"); lost > 0 {
				t.Fatalf("strike %d: extents that were never written are called lost", n)
			}
			if !struck {
				break
			}
		}
	}
}

func countEvents(s *sim, kind string) int {
	n := 0
	for _, e := range s.reports {
		if e.Type == kind {
			n++
		}
	}
	return n
}

func TestH65UnbornNeedsNoMetadata(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.cell.down = true
	s.do(n1, read(0, 2*runSize), trim(0, 2*runSize), zero(X, blockSize), flush())
	s.waits(10*time.Second, n1.submit(write(X, blockSize)))
	s.cell.down = false
	s.until("the birth resumes", func() bool { return len(n1.pending) == 0 })
	s.verify(n1)
}

func TestH66BirthNotCommitted(t *testing.T) {
	for _, fate := range []fate{lost, late, unanswered, unavailable} {
		for _, delay := range []time.Duration{time.Nanosecond, 500 * time.Millisecond, 5 * time.Second} {
			for _, killed := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s by %v, killed %t", fate, delay, killed), func(t *testing.T) {
					s := start(t, 3, setup{disks: 3})
					n1 := s.device("n1")
					s.cell.delay = delay
					s.cell.next("commit", fate)
					w1 := n1.submit(write(X, blockSize))
					s.until("the commit is under way", func() bool { return len(s.cell.fates["commit"]) == 0 })
					if killed {
						s.run(time.Millisecond)
						s.killed()
					}
					s.done(w1)
					w2 := write(X, blockSize)
					s.do(n1, w2)
					s.run(time.Minute) // the old commit lands
					s.shows(n1, w2)
					s.verify(n1)
					s.do(n1, flush())
					s.powerCut()
					n1.connect()
					s.back(n1)
					if n1.broken == nil {
						s.shows(n1, w2)
					}
				})
			}
		}
	}
}

func TestH67NoSpaceOnOneMember(t *testing.T) {
	for _, c := range []struct {
		name string
		rule string
	}{
		{"nothing written", "write head.img #1 enospc"},
		{"half written", "write head.img #1 enospc short=8192"},
	} {
		for _, failing := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, on-full error %t", c.name, failing), func(t *testing.T) {
				s := start(t, 1, setup{errorOnFull: failing})
				n1 := s.device("n1")
				s.do(n1, write(X, 4*blockSize))
				w := n1.submit(write(X, 4*blockSize))
				s.disk(0).arm(c.rule)
				s.until("an answer", func() bool { return w.done })
				if failing != errors.Is(w.err, block.ErrNoSpace) {
					t.Fatalf("answered with %v", w.err)
				}
				s.verify(n1)
				s.verify(n1)
				if s.disk(0).ended || n1.broken != nil || s.epoch() != 1 {
					t.Fatal("no space ended an open instance")
				}
				s.do(n1, write(X, 4*blockSize))
			})
		}
	}
}

func TestH68FullAndFreeAgain(t *testing.T) {
	t.Run("wait", func(t *testing.T) {
		s := start(t, 1, setup{})
		n1 := s.device("n1")
		s.do(n1, write(X, blockSize))
		s.disk(0).leave(0)
		w := n1.submit(write(2*X, blockSize))
		s.waits(20*time.Second, w)
		if countEvents(s, "VolumeWaitsForSpace") == 0 || s.status().Problem == "" {
			t.Fatal("nobody is told of the stall")
		}
		s.do(n1, write(X, blockSize), trim(X, blockSize), zero(3*X, blockSize), read(X, blockSize), flush()) // what needs no space goes on
		s.disk(0).roomAgain()
		s.within(5*time.Second, "it resumes by itself", func() bool { return w.done })
		s.done(w)
		s.unbroken(n1, 1)
		s.verify(n1)
	})
	t.Run("wait for a birth", func(t *testing.T) {
		s := start(t, 1, setup{})
		n1 := s.device("n1")
		s.do(n1, write(X, blockSize))
		s.disk(0).leave(-1)
		s.disk(0).arm("write head.idx #1+ enospc")
		w := n1.submit(write(runSize, blockSize))
		s.waits(20*time.Second, w)
		s.disk(0).rules.Clear()
		s.disk(0).roomAgain()
		s.server.allCores((*primary.Core).SpaceChanged)
		s.within(10*time.Second, "it resumes by itself", func() bool { return w.done })
		s.done(w)
		s.unbroken(n1, 1)
	})
	t.Run("error", func(t *testing.T) {
		s := start(t, 1, setup{errorOnFull: true})
		n1 := s.device("n1")
		s.do(n1, write(X, blockSize))
		s.disk(0).leave(0)
		before := s.effects
		w := n1.submit(write(2*X, blockSize))
		s.within(time.Second, "the error", func() bool { return w.done })
		if !errors.Is(w.err, block.ErrNoSpace) || s.effects != before {
			t.Fatalf("answered with %v, %d writes were made", w.err, s.effects-before)
		}
		s.do(n1, write(X, blockSize), trim(X, blockSize), flush())
		s.disk(0).roomAgain()
		s.do(n1, write(2*X, blockSize))
		s.verify(n1)
	})
}
