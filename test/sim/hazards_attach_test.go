package sim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// The hazards of attaching and detaching, and of commands with unknown outcomes.

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func TestH72UnpublishMeansIt(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(X, blockSize))
	if _, err := s.attach("n2"); !errors.Is(err, block.ErrInUse) {
		t.Fatalf("a second consumer: %v", err)
	}
	s.disk(0).hold(writes)
	n1.submit(write(X, blockSize))
	s.until("w1 is in flight", func() bool { return s.status().InFlight == 1 })
	a := s.view().Attachment(s.id, "n1")
	s.detach(a.Id)
	s.run(5 * time.Second)
	if !s.attached(a.Id) {
		t.Fatal("detached while a write of n1 was in flight")
	}
	if _, err := s.attach("n2"); !errors.Is(err, block.ErrInUse) {
		t.Fatalf("a second consumer during the detach: %v", err)
	}
	s.broken(n1, block.ErrPermission)
	s.disk(0).release(writes)
	s.until("the detach", func() bool { return !s.attached(a.Id) })
	n1.end()
	n2 := s.device("n2")
	s.do(n2, read(X, blockSize))
	w2 := write(X, blockSize)
	s.do(n2, w2)
	n1.broken = nil // it comes back with its old token
	n1.connect()
	s.broken(n1, block.ErrPermission)
	s.run(time.Minute)
	s.shows(n2, w2)
}

func TestH72UnpublishWithEverythingDead(t *testing.T) {
	for _, dead := range []string{"server", "client", "both"} {
		t.Run(dead, func(t *testing.T) {
			s := start(t, 1, setup{})
			n1 := s.device("n1")
			w1 := write(X, blockSize)
			s.do(n1, w1)
			n1.submit(write(2*X, blockSize))
			if dead != "server" {
				for _, c := range n1.socks {
					c.cut()
				}
				n1.closing = true
			}
			if dead != "client" {
				s.server.kill()
			}
			a := s.view().Attachment(s.id, "n1")
			s.detach(a.Id)
			s.run(time.Second)
			s.restart()
			s.within(20*time.Second, "the detach", func() bool { return !s.attached(a.Id) })
			n1.end()
			n2 := s.device("n2")
			s.shows(n2, w1)
			s.verify(n2)
		})
	}
}

func TestH74LateDuplicates(t *testing.T) {
	s := start(t, 1, setup{})
	n1 := s.device("n1")
	s.do(n1, write(X, blockSize))
	first := s.view().Attachment(s.id, "n1")
	s.cell.delay = 30 * time.Second
	s.cell.next("confirm-detach", late) // lands long after it was settled otherwise
	s.detach(first.Id)
	s.until("the detach", func() bool { return !s.attached(first.Id) })
	n1.end()
	again := s.device("n1")
	now := s.view().Attachment(s.id, "n1")
	if now.Id == first.Id {
		t.Fatal("an attachment's id was used twice")
	}
	s.detach(first.Id) // an Unpublish that hung since its look-up
	s.run(time.Minute)
	if !s.attached(now.Id) || s.view().Attachment(s.id, "n1").Revoking {
		t.Fatal("a late duplicate detached the newer attachment")
	}
	s.do(again, write(X, blockSize))
	s.unbroken(again, 1)
}

// TestH80RefusalIsNotSuccess gives every kind of command every fate, one after
// the other and repeatedly: whatever is said of it, what counts is what became of it.
func TestH80RefusalIsNotSuccess(t *testing.T) {
	for _, kind := range []string{"grant", "takeover", "commit", "confirm-size", "confirm-detach", "map", "granted", "place"} {
		for f := unavailable; f < fates; f++ {
			t.Run(fmt.Sprintf("%s %s", kind, f), func(t *testing.T) {
				s := start(t, 5, setup{disks: 2})
				s.cell.next(kind, f, f, answered, f)
				n1 := s.device("n1")
				w := write(X, blockSize)
				s.do(n1, w)
				s.do(n1, write(runSize, blockSize))
				if err := s.resize(4 * runSize); err != nil {
					t.Fatal(err)
				}
				s.until("the growth", func() bool { return s.volume().Size == 4*runSize })
				s.killed()
				s.do(n1, write(3*runSize, blockSize))
				s.shows(n1, w)
				a := s.view().Attachment(s.id, "n1")
				s.detach(a.Id)
				s.until("the detach", func() bool { return !s.attached(a.Id) })
				n1.end()
				n2 := s.device("n2")
				s.shows(n2, w)
				s.verify(n2)
				if s.epoch() != 1 {
					t.Fatalf("cache epoch %d", s.epoch())
				}
			})
		}
	}
}
