package primary

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/server/block"
)

// command is the one that is sent and whose outcome is not known.
type command struct {
	cmd     Command
	version block.Version    // that it expects
	epoch   block.CacheEpoch // Takeover: the volume's, once it is applied
	doubt   bool             // the answer decided nothing: a map will
	after   uint64           // only a read with a higher number decides
}

// mapReads is the reading of the map: one at a time, numbered.
type mapReads struct {
	wanted  bool
	running bool
	held    bool // the next one waits for a retry
	started uint64
}

func (r *mapReads) want() { r.wanted = true }

// settleCommand sends the most urgent command that is due, or repeats the one
// in doubt: two with the same expected version cannot both succeed.
func (c *Core) settleCommand() {
	if c.cmd != nil || c.holdSend {
		return
	}
	cmd, epoch := c.due()
	if cmd == nil {
		return
	}
	c.cmd = &command{cmd: cmd, version: c.info.Version, epoch: epoch}
	c.send()
}

// due is the most urgent command, nil if there is none, and the cache epoch that it leads to.
func (c *Core) due() (Command, block.CacheEpoch) {
	epoch := c.info.CacheEpoch
	if c.takeoverDue() {
		raise := slices.ContainsFunc(c.copies, func(cp *Copy) bool {
			return cp.state == copySealed && cp.isMember() && c.mayHaveLost(cp)
		})
		if raise {
			epoch++
		}
		return Takeover{Members: c.memberList(), RaiseCacheEpoch: raise}, epoch
	}
	if !c.opened {
		return nil, 0
	}
	if a := c.revoked(); a != nil {
		return ConfirmDetach{Attachment: a.id}, epoch
	}
	if c.births.phase == birthDurable {
		c.births.phase = birthProposed
		return c.commitBirths(), epoch
	}
	if c.grown() {
		return ConfirmSize{Size: c.wantedSize}, epoch
	}
	return nil, 0
}

func (c *Core) send() {
	c.cmd.doubt = false
	c.act(Send{Fence: Fence{Volume: c.info.ID, Generation: c.generation, Version: c.cmd.version}, Command: c.cmd.cmd})
}

// takeoverDue reports whether members wait to be admitted. The first takeover
// waits until every member has answered its seal, or failed to.
func (c *Core) takeoverDue() bool {
	due := !c.opened
	for _, cp := range c.copies {
		if !cp.isMember() {
			continue
		}
		if !c.opened && (cp.state == copySealing || cp.state == copyAway && !cp.held) {
			return false
		}
		due = due || cp.state == copySealed
	}
	return due
}

// Proposed answers Send.
func (c *Core) Proposed(v block.Version, err error) {
	if c.over != nil {
		return
	}
	switch {
	case err == nil:
		c.info.Version = max(c.info.Version, v)
		c.applied()
	case errors.Is(err, block.ErrInvalid), errors.Is(err, block.ErrPrecondition), errors.Is(err, block.ErrTooLarge):
		c.report("CommandRefused", block.DiskID{}, "the metadata service refused %T: %v", c.cmd.cmd, err)
		c.holdSend = true
		c.refused(err)
	default:
		c.cmd.doubt, c.cmd.after = true, c.reads.started
		c.reads.want()
	}
}

// MapRead answers ReadMap.
func (c *Core) MapRead(m Map, err error) {
	c.reads.running = false
	switch {
	case c.over != nil:
		return
	case errors.Is(err, block.ErrNotFound):
		c.end(fmt.Errorf("%w: the volume was deleted", block.ErrNotFound))
		return
	case err != nil:
		c.reads.wanted, c.reads.held = true, true
		return
	case m.Generation > c.generation:
		c.depose(fmt.Errorf("%w: generation %d was granted", block.ErrStale, m.Generation))
		return
	case m.Volume.Version < c.info.Version: // read before what is known already
		c.reads.want()
		return
	}
	c.adopt(m)
	if k := c.cmd; k != nil && k.doubt && c.reads.started > k.after {
		c.decide(m)
	}
}

// adopt takes over what others decide: attachments, wanted size, policy.
// Placements, members and the cache epoch come from this core's own commands.
func (c *Core) adopt(m Map) {
	size, epoch := c.info.Size, c.info.CacheEpoch
	c.info = m.Volume
	c.info.Size, c.info.CacheEpoch = size, epoch
	c.wantedSize = max(c.wantedSize, m.Volume.WantedSize)
	c.adoptAttachments(m.Attachments)
}

// decide settles a command in doubt. At a higher version than it expects it
// can never be applied any more, so what the map shows is what became of it.
// At that version it may still be under way: it is sent again.
func (c *Core) decide(m Map) {
	switch {
	case m.Volume.Version == c.cmd.version:
		if c.holdSend {
			c.reads.wanted, c.reads.held = true, true
			return
		}
		c.holdSend = true // at the pace of the retries
		c.send()
	case c.cmd.in(m):
		c.applied()
	default:
		c.superseded()
	}
}

// in reports whether the map shows the command's effect.
func (k *command) in(m Map) bool {
	switch cmd := k.cmd.(type) {
	case Takeover:
		if m.Volume.CacheEpoch != k.epoch || !m.Opened {
			return false
		}
		for _, mb := range cmd.Members {
			if !slices.Contains(m.Members, mb) {
				return false
			}
		}
		return true
	case CommitRuns:
		for _, r := range cmd.Runs {
			i, ok := slices.BinarySearchFunc(m.Runs, r.Index, func(x Run, i block.RunIndex) int { return int(x.Index) - int(i) })
			if !ok || !slices.Equal(m.Runs[i].Disks, r.Disks) {
				return false
			}
		}
		return true
	case ConfirmSize:
		return m.Volume.Size >= cmd.Size
	case ConfirmDetach:
		return !slices.ContainsFunc(m.Attachments, func(a Attachment) bool { return a.ID == cmd.Attachment })
	}
	panic(fmt.Sprintf("primary: unknown command %T", k.cmd))
}

// applied carries out what the command in c.cmd decided.
func (c *Core) applied() {
	k := c.cmd
	c.cmd, c.holdSend = nil, false
	switch cmd := k.cmd.(type) {
	case Takeover:
		c.takenOver(cmd, k.epoch)
	case CommitRuns:
		c.birthsCommitted(cmd)
	case ConfirmSize:
		c.info.Size = cmd.Size
		c.report("VolumeResized", block.DiskID{}, "%d bytes are served", cmd.Size)
	case ConfirmDetach:
		c.forget(cmd.Attachment)
	}
}

// takenOver admits the members that are still as the takeover names them. If
// the cache epoch rose, older sessions end first.
func (c *Core) takenOver(cmd Takeover, epoch block.CacheEpoch) {
	c.opened = true
	if epoch > c.info.CacheEpoch {
		c.info.CacheEpoch = epoch
		c.report("CacheEpochRaised", block.DiskID{}, "acknowledged data that was never flushed may be lost; clients of before are refused")
		c.raiseEpoch()
	}
	for _, m := range cmd.Members {
		cp := c.copyOn(m.Disk)
		cp.record(m)
		if cp.state == copySealed && cp.sealed.Incarnation == m.Incarnation {
			cp.state = copyAdmitted
		}
	}
}

// superseded gives up a command that lost its version to another one. Whatever
// made it due makes its like due at the new version; births are durable already.
func (c *Core) superseded() {
	k := c.cmd
	c.cmd, c.holdSend = nil, false
	if _, ok := k.cmd.(CommitRuns); ok {
		c.births.phase = birthDurable
	}
}

// refused gives up a command that the state machine will not have.
func (c *Core) refused(err error) {
	k := c.cmd
	c.cmd = nil
	if _, ok := k.cmd.(CommitRuns); ok {
		c.birthsFailed(err)
	}
}
