package metadata

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// served is a state with an attached, open volume v1 with two born runs, a deleted one v2 and one never served, v3.
func served(t failer) *checked {
	s := prepared(t, "alpha", "beta", "gamma")
	s.must(&metapb.Command{Kind: &metapb.Command_AttachVolume{AttachVolume: &metapb.AttachVolume{Attachment: &metapb.Attachment{
		Id: id("a1"), VolumeId: id("v1"), Node: "k1", Token: []byte("0123456789abcdef")}}}})
	s.must(&metapb.Command{Kind: &metapb.Command_ResizeVolume{ResizeVolume: &metapb.ResizeVolume{Id: id("v1"), Size: 8 << 30}}})
	s.open("v1")
	s.must(birth(s.View(), "v1", 0, 2))
	s.must(remove("v2"))
	return s
}

// alter returns a View in which volume v1 is changed.
func alter(v *View, change func(*volume)) *View {
	w := *v
	old, _ := v.volumes.Get(volumeID("v1"))
	next := *old
	next.Volume = proto.CloneOf(old.Volume)
	next.grant = proto.CloneOf(old.grant)
	next.members = []*metapb.Member{proto.CloneOf(old.members[0])}
	next.attachments = []*metapb.Attachment{proto.CloneOf(old.attachments[0])}
	change(&next)
	w.volumes = v.volumes.Set(volumeID("v1"), &next)
	return &w
}

// TestCheckSeesWhatIsBroken breaks each invariant once.
func TestCheckSeesWhatIsBroken(t *testing.T) {
	good := served(t).View()
	if err := Check(good); err != nil {
		t.Fatal(err)
	}
	with := func(change func(*View)) *View {
		w := *good
		change(&w)
		return &w
	}
	for name, v := range map[string]*View{
		"no cluster": with(func(v *View) { v.cluster = nil }),
		"a cluster without id": with(func(v *View) {
			v.cluster = &metapb.InitCluster{ExtentSize: block.DefaultExtentSize, DefaultReplicas: 1}
		}),
		"a node that is up":       with(func(v *View) { v.nodes = v.nodes.Set("n1", &metapb.Node{Name: "n1", Rack: "r1", Up: true}) }),
		"a node under two names":  with(func(v *View) { v.nodes = v.nodes.Set("n2", &metapb.Node{Name: "n1", Rack: "r1"}) }),
		"a disk without number":   with(func(v *View) { v.numbered = nil }),
		"a disk of no node":       with(func(v *View) { v.nodes = v.nodes.Delete("n1") }),
		"a name too many":         with(func(v *View) { v.names = v.names.Set("delta", volumeID("v1")) }),
		"a name of another":       with(func(v *View) { v.names = v.names.Set("alpha", volumeID("v3")) }),
		"a living dead":           with(func(v *View) { v.tombstones = v.tombstones.Set(volumeID("v1"), 1) }),
		"a tombstone from ahead":  with(func(v *View) { v.tombstones = v.tombstones.Set(volumeID("v9"), 999) }),
		"demand":                  with(func(v *View) { v.demand[1]++ }),
		"attachments":             with(func(v *View) { v.attachments++ }),
		"an event from ahead":     with(func(v *View) { v.events.kept = []*metapb.Event{{Type: "Late", Index: 999}} }),
		"an event before its end": with(func(v *View) { v.events.forgotten = v.index }),
		"too many events":         with(func(v *View) { v.events.kept = make([]*metapb.Event, EventsKept+1) }),
		"a name of no volume":     alter(good, func(v *volume) { v.Name = "a\x00b" }),
		"size above wanted":       alter(good, func(v *volume) { v.Size = 16 << 30 }),
		"an odd size":             alter(good, func(v *volume) { v.Size = 4097 }),
		"half a policy":           alter(good, func(v *volume) { v.Policy = &metapb.Policy{Replicas: 1} }),
		"no version":              alter(good, func(v *volume) { v.Version = 0 }),
		"no cache epoch":          alter(good, func(v *volume) { v.CacheEpoch = 0 }),
		"generation of no grant":  alter(good, func(v *volume) { v.grant.Generation = 99 }),
		"a grant to nobody":       alter(good, func(v *volume) { v.grant.Node = "n9" }),
		"two attachments":         alter(good, func(v *volume) { v.attachments = append(v.attachments, v.attachments[0]) }),
		"another's attachment":    alter(good, func(v *volume) { v.attachments[0].VolumeId = id("v3") }),
		"another token's digest":  alter(good, func(v *volume) { v.attachments[0].Token = []byte("fedcba9876543210") }),
		"nobody to revoke": alter(good, func(v *volume) {
			v.grant, v.runs, v.members, v.Size, v.attachments[0].Revoking = nil, newRuns(), nil, v.WantedSize, true
		}),
		"growth without a grant": alter(good, func(v *volume) { v.grant, v.runs, v.members, v.Size = nil, newRuns(), nil, 1<<30 }),
		"a member that is no disk": alter(good, func(v *volume) {
			v.members[0].DiskId = id("d9")
		}),
		"a member without state": alter(good, func(v *volume) { v.members[0].State = 0 }),
		"a member from ahead":    alter(good, func(v *volume) { v.members[0].AdmittedGeneration = 9 }),
		"members out of order":   alter(good, func(v *volume) { v.members = append(v.members, v.members[0]) }),
		"no member in":           alter(good, func(v *volume) { v.members[0].State = metapb.Member_OUT }),
		"a run without members":  alter(good, func(v *volume) { v.members = nil }),
		"a run beyond the end":   alter(good, func(v *volume) { v.runs = v.runs.Set(8, replicas{1}) }),
		"a run on nothing":       alter(good, func(v *volume) { v.runs = v.runs.Set(2, replicas{}) }),
		"a run on a disk twice":  alter(good, func(v *volume) { v.Policy.Replicas = 2; v.runs = newRuns().Set(0, replicas{1, 1}) }),
	} {
		if err := Check(v); err == nil || !strings.Contains(err.Error(), "broken invariant") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestCheckTransitionSeesWhatWentBackwards.
func TestCheckTransitionSeesWhatWentBackwards(t *testing.T) {
	good := served(t).View()
	if err := CheckTransition(good, good); err != nil {
		t.Fatal(err)
	}
	with := func(change func(*View)) *View {
		w := *good
		change(&w)
		return &w
	}
	for name, v := range map[string]*View{
		"index":                  with(func(v *View) { v.index-- }),
		"cluster":                with(func(v *View) { v.cluster = &metapb.InitCluster{} }),
		"numbers":                with(func(v *View) { v.numbered = []block.DiskID{{UUID: block.NewUUID()}} }),
		"tombstones":             with(func(v *View) { v.tombstones = emptyView().tombstones }),
		"vanished":               with(func(v *View) { v.volumes = v.volumes.Delete(volumeID("v1")) }),
		"renamed":                alter(good, func(v *volume) { v.Name, v.Version = "omega", v.Version+1 }),
		"version":                alter(good, func(v *volume) { v.Version-- }),
		"epoch":                  alter(good, func(v *volume) { v.CacheEpoch, v.Version = 0, v.Version+1 }),
		"generation":             alter(good, func(v *volume) { v.grant.Generation--; v.Version++ }),
		"size":                   alter(good, func(v *volume) { v.Size -= 4096; v.Version++ }),
		"wanted":                 alter(good, func(v *volume) { v.WantedSize -= 4096; v.Version++ }),
		"closed":                 alter(good, func(v *volume) { v.grant.Opened = false; v.Version++ }),
		"unversioned member":     alter(good, func(v *volume) { v.members[0].State = metapb.Member_OUT }),
		"unversioned attachment": alter(good, func(v *volume) { v.attachments = nil }),
		"unversioned birth":      alter(good, func(v *volume) { v.runs = v.runs.Set(5, replicas{1}) }),
		"unborn again":           alter(good, func(v *volume) { v.runs = newRuns(); v.Version++ }),
		"moved run":              alter(good, func(v *volume) { v.runs = v.runs.Set(0, replicas{1, 1}); v.Version++ }),
		"born on one node twice": alter(good, func(v *volume) { v.runs = v.runs.Set(5, replicas{1, 1}); v.Version++ }),
	} {
		if err := CheckTransition(good, v); err == nil {
			t.Errorf("%s: nothing was seen", name)
		}
	}
}

// TestH77OldMap: a map says at which index it is true, and one from a grant's index has that grant.
func TestH77OldMap(t *testing.T) {
	s := served(t)
	old := s.View()
	s.open("v1")
	if g := old.Map(volumeID("v1")).Grant; g.Generation != 1 || !g.Opened {
		t.Errorf("the old map changed: %v", g)
	}
	m := s.View().Map(volumeID("v1"))
	if m.Index != s.next || m.Grant.Generation != 2 || len(m.Runs) != 2 || m.Volume.Version != old.Volume(volumeID("v1")).Version+2 {
		t.Errorf("the new map is %v", m)
	}
	if s.View().Map(volumeID("v2")) != nil {
		t.Error("a deleted volume has a map")
	}
}
