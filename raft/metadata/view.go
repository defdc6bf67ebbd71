package metadata

import (
	"iter"
	"math"
	"slices"

	"github.com/benbjohnson/immutable"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

// View is the whole state at one log index. It never changes and is safe for
// any number of readers; it keeps alive what it refers to, so it is not for
// keeping long.
type View struct {
	index   uint64
	cluster *metapb.InitCluster

	nodes      *immutable.SortedMap[string, *metapb.Node]
	disks      *immutable.SortedMap[block.DiskID, disk]
	numbered   []block.DiskID // the disk with number n at n-1; only grows
	volumes    *immutable.SortedMap[block.VolumeID, *volume]
	names      *immutable.SortedMap[string, block.VolumeID] // of exactly the volumes
	tombstones *immutable.SortedMap[block.VolumeID, uint64]
	consumers  *immutable.SortedMap[string, *metapb.Consumer]
	events     ring
	level      uint32 // the highest of the commands that made this state

	// Sums over the volumes.
	demand      placement.Demand                               // of those that may lie anywhere
	pinned      *immutable.SortedMap[string, placement.Demand] // of those that lie in one rack, by rack; none is zero
	loads       *immutable.SortedMap[string, int]              // attachments by node; none is zero
	attachments int
}

// disk is a disk with its number.
type disk struct {
	*metapb.Disk
	number diskNumber
}

// diskNumber stands for a disk in runs; 0 is none.
type diskNumber uint32

// replicas are the disks of a run, the rest 0. It is a value of 12 bytes, not
// a slice, because a cell has a million of them.
type replicas [placement.MaxReplicas]diskNumber

// runs are the born runs of a volume.
type runs = immutable.SortedMap[block.RunIndex, replicas]

// volume is all of a volume. Like all that a View refers to it is never
// modified: a command stores a changed copy.
type volume struct {
	*metapb.Volume
	id          block.VolumeID
	grant       *metapb.Grant        // nil: never granted; without a node: that was removed
	members     []*metapb.Member     // by disk id
	attachments []*metapb.Attachment // by node
	runs        *runs
}

// unserved reports whether a volume has no primary that could confirm anything:
// it was never granted, or the node was removed.
func (v *volume) unserved() bool { return v.grant.GetNode() == "" }

// Index is the log index of the last command applied, 0 before the first.
func (v *View) Index() uint64 { return v.index }

// Cluster is what InitCluster set, nil before.
func (v *View) Cluster() *metapb.InitCluster { return v.cluster }

// Geometry is the cluster's; the zero Geometry before InitCluster.
func (v *View) Geometry() block.Geometry {
	return block.Geometry{ExtentSize: v.cluster.GetExtentSize()}
}

// CommonLevel is the lowest feature level that any node announced, 0 without nodes.
func (v *View) CommonLevel() uint32 {
	if v.nodes.Len() == 0 {
		return 0
	}
	level := uint32(math.MaxUint32)
	for n := range values(v.nodes) {
		level = min(level, n.FeatureLevel)
	}
	return level
}

// Level is the feature level of commands that are proposed now: what all nodes
// have announced, and never less than what was applied already.
func (v *View) Level() uint32 {
	return max(v.level, min(v.CommonLevel(), Level))
}

// Node is the node of a name, nil if there is none. Up and SeenAt are never set: the leader alone knows them.
func (v *View) Node(name string) *metapb.Node {
	n, _ := v.nodes.Get(name)
	return n
}

// Nodes are all nodes by name.
func (v *View) Nodes() []*metapb.Node { return slices.Collect(values(v.nodes)) }

// Disk is the disk of an id, nil if there is none.
func (v *View) Disk(id block.DiskID) *metapb.Disk {
	d, _ := v.disks.Get(id)
	return d.Disk
}

// Disks are all disks by id.
func (v *View) Disks() []*metapb.Disk {
	all := make([]*metapb.Disk, 0, v.disks.Len())
	for d := range values(v.disks) {
		all = append(all, d.Disk)
	}
	return all
}

// Volume is the live volume of an id, nil if there is none.
func (v *View) Volume(id block.VolumeID) *metapb.Volume {
	if vol, ok := v.volumes.Get(id); ok {
		return vol.Volume
	}
	return nil
}

// VolumeByName is the live volume of a name, nil if there is none.
func (v *View) VolumeByName(name string) *metapb.Volume {
	if id, ok := v.names.Get(name); ok {
		return v.Volume(id)
	}
	return nil
}

// Position is a place in the order of (name, id), which pages of volumes follow.
type Position struct {
	Name string
	ID   block.VolumeID
}

// Volumes are at most limit live volumes behind a position, in order, all of
// them if limit is 0. The zero Position is before the first. A volume that
// exists throughout is on exactly one page, whatever comes and goes between.
func (v *View) Volumes(after Position, limit int) []*metapb.Volume {
	var page []*metapb.Volume
	it := v.names.Iterator()
	for it.Seek(after.Name); !it.Done() && (limit <= 0 || len(page) < limit); {
		name, id, _ := it.Next()
		if name != after.Name || compareIDs(id.UUID, after.ID.UUID) > 0 {
			page = append(page, v.Volume(id))
		}
	}
	return page
}

// VolumeCount is how many live volumes there are.
func (v *View) VolumeCount() int { return v.volumes.Len() }

// AttachmentCount is how many attachments there are.
func (v *View) AttachmentCount() int { return v.attachments }

// Grant is a volume's current grant, nil if it was never granted or is not live.
func (v *View) Grant(id block.VolumeID) *metapb.Grant {
	if vol, ok := v.volumes.Get(id); ok {
		return vol.grant
	}
	return nil
}

// Members are a volume's members by disk id.
func (v *View) Members(id block.VolumeID) []*metapb.Member {
	if vol, ok := v.volumes.Get(id); ok {
		return vol.members
	}
	return nil
}

// Attachments are a volume's attachments by node, with their tokens.
func (v *View) Attachments(id block.VolumeID) []*metapb.Attachment {
	if vol, ok := v.volumes.Get(id); ok {
		return vol.attachments
	}
	return nil
}

// Attachment is the attachment of a volume to a node, with its token, nil if there is none.
func (v *View) Attachment(id block.VolumeID, node string) *metapb.Attachment {
	for _, a := range v.Attachments(id) {
		if a.Node == node {
			return a
		}
	}
	return nil
}

// Load is how many volumes are attached to a node.
func (v *View) Load(node string) int {
	n, _ := v.loads.Get(node)
	return n
}

// Consumer is the consumer of a name, nil if none was registered.
func (v *View) Consumer(name string) *metapb.Consumer {
	c, _ := v.consumers.Get(name)
	return c
}

// MaxVolumes is how many volumes are attached to a node at most.
func (v *View) MaxVolumes(node string) int64 { return maxVolumes(v.Consumer(node)) }

// Consumers are all consumers by name.
func (v *View) Consumers() []*metapb.Consumer { return slices.Collect(values(v.consumers)) }

// KnowsRack reports whether a node or a consumer is in a rack.
func (v *View) KnowsRack(rack string) bool {
	for n := range values(v.nodes) {
		if n.Rack == rack {
			return true
		}
	}
	for c := range values(v.consumers) {
		if c.Rack == rack {
			return true
		}
	}
	return false
}

// Run is a born run of a volume, nil if it is unborn.
func (v *View) Run(id block.VolumeID, index block.RunIndex) *metapb.Run {
	vol, ok := v.volumes.Get(id)
	if !ok {
		return nil
	}
	if r, born := vol.runs.Get(index); born {
		return v.run(index, r)
	}
	return nil
}

// Runs are the born runs of a volume by index, made one by one.
func (v *View) Runs(id block.VolumeID) iter.Seq[*metapb.Run] {
	return func(yield func(*metapb.Run) bool) {
		vol, ok := v.volumes.Get(id)
		if !ok {
			return
		}
		for index, r := range entries(vol.runs) {
			if !yield(v.run(index, r)) {
				return
			}
		}
	}
}

func (v *View) run(index block.RunIndex, r replicas) *metapb.Run {
	run := &metapb.Run{Index: uint32(index), Disks: make([]string, 0, len(r))}
	for _, n := range r {
		if n != 0 {
			run.Disks = append(run.Disks, v.numbered[n-1].String())
		}
	}
	return run
}

// RunCount is how many runs of a volume are born.
func (v *View) RunCount(id block.VolumeID) int {
	if vol, ok := v.volumes.Get(id); ok {
		return vol.runs.Len()
	}
	return 0
}

// BornExtents is how many extents of a volume the born runs cover.
func (v *View) BornExtents(id block.VolumeID) int64 {
	vol, ok := v.volumes.Get(id)
	if !ok || vol.runs.Len() == 0 {
		return 0
	}
	g := v.Geometry()
	born := int64(vol.runs.Len()) * block.ExtentsPerRun
	last := g.Runs(vol.WantedSize) - 1
	if _, ok := vol.runs.Get(block.RunIndex(last)); ok {
		born -= (last+1)*block.ExtentsPerRun - g.Extents(vol.WantedSize)
	}
	return born
}

// Map is the whole map of a volume, nil if it is not live. Its attachments
// carry digests, never tokens.
func (v *View) Map(id block.VolumeID) *metapb.VolumeMap {
	vol, ok := v.volumes.Get(id)
	if !ok {
		return nil
	}
	m := &metapb.VolumeMap{Index: v.index, Volume: vol.Volume, Grant: vol.grant, Members: vol.members}
	m.Runs = slices.AppendSeq(make([]*metapb.Run, 0, vol.runs.Len()), v.Runs(id))
	for _, a := range vol.attachments {
		m.Attachments = append(m.Attachments, WithoutToken(a))
	}
	return m
}

// Tombstone is the index at which the volume of an id was deleted; ok is false if none was.
func (v *View) Tombstone(id block.VolumeID) (index uint64, ok bool) { return v.tombstones.Get(id) }

// Events are the kept events with an index above after, in order. ok is false
// if some of those are not kept any more: the caller reads anew.
func (v *View) Events(after uint64) (events []*metapb.Event, ok bool) { return v.events.after(after) }

// Provisioned is the bytes promised to all volumes, replicas included.
func (v *View) Provisioned() int64 { return v.Promises().Total() }

// Promises is what was promised to all volumes.
func (v *View) Promises() placement.Promises {
	p := placement.Promises{Free: v.demand, Racks: make(map[string]placement.Demand, v.pinned.Len())}
	for rack, d := range entries(v.pinned) {
		p.Racks[rack] = d
	}
	return p
}

// Capacity is what can still be promised to volumes with so many replicas in
// the cell, or, if it is not empty, in a rack.
func (v *View) Capacity(rack string, replicas int) placement.Capacity {
	return v.cell().Capacity(v.Promises(), rack, replicas)
}

// CapacityOfRacks is what can still be promised to volumes that lie in one rack, whichever.
func (v *View) CapacityOfRacks(replicas int) placement.Capacity {
	return v.cell().CapacityOfRacks(v.Promises(), replicas)
}

// RackOf is a volume's rack, placement.Request.Rack: the one it was created
// for, else that of its members, empty if it has none.
func (v *View) RackOf(id block.VolumeID) string {
	if rack := v.Volume(id).GetRack(); rack != "" {
		return rack
	}
	for _, m := range v.Members(id) {
		if d, err := parseDisk(m.DiskId); err == nil {
			if n := v.Node(v.Disk(d).GetNode()); n != nil {
				return n.Rack
			}
		}
	}
	return ""
}

func (v *View) cell() placement.Cell {
	return placement.Cell{Nodes: v.Nodes(), Disks: v.Disks(), Overcommit: v.cluster.GetOvercommit()}
}
