package placement

import (
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// feasible returns ErrPrecondition unless the cell has as many nodes with disks
// as the policy has replicas, and ErrNoSpace if it has but their disks are full,
// or if rack is not empty and has too few. Which nodes are up is not asked.
func (c Cell) feasible(p *metapb.Policy, rack string) error {
	want, counts := int(p.GetReplicas()), c.counts()
	all := counts[rack]
	if rack == "" && p.GetAccess() == metapb.Policy_SAME_RACK {
		all = nodeCount{}
		for _, n := range c.Nodes {
			in := counts[n.Rack]
			all.usable, all.online = max(all.usable, in.usable), max(all.online, in.online)
		}
	}
	switch {
	case all.usable < want && rack != "":
		return tooFewNodes(p, rack, all.usable, block.ErrNoSpace)
	case all.usable < want:
		return tooFewNodes(p, "", all.usable, block.ErrPrecondition)
	case all.online < want:
		return fmt.Errorf("%w: %s asked for, %s a disk that is not full%s: add disks or delete data",
			block.ErrNoSpace, asked(p), have(all.online), inRack(rack))
	}
	return nil
}

// racks are the racks of the nodes, in order.
func (c Cell) racks() []string {
	var racks []string
	for _, n := range c.Nodes {
		racks = append(racks, n.Rack)
	}
	slices.Sort(racks)
	return slices.Compact(racks)
}

// nodeCount is how many nodes there are of each kind, each kind among the one before.
type nodeCount struct {
	usable int // with a disk that is not failed
	online int // with a disk that is not full either
}

// counts counts the nodes of each rack, and under "" those of the cell.
func (c Cell) counts() map[string]nodeCount {
	nodes := map[string]nodeCount{} // each 0 or 1
	for _, d := range c.Disks {
		if d.Node != "" && d.State != metapb.Disk_FAILED {
			n := nodes[d.Node]
			n.usable = 1
			if d.State == metapb.Disk_ONLINE {
				n.online = 1
			}
			nodes[d.Node] = n
		}
	}
	racks := map[string]nodeCount{}
	for _, n := range c.Nodes {
		for _, rack := range []string{"", n.Rack} {
			sum := racks[rack]
			sum.usable += nodes[n.Name].usable
			sum.online += nodes[n.Name].online
			racks[rack] = sum
		}
	}
	return racks
}

// shortage says why a request cannot be placed now, nil if it can.
func (p *placer) shortage(c Cell) error {
	policy, want := p.q.Policy, int(p.q.Policy.GetReplicas())
	up, room := len(p.nodes), 0
	for _, has := range p.nodes {
		if has {
			room++
		}
	}
	registered := c.counts()[p.rack].usable
	switch {
	case room >= want:
		return nil
	case registered < want:
		return tooFewNodes(policy, p.rack, registered, block.ErrPrecondition)
	case up < want:
		return fmt.Errorf("%w: %s asked for, %d of %d nodes with disks%s can be reached: start the others or add nodes",
			block.ErrUnavailable, asked(policy), up, registered, inRack(p.rack))
	}
	return fmt.Errorf("%w: %s asked for, %s a disk with room%s: add disks or delete data",
		block.ErrNoSpace, asked(policy), have(room), inRack(p.rack))
}

func tooFewNodes(p *metapb.Policy, rack string, nodes int, sentinel error) error {
	remedy := fmt.Sprintf("add nodes or use --replicas %d", nodes)
	where := inRack(rack)
	switch {
	case nodes == 0:
		remedy = "start a server with --disk"
	case p.GetAccess() == metapb.Policy_SAME_RACK:
		remedy += " or --access cluster"
		if rack == "" {
			where = " in any one rack"
		}
	}
	return fmt.Errorf("%w: %s asked for, %s a usable disk%s: %s", sentinel, asked(p), have(nodes), where, remedy)
}

func asked(p *metapb.Policy) string {
	if n := p.GetReplicas(); n != 1 {
		return fmt.Sprintf("%d replicas on distinct nodes were", n)
	}
	return "1 replica was"
}

func have(nodes int) string {
	switch nodes {
	case 0:
		return "no node has"
	case 1:
		return "1 node has"
	}
	return fmt.Sprintf("%d nodes have", nodes)
}

func inRack(rack string) string {
	if rack == "" {
		return ""
	}
	return fmt.Sprintf(" in rack %q", rack)
}
