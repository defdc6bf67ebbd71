// Package fault holds the named delay and fail points of a server that was
// started with --fault-injection. A nil *Set has no points and costs a nil
// check, so production code calls Hit unconditionally.
package fault

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// Points are the steps that can be delayed or failed: "operation.step".
var Points = []string{
	"disk.open", "disk.read", "disk.write", "disk.sync", "disk.record", "disk.space",
	"metadata.create", "metadata.commit", "metadata.log", "metadata.read",
	"primary.open", "primary.seal", "primary.birth", "primary.birth-committed",
	"primary.write", "primary.flush", "primary.detach", "primary.grow",
	"nbd.handshake", "nbd.parse", "nbd.reply",
	"collect.unlink",
	"kernel.dial", "kernel.connect", "kernel.connected", "kernel.move", "kernel.moved", "kernel.disconnect", "kernel.disconnected",
}

// Rule is what happens at a point. A zero Count means every time.
type Rule struct {
	Point string        `json:"point"`
	Match string        `json:"match,omitempty"` // only hits with this detail (a volume or disk id)
	Delay time.Duration `json:"delay,omitempty"` // nanoseconds
	Hold  bool          `json:"hold,omitempty"`  // wait until the rule is cleared
	Error string        `json:"error,omitempty"` // "io", "nospace", "unavailable"
	Count int           `json:"count,omitempty"`
}

var kinds = map[string]error{
	"":            nil,
	"io":          block.ErrIO,
	"nospace":     block.ErrNoSpace,
	"unavailable": block.ErrUnavailable,
}

type armed struct {
	Rule
	left    int // hits left, -1: no end
	hits    int
	cleared chan struct{}
}

// Set is the rules of one server. Safe for concurrent use.
type Set struct {
	mu    sync.Mutex
	rules []*armed
}

// Arm adds a rule. An unknown point, an unknown error or a negative number is ErrInvalid.
func (s *Set) Arm(r Rule) error {
	if !slices.Contains(Points, r.Point) {
		return fmt.Errorf("%w: no fault point %.60q; the points are %v", block.ErrInvalid, r.Point, Points)
	}
	if _, ok := kinds[r.Error]; !ok {
		return fmt.Errorf("%w: a fault's error is io, nospace or unavailable, not %.60q", block.ErrInvalid, r.Error)
	}
	if r.Count < 0 || r.Delay < 0 {
		return fmt.Errorf("%w: a fault's count and delay cannot be negative", block.ErrInvalid)
	}
	a := &armed{Rule: r, left: r.Count, cleared: make(chan struct{})}
	if r.Count == 0 {
		a.left = -1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = append(s.rules, a)
	return nil
}

// Clear ends all rules of a point, or all rules if point is empty, and lets go who is held.
func (s *Set) Clear(point string) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = slices.DeleteFunc(s.rules, func(a *armed) bool {
		if point != "" && a.Point != point {
			return false
		}
		close(a.cleared)
		return true
	})
}

// Hits is how often the rules now armed at a point have been hit.
func (s *Set) Hits(point string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, a := range s.rules {
		if a.Point == point {
			n += a.hits
		}
	}
	return n
}

// Status is a rule as it stands.
type Status struct {
	Rule
	Hits int
}

// Rules lists what is armed, in order.
func (s *Set) Rules() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Status, len(s.rules))
	for i, a := range s.rules {
		list[i] = Status{a.Rule, a.hits}
	}
	return list
}

// Hit is called at a point with the identity it concerns. It waits as the
// first matching rule says and returns that rule's error, wrapped.
func (s *Set) Hit(point, detail string) error {
	if s == nil {
		return nil
	}
	a := s.take(point, detail)
	if a == nil {
		return nil
	}
	if a.Hold {
		<-a.cleared
	} else if a.Delay > 0 {
		t := time.NewTimer(a.Delay)
		defer t.Stop()
		select {
		case <-t.C:
		case <-a.cleared:
		}
	}
	if err := kinds[a.Error]; err != nil {
		return fmt.Errorf("fault injected at %s: %w", point, err)
	}
	return nil
}

func (s *Set) take(point, detail string) *armed {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.rules {
		if a.Point != point || a.left == 0 || a.Match != "" && a.Match != detail {
			continue
		}
		if a.left > 0 {
			a.left--
		}
		a.hits++
		return a
	}
	return nil
}
