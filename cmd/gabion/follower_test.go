package main

import (
	"maps"
	"slices"
	"testing"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// H77: a volume that was deleted while nobody watched is in no list, and must not be kept for ever.
func TestFollowerMissedADeletion(t *testing.T) {
	live, gone, unheard := block.VolumeID{UUID: block.NewUUID()}, block.VolumeID{UUID: block.NewUUID()}, block.VolumeID{UUID: block.NewUUID()}
	c := &canned{
		list: func(*metapb.ListVolumesRequest) (*metapb.ListVolumesResponse, error) {
			return &metapb.ListVolumesResponse{Volumes: []*metapb.Volume{{Id: live.String()}}}, nil
		},
		fate: map[string]metapb.LookupVolumeResponse_State{
			gone.String(): metapb.LookupVolumeResponse_TOMBSTONE, unheard.String(): metapb.LookupVolumeResponse_UNKNOWN,
		},
	}
	cl, err := client.Dial([]string{c.serve(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	changed, deleted := map[block.VolumeID]bool{}, map[block.VolumeID]bool{}
	f := follower{
		client:  cl,
		changed: func(id block.VolumeID) { changed[id] = true },
		deleted: func(id block.VolumeID) { deleted[id] = true },
		held:    func() []block.VolumeID { return []block.VolumeID{live, gone, gone, unheard} },
	}
	if _, err := f.all(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(changed) != 2 || !changed[live] || !changed[gone] || !slices.Equal(slices.Collect(maps.Keys(deleted)), []block.VolumeID{gone}) {
		t.Errorf("changed %v, deleted %v", changed, deleted)
	}
}
