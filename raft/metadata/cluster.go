package metadata

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

func (d *draft) initCluster(c *metapb.InitCluster) error {
	if d.cluster != nil {
		if proto.Equal(d.cluster, c) {
			return nil
		}
		return fmt.Errorf("%w: this is cluster %s with extents of %d bytes, %d default replicas and overcommit %d already",
			block.ErrExists, d.cluster.ClusterId, d.cluster.ExtentSize, d.cluster.DefaultReplicas, d.cluster.Overcommit)
	}
	if _, err := parseID("cluster", c.ClusterId); err != nil {
		return err
	}
	if err := (block.Geometry{ExtentSize: c.ExtentSize}).Validate(); err != nil {
		return err
	}
	if c.DefaultReplicas < 1 || c.DefaultReplicas > placement.MaxReplicas {
		return fmt.Errorf("%w: the default number of replicas must be 1 to %d, not %d",
			block.ErrInvalid, placement.MaxReplicas, c.DefaultReplicas)
	}
	if c.Overcommit > placement.MaxOvercommit {
		return fmt.Errorf("%w: the overcommit ratio must be at most %d, not %d", block.ErrInvalid, placement.MaxOvercommit, c.Overcommit)
	}
	d.cluster = proto.CloneOf(c)
	return nil
}

func (d *draft) putNode(c *metapb.PutNode) error {
	if c.Node == nil {
		return fmt.Errorf("%w: no node to register", block.ErrInvalid)
	}
	n := proto.CloneOf(c.Node)
	n.Up, n.SeenAt, n.Role = false, 0, metapb.Node_ROLE_UNSPECIFIED
	if err := checkNode(n); err != nil {
		return err
	}
	old := d.Node(n.Name)
	if err := keepDirectory(old, n, d.at); err != nil {
		return err
	}
	if !proto.Equal(old, n) {
		d.nodes = d.nodes.Set(n.Name, n)
	}
	if old.GetProcess() != n.Process || old == nil {
		d.emit(&metapb.Event{Type: NodeRegistered, Node: n.Name}, "node %q of rack %q started", n.Name, n.Rack)
	}
	if old != nil && old.Rack != n.Rack {
		d.emit(&metapb.Event{Type: NodeRackChanged, Node: n.Name}, "node %q moved from rack %q to rack %q with the data on its disks",
			n.Name, old.Rack, n.Rack)
	}
	listed, err := d.storeDisks(n.Name, c.Disks, c.MovedDisks)
	if err != nil {
		return err
	}
	d.giveUpDisks(n.Name, listed)
	return nil
}

// keepDirectory refuses a node whose server has another data directory than it
// registered with: a voter that forgot what it acknowledged could elect a
// leader that lacks it. A command of before the level knows no directories.
func keepDirectory(old, n *metapb.Node, level uint32) error {
	switch {
	case old.GetDirectory() == "":
	case level < LevelServers:
		n.Directory = old.Directory
	case n.Directory != old.Directory:
		return fmt.Errorf("%w: node %q is registered with another data directory: start its server with that one, give this one another name, "+
			"or, if that one is lost for good, `gabion node remove %s` first", block.ErrInUse, n.Name, n.Name)
	}
	return nil
}

func checkNode(n *metapb.Node) error {
	if err := ValidateNodeName(n.Name); err != nil {
		return err
	}
	if err := ValidateRack(n.Rack); err != nil {
		return fmt.Errorf("node %q: %w", n.Name, err)
	}
	return checkText(fmt.Sprintf("node %q", n.Name), n.MetadataAddress, n.RaftAddress, n.ReplicaAddress,
		n.NbdAddress, n.NbdSocket, n.Process, n.Version, n.Directory)
}

func (d *draft) putDisks(c *metapb.PutDisks) error {
	if d.Node(c.Node) == nil {
		return fmt.Errorf("%w: node %.300q is not registered", block.ErrNotFound, c.Node)
	}
	_, err := d.storeDisks(c.Node, c.Disks, nil)
	return err
}

// storeDisks stores what a node says of disks and returns their ids.
func (d *draft) storeDisks(node string, disks []*metapb.Disk, moved []string) (map[block.DiskID]bool, error) {
	if len(disks) > maxDisks {
		return nil, fmt.Errorf("%w: node %q reports %d disks in one command; at most %d are allowed",
			block.ErrTooLarge, node, len(disks), maxDisks)
	}
	listed := make(map[block.DiskID]bool, len(disks))
	for _, reported := range disks {
		id, err := parseDisk(reported.GetId())
		if err != nil {
			return nil, fmt.Errorf("node %q: %w", node, err)
		}
		if listed[id] {
			return nil, fmt.Errorf("%w: node %q reports disk %s twice", block.ErrInvalid, node, id)
		}
		listed[id] = true
		next := proto.CloneOf(reported)
		next.Node = node
		if err := checkDisk(next); err != nil {
			return nil, err
		}
		if err := d.storeDisk(id, next, slices.Contains(moved, next.Id)); err != nil {
			return nil, err
		}
	}
	return listed, nil
}

func checkDisk(d *metapb.Disk) error {
	switch {
	case d.State == metapb.Disk_STATE_UNSPECIFIED:
		return fmt.Errorf("%w: disk %s of node %q has no state", block.ErrInvalid, d.Id, d.Node)
	case d.Capacity < 0 || d.Available < 0 || d.Available > d.Capacity:
		return fmt.Errorf("%w: disk %s of node %q says %d of %d bytes are available",
			block.ErrInvalid, d.Id, d.Node, d.Available, d.Capacity)
	}
	if d.Incarnation != nil {
		if err := checkIncarnation(d.Incarnation); err != nil {
			return fmt.Errorf("disk %s of node %q: %w", d.Id, d.Node, err)
		}
	}
	return checkText("disk "+d.Id, d.Path, d.Problem, d.IoMode)
}

// storeDisk stores one disk. A disk of another node is refused: one identity
// in two places is a copy, and using both would mix two histories. It may change
// hands when its node gave it up, or is down as far as the leader knows.
func (d *draft) storeDisk(id block.DiskID, next *metapb.Disk, moved bool) error {
	old, known := d.disks.Get(id)
	if known && old.Node != next.Node && old.Node != "" && !moved {
		return fmt.Errorf("%w: disk %s at %q of node %q is at %q of node %q already: is one a copy of the other? "+
			"stop that node's server or remove the disk from it first",
			block.ErrInUse, id, next.Path, next.Node, old.Path, old.Node)
	}
	if known && proto.Equal(old.Disk, next) {
		return nil
	}
	number := old.number
	if !known {
		d.numbered = append(d.numbered, id)
		number = diskNumber(len(d.numbered))
	}
	d.disks = d.disks.Set(id, disk{Disk: next, number: number})
	if !known || old.State != next.State || old.Node != next.Node {
		d.emitDisk(next)
	}
	return nil
}

func (d *draft) emitDisk(disk *metapb.Disk) {
	e := &metapb.Event{Node: disk.Node, DiskId: disk.Id}
	switch disk.State {
	case metapb.Disk_FULL:
		e.Type = DiskFull
		d.emit(e, "disk %s at %q of node %q is full: add disks or delete data", disk.Id, disk.Path, disk.Node)
	case metapb.Disk_FAILED:
		e.Type = DiskFailed
		d.emit(e, "disk %s at %q of node %q failed: %s", disk.Id, disk.Path, disk.Node, disk.Problem)
	default:
		e.Type = DiskOnline
		d.emit(e, "disk %s at %q of node %q is online", disk.Id, disk.Path, disk.Node)
	}
}

// giveUpDisks takes from a node the disks that its registration did not list.
func (d *draft) giveUpDisks(node string, listed map[block.DiskID]bool) {
	d.orphanDisks(node, listed, fmt.Sprintf("node %q started without it", node))
}

// orphanDisks makes a node's disks nobody's, but for some.
func (d *draft) orphanDisks(node string, except map[block.DiskID]bool, why string) {
	for id, old := range entries(d.disks) {
		if old.Node != node || except[id] {
			continue
		}
		gone := proto.CloneOf(old.Disk)
		gone.Node, gone.State, gone.Available = "", metapb.Disk_FAILED, 0
		gone.Problem = why
		d.disks = d.disks.Set(id, disk{Disk: gone, number: old.number})
		d.emit(&metapb.Event{Type: DiskFailed, Node: node, DiskId: gone.Id},
			"disk %s at %q failed: %s", gone.Id, gone.Path, gone.Problem)
	}
}
