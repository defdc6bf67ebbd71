package placement

import (
	"fmt"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Feasible returns ErrPrecondition unless the cell, or one of its racks for
// access SAME_RACK, has as many nodes with disks as the policy has replicas,
// and ErrNoSpace if it has but their disks are full. Which nodes are up is not asked.
func (c Cell) Feasible(p *metapb.Policy) error {
	want := int(p.GetReplicas())
	all := c.count("")
	if p.GetAccess() == metapb.Policy_SAME_RACK {
		all = nodeCount{}
		for _, n := range c.Nodes {
			in := c.count(n.Rack)
			all.usable, all.online = max(all.usable, in.usable), max(all.online, in.online)
		}
	}
	switch {
	case all.usable < want:
		return tooFewNodes(p, "", all.usable)
	case all.online < want:
		return fmt.Errorf("%w: %s asked for, %s a disk that is not full: add disks or delete data",
			block.ErrNoSpace, asked(p), have(all.online))
	}
	return nil
}

// nodeCount is how many nodes there are of each kind, each kind among the one before.
type nodeCount struct {
	usable int // with a disk that is not failed
	online int // with a disk that is not full either
}

// count counts the nodes of a rack, of the cell if rack is empty.
func (c Cell) count(rack string) nodeCount {
	nodes := map[string]nodeCount{} // each 0 or 1
	for _, n := range c.Nodes {
		if rack == "" || n.Rack == rack {
			nodes[n.Name] = nodeCount{}
		}
	}
	for _, d := range c.Disks {
		if n, known := nodes[d.Node]; known && d.State != metapb.Disk_FAILED {
			n.usable = 1
			if d.State == metapb.Disk_ONLINE {
				n.online = 1
			}
			nodes[d.Node] = n
		}
	}
	var sum nodeCount
	for _, n := range nodes {
		sum.usable += n.usable
		sum.online += n.online
	}
	return sum
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
	registered := c.count(p.rack).usable
	switch {
	case room >= want:
		return nil
	case registered < want:
		return tooFewNodes(policy, p.rack, registered)
	case up < want:
		return fmt.Errorf("%w: %s asked for, %d of %d nodes with disks%s can be reached: start the others or add nodes",
			block.ErrUnavailable, asked(policy), up, registered, inRack(p.rack))
	}
	return fmt.Errorf("%w: %s asked for, %s a disk with room%s: add disks or delete data",
		block.ErrNoSpace, asked(policy), have(room), inRack(p.rack))
}

func tooFewNodes(p *metapb.Policy, rack string, nodes int) error {
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
	return fmt.Errorf("%w: %s asked for, %s a usable disk%s: %s", block.ErrPrecondition, asked(p), have(nodes), where, remedy)
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
