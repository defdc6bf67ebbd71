package image

import (
	"math/bits"

	"github.com/gabion-storage/gabion/server/block"
)

// Marks chooses mark masks.
type Marks uint8

const (
	Behind    Marks = 1 << iota // written since all disks of the run were equal
	Unflushed                   // written since the last recorded flush
)

// readiness says whether a write may start.
type readiness uint8

const (
	ready    readiness = iota // it has started: finish must follow
	missing                   // an extent is not present
	unloaded                  // a group's records are not in memory
	unmarked                  // a region is not marked durably
)

// regions is the mask of the regions of extent e that [off, off+length) touches.
func (x *index) regions(e block.ExtentIndex, off, length int64) uint64 {
	start, size := int64(e)*x.geometry.ExtentSize, x.geometry.RegionSize()
	first := max(off-start, 0) / size
	last := (min(off+length-start, x.geometry.ExtentSize) - 1) / size
	return ^uint64(0) >> (63 - (last - first)) << first
}

// begin starts a write if all its regions are marked; otherwise nothing
// happens and it says why, and for which extent.
func (x *index) begin(off, length int64, seq block.Sequence) (readiness, block.ExtentIndex) {
	first, last := x.geometry.Extent(off), x.geometry.Extent(off+length-1)
	x.mu.Lock()
	defer x.mu.Unlock()
	for e := first; e <= last; e++ {
		if !x.present(e) {
			return missing, e
		}
		r := x.record(e)
		if r == nil {
			return unloaded, e
		}
		if x.regions(e, off, length)&^(r.behind&r.unflushed) != 0 {
			return unmarked, e
		}
	}
	for e := first; e <= last; e++ {
		r := x.record(e)
		r.busy++
		r.seq = max(r.seq, seq)
	}
	return ready, 0
}

// finish ends a write that begin started, whatever came of it.
func (x *index) finish(off, length int64) {
	first, last := x.geometry.Extent(off), x.geometry.Extent(off+length-1)
	x.mu.Lock()
	defer x.mu.Unlock()
	tick := x.completed.Add(1)
	for e := first; e <= last; e++ {
		r := x.record(e)
		r.busy--
		r.tick = tick
	}
}

// want asks for the marks that a write to the range needs.
func (x *index) want(off, length int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for e := x.geometry.Extent(off); e <= x.geometry.Extent(off+length-1); e++ {
		r := x.record(e)
		if r == nil {
			continue // dropped meanwhile; begin will say so
		}
		need := x.regions(e, off, length) &^ (r.behind & r.unflushed)
		if need == 0 {
			continue
		}
		r.wanted |= need | ahead(r.behind&r.unflushed|need, need)
		if !r.queued {
			r.queued = true
			x.queue = append(x.queue, r)
		}
	}
}

// ahead is which regions behind the needed ones to mark along with them: as
// many as are marked in a row up to there, so that who writes sequentially
// waits for half a dozen commits in an extent and not for 64. A single region, as
// random writes need it, brings none.
func ahead(marked, need uint64) uint64 {
	top := 63 - bits.LeadingZeros64(need)
	row := bits.LeadingZeros64(^(marked << (63 - top))) // marked in a row, ending at top
	if row < 2 {
		return 0
	}
	return (uint64(1)<<min(row, 63) - 1) << (top + 1)
}

// commit makes the wanted marks durable, together with everybody else's.
func (x *index) commit() error { return x.commits.do(x.commitQueue) }

func (x *index) commitQueue() error {
	x.turn.Lock()
	defer x.turn.Unlock()

	x.mu.Lock()
	batch := x.queue
	x.queue = nil
	slots := make([]slot, len(batch))
	for i, r := range batch {
		s := r.slot
		s.counter++
		s.flags |= written
		s.behind |= r.wanted
		s.unflushed |= r.wanted
		slots[i] = s
		r.wanted = 0
	}
	x.mu.Unlock()

	err := x.writeSlots(slots)

	x.mu.Lock()
	defer x.mu.Unlock()
	for i, r := range batch {
		if err == nil {
			r.slot = slots[i]
		}
		r.queued = r.wanted != 0
		if r.queued { // asked for while this commit ran
			x.queue = append(x.queue, r)
		}
	}
	return err
}

// clear forgets marks of the kinds in every extent that nothing was written
// to after upto, and whose last write a sync covered.
func (x *index) clear(upto block.Sequence, kinds Marks) error {
	var behind, unflushed uint64
	if kinds&Behind != 0 {
		behind = ^uint64(0)
	}
	if kinds&Unflushed != 0 {
		unflushed = ^uint64(0)
	}
	x.turn.Lock()
	defer x.turn.Unlock()

	x.mu.Lock()
	var batch []*record
	var slots []slot
	synced := x.synced.Load()
	x.each(func(r *record) {
		if r.behind&behind|r.unflushed&unflushed == 0 || r.busy > 0 || r.queued || r.tick > synced || r.seq > upto {
			return
		}
		// From here a new writer has to mark again, and so waits for its turn.
		r.behind &^= behind
		r.unflushed &^= unflushed
		s := r.slot
		s.counter++
		batch, slots = append(batch, r), append(slots, s)
	})
	x.mu.Unlock()

	var err error
	if len(batch) > 0 {
		err = x.writeSlots(slots)
	}

	x.mu.Lock()
	defer x.mu.Unlock()
	for i, r := range batch {
		if err == nil {
			r.counter = slots[i].counter
		}
	}
	x.eachGroup(func(g *group) {
		for i := range g.live {
			if !g.live[i].clean() {
				return
			}
		}
		g.live = nil
	})
	return err
}

// anyUnflushed reports whether a region is marked unflushed.
func (x *index) anyUnflushed() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	found := false
	x.each(func(r *record) { found = found || r.unflushed != 0 })
	return found
}

// sealed begins a generation, in which sequences count from 1 again.
func (x *index) sealed() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.each(func(r *record) { r.seq = 0 })
}
