package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// PickRack chooses the rack of a new volume among those of a wish, the
// preferred first; an empty wish is for any.
//
// With access SAME_RACK it is the first that accepts the volume and whose nodes
// can take its copies now, else the first that accepts it; where any will do, the
// roomiest come first. ErrNoSpace: none of the wish accepts it, and why each
// does not. ErrPrecondition: no rack of such a cell ever could.
//
// With access CLUSTER it is the first of the wish with a node that can take a
// copy now, or empty.
func (c Cell) PickRack(promised Promises, p *metapb.Policy, size int64, wish []string) (string, error) {
	ready := c.ready()
	if p.GetAccess() != metapb.Policy_SAME_RACK {
		for _, rack := range wish {
			if ready[rack] > 0 {
				return rack, nil
			}
		}
		return "", nil
	}
	racks := slices.Clone(wish)
	if len(racks) == 0 {
		racks = c.roomiest(promised, int(p.GetReplicas()))
	}
	picked, found := "", false
	var refusals []error
	for _, rack := range racks {
		switch err := c.CheckCreate(promised, p, rack, size); {
		case err != nil:
			refusals = append(refusals, err)
		case ready[rack] >= int(p.GetReplicas()):
			return rack, nil
		case !found:
			picked, found = rack, true
		}
	}
	switch {
	case found:
		return picked, nil
	case len(wish) == 0:
		if err := c.feasible(p, ""); err != nil {
			return "", err
		}
		return "", refusals[0] // of the roomiest
	case len(refusals) == 1:
		return "", refusals[0]
	}
	return "", refused(wish, refusals)
}

// refused says of each rack of a wish why it does not take a volume.
func refused(wish []string, refusals []error) error {
	const most = 5
	var why []string
	for i, err := range refusals {
		if i == most {
			why = append(why, fmt.Sprintf("and %d more", len(refusals)-most))
			break
		}
		why = append(why, strings.TrimPrefix(err.Error(), block.ErrNoSpace.Error()+": "))
	}
	return fmt.Errorf("%w: none of the %d racks asked for can take the volume: %s", block.ErrNoSpace, len(wish), strings.Join(why, "; "))
}

// ready is how many nodes of each rack could take a copy now.
func (c Cell) ready() map[string]int {
	room := map[string]bool{}
	for _, d := range c.Disks {
		if d.State == metapb.Disk_ONLINE && d.Available > 0 {
			room[d.Node] = true
		}
	}
	racks := map[string]int{}
	for _, n := range c.Nodes {
		if n.Up && room[n.Name] {
			racks[n.Rack]++
		}
	}
	return racks
}

// roomiest are the racks by what they may still be promised, most first.
func (c Cell) roomiest(promised Promises, replicas int) []string {
	r, racks, left := c.room(promised), c.racks(), map[string]int64{}
	for _, rack := range racks {
		left[rack] = r.left(replicas, rack)
	}
	slices.SortStableFunc(racks, func(a, b string) int { return cmp.Compare(left[b], left[a]) })
	return racks
}
