package primary

import (
	"fmt"

	"github.com/gabion-storage/gabion/server/block"
)

// VolumeStatus is one open volume in numbers, for metrics and people.
type VolumeStatus struct {
	ID         block.VolumeID
	Name       string
	Size       int64
	Generation block.Generation
	CacheEpoch block.CacheEpoch
	// Problem says in one sentence what is wrong; empty: all is well. Remedy says what to do about it.
	Problem, Remedy string

	Ops      [block.OpCache + 1]int64 // answered since the volume was opened, by block.Op
	Bytes    [block.OpCache + 1]int64 // of those that succeeded
	Errors   [block.OpCache + 1]int64 // of those, failed
	Sessions int                      // open connections
	InFlight int                      // requests handed to members
	Queued   int                      // waiting for a conflicting one
	Blocked  int                      // waiting for a member
	Births   int                      // waiting for the first placement of their range
	Space    int                      // waiting for space
	Syncing  int                      // waiting for a sync
}

// stats counts what was answered.
type stats struct {
	ops, bytes, errors [block.OpCache + 1]int64
}

func (s *stats) add(r *block.Request) {
	if r.Op > block.OpCache {
		return
	}
	s.ops[r.Op]++
	if r.Err != nil {
		s.errors[r.Op]++
		return
	}
	s.bytes[r.Op] += r.Length
}

// requests is how many were answered.
func (s *stats) requests() (n int64) {
	for _, k := range s.ops {
		n += k
	}
	return n
}

// Status is a snapshot.
func (c *Core) Status() VolumeStatus {
	s := VolumeStatus{
		ID: c.info.ID, Name: c.info.Name, Size: c.info.Size, Generation: c.generation, CacheEpoch: c.info.CacheEpoch,
		Ops: c.stats.ops, Bytes: c.stats.bytes, Errors: c.stats.errors,
		InFlight: c.count[opRunning], Queued: c.count[opQueued], Blocked: c.count[opBlocked],
		Births: c.count[opBirth], Space: c.count[opSpace], Syncing: c.count[opSyncing],
	}
	for _, a := range c.attachments {
		for _, cn := range a.conns {
			if cn.state == connOpen {
				s.Sessions++
			}
		}
	}
	s.Problem, s.Remedy = c.diagnose()
	return s
}

// diagnose is the worst that is wrong, and what to do.
func (c *Core) diagnose() (problem, remedy string) {
	if c.over != nil {
		return "The volume is not served here any more: " + c.over.Error() + ".", "Clients reconnect by themselves."
	}
	for _, cp := range c.copies {
		if cp.counts() && cp.problem != "" {
			return fmt.Sprintf("Disk %s is away (%s): requests to %d runs of it, and every flush, wait.", cp.Disk, cp.problem, cp.runs),
				"Bring the disk back; requests go on by themselves."
		}
	}
	for _, cp := range c.copies {
		if n := len(cp.sealed.Lost); n > 0 && cp.counts() {
			return fmt.Sprintf("%d extents on disk %s have no good record: requests to them wait.", n, cp.Disk),
				"Restore the volume from a backup, or detach it."
		}
	}
	switch {
	case c.short.told || c.short.on && c.waitForSpace() > 0: // told: also while they are tried again
		return "Writes wait for space.",
			"Delete or trim something, or add a disk; the writes go on by themselves."
	case c.problem != "":
		return "New " + c.problem + ".", "It is tried again twice a second."
	case !c.serving:
		return "The volume is being opened.", "Wait; it takes as long as its disks and the metadata service take to answer."
	}
	return "", ""
}
