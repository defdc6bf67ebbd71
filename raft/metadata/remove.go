package metadata

import (
	"fmt"
	"strings"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// namedVolumes is how many volumes a refusal names.
const namedVolumes = 3

// removeNode takes a node out of the cell, with the disks that hold nothing.
func (d *draft) removeNode(c *metapb.RemoveNode) error {
	if err := ValidateNodeName(c.Name); err != nil {
		return err
	}
	old := d.Node(c.Name)
	if old == nil {
		return nil
	}
	if held := d.heldBy(c.Name); len(held) > 0 {
		return fmt.Errorf("%w: disks of node %q hold parts of %s: delete those, or start the node's server", block.ErrInUse, c.Name, someOf(held))
	}
	d.nodes = d.nodes.Delete(c.Name)
	for v := range values(d.volumes) {
		if v.grant.GetNode() == c.Name && len(v.members) == 0 {
			d.endGrant(v)
		}
	}
	d.orphanDisks(c.Name, nil, fmt.Sprintf("node %q was removed", c.Name))
	d.emit(&metapb.Event{Type: NodeRemoved, Node: c.Name}, "node %q of rack %q was removed", c.Name, old.Rack)
	return nil
}

// endGrant leaves a volume that has no data to nobody, in a generation of its own:
// the primary of before can make no run born any more, so what waits for its
// confirmation is done.
func (d *draft) endGrant(v *volume) {
	next := v.changed()
	next.grant = &metapb.Grant{Generation: v.grant.Generation + 1}
	d.emitVolume(PrimaryRemoved, next, v.grant.Node, "node %q, the primary of volume %q, was removed", v.grant.Node, v.Name)
	if next.Size < next.WantedSize {
		d.emitVolume(VolumeGrown, next, "", "volume %q grew from %d to %d bytes", v.Name, v.Size, next.WantedSize)
	}
	next.Size = next.WantedSize
	for i := len(next.attachments) - 1; i >= 0; i-- {
		if next.attachments[i].Revoking {
			d.detach(next, i)
		}
	}
	d.store(next)
}

// heldBy are the names of the volumes that have a member on a node's disks.
func (v *View) heldBy(node string) (names []string) {
	for vol := range values(v.volumes) {
		for _, m := range vol.members {
			if id, err := parseDisk(m.DiskId); err == nil && v.Disk(id).GetNode() == node {
				names = append(names, vol.Name)
				break
			}
		}
	}
	return names
}

// Holds reports whether a disk is a member of any volume. It looks at all of them.
func (v *View) Holds(disk string) bool {
	for vol := range values(v.volumes) {
		if vol.member(disk) != nil {
			return true
		}
	}
	return false
}

// someOf names volumes, not all of them if there are many.
func someOf(names []string) string {
	var b strings.Builder
	for i, name := range names[:min(len(names), namedVolumes)] {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "volume %q", name)
	}
	if more := len(names) - namedVolumes; more > 0 {
		fmt.Fprintf(&b, " and %d more", more)
	}
	return b.String()
}
