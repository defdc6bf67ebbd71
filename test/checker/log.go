package checker

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/gabion-storage/gabion/server/block"
)

// Log is the write log of one volume. Safe for concurrent use; a method call
// is an instant, so call Write before the request is sent and Acked after its
// answer was received.
type Log struct {
	volume  block.VolumeID
	grain   int64
	through bool

	mu      sync.Mutex
	now     instant
	blocks  map[int64]*history // by number; missing: never written
	flushed instant            // when the newest answered flush began
	reads   []*Read            // not answered, oldest first
	losses  int                // what began before the last one is over
}

// New returns the log of a volume that reads as zeros. grain is the size of a
// block in bytes: 512, which also judges writes that a power cut may have torn
// into sectors, or 4096. writeThrough: acknowledged is durable.
func New(volume block.VolumeID, grain int, writeThrough bool) *Log {
	if grain < minGrain || grain%8 != 0 {
		panic(fmt.Sprintf("checker: a block of %d bytes", grain))
	}
	return &Log{volume: volume, grain: int64(grain), through: writeThrough, now: 1, blocks: map[int64]*history{}}
}

func (l *Log) tick() instant {
	l.now++
	return l.now
}

func (l *Log) history(number int64) *history {
	h := l.blocks[number]
	if h == nil {
		h = newHistory()
		l.blocks[number] = h
	}
	return h
}

func (l *Log) check(off, length int64) {
	if off < 0 || length <= 0 || off%l.grain != 0 || length%l.grain != 0 {
		panic(fmt.Sprintf("checker: [%d, +%d) is not made of blocks of %d bytes", off, length, l.grain))
	}
}

// Write is one write, trim or zero from its beginning to its end.
type Write struct {
	l       *Log
	off     int64
	zero    bool
	counts  []uint64 // one per block
	begin   instant
	durable bool
	over    bool // acknowledged, refused or ended
	losses  int  // of the log when it began
}

// Write begins a write of a range. durable: its acknowledgement says that it is durable (FUA).
func (l *Log) Write(off, length int64, durable bool) *Write {
	return l.begin(off, length, false, durable, nil)
}

// Zero begins a trim or a write of zeros.
func (l *Log) Zero(off, length int64, durable bool) *Write {
	return l.begin(off, length, true, durable, nil)
}

func (l *Log) begin(off, length int64, zero, durable bool, prior *Write) *Write {
	l.check(off, length)
	l.mu.Lock()
	defer l.mu.Unlock()
	w := &Write{l: l, off: off, zero: zero, counts: make([]uint64, length/l.grain), begin: l.tick(), durable: durable || l.through, losses: l.losses}
	for i := range w.counts {
		var before uint64
		if prior != nil {
			before = prior.counts[i]
		}
		w.counts[i] = l.history(off/l.grain+int64(i)).add(zero, w.begin, before)
	}
	return w
}

// Fill makes the content: p has the write's length.
func (w *Write) Fill(p []byte) {
	for i, count := range w.counts {
		at := int64(i) * w.l.grain
		putBlock(p[at:at+w.l.grain], w.l.volume, w.off+at, count)
	}
}

// Count is the count of the write's first block, for messages.
func (w *Write) Count() uint64 { return w.counts[0] }

// Acked says that the client received the acknowledgement.
func (w *Write) Acked() {
	w.finish(func(h *history, e *entry, now instant) {
		h.hide(w.begin, now, w.durable, func(o *entry) bool { return o == e })
		h.overtake(e, now, w.durable)
	})
}

// Ended says that the outcome will stay unknown and that nothing of the write
// can reach a disk any more: it failed with an error, or its session is over
// and a newer one was answered.
func (w *Write) Ended() { w.finish(func(*history, *entry, instant) {}) }

// Refused says that the write was refused before anything of it was done.
func (w *Write) Refused() {
	w.finish(func(_ *history, e *entry, now instant) { e.hidden, e.settled = now, true })
}

// Resend begins the same write again with new bytes, because the client gave
// up waiting; only the new copy is finished from then on. The first copy comes
// before it or is never executed. A resend of the same bytes is the same Write
// and needs no call.
func (w *Write) Resend() *Write {
	w.l.mu.Lock()
	w.over = true
	w.l.mu.Unlock()
	return w.l.begin(w.off, int64(len(w.counts))*w.l.grain, w.zero, w.durable, w)
}

func (w *Write) finish(f func(h *history, e *entry, now instant)) {
	l := w.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.over || w.losses != l.losses {
		return
	}
	w.over = true
	now, oldest := l.tick(), l.oldestRead()
	for i, count := range w.counts {
		h := l.history(w.off/l.grain + int64(i))
		if e := h.find(count); e != nil {
			h.copies(e, func(o *entry) {
				if o.end == 0 {
					o.end = now
				}
			})
			f(h, e, now)
		}
		h.prune(l.flushed, oldest)
	}
}

// Flush is a FLUSH from its beginning to its answer.
type Flush struct {
	l      *Log
	begin  instant
	losses int
}

// Flush begins a FLUSH: call it before the request is sent.
func (l *Log) Flush() *Flush {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &Flush{l, l.tick(), l.losses}
}

// Acked says that the FLUSH was answered without an error.
func (f *Flush) Acked() {
	f.l.mu.Lock()
	defer f.l.mu.Unlock()
	if f.losses == f.l.losses {
		f.l.flushed = max(f.l.flushed, f.begin)
	}
}

// Lost says that unflushed data may be gone and the client was told so. Every
// session of the older cache epoch is over. Call it before anything that was
// read afterwards is judged.
func (l *Log) Lost() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now, oldest := l.tick(), l.oldestRead()
	l.losses++
	for _, h := range l.blocks {
		h.prune(l.flushed, oldest)
		h.lose(l.flushed, now)
	}
}

func (l *Log) oldestRead() instant {
	if len(l.reads) == 0 {
		return l.now + 1
	}
	return l.reads[0].begin
}

// Read is a read from its beginning to its answer.
type Read struct {
	l     *Log
	off   int64
	begin instant
}

// Read begins a read at off: call it before the request is sent, and
// then exactly one of Returned and Failed.
func (l *Log) Read(off int64) *Read {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := &Read{l: l, off: off, begin: l.tick()}
	l.reads = append(l.reads, r)
	return r
}

// Failed says that the read returned nothing.
func (r *Read) Failed() {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	r.done()
}

func (r *Read) done() {
	r.l.reads = slices.DeleteFunc(r.l.reads, func(o *Read) bool { return o == r })
}

// Returned judges what was read, whole blocks. The error is a *Violation and
// names the first block that shows what it must not.
func (r *Read) Returned(p []byte) error {
	l := r.l
	l.check(r.off, int64(len(p)))
	l.mu.Lock()
	defer l.mu.Unlock()
	r.done()
	now, oldest := l.tick(), l.oldestRead()
	scratch := make([]byte, l.grain)
	for at := int64(0); at < int64(len(p)); at += l.grain {
		off := r.off + at
		c := parse(p[at:at+l.grain], scratch)
		h := l.blocks[off/l.grain]
		if h == nil && c.zero {
			continue
		}
		h = l.history(off / l.grain)
		mine := c.zero || c.whole && c.volume == l.volume && c.off == off
		if !mine || !h.returned(c, r.begin, now) {
			return &Violation{Volume: l.volume, Offset: off, Found: c.tell(l.volume, off), Allowed: h.tell(r.begin)}
		}
		h.prune(l.flushed, oldest)
	}
	return nil
}

// Violation is a block that shows what it must not.
type Violation struct {
	Volume  block.VolumeID
	Offset  int64 // bytes
	Found   string
	Allowed string
}

func (v *Violation) Error() string {
	return fmt.Sprintf("volume %s, block at %d: found %s; allowed: %s", v.Volume, v.Offset, v.Found, v.Allowed)
}

// Verify reads size bytes of a volume at rest and judges them all.
func (l *Log) Verify(from io.ReaderAt, size int64) error {
	const chunk = 1 << 20
	p := make([]byte, min(size, chunk))
	for off := int64(0); off < size; off += chunk {
		p := p[:min(chunk, size-off)]
		r := l.Read(off)
		if n, err := from.ReadAt(p, off); n < len(p) {
			r.Failed()
			if err == nil || errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("read [%d, +%d) of volume %s: %w", off, len(p), l.volume, err)
		}
		if err := r.Returned(p); err != nil {
			return err
		}
	}
	return nil
}

// Allowed lists the counts that a read of the block at off may return now; 0 is
// what was there at first.
func (l *Log) Allowed(off int64) []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h := l.blocks[off/l.grain]; h != nil {
		return h.allowed(l.now)
	}
	return []uint64{0}
}
