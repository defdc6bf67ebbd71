package primary

import (
	"sync"

	"github.com/gabion-storage/gabion/server/block"
)

// maxLaneWorkers bounds the goroutines that may block on one copy of one
// volume, and with them what a hung disk can tie up.
const maxLaneWorkers = 32

// lane does the blocking work of one copy: what could not be done in line, by
// workers that come with the work and go without it, and its syncs.
type lane struct {
	v    *volume
	cp   *Copy
	work func() // the worker, as a value: starting it allocates nothing
	sync func() // likewise

	mu      sync.Mutex
	queue   []*IO // from head on
	head    int
	workers int
}

func newLane(v *volume, cp *Copy) *lane {
	l := &lane{v: v, cp: cp}
	l.work, l.sync = l.runWorker, l.runSync
	return l
}

// put hands an IO over. Where writes can never be done in line all of them come this way.
func (l *lane) put(io *IO) {
	l.mu.Lock()
	if l.head > maxLaneWorkers && l.head > len(l.queue)/2 { // a queue that never empties does not grow for ever
		n := copy(l.queue, l.queue[l.head:])
		clear(l.queue[n:])
		l.queue, l.head = l.queue[:n], 0
	}
	l.queue = append(l.queue, io)
	more := l.workers < maxLaneWorkers
	if more {
		l.workers++
		l.v.wg.Add(1)
	}
	l.mu.Unlock()
	if more {
		go l.work()
	}
}

// take is the next IO, or nil: then the worker is not counted any more.
func (l *lane) take() *IO {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.head == len(l.queue) {
		l.queue, l.head = l.queue[:0], 0
		l.workers--
		return nil
	}
	io := l.queue[l.head]
	l.queue[l.head] = nil
	l.head++
	return io
}

func (l *lane) runWorker() {
	defer l.v.wg.Done()
	s := l.v.scraps.Get().(*scratch)
	for io := l.take(); io != nil; io = l.take() {
		if io.Op == block.OpRead {
			io.Err = io.Member.Read(io.Generation, io.Data, io.Offset)
		} else {
			io.Err = io.Member.Write(&io.IO)
		}
		s.finished = append(s.finished, io)
		l.v.finish(s)
	}
	l.v.scraps.Put(s)
}

func (l *lane) runSync() {
	defer l.v.wg.Done()
	v := l.v
	err := v.hit("primary.flush")
	if err == nil {
		err = l.cp.Member.Sync(v.ctx, v.core.Generation())
	}
	s := v.scraps.Get().(*scratch)
	v.mu.Lock()
	v.core.Synced(l.cp, err)
	v.pump(s)
	v.scraps.Put(s)
}
