package metadata

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// commitRuns makes runs born whose births are durable on all of their disks.
func (d *draft) commitRuns(v *volume, c *metapb.CommitRuns) error {
	if len(c.Runs) > maxRuns {
		return fmt.Errorf("%w: %d runs of volume %q in one command; at most %d are allowed", block.ErrTooLarge, len(c.Runs), v.Name, maxRuns)
	}
	sealed := make(map[string]*metapb.Member, len(c.Members))
	for _, m := range c.Members {
		if m.State != metapb.Member_IN || m.AdmittedGeneration != v.grant.Generation {
			return fmt.Errorf("%w: new member %s of volume %q is not admitted in generation %d",
				block.ErrInvalid, m.DiskId, v.Name, v.grant.Generation)
		}
		if err := checkAdmission(v, m); err != nil {
			return err
		}
		sealed[m.DiskId] = m
	}
	last := block.RunIndex(d.Geometry().Runs(v.WantedSize) - 1)
	for _, run := range c.Runs {
		if block.RunIndex(run.Index) > last {
			return fmt.Errorf("%w: volume %q has no run %d, the last is %d", block.ErrInvalid, v.Name, run.Index, last)
		}
		if err := d.commitRun(v, run, sealed); err != nil {
			return err
		}
	}
	return nil
}

func (d *draft) commitRun(v *volume, run *metapb.Run, sealed map[string]*metapb.Member) error {
	index := block.RunIndex(run.Index)
	r, err := d.replicas(v, run)
	if err != nil {
		return err
	}
	if born, ok := v.runs.Get(index); ok {
		if born == r {
			return nil
		}
		return fmt.Errorf("%w: run %d of volume %q was born on %v, not on %v",
			block.ErrStale, index, v.Name, d.run(index, born).Disks, run.Disks)
	}
	for i, id := range run.Disks {
		if err := d.joinAtBirth(v, id, r[i], sealed[id]); err != nil {
			return err
		}
	}
	v.runs = v.runs.Set(index, r)
	return nil
}

// replicas translates the disks of a run and checks that they are as many as
// the policy says, on distinct nodes. Racks are the leader's choice: which of
// them have a node that is up is not part of the state.
func (d *draft) replicas(v *volume, run *metapb.Run) (replicas, error) {
	var r replicas
	if len(run.Disks) != int(v.Policy.Replicas) {
		return r, fmt.Errorf("%w: run %d of volume %q is on %d disks, its policy says %d",
			block.ErrInvalid, run.Index, v.Name, len(run.Disks), v.Policy.Replicas)
	}
	nodes := make([]string, 0, len(r))
	for i, text := range run.Disks {
		id, err := parseDisk(text)
		if err != nil {
			return r, err
		}
		disk, ok := d.disks.Get(id)
		if !ok || disk.Node == "" {
			return r, fmt.Errorf("%w: run %d of volume %q is on disk %s, which no node has", block.ErrNotFound, run.Index, v.Name, id)
		}
		for _, n := range nodes {
			if n == disk.Node {
				return r, fmt.Errorf("%w: run %d of volume %q has two replicas on node %q", block.ErrInvalid, run.Index, v.Name, n)
			}
		}
		nodes = append(nodes, disk.Node)
		r[i] = disk.number
	}
	return r, nil
}

// joinAtBirth makes sure that a disk counts for the run that is born on it.
// Without the incarnation that the primary sealed, the registered one is as
// good: nothing was acknowledged on a disk before its first run is committed.
func (d *draft) joinAtBirth(v *volume, id string, number diskNumber, sealed *metapb.Member) error {
	m := v.member(id)
	switch {
	case m == nil && sealed != nil:
		m = proto.CloneOf(sealed)
	case m == nil:
		disk := d.Disk(d.numbered[number-1])
		m = &metapb.Member{DiskId: id, State: metapb.Member_IN, AdmittedGeneration: v.grant.Generation,
			Incarnation: proto.CloneOf(disk.Incarnation)}
	case m.State != metapb.Member_IN:
		return fmt.Errorf("%w: disk %s is out of volume %q: place the run on another", block.ErrPrecondition, id, v.Name)
	case m.AdmittedGeneration != v.grant.Generation:
		return fmt.Errorf("%w: disk %s of volume %q is not admitted in generation %d: place the run on another",
			block.ErrPrecondition, id, v.Name, v.grant.Generation)
	default:
		return nil
	}
	members := append(append(make([]*metapb.Member, 0, len(v.members)+1), v.members...), m)
	if err := sortMembers(v, members); err != nil {
		return err
	}
	v.members = members
	return nil
}
