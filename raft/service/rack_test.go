package service

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

func sameRack(replicas uint32) *metapb.Policy {
	return &metapb.Policy{Replicas: replicas, Access: metapb.Policy_SAME_RACK}
}

// B064: a volume that lies in one rack lies in one of those asked for; its
// runs, its primary and what its consumers are told follow.
func TestB064Racks(t *testing.T) {
	w := newWorld(t)
	w.registerIn("r1", "n1", disk(1, 100*gib))
	w.registerIn("r2", "n2", disk(2, 50*gib))
	w.registerIn("r2", "n3", disk(3, 50*gib))
	w.consumer("k1", "compute", 0)
	create := func(name string, p *metapb.Policy, racks ...string) (*metapb.Volume, error) {
		return w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: name, Size: gib, Policy: p, Racks: racks})
	}
	for _, c := range []struct {
		name  string
		p     *metapb.Policy
		racks []string
		want  string
	}{
		{"one", sameRack(1), []string{"r1"}, "r1"},
		{"preferred", sameRack(1), []string{"r2", "r1"}, "r2"},
		{"the one that can", sameRack(2), []string{"r1", "r2"}, "r2"},
		{"any", sameRack(2), nil, "r2"},
		{"from everywhere", nil, []string{"r2"}, "r2"},
		{"near a rack without disks", nil, []string{"compute"}, ""},
		{"no wish", nil, nil, ""},
	} {
		v, err := create(c.name, c.p, c.racks...)
		if err != nil || v.Rack != c.want {
			t.Errorf("%s: %v, %v", c.name, v, err)
			continue
		}
		again, err := create(c.name, c.p, c.racks...)
		if err != nil || again.Id != v.Id {
			t.Errorf("%s again: %v, %v", c.name, again, err)
		}
	}
	for what, c := range map[string]struct {
		name  string
		p     *metapb.Policy
		racks []string
		code  codes.Code
		says  string
	}{
		"a repeat that another rack would not satisfy": {"one", sameRack(1), []string{"r2"}, codes.AlreadyExists, "rack r1 instead of r2"},
		"a repeat with another access":                 {"one", nil, []string{"r1"}, codes.AlreadyExists, "access"},
		"a rack with too few nodes":                    {"x", sameRack(2), []string{"r1"}, codes.ResourceExhausted, `1 node has a usable disk in rack "r1"`},
		"no rack that can":                             {"x", sameRack(3), []string{"r1", "r2"}, codes.ResourceExhausted, "none of the 2 racks"},
		"a rack without disks":                         {"x", sameRack(1), []string{"compute"}, codes.ResourceExhausted, `in rack "compute"`},
		"a rack of nobody":                             {"x", nil, []string{"moon"}, codes.ResourceExhausted, `no node and no consumer is in rack "moon"`},
		"racks of nobody":                              {"x", sameRack(1), []string{"moon", "mars"}, codes.ResourceExhausted, `"moon" the first`},
		"no rack of the cluster ever":                  {"x", sameRack(3), nil, codes.FailedPrecondition, "in any one rack"},
		"no name":                                      {"x", sameRack(1), []string{""}, codes.InvalidArgument, "rack name"},
		"too many":                                     {"x", nil, make([]string, 1025), codes.OutOfRange, "1024"},
	} {
		if _, err := create(c.name, c.p, c.racks...); code(err) != c.code || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// A repeat whose wish the volume satisfies, though it would now be made elsewhere.
	if v, err := create("one", sameRack(1), "r2", "r1"); err != nil || v.Rack != "r1" {
		t.Errorf("%v, %v", v, err)
	}

	a := w.attach("preferred", "k1")
	if len(a.Endpoints) != 2 || a.Endpoints[0].Node == "n1" || a.Endpoints[1].Node == "n1" {
		t.Errorf("endpoints %v", a.Endpoints)
	}
	if e := w.attach("from everywhere", "k1").Endpoints; len(e) != 3 || e[2].Node != "n1" {
		t.Errorf("endpoints %v", e)
	}
	_, err := w.Grant(t.Context(), &metapb.GrantRequest{VolumeId: a.Volume.Id, Node: "n1", Process: proc})
	if !errors.Is(err, block.ErrPrecondition) || !strings.Contains(err.Error(), `lies in rack "r2"`) {
		t.Errorf("a primary of another rack: %v", err)
	}
	p := w.serve(a.Volume.Id, "n3", disk(3, 50*gib))
	r, err := w.PlaceRuns(t.Context(), &metapb.PlaceRunsRequest{VolumeId: a.Volume.Id, Generation: p.fence.Generation, Runs: []uint32{0}})
	if err != nil || r.Runs[0].Disks[0] != disk(3, 0).Id {
		t.Errorf("%v, %v", r, err)
	}
}

// A rack whose nodes are down is passed over while another will do.
func TestB064RackThatIsDown(t *testing.T) {
	w := newWorld(t)
	w.registerIn("r1", "n1", disk(1, 100*gib))
	w.registerIn("r2", "n2", disk(2, 100*gib))
	w.clock.pass(time.Minute)
	w.registerIn("r2", "n2", disk(2, 100*gib))
	for name, c := range map[string]struct {
		racks []string
		want  string
	}{"both": {[]string{"r1", "r2"}, "r2"}, "one": {[]string{"r1"}, "r1"}} {
		v, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: name, Size: gib, Policy: sameRack(1), Racks: c.racks})
		if err != nil || v.Rack != c.want {
			t.Errorf("%s: %v, %v", name, v, err)
		}
	}
}

// B138, B139 per rack and policy: what is named as the largest volume is
// accepted right away, a block more is not, and the racks add up.
func TestB138B139CapacityOfRacks(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Overcommit = 2 })
	w.registerIn("r1", "n1", disk(1, 100*gib))
	w.registerIn("r2", "n2", disk(2, 50*gib))
	w.registerIn("r2", "n3", disk(3, 30*gib))
	w.consumer("k1", "compute", 0)
	capacity := func(rack string, p *metapb.Policy) *metapb.GetCapacityResponse {
		t.Helper()
		c, err := w.GetCapacity(t.Context(), &metapb.GetCapacityRequest{Rack: rack, Policy: p})
		if err != nil || c.Available < 0 || c.MaximumVolumeSize < 0 {
			t.Fatalf("%v, %v", c, err)
		}
		return c
	}
	made, mirrored := 0, false
	try := func(p *metapb.Policy, size int64, racks ...string) error {
		made++
		_, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: fmt.Sprint("v", made), Size: size, Policy: p, Racks: racks})
		if err == nil && size > 4096 { // only asked
			_, err := w.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: byName(fmt.Sprint("v", made))})
			if err != nil {
				t.Fatal(err)
			}
		}
		return err
	}
	round := func() {
		t.Helper()
		for _, c := range []struct {
			p     *metapb.Policy
			rack  string
			racks []string
		}{
			{sameRack(1), "r1", []string{"r1"}}, {sameRack(1), "r2", []string{"r2"}}, {sameRack(2), "r2", []string{"r2"}}, {sameRack(2), "r1", []string{"r1"}},
			{sameRack(1), "", nil}, {sameRack(2), "", nil}, {sameRack(1), "compute", []string{"compute"}},
			{&metapb.Policy{Replicas: 1}, "r1", []string{"r1"}}, {&metapb.Policy{Replicas: 2}, "compute", []string{"compute"}},
			{&metapb.Policy{Replicas: 3}, "", nil}, {&metapb.Policy{Replicas: 1}, "moon", []string{"moon"}},
		} {
			most := capacity(c.rack, c.p).MaximumVolumeSize
			if most > 0 {
				if err := try(c.p, most, c.racks...); err != nil {
					t.Errorf("%v in %q: the largest, %d: %v", c.p, c.rack, most, err)
				}
			}
			if err := try(c.p, most+4096, c.racks...); code(err) != codes.ResourceExhausted {
				t.Errorf("%v in %q: more than %d: %v", c.p, c.rack, most, err)
			}
		}
		sum := capacity("r1", sameRack(1)).Available + capacity("r2", sameRack(1)).Available
		all := capacity("", &metapb.Policy{Replicas: 1}).Available
		if sum > all || !mirrored && sum < all-4*4096 { // mirrors need room in several places at once
			t.Errorf("racks have %d, the cell %d", sum, all)
		}
	}
	round()
	for i, c := range []*metapb.CreateVolumeRequest{
		{Policy: sameRack(1), Racks: []string{"r1"}, Size: 33 * gib}, {Policy: sameRack(2), Racks: []string{"r2"}, Size: 7 * gib},
		{Policy: &metapb.Policy{Replicas: 2}, Size: 5 * gib}, {Policy: &metapb.Policy{Replicas: 3}, Size: gib}, {Size: 9 * gib},
	} {
		c.Name = fmt.Sprint("kept", i)
		if _, err := w.CreateVolume(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		mirrored = mirrored || c.Policy.GetReplicas() > 1
		round()
	}
	if c := capacity("moon", nil); c.Available != 0 {
		t.Errorf("a rack of nobody has %v", c)
	}
	if _, err := w.GetCapacity(t.Context(), &metapb.GetCapacityRequest{Policy: &metapb.Policy{Replicas: 4}}); code(err) != codes.InvalidArgument {
		t.Errorf("policy: %v", err)
	}
}

// B140 over racks: whichever rack a create meets full, the other still takes it.
func TestB140FiftyCreatesInTwoRacks(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Overcommit = 1 })
	w.registerIn("r1", "n1", disk(1, 6*gib))
	w.registerIn("r2", "n2", disk(2, 4*gib))
	var mu sync.Mutex
	made := map[string]int{}
	var wait sync.WaitGroup
	for i := range 50 {
		wait.Go(func() {
			racks := [][]string{nil, {"r1", "r2"}, {"r2", "r1"}}[i%3]
			v, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: fmt.Sprint(i), Size: gib, Policy: sameRack(1), Racks: racks})
			if err != nil && code(err) != codes.ResourceExhausted {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				made[v.Rack]++
			}
		})
	}
	wait.Wait()
	if made["r1"] != 6 || made["r2"] != 4 {
		t.Errorf("made %v", made)
	}
}

// B056 over racks: the same create fifty times at once is one volume, in a rack that all of them asked for.
func TestB056DuplicatesWithRacks(t *testing.T) {
	w := newWorld(t)
	w.registerIn("r1", "n1", disk(1, 100*gib))
	w.registerIn("r2", "n2", disk(2, 100*gib))
	var mu sync.Mutex
	ids := map[string]bool{}
	var wait sync.WaitGroup
	for i := range 50 {
		wait.Go(func() {
			racks := [][]string{{"r1", "r2"}, {"r2", "r1"}, nil}[i%3]
			v, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib, Policy: sameRack(1), Racks: racks})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ids[v.Id] = true
		})
	}
	wait.Wait()
	if len(ids) != 1 {
		t.Errorf("%d volumes", len(ids))
	}
}

// B056: the volume comes to be in another rack of the wish after the state was read on which one is chosen.
func TestB056TheOtherRackMeanwhile(t *testing.T) {
	w := newWorld(t)
	w.registerIn("r1", "n1", disk(1, 100*gib))
	w.registerIn("r2", "n2", disk(2, 100*gib))
	create := func(racks ...string) (*metapb.Volume, error) {
		return w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib, Policy: sameRack(1), Racks: racks})
	}
	if err := w.faults.Arm(fault.Rule{Point: "metadata.create", Hold: true, Count: 1}); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		v   *metapb.Volume
		err error
	}
	late := make(chan answer, 1)
	go func() {
		v, err := create("r2", "r1")
		late <- answer{v, err}
	}()
	for w.faults.Hits("metadata.create") == 0 {
		time.Sleep(time.Millisecond)
	}
	first, err := create("r1", "r2")
	if err != nil {
		t.Fatal(err)
	}
	w.faults.Clear("metadata.create")
	if a := <-late; a.err != nil || a.v.Id != first.Id || a.v.Rack != "r1" {
		t.Errorf("%v, %v", a.v, a.err)
	}
}
