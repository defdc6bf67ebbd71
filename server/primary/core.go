package primary

import (
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// Core is one volume served under one grant, as a pure state machine: methods
// are events, Take brings what is to be done. Not safe for concurrent use. See
// DESIGN.md for its states and rules.
type Core struct {
	geometry   block.Geometry
	runShift   int
	generation block.Generation

	info        VolumeInfo     // Version: the newest known; CacheEpoch: the one served
	wantedSize  int64          // bytes, >= info.Size
	sequence    block.Sequence // of the newest mutation
	over        error          // not nil: serves no more, and why
	serving     bool           // the first takeover is done: sessions are answered
	opened      bool           // a takeover was committed in this generation
	attachments []*attachment  // in order of ID

	copies []*Copy // in order of first mention; never removed
	runs   runTable
	locks  rangeLock

	lists    [opStates]opList
	count    [opStates]int
	mutating int   // running mutations
	free     *Op   // list through next
	granted  []*Op // scratch of release

	births births
	cmd    *command // sent, outcome not yet known
	reads  mapReads

	now       time.Duration // of the last Tick
	retryAt   time.Duration // when what is held up is tried again
	holdSend  bool          // commands wait for that
	lastWrite time.Duration // Tick at which a new mutation was last seen
	tickSeq   block.Sequence
	idle      struct { // since when no request was answered
		requests int64
		since    time.Duration
	}
	short   shortage
	problem string // why births fail that somebody waits for

	stats stats
	out   Output
}

const (
	// retryEvery is the pause before what failed for the moment is tried again.
	retryEvery = 500 * time.Millisecond
	// quietBeforeClear is how long nothing was written before marks are cleared.
	quietBeforeClear = 30 * time.Second
	// quietBeforeTrim is how long nothing was asked before memory is given back.
	quietBeforeTrim = 10 * time.Second
)

// shortage is a time in which requests were refused for want of space.
type shortage struct {
	on          bool
	told        bool
	disk        block.DiskID  // that refused first; zero: placement
	first, last time.Duration // Ticks of the refusals
}

// Output is what a Core wants done. Start and Actions are in order of
// decision, Done in order of completion.
type Output struct {
	Start   []*Op            // requests to run
	Done    []*block.Request // requests to complete, Err is set
	Actions []Action
}

// NewCore is the core of a grant: m is the map that came with it.
func NewCore(g block.Geometry, m Map) *Core {
	c := &Core{
		geometry: g, runShift: bits.TrailingZeros64(uint64(g.RunSize())), generation: m.Generation,
		info: m.Volume, wantedSize: max(m.Volume.WantedSize, m.Volume.Size),
	}
	for _, mb := range m.Members {
		cp := c.copyOn(mb.Disk)
		cp.record(mb)
	}
	for _, r := range m.Runs {
		c.commitRun(r)
	}
	c.adoptAttachments(m.Attachments)
	return c
}

// Take settles what the events since the last Take led to and exchanges o's
// emptied slices for what is to be done.
func (c *Core) Take(o *Output) {
	c.settle()
	clear(o.Start)
	clear(o.Done)
	clear(o.Actions)
	*o, c.out = c.out, Output{o.Start[:0], o.Done[:0], o.Actions[:0]}
}

// settle goes on with everything that an event may have let go.
func (c *Core) settle() {
	c.examineReady()
	if c.over != nil {
		return
	}
	c.settleCopies()
	c.settleBirths()
	c.settleSpace()
	c.settleSessions()
	c.settleCommand()
	if c.reads.wanted && !c.reads.running && !c.reads.held {
		c.reads.running, c.reads.wanted = true, false
		c.reads.started++
		c.act(ReadMap{})
	}
}

func (c *Core) examineReady() {
	for ready := &c.lists[opReady]; ready.head != nil; {
		op := ready.head
		if c.over != nil || op.conn.state == connClosed {
			c.finish(op, errConnClosed)
			continue
		}
		c.examine(op)
	}
}

// wake lets every op of a state be examined again, in the order in which they came to wait.
func (c *Core) wake(s opState) {
	for op := c.lists[s].head; op != nil; op = c.lists[s].head {
		c.move(op, opReady)
	}
}

// Tick tells the time, on a monotonic clock of the driver's. Every retry and
// the clearing of marks hang on it; several times a second is enough.
func (c *Core) Tick(now time.Duration) {
	c.now = now
	if c.over != nil {
		return
	}
	if c.tickSeq != c.sequence {
		c.tickSeq, c.lastWrite = c.sequence, now
	}
	if now >= c.retryAt {
		c.retryAt = now + retryEvery
		c.holdSend, c.reads.held, c.births.held = false, false, false
		for _, cp := range c.copies {
			cp.held = false
		}
		c.wake(opSpace)
	}
	c.trim() // before anything is put out, which it would give back as well
	if now-c.lastWrite >= quietBeforeClear {
		c.clearMarks()
	}
}

// trim gives back what a burst left, once nothing was asked for a while, so
// that an idle volume is small.
func (c *Core) trim() {
	requests := c.stats.requests()
	if requests != c.idle.requests || c.locks.entries > 0 {
		c.idle.requests, c.idle.since = requests, c.now
		return
	}
	if c.free != nil && c.now-c.idle.since >= quietBeforeTrim {
		c.free, c.granted, c.out = nil, nil, Output{}
		c.locks = rangeLock{order: c.locks.order}
	}
}

// Changed says that the map may have changed.
func (c *Core) Changed() { c.reads.want() }

// Learn takes a map that somebody read for another reason.
func (c *Core) Learn(m Map) {
	switch {
	case c.over != nil:
	case m.Generation > c.generation:
		c.depose(fmt.Errorf("%w: generation %d was granted", block.ErrStale, m.Generation))
	case m.Generation == c.generation && m.Volume.Version >= c.info.Version:
		c.adopt(m)
	}
}

// SpaceChanged says that a disk may have room again.
func (c *Core) SpaceChanged() {
	c.births.held = false
	c.wake(opSpace)
}

// DiskChanged says that a disk failed or may be there again. A copy that is in
// service is synced: if its open instance has ended, that says so.
func (c *Core) DiskChanged(disk block.DiskID) {
	for _, cp := range c.copies {
		if cp.Disk == disk {
			cp.held, cp.doubted = false, true
		}
	}
	c.births.held = false
}

// Stop ends the core in an orderly way: nothing new is started, connections
// are closed; what runs finishes and is answered. Running says when that is.
func (c *Core) Stop() { c.end(fmt.Errorf("%w: the server is stopping", block.ErrShutdown)) }

// Generation is that of the grant; it never changes and may be read at any time.
func (c *Core) Generation() block.Generation { return c.generation }

// Running is how many requests are in flight.
func (c *Core) Running() int { return c.count[opRunning] }

// Over is why the core serves no more, or nil.
func (c *Core) Over() error { return c.over }

func (c *Core) act(a Action) { c.out.Actions = append(c.out.Actions, a) }

func (c *Core) report(kind string, disk block.DiskID, format string, args ...any) {
	c.act(Report{Event{Type: kind, Volume: c.info.ID, Disk: disk, Message: fmt.Sprintf(format, args...)}})
}

// depose ends a core whose generation is over: somebody else may be serving.
// Its clients are let go at once, so that they send again elsewhere.
func (c *Core) depose(cause error) {
	if c.over == nil {
		c.report("PrimaryDeposed", block.DiskID{}, "generation %d is over: %v", c.generation, cause)
	}
	c.end(fmt.Errorf("%w: the volume is served under a newer grant; connect again", block.ErrUnavailable))
}

// end closes everything that is not in flight. The first reason stays.
func (c *Core) end(reason error) {
	if c.over != nil {
		return
	}
	c.over = reason
	for _, a := range c.attachments {
		for _, cn := range slices.Clone(a.conns) {
			c.close(cn, reason)
		}
	}
	c.act(Retire{Reason: reason})
}

// spaceShort notes that a request waits for space.
func (c *Core) spaceShort(disk block.DiskID) {
	if s := &c.short; !s.on {
		*s = shortage{on: true, disk: disk, first: c.now}
	}
	c.short.last = c.now
}

// settleSpace tells of a shortage when it lasts, and of the end of one that was
// told: after a while without a refusal, as none waits while all are tried again.
func (c *Core) settleSpace() {
	s := &c.short
	if !s.on {
		return
	}
	waiting := c.waitForSpace() > 0
	switch {
	case waiting && !s.told && c.now-s.first >= retryEvery:
		s.told = true
		c.report("VolumeWaitsForSpace", s.disk, "writes wait for space; free some or add a disk, and they go on by themselves")
	case !waiting && c.now-s.last > 2*retryEvery:
		if s.told {
			c.report("VolumeResumed", block.DiskID{}, "no write waits for space any more")
		}
		*s = shortage{}
	}
}

// waitForSpace is how many requests do.
func (c *Core) waitForSpace() int {
	n := c.count[opSpace]
	if c.births.full {
		n += c.count[opBirth]
	}
	return n
}
