package primary

import (
	"sync"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// A write that may have to wait for the page cache is done in line all the
// same: the copy takes less than handing it over, all the more while the payload
// is in this processor's cache, and writers of one file would only queue for
// its lock. The longest are handed over, and so is everything once a Submit has
// written for inlineTime, since a disk that is behind is better waited for by many.
const (
	inlineTime = 4 * time.Millisecond
	inlineSize = 1 << 20
)

// inline is the writes that a goroutine in Submit does itself though they may wait. It begins with them when all else
// of its batch is reported or in other hands, and if it is held up, handOff takes the others away: nothing waits for a
// disk but what is on it.
type inline struct {
	// Of the goroutine: whose Submit it is in (nil: in none, and everything that may wait is handed over), whether that
	// stream was asked to let it wait, and until when it does.
	stream block.Stream
	asked  bool
	until  time.Time

	handOff func() // for the stream; made once, so that asking allocates nothing

	mu   sync.Mutex // handOff comes from another goroutine, and perhaps late
	todo []*IO      // todo[next:] is not begun
	next int
	done []*IO // not reported
}

// begin is called at the start of a Submit, and with nil at its end.
func (l *inline) begin(s block.Stream) { l.stream, l.asked, l.until = s, false, time.Time{} }

// put keeps a write for later, unless it can't be done in line.
func (l *inline) put(io *IO) bool {
	if l.stream == nil || io.Op != block.OpWrite || io.Length > inlineSize {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.todo = append(l.todo, io)
	return true
}

// take is the next write, or nil.
func (l *inline) take() *IO {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.next == len(l.todo) {
		l.todo, l.next = l.todo[:0], 0
		return nil
	}
	io := l.todo[l.next]
	l.todo[l.next] = nil
	l.next++
	return io
}

// mayWait reports whether the goroutine may do what waits for the page cache.
func (l *inline) mayWait() bool {
	now := time.Now()
	if !l.asked {
		l.asked = true
		if l.stream.Blocking(l.handOff) {
			l.until = now.Add(inlineTime)
		}
	}
	return now.Before(l.until)
}

func (l *inline) did(io *IO) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = append(l.done, io)
}

// report moves what is done to finished.
func (l *inline) report(finished []*IO) []*IO {
	l.mu.Lock()
	defer l.mu.Unlock()
	finished = append(finished, l.done...)
	clear(l.done)
	l.done = l.done[:0]
	return finished
}

// writeInline does the writes that were kept, as long as it may wait, and hands the others over.
func (v *volume) writeInline(s *scratch) {
	l := &s.inline
	for io := l.take(); io != nil; io = l.take() {
		done := false
		if l.mayWait() {
			done, io.Err = io.Member.WriteCached(&io.IO)
		}
		if done || io.Err != nil {
			l.did(io)
		} else {
			io.Copy.Tag.(*lane).put(io)
		}
	}
	s.finished = l.report(s.finished)
}

// handOff gives to others what a goroutine that is held up has not begun, and reports what it has done.
func (v *volume) handOff(l *inline) {
	for io := l.take(); io != nil; io = l.take() {
		io.Copy.Tag.(*lane).put(io)
	}
	s := v.scraps.Get().(*scratch)
	s.finished = l.report(s.finished)
	v.finish(s)
	v.scraps.Put(s)
}
