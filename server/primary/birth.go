package primary

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/server/block"
)

// births turns wanted runs into born ones, one batch at a time: place, seal
// the disks that are new, birth on every disk, commit.
type births struct {
	wanted []block.RunIndex // in order of demand, not in a batch yet
	phase  birthPhase
	batch  []block.RunIndex
	placed []Run
	copies []*Copy // of placed, each once
	left   int     // Births not answered
	err    error   // of a Birth
	held   bool    // the next batch waits for a retry
	full   bool    // the last batch found no room
}

type birthPhase uint8

const (
	birthIdle     birthPhase = iota
	birthPlacing             // Place is under way
	birthSealing             // copies are sealed
	birthRunning             // BirthRuns are under way
	birthDurable             // to be committed
	birthProposed            // CommitRuns is under way, or in doubt
)

// wantBirths asks for the unborn runs of [off, end).
func (c *Core) wantBirths(off, end int64) {
	for run := block.RunIndex(off >> c.runShift); run <= block.RunIndex((end-1)>>c.runShift); run++ {
		if c.runs.at(run) == unborn {
			c.runs.put(run, wanted)
			c.births.wanted = append(c.births.wanted, run)
		}
	}
}

func (c *Core) settleBirths() {
	b := &c.births
	switch b.phase {
	case birthIdle:
		if len(b.wanted) > 0 && !b.held && c.opened {
			n := min(len(b.wanted), MaxRunsPerBirth)
			b.batch = append(b.batch[:0], b.wanted[:n]...)
			b.wanted = slices.Delete(b.wanted, 0, n)
			b.phase = birthPlacing
			c.act(Place{Runs: slices.Clone(b.batch)})
		}
	case birthSealing:
		c.startBirths()
	}
}

// Placed answers Place.
func (c *Core) Placed(runs []Run, err error) {
	b := &c.births
	if c.over != nil {
		return
	}
	switch {
	case err == nil:
		err = checkPlacement(b.batch, runs)
	case errors.Is(err, block.ErrStale), errors.Is(err, block.ErrNotFound):
		c.reads.want()
	}
	if err != nil {
		c.birthsFailed(err)
		return
	}
	b.placed, b.copies = runs, b.copies[:0]
	for _, r := range runs {
		for _, d := range r.Disks {
			if cp := c.copyOn(d); !slices.Contains(b.copies, cp) {
				cp.wanted = true
				cp.held = false
				b.copies = append(b.copies, cp)
			}
		}
	}
	b.phase = birthSealing
	c.settleCopies()
}

// checkPlacement makes sure that every run of the batch got disks, and nothing else did.
func checkPlacement(batch []block.RunIndex, runs []Run) error {
	if len(runs) != len(batch) {
		return fmt.Errorf("%w: %d runs placed of %d", block.ErrInvalid, len(runs), len(batch))
	}
	for _, r := range runs {
		if !slices.Contains(batch, r.Index) || len(r.Disks) == 0 {
			return errNoMembers
		}
	}
	return nil
}

// startBirths begins when every disk of the batch can take births: it is live,
// or sealed and no member yet. One that is away fails the batch, which is
// placed anew.
func (c *Core) startBirths() {
	b := &c.births
	for _, cp := range b.copies {
		switch cp.state {
		case copyLive:
		case copySealed:
			if cp.isMember() {
				return // a takeover comes first
			}
		case copyAway:
			if cp.held {
				c.birthsFailed(fmt.Errorf("%w: disk %s: %s", block.ErrUnavailable, cp.Disk, cp.problem))
			}
			return
		default:
			return
		}
	}
	b.phase, b.left, b.err = birthRunning, len(b.copies), nil
	for _, cp := range b.copies {
		var runs []block.RunIndex
		for _, r := range b.placed {
			if slices.Contains(r.Disks, cp.Disk) {
				runs = append(runs, r.Index)
			}
		}
		cp.birth = call{running: true, life: cp.life}
		cp.busy++
		c.act(BirthRuns{Copy: cp, Runs: runs})
	}
}

// Born answers BirthRuns.
func (c *Core) Born(cp *Copy, err error) {
	b := &c.births
	if !c.answered(cp, &cp.birth, "birth", err) && b.err == nil {
		b.err = err
		if err == nil {
			b.err = fmt.Errorf("%w: disk %s went away", block.ErrUnavailable, cp.Disk)
		}
	}
	if b.left--; b.left > 0 || c.over != nil {
		return
	}
	if b.err != nil {
		c.birthsFailed(b.err)
		return
	}
	b.phase = birthDurable
}

// commitBirths is the command that makes the batch's births count. It names
// the disks that become members by it, as they were sealed.
func (c *Core) commitBirths() CommitRuns {
	cmd := CommitRuns{Runs: c.births.placed}
	for _, cp := range c.births.copies {
		if !cp.recorded {
			cmd.Members = append(cmd.Members,
				Membership{Disk: cp.Disk, In: true, Incarnation: cp.sealed.Incarnation, Admitted: c.generation})
		}
	}
	return cmd
}

// birthsCommitted applies what was committed and lets the requests go that waited for it.
func (c *Core) birthsCommitted(cmd CommitRuns) {
	for _, m := range cmd.Members {
		cp := c.copyOn(m.Disk)
		cp.record(m)
		if cp.state == copySealed && cp.sealed.Incarnation == m.Incarnation {
			c.live(cp) // nothing was acknowledged on it before, so there is nothing to sync
		}
	}
	for _, r := range cmd.Runs {
		c.commitRun(r)
	}
	c.births.phase, c.births.full, c.problem = birthIdle, false, ""
	c.wake(opBirth)
}

func (c *Core) commitRun(r Run) {
	copies := make([]*Copy, len(r.Disks))
	for i, d := range r.Disks {
		copies[i] = c.copyOn(d)
		copies[i].runs++
	}
	c.runs.put(r.Index, c.runs.setOf(copies))
}

// birthsFailed gives the batch back. By policy, requests that wait for it fail
// when the reason is want of space; all others ask again at the next retry.
func (c *Core) birthsFailed(err error) {
	b := &c.births
	b.phase, b.held = birthIdle, true
	for _, run := range b.batch {
		c.runs.put(run, unborn)
	}
	for _, cp := range b.copies {
		cp.wanted = false
	}
	full := errors.Is(err, block.ErrNoSpace)
	b.full = full
	var next *Op
	for op := c.lists[opBirth].head; op != nil; op = next {
		next = op.next
		if full && !c.info.WaitWhenFull && c.touches(op, b.batch) {
			c.finish(op, err)
			continue
		}
		c.move(op, opReady)
	}
	c.examineReady()           // asks for the births again, in the old order
	if c.count[opBirth] == 0 { // nobody does
		c.problem, b.full = "", false
		return
	}
	c.problem = "space cannot be placed: " + err.Error()
	if full && c.info.WaitWhenFull {
		c.spaceShort(block.DiskID{})
	}
}

func (c *Core) touches(op *Op, runs []block.RunIndex) bool {
	first := block.RunIndex(op.Req.Offset >> c.runShift)
	last := block.RunIndex((op.Req.Offset + op.Req.Length - 1) >> c.runShift)
	return slices.ContainsFunc(runs, func(r block.RunIndex) bool { return first <= r && r <= last })
}
