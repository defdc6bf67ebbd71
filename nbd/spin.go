package nbd

import (
	"runtime"
	"sync/atomic"
	"time"
)

// A client that sends its next request when it has the reply to the last one
// sends it a few microseconds later: less than it takes to put a thread to
// sleep and to wake it. So a reader that finds nothing looks again for a moment.
const (
	spinTime = 40 * time.Microsecond
	maxSkips = 64 // searches that a connection goes without after it found nothing, at most
	// payloadGap lies between two looks for the rest of a payload. It comes in pieces that take the client longer than
	// that to copy, and each look takes the socket's lock, which the client needs to send.
	payloadGap = 4 * time.Microsecond
)

// spinners bounds how many readers of a server look again at one time, so that
// one processor at least is left for work.
type spinners struct {
	now atomic.Int32
	max int32
}

func newSpinners() *spinners { return &spinners{max: int32(runtime.GOMAXPROCS(0) - 1)} }

func (s *spinners) enter() bool {
	if s.now.Add(1) <= s.max {
		return true
	}
	s.now.Add(-1)
	return false
}

func (s *spinners) leave() { s.now.Add(-1) }

// spin is a reader's search for bytes. What it finds is remembered: a
// connection whose client takes its time searches less and less often.
type spin struct {
	skips, skip int       // to go without now; after the next vain search
	until       time.Time // of the search under way, zero if none is
}

// more reports whether the reader, which found nothing, should look once more, and returns when it should.
func (p *spin) more(s *spinners, payload bool) bool {
	if p.until.IsZero() {
		if p.skips > 0 {
			p.skips--
			return false
		}
		if !s.enter() {
			return false
		}
		p.until = time.Now().Add(spinTime)
	}
	now := time.Now()
	if payload {
		for next := now.Add(payloadGap); now.Before(next); now = time.Now() {
		}
	}
	if now.Before(p.until) {
		return true
	}
	p.skip = min(2*p.skip+1, maxSkips)
	p.skips = p.skip
	p.end(s)
	return false
}

// found ends a search with success.
func (p *spin) found(s *spinners) {
	if !p.until.IsZero() {
		p.skip = 0
		p.end(s)
	}
}

func (p *spin) end(s *spinners) {
	p.until = time.Time{}
	s.leave()
}
