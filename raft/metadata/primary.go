package metadata

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

func (d *draft) grantPrimary(c *metapb.GrantPrimary) (*metapb.Grant, error) {
	v, err := d.find(c.VolumeId)
	if err != nil {
		return nil, err
	}
	n := d.Node(c.Node)
	if n == nil {
		return nil, fmt.Errorf("%w: node %.300q is not registered", block.ErrNotFound, c.Node)
	}
	if n.Process != c.Process {
		return nil, fmt.Errorf("%w: node %q runs another server process now", block.ErrStale, c.Node)
	}
	next := v.changed()
	next.grant = &metapb.Grant{Generation: v.grant.GetGeneration() + 1, Node: c.Node, Process: c.Process}
	d.store(next)
	d.emitVolume(PrimaryGranted, next, c.Node, "node %q is the primary of volume %q in generation %d", c.Node, v.Name, next.grant.Generation)
	return next.grant, nil
}

// applyFenced applies a primary's command. Each success raises the version, so
// that a later one at the same version is refused and its outcome thereby known.
func (d *draft) applyFenced(c *metapb.FencedCommand) (*metapb.Volume, error) {
	v, err := d.find(c.Fence.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := v.checkFence(c.Fence); err != nil {
		return nil, err
	}
	takeover := c.GetTakeover()
	if takeover == nil && !v.grant.Opened {
		return nil, fmt.Errorf("%w: volume %q was not taken over in generation %d yet", block.ErrPrecondition, v.Name, v.grant.Generation)
	}
	next := v.changed()
	switch k := c.GetKind().(type) {
	case *metapb.FencedCommand_Takeover:
		err = d.takeover(next, takeover)
	case *metapb.FencedCommand_CommitRuns:
		err = d.commitRuns(next, k.CommitRuns)
	case *metapb.FencedCommand_ConfirmSize:
		err = d.confirmSize(next, k.ConfirmSize.GetSize())
	case *metapb.FencedCommand_ConfirmDetach:
		err = d.confirmDetach(next, k.ConfirmDetach.GetAttachmentId())
	}
	if err != nil {
		return nil, err
	}
	return d.store(next), nil
}

func (v *volume) checkFence(f *metapb.Fence) error {
	if v.unserved() || f.Generation != v.grant.Generation {
		return fmt.Errorf("%w: volume %q is in generation %d with primary %q, not in generation %d",
			block.ErrStale, v.Name, v.grant.GetGeneration(), v.grant.GetNode(), f.Generation)
	}
	if f.Version != v.Version {
		return fmt.Errorf("%w: volume %q is at version %d, not %d: read the whole map again", block.ErrStale, v.Name, v.Version, f.Version)
	}
	return nil
}

// takeover is all of a takeover at once: a primary that dies half-way must not
// leave an incarnation recorded without the cache epoch it should have raised.
func (d *draft) takeover(v *volume, c *metapb.Takeover) error {
	members := make([]*metapb.Member, 0, len(c.Members))
	for _, m := range c.Members {
		next, err := d.admit(v, m)
		if err != nil {
			return err
		}
		members = append(members, next)
	}
	if err := sortMembers(v, members); err != nil {
		return err
	}
	old, leaves := v.members, false
	v.members = members
	for _, m := range old {
		now := v.member(m.DiskId)
		if now == nil {
			return fmt.Errorf("%w: the takeover of volume %q leaves out member %s", block.ErrInvalid, v.Name, m.DiskId)
		}
		leaves = leaves || m.State == metapb.Member_IN && now.State != metapb.Member_IN
	}
	if leaves {
		if err := d.checkInMembers(v); err != nil {
			return err
		}
	}
	if !v.grant.Opened {
		v.grant = proto.CloneOf(v.grant)
		v.grant.Opened = true
		d.emitVolume(PrimaryOpened, v, v.grant.Node, "node %q took over volume %q in generation %d", v.grant.Node, v.Name, v.grant.Generation)
	}
	if c.RaiseCacheEpoch {
		v.CacheEpoch++
		d.emitVolume(CacheEpochRaised, v, v.grant.Node,
			"volume %q may have lost writes that were not flushed: older sessions are refused, cache epoch %d", v.Name, v.CacheEpoch)
	}
	return nil
}

// admit is what a member's standing becomes by a takeover.
func (d *draft) admit(v *volume, m *metapb.Member) (*metapb.Member, error) {
	id, err := parseDisk(m.GetDiskId())
	if err != nil {
		return nil, err
	}
	if d.Disk(id) == nil {
		return nil, fmt.Errorf("%w: volume %q cannot have member %s: no such disk", block.ErrNotFound, v.Name, id)
	}
	old := v.member(m.DiskId)
	next := proto.CloneOf(m)
	switch now := m.AdmittedGeneration == v.grant.Generation; {
	case m.State == metapb.Member_IN && now:
		if old.GetState() == metapb.Member_OUT && d.holds(v, id) {
			return nil, fmt.Errorf("%w: member %s of volume %q is out: what it missed must be repaired before it is admitted",
				block.ErrPrecondition, id, v.Name)
		}
		return next, checkAdmission(v, m)
	case old == nil:
		return nil, fmt.Errorf("%w: disk %s is no member of volume %q and not admitted in generation %d",
			block.ErrInvalid, id, v.Name, v.grant.Generation)
	case m.State == metapb.Member_IN && (old.State != metapb.Member_IN || m.AdmittedGeneration != old.AdmittedGeneration):
		return nil, fmt.Errorf("%w: member %s of volume %q is neither admitted in generation %d nor as recorded (%s, admitted in %d)",
			block.ErrInvalid, id, v.Name, v.grant.Generation, old.State, old.AdmittedGeneration)
	case m.State == metapb.Member_STATE_UNSPECIFIED:
		return nil, fmt.Errorf("%w: member %s of volume %q has no state", block.ErrInvalid, id, v.Name)
	}
	next.Incarnation, next.AdmittedGeneration = old.Incarnation, old.AdmittedGeneration
	return next, nil
}

// holds reports whether any run of a volume lies on a disk.
func (d *draft) holds(v *volume, id block.DiskID) bool {
	disk, _ := d.disks.Get(id)
	for _, r := range entries(v.runs) {
		if slices.Contains(r[:], disk.number) {
			return true
		}
	}
	return false
}

// checkAdmission refuses an admission that does not say whom it admits.
func checkAdmission(v *volume, m *metapb.Member) error {
	if m.GetIncarnation() == nil {
		return fmt.Errorf("%w: member %s of volume %q is admitted without an incarnation", block.ErrInvalid, m.DiskId, v.Name)
	}
	if err := checkIncarnation(m.Incarnation); err != nil {
		return fmt.Errorf("member %s of volume %q: %w", m.DiskId, v.Name, err)
	}
	return nil
}

// sortMembers puts members into the order of their ids and refuses one that is there twice.
func sortMembers(v *volume, members []*metapb.Member) error {
	slices.SortFunc(members, func(a, b *metapb.Member) int { return strings.Compare(a.DiskId, b.DiskId) })
	for i := range members[:max(len(members)-1, 0)] {
		if members[i].DiskId == members[i+1].DiskId {
			return fmt.Errorf("%w: member %s of volume %q is there twice", block.ErrInvalid, members[i].DiskId, v.Name)
		}
	}
	return nil
}

// member is the member of a disk id, nil if there is none.
func (v *volume) member(disk string) *metapb.Member {
	i, ok := slices.BinarySearchFunc(v.members, disk, func(m *metapb.Member, id string) int { return strings.Compare(m.DiskId, id) })
	if !ok {
		return nil
	}
	return v.members[i]
}

// checkInMembers refuses to leave a run without a member that is in: nobody
// but an operator gives up the last copy.
func (d *draft) checkInMembers(v *volume) error {
	in := make(map[diskNumber]bool, len(v.members))
	for _, m := range v.members {
		if id, err := parseDisk(m.DiskId); err == nil && m.State == metapb.Member_IN {
			disk, _ := d.disks.Get(id)
			in[disk.number] = true
		}
	}
	for index, r := range entries(v.runs) {
		if !slices.ContainsFunc(r[:], func(n diskNumber) bool { return in[n] }) {
			return fmt.Errorf("%w: run %d of volume %q would lose its last member", block.ErrPrecondition, index, v.Name)
		}
	}
	return nil
}

func (d *draft) confirmSize(v *volume, size int64) error {
	if err := block.ValidateSize(size); err != nil {
		return fmt.Errorf("volume %q: %w", v.Name, err)
	}
	if size < v.Size || size > v.WantedSize {
		return fmt.Errorf("%w: volume %q cannot be confirmed at %d bytes: it has %d and is to have %d",
			block.ErrInvalid, v.Name, size, v.Size, v.WantedSize)
	}
	if size > v.Size {
		d.emitVolume(VolumeGrown, v, v.grant.Node, "volume %q grew from %d to %d bytes", v.Name, v.Size, size)
	}
	v.Size = size
	return nil
}

func (d *draft) confirmDetach(v *volume, id string) error {
	i := v.attachment(id)
	if i < 0 {
		return nil
	}
	if !v.attachments[i].Revoking {
		return fmt.Errorf("%w: nobody asked to detach volume %q from node %q", block.ErrPrecondition, v.Name, v.attachments[i].Node)
	}
	d.detach(v, i)
	return nil
}
