package metadata

import (
	"github.com/benbjohnson/immutable"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// loader builds a View from the records of a snapshot, in their order.
type loader struct {
	v     *View
	stage int // of the newest record; records come in rising stages

	disks   *immutable.SortedMapBuilder[block.DiskID, disk]
	volumes *immutable.SortedMapBuilder[block.VolumeID, *volume]
	names   *immutable.SortedMapBuilder[string, block.VolumeID]
	current *volume // whose runs come next
	runs    *immutable.SortedMapBuilder[block.RunIndex, replicas]
	lastRun int64
}

// The stages. A volume's runs belong to the stage of volumes.
const (
	stageNone = iota
	stageHead
	stageNodes
	stageDisks
	stageVolumes
	stageTombstones
	stageEvents
	stageConsumers
)

func newLoader(level uint32) *loader {
	v := emptyView()
	v.level = level
	return &loader{
		v:       v,
		disks:   immutable.NewSortedMapBuilder[block.DiskID, disk](byDisk{}),
		volumes: immutable.NewSortedMapBuilder[block.VolumeID, *volume](byVolume{}),
		names:   immutable.NewSortedMapBuilder[string, block.VolumeID](byString{}),
	}
}

func (l *loader) add(record *metapb.SnapshotRecord) error {
	switch k := record.GetKind().(type) {
	case *metapb.SnapshotRecord_Head:
		if l.stage != stageNone {
			return corrupt("it has two heads")
		}
		l.v.index, l.v.cluster = k.Head.Index, k.Head.Cluster
		l.v.events.forgotten = k.Head.ForgottenEvents
		return l.enter(stageHead)
	case *metapb.SnapshotRecord_Node:
		if l.v.Node(k.Node.Name) != nil {
			return corrupt("node %q is there twice", k.Node.Name)
		}
		l.v.nodes = l.v.nodes.Set(k.Node.Name, k.Node)
		return l.enter(stageNodes)
	case *metapb.SnapshotRecord_Disk:
		return l.addDisk(k.Disk)
	case *metapb.SnapshotRecord_Volume:
		return l.addVolume(k.Volume)
	case *metapb.SnapshotRecord_Runs:
		return l.addRuns(k.Runs)
	case *metapb.SnapshotRecord_Tombstone:
		id, err := parseVolume(k.Tombstone.VolumeId)
		if err != nil {
			return corrupt("%v", err)
		}
		if _, ok := l.v.Tombstone(id); ok {
			return corrupt("tombstone %s is there twice", id)
		}
		l.v.tombstones = l.v.tombstones.Set(id, k.Tombstone.Index)
		return l.enter(stageTombstones)
	case *metapb.SnapshotRecord_Event:
		l.v.events.kept = append(l.v.events.kept, k.Event)
		return l.enter(stageEvents)
	case *metapb.SnapshotRecord_Consumer:
		if l.v.Consumer(k.Consumer.Name) != nil {
			return corrupt("consumer %q is there twice", k.Consumer.Name)
		}
		l.v.consumers = l.v.consumers.Set(k.Consumer.Name, k.Consumer)
		return l.enter(stageConsumers)
	}
	return corrupt("it has an empty record")
}

// enter refuses a record that comes too late or before the head.
func (l *loader) enter(stage int) error {
	if stage < l.stage || l.stage == stageNone && stage != stageHead {
		return corrupt("its records are out of order")
	}
	l.stage = stage
	return nil
}

func (l *loader) addDisk(d *metapb.Disk) error {
	id, err := parseDisk(d.Id)
	if err != nil {
		return corrupt("%v", err)
	}
	if _, ok := l.disks.Get(id); ok {
		return corrupt("disk %s is there twice", id)
	}
	l.v.numbered = append(l.v.numbered, id)
	l.disks.Set(id, disk{Disk: d, number: diskNumber(len(l.v.numbered))})
	return l.enter(stageDisks)
}

func (l *loader) addVolume(r *metapb.SnapshotVolume) error {
	l.endVolume()
	id, err := parseVolume(r.GetVolume().GetId())
	if err != nil {
		return corrupt("%v", err)
	}
	v := &volume{id: id, Volume: r.Volume, grant: r.Grant, members: r.Members, attachments: r.Attachments}
	if _, ok := l.volumes.Get(id); ok {
		return corrupt("volume %s is there twice", id)
	}
	if _, ok := l.names.Get(v.Name); ok {
		return corrupt("two volumes are called %q", v.Name)
	}
	if err := ValidatePolicy(v.Policy); err != nil {
		return corrupt("volume %q: %v", v.Name, err)
	}
	if v.Format == metapb.Volume_FORMAT_UNSPECIFIED {
		v.Format = metapb.Volume_NONE
	}
	l.volumes.Set(id, v)
	l.names.Set(v.Name, id)
	sums := draft{View: *l.v}
	sums.promise(v.Volume, v.WantedSize)
	for _, a := range v.attachments {
		sums.countAttachment(a.Node, 1)
	}
	*l.v = sums.View
	l.current, l.lastRun = v, -1
	l.runs = immutable.NewSortedMapBuilder[block.RunIndex, replicas](byRun{})
	return l.enter(stageVolumes)
}

func (l *loader) addRuns(r *metapb.SnapshotRuns) error {
	if l.current == nil || l.stage != stageVolumes {
		return corrupt("it has runs of no volume")
	}
	if len(r.Index) == 0 || len(r.Disk)%len(r.Index) != 0 || len(r.Disk)/len(r.Index) > len(replicas{}) {
		return corrupt("volume %q has %d runs on %d disks in one record", l.current.Name, len(r.Index), len(r.Disk))
	}
	width := len(r.Disk) / len(r.Index)
	for i, index := range r.Index {
		if int64(index) <= l.lastRun {
			return corrupt("the runs of volume %q are out of order", l.current.Name)
		}
		l.lastRun = int64(index)
		var disks replicas
		for j, number := range r.Disk[i*width : (i+1)*width] {
			if number == 0 || int64(number) > int64(len(l.v.numbered)) {
				return corrupt("run %d of volume %q is on disk number %d of %d", index, l.current.Name, number, len(l.v.numbered))
			}
			disks[j] = diskNumber(number)
		}
		l.runs.Set(block.RunIndex(index), disks)
	}
	return nil
}

func (l *loader) endVolume() {
	if l.current != nil {
		l.current.runs = l.runs.Map()
	}
	l.current = nil
}

// finish returns the state if it holds all invariants.
func (l *loader) finish() (*View, error) {
	l.endVolume()
	if l.stage == stageNone {
		return nil, corrupt("it has no head")
	}
	l.v.disks, l.v.volumes, l.v.names = l.disks.Map(), l.volumes.Map(), l.names.Map()
	if err := Check(l.v); err != nil {
		return nil, corrupt("%v", err)
	}
	return l.v, nil
}
