package controller

import (
	"fmt"
	"slices"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

// racksOf are the racks that a volume must be reachable from, the preferred
// first. A term that does not name the rack, as of a node that runs another
// version or has another set of keys, says nothing about racks and is passed
// over; if none names one, any rack will do, unless the volume is to be pinned to one.
func racksOf(r *csispec.TopologyRequirement, access Access) ([]string, error) {
	requisite, preferred := segments(r.GetRequisite()), segments(r.GetPreferred())
	var racks []string
	add := func(list []string) {
		for _, rack := range list {
			if !slices.Contains(racks, rack) && (len(requisite) == 0 || slices.Contains(requisite, rack)) {
				racks = append(racks, rack)
			}
		}
	}
	add(preferred)
	add(requisite)
	if slices.Contains(racks, "") {
		return nil, fmt.Errorf("%w: the topology segment %s is empty", block.ErrInvalid, driver.TopologyRack)
	}
	if len(racks) == 0 && access == AccessRack && len(r.GetRequisite())+len(r.GetPreferred()) > 0 {
		return nil, fmt.Errorf("%w: the volume is to lie in one rack (access: rack), but no topology that is asked for names %s: "+
			"does the node plugin run on those nodes?", block.ErrNoSpace, driver.TopologyRack)
	}
	return racks, nil
}

func segments(terms []*csispec.Topology) (racks []string) {
	for _, t := range terms {
		if rack, ok := t.GetSegments()[driver.TopologyRack]; ok {
			racks = append(racks, rack)
		}
	}
	return racks
}

// topologyOf is where a volume can be reached from; none: everywhere.
func topologyOf(v Volume) []*csispec.Topology {
	if v.Policy.Access != AccessRack || v.Rack == "" {
		return nil
	}
	return []*csispec.Topology{{Segments: map[string]string{driver.TopologyRack: v.Rack}}}
}
