package placement

import (
	"fmt"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Feasible returns ErrPrecondition unless the cluster has enough nodes with
// disks for the policy, and ErrNoSpace if it has but their disks are full.
// Which nodes are up is not asked.
func (c Cell) Feasible(p *metapb.Policy) error {
	racks := map[string]string{}
	for _, n := range c.Nodes {
		racks[n.Name] = n.Rack
	}
	nodes, online := map[string]bool{}, map[string]bool{}
	for _, d := range c.Disks {
		if _, known := racks[d.Node]; known && d.State != metapb.Disk_FAILED {
			nodes[d.Node] = true
			online[d.Node] = online[d.Node] || d.State == metapb.Disk_ONLINE
		}
	}
	count := func(rack string) (all, open int) {
		for n := range nodes {
			if rack == "" || racks[n] == rack {
				all++
				if online[n] {
					open++
				}
			}
		}
		return all, open
	}
	all, open := count("")
	if p.GetAccess() == metapb.Policy_SAME_RACK {
		all, open = 0, 0
		for _, rack := range racks {
			a, o := count(rack)
			all, open = max(all, a), max(open, o)
		}
	}
	want := int(p.GetReplicas())
	switch {
	case all < want:
		return missingNodes(p, "", all)
	case open < want:
		return fmt.Errorf("%w: %s on distinct nodes asked for, %s a disk that is not full: add disks or delete data",
			block.ErrNoSpace, copies(p.GetReplicas()), have(open))
	}
	return nil
}

// feasible is Feasible for a placement now: up is the nodes that are up with a
// disk, open those of them with room, both in rack if it is not empty.
func (c Cell) feasible(p *metapb.Policy, rack string, up, open int) error {
	want := int(p.GetReplicas())
	if open >= want {
		return nil
	}
	registered := c.withDisks(rack)
	switch {
	case registered < want:
		return missingNodes(p, rack, registered)
	case up < want:
		return fmt.Errorf("%w: %s on distinct nodes asked for, %d of %d nodes with disks%s up: start the others or add nodes",
			block.ErrUnavailable, copies(p.GetReplicas()), up, registered, inRack(rack)+be(up))
	}
	return fmt.Errorf("%w: %s on distinct nodes asked for, %s a disk with room%s: add disks or delete data",
		block.ErrNoSpace, copies(p.GetReplicas()), have(open), inRack(rack))
}

// withDisks counts the nodes that have a disk that is not failed.
func (c Cell) withDisks(rack string) int {
	nodes := map[string]bool{}
	for _, n := range c.Nodes {
		if rack == "" || n.Rack == rack {
			nodes[n.Name] = false
		}
	}
	count := 0
	for _, d := range c.Disks {
		if counted, known := nodes[d.Node]; known && !counted && d.State != metapb.Disk_FAILED {
			nodes[d.Node] = true
			count++
		}
	}
	return count
}

func missingNodes(p *metapb.Policy, rack string, nodes int) error {
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
	return fmt.Errorf("%w: %s on distinct nodes asked for, %s a usable disk%s: %s",
		block.ErrPrecondition, copies(p.GetReplicas()), have(nodes), where, remedy)
}

func copies(n uint32) string {
	if n == 1 {
		return "1 replica"
	}
	return fmt.Sprintf("%d replicas", n)
}

func have(nodes int) string {
	if nodes == 1 {
		return "1 node has"
	}
	return fmt.Sprintf("%d nodes have", nodes)
}

func be(nodes int) string {
	if nodes == 1 {
		return " is"
	}
	return " are"
}

func inRack(rack string) string {
	if rack == "" {
		return ""
	}
	return fmt.Sprintf(" in rack %q", rack)
}
