package primary

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/server/block"
)

type copyState uint8

const (
	copyAway     copyState = iota // not reached, or its open instance has ended
	copySealing                   // SealCopy is under way
	copySealed                    // at this generation; counts for nothing yet
	copyAdmitted                  // its incarnation is recorded; its first sync is missing
	copyLive                      // serves
)

// Copy is the volume on one disk, as its primary sees it. Member and Tag may be
// read while an operation or a call on the copy is under way, and only then
// without the driver's lock; what is not exported is the core's.
type Copy struct {
	Disk   block.DiskID
	Member Member // of the open instance that was last sealed; replaced only when nothing is under way
	Tag    any    // the driver's own, set before the first Sealed

	state  copyState
	sealed Sealed // what it said then; Lost stays of interest
	life   uint64 // rises whenever the copy goes away: what older lives answer proves nothing
	busy   int    // operations and calls not answered, of all lives; it is sealed again only at 0
	held   bool   // away, and the next attempt waits for a retry
	wanted bool   // away and no member, but a birth is to go there
	// Its disk changed since the last sync began, which may have been before the end of the open instance.
	doubted bool

	// As the metadata has it: recorded is set once a Takeover or CommitRuns names the disk.
	recorded   bool
	membership Membership
	runs       int // committed here

	size     int64             // bytes the image surely has
	problem  string            // why it is away; empty if nobody tried yet
	failed   block.Incarnation // of the life that ended by an I/O error: what it says later is never counted
	reported bool              // that it is away

	syncing  []*Op // wait for the sync that runs
	nextSync []*Op // wait for the next one

	// The calls under way; a second one of a kind waits for the first.
	sync, birth, grow, clear call
	asked                    int64 // bytes: what SealCopy or GrowCopy asked for

	// What the last syncs and clearings of this life covered. A quiet sync is
	// one that began when no mutation was running; it covers every mutation so far.
	quiet   progress
	cleared progress
}

// call is one kind of call to a member. It was made in a life of the copy; an
// answer to another life is ignored.
type call struct {
	running bool
	life    uint64
	upto    block.Sequence // what it covers, if covers
	covers  bool
}

// progress is how far something has come in the copy's present life.
type progress struct {
	upto  block.Sequence
	known bool
}

func (p progress) reached(s block.Sequence) bool { return p.known && p.upto == s }

// copyOn is the copy on a disk, made if it was never mentioned.
func (c *Core) copyOn(disk block.DiskID) *Copy {
	for _, cp := range c.copies {
		if cp.Disk == disk {
			return cp
		}
	}
	cp := &Copy{Disk: disk}
	c.copies = append(c.copies, cp)
	return cp
}

func (cp *Copy) record(m Membership) { cp.recorded, cp.membership = true, m }

// isMember reports whether the metadata has the disk as one of the volume.
func (cp *Copy) isMember() bool { return cp.recorded && cp.membership.In }

// counts reports whether acknowledged data may be on the copy.
func (cp *Copy) counts() bool { return cp.isMember() && cp.runs > 0 }

// serves reports whether the copy can take part in a request of [off, end).
func (cp *Copy) serves(g block.Geometry, off, end int64) bool {
	if cp.state != copyLive {
		return false
	}
	if len(cp.sealed.Lost) == 0 {
		return true
	}
	i, _ := slices.BinarySearch(cp.sealed.Lost, g.Extent(off))
	return i == len(cp.sealed.Lost) || cp.sealed.Lost[i] > g.Extent(end-1)
}

// settleCopies moves each copy on: seal what is away, sync what asks for it,
// grow what is short. Members come back even if no request waits for them.
func (c *Core) settleCopies() {
	for _, cp := range c.copies {
		switch cp.state {
		case copyAway:
			if cp.busy == 0 && !cp.held && (cp.isMember() || cp.wanted) {
				cp.state = copySealing
				cp.busy++
				cp.asked = c.wantedSize
				c.act(SealCopy{Copy: cp, Volume: c.info, Size: cp.asked, Born: c.runs.born(cp)})
			}
		case copyAdmitted:
			c.startSync(cp)
		case copyLive:
			if len(cp.nextSync) > 0 || cp.doubted {
				c.startSync(cp)
			}
			c.startGrow(cp)
		}
	}
	if !c.serving && c.opened {
		c.serving = !c.admitting()
	}
}

// admitting reports whether a member is between its seal and being live.
func (c *Core) admitting() bool {
	return slices.ContainsFunc(c.copies, func(cp *Copy) bool {
		return cp.isMember() && (cp.state == copySealed || cp.state == copyAdmitted)
	})
}

// Sealed answers SealCopy. member and s count only if err is nil.
func (c *Core) Sealed(cp *Copy, member Member, s Sealed, err error) {
	cp.busy--
	cp.state = copyAway
	switch {
	case errors.Is(err, block.ErrStale):
		c.depose(err)
	case c.over != nil:
	case err == nil && s.Incarnation == cp.failed:
		c.unreachable(cp, fmt.Errorf("%w: the open instance that failed still answers", block.ErrIO))
	case err != nil:
		c.unreachable(cp, err)
	default:
		cp.state, cp.Member, cp.sealed = copySealed, member, s
		cp.size, cp.problem = cp.asked, ""
		cp.quiet, cp.cleared = progress{}, progress{}
		if m := &cp.membership; cp.isMember() && m.Admitted == c.generation && m.Incarnation == s.Incarnation {
			cp.state = copyAdmitted // nothing has changed since it was admitted
		}
		if len(s.Lost) > 0 {
			c.report("ExtentsLost", cp.Disk, "%d extents, the first is %d, have no good record on this disk; requests to them wait",
				len(s.Lost), s.Lost[0])
		}
	}
}

// unreachable leaves a copy away until the next retry.
func (c *Core) unreachable(cp *Copy, err error) {
	cp.held, cp.problem = true, err.Error()
	c.reportAway(cp)
}

// lose takes a copy out of service until it is sealed and admitted again.
// Whatever waits for its syncs is examined again, and finds itself blocked.
func (c *Core) lose(cp *Copy, err error) {
	if cp.state == copyAway {
		return
	}
	cp.state = copyAway
	cp.life++
	if errors.Is(err, block.ErrIO) || errors.Is(err, block.ErrCorrupt) || errors.Is(err, block.ErrNoSpace) { // the last: a sync
		cp.failed = cp.sealed.Incarnation
	}
	cp.problem = err.Error()
	c.reportAway(cp)
	for len(cp.syncing)+len(cp.nextSync) > 0 {
		op := append(cp.syncing, cp.nextSync...)[0]
		c.unsync(op)
		c.move(op, opReady)
	}
}

func (c *Core) reportAway(cp *Copy) {
	if cp.reported || !cp.counts() {
		return
	}
	cp.reported = true
	c.report("VolumeBlocked", cp.Disk, "requests to %d runs wait for this disk: %s", cp.runs, cp.problem)
}

func (c *Core) live(cp *Copy) {
	cp.state = copyLive
	if cp.reported {
		cp.reported = false
		c.report("VolumeResumed", cp.Disk, "the disk is back in service")
	}
	c.wake(opBlocked)
}

// startSync makes the waiting list the running one, unless a sync runs already.
func (c *Core) startSync(cp *Copy) {
	if cp.sync.running {
		return
	}
	cp.doubted = false
	cp.syncing, cp.nextSync = cp.nextSync, cp.syncing[:0]
	cp.sync = call{running: true, life: cp.life, upto: c.sequence, covers: c.mutating == 0}
	cp.busy++
	c.act(SyncCopy{Copy: cp})
}

// Synced answers SyncCopy.
func (c *Core) Synced(cp *Copy, err error) {
	if !c.answered(cp, &cp.sync, "sync", err) {
		return
	}
	if cp.sync.covers {
		cp.quiet = progress{cp.sync.upto, true}
	}
	for i, op := range cp.syncing {
		cp.syncing[i] = nil
		if op.pending--; op.pending == 0 {
			c.finish(op, nil)
		}
	}
	cp.syncing = cp.syncing[:0]
	if cp.state == copyAdmitted {
		c.live(cp)
	}
}

// answered ends a call and reports whether it succeeded and still counts. Any
// failure ends the copy's life, but for want of space: that passes, unless a
// sync says so, for then what was written is lost.
func (c *Core) answered(cp *Copy, k *call, what string, err error) bool {
	cp.busy--
	k.running = false
	switch {
	case errors.Is(err, block.ErrStale):
		c.depose(err)
	case k.life != cp.life || c.over != nil:
	case err == nil:
		return true
	case errors.Is(err, block.ErrNoSpace) && k != &cp.sync:
		cp.held = true
	default:
		c.lose(cp, fmt.Errorf("%s: %w", what, err))
	}
	return false
}

// unsync takes an op out of the lists of all copies.
func (c *Core) unsync(op *Op) {
	for _, cp := range c.copies {
		for _, list := range []*[]*Op{&cp.syncing, &cp.nextSync} {
			if i := slices.Index(*list, op); i >= 0 {
				*list = slices.Delete(*list, i, i+1)
			}
		}
	}
}

func (c *Core) startGrow(cp *Copy) {
	if cp.size >= c.wantedSize || cp.grow.running || cp.held {
		return
	}
	cp.grow = call{running: true, life: cp.life}
	cp.asked = c.wantedSize
	cp.busy++
	c.act(GrowCopy{Copy: cp, Size: cp.asked})
}

// Grown answers GrowCopy.
func (c *Core) Grown(cp *Copy, err error) {
	if c.answered(cp, &cp.grow, "grow", err) {
		cp.size = cp.asked
	}
}

// grown reports whether every copy has the wanted size, and there is something to confirm.
func (c *Core) grown() bool {
	if c.wantedSize == c.info.Size {
		return false
	}
	for _, cp := range c.copies {
		if cp.isMember() && (cp.state != copyLive || cp.size < c.wantedSize) {
			return false
		}
	}
	return true
}

// clearMarks lets copies forget marks, once all of them are synced up to the last mutation.
func (c *Core) clearMarks() {
	for _, cp := range c.copies {
		if cp.counts() && (cp.state != copyLive || c.mutating > 0 || !cp.quiet.reached(c.sequence)) {
			return
		}
	}
	for _, cp := range c.copies {
		if cp.counts() && !cp.clear.running && !cp.cleared.reached(c.sequence) {
			cp.clear = call{running: true, life: cp.life, upto: c.sequence}
			cp.busy++
			c.act(ClearMarks{Copy: cp, Upto: c.sequence})
		}
	}
}

// Cleared answers ClearMarks.
func (c *Core) Cleared(cp *Copy, err error) {
	if c.answered(cp, &cp.clear, "clear marks", err) {
		cp.cleared = progress{cp.clear.upto, true}
	}
}

// mayHaveLost reports whether acknowledged, unflushed data may be gone from a
// sealed copy: the disk's host or its open instance ended since it was
// admitted, and it does not know all it holds to be flushed. A copy without
// committed runs never had any.
func (c *Core) mayHaveLost(cp *Copy) bool {
	return !c.info.WriteThrough && cp.runs > 0 &&
		cp.sealed.Incarnation.Since(cp.membership.Incarnation) == block.Rebooted &&
		(cp.sealed.Unflushed || len(cp.sealed.Lost) > 0)
}

// memberList is every member in order of Disk, as a takeover now would record them.
func (c *Core) memberList() []Membership {
	var list []Membership
	for _, cp := range c.copies {
		if !cp.recorded {
			continue
		}
		m := cp.membership
		if cp.state == copySealed && m.In {
			m = Membership{Disk: cp.Disk, In: true, Incarnation: cp.sealed.Incarnation, Admitted: c.generation}
		}
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b Membership) int { return bytes.Compare(a.Disk.UUID[:], b.Disk.UUID[:]) })
	return list
}
