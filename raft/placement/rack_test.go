package placement

import (
	"errors"
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// TestPickRack is B064 where it is decided.
func TestPickRack(t *testing.T) {
	const gib = 1 << 30
	// r1: two nodes of 10 GiB; r2: one of 100; r3: two of 50, one of them down.
	c := cell(1, "a r1 10737418240", "b r1 10737418240", "c r2 107374182400", "d r3 53687091200", "e r3 53687091200")
	c.Nodes[4].Up = false
	all := metapb.Policy_SAME_RACK
	for _, test := range []struct {
		name     string
		access   metapb.Policy_Access
		replicas uint32
		size     int64
		promised Promises
		wish     []string
		want     string
		err      error
		says     []string
	}{
		{name: "the preferred rack", access: all, replicas: 1, size: gib, wish: []string{"r2", "r1"}, want: "r2"},
		{name: "the first that can", access: all, replicas: 2, size: gib, wish: []string{"r2", "r1"}, want: "r1"},
		{name: "the first with room", access: all, replicas: 1, size: 30 * gib, wish: []string{"r1", "r2"}, want: "r2"},
		{name: "one that can now before one that waits for a node", access: all, replicas: 2, size: gib, wish: []string{"r3", "r1"}, want: "r1"},
		{name: "but rather one that waits than none", access: all, replicas: 2, size: 20 * gib, wish: []string{"r3", "r1"}, want: "r3"},
		{name: "any: the roomiest", access: all, replicas: 1, size: gib, want: "r2"},
		{name: "any: the roomiest that has nodes", access: all, replicas: 2, size: gib, want: "r1"},
		{name: "what is promised there counts", access: all, replicas: 1, size: 5 * gib,
			promised: Promises{Racks: map[string]Demand{"r2": {1: 99 * gib}}}, wish: []string{"r2", "r1"}, want: "r1"},
		{name: "one rack that cannot", access: all, replicas: 2, size: gib, wish: []string{"r2"}, err: block.ErrNoSpace,
			says: []string{"2 replicas on distinct nodes were asked for, 1 node has a usable disk in rack \"r2\": add nodes or use --replicas 1 or --access cluster"}},
		{name: "one rack too small", access: all, replicas: 1, size: 200 * gib, wish: []string{"r2"}, err: block.ErrNoSpace,
			says: []string{"at most 107374182400 more may be promised in rack \"r2\""}},
		{name: "none of several", access: all, replicas: 2, size: 30 * gib, wish: []string{"r1", "r2", "r9"}, err: block.ErrNoSpace,
			says: []string{"none of the 3 racks asked for", "in rack \"r1\"", "in rack \"r2\"", "no node has a usable disk in rack \"r9\""}},
		{name: "no rack of the cell, ever", access: all, replicas: 3, size: gib, err: block.ErrPrecondition, says: []string{"in any one rack"}},
		{name: "no rack of the cell, now", access: all, replicas: 2, size: 60 * gib, err: block.ErrNoSpace, says: []string{"in rack \"r3\""}},
		{name: "reachable from everywhere: the first copy near", access: metapb.Policy_CLUSTER, replicas: 3, size: gib, wish: []string{"r9", "r2"}, want: "r2"},
		{name: "or anywhere", access: metapb.Policy_CLUSTER, replicas: 3, size: gib, wish: []string{"r9"}, want: ""},
		{name: "no wish", access: metapb.Policy_CLUSTER, replicas: 3, size: gib, want: ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := policy(test.replicas)
			p.Access = test.access
			got, err := c.PickRack(test.promised, p, test.size, test.wish)
			if !errors.Is(err, test.err) || test.err == nil && err != nil || got != test.want {
				t.Fatalf("got %q, %v", got, err)
			}
			for _, says := range test.says {
				if !strings.Contains(err.Error(), says) {
					t.Errorf("%q does not say %q", err, says)
				}
			}
			if err != nil && strings.Count(err.Error(), block.ErrNoSpace.Error()) > 1 {
				t.Errorf("%q repeats itself", err)
			}
		})
	}
}

// A volume that is reachable from everywhere has a copy in the rack it was
// wished for, whatever the spread, and the primary's own disks come first.
func TestPlaceWithAWish(t *testing.T) {
	c := cell(1, "a r1 1073741824", "b r2 1073741824", "c r3 1073741824", "d r3 1073741824")
	rackOf := map[string]string{}
	for i, d := range c.Disks {
		rackOf[d.Id] = c.Nodes[i].Rack
	}
	for _, spread := range []metapb.Policy_Spread{metapb.Policy_RACK, metapb.Policy_NODE} {
		p := policy(2)
		p.Spread = spread
		for _, near := range []string{"", "a", "c"} {
			q := Request{Policy: p, Runs: []block.RunIndex{0, 1, 2, 3, 4, 5}, ExtentSize: 1 << 20, Near: near, Rack: "r2"}
			runs, err := c.Place(q)
			if err != nil {
				t.Fatal(err)
			}
			for _, run := range runs {
				first, second := rackOf[run.Disks[0]], rackOf[run.Disks[1]]
				if near == "" && first != "r2" || near == "a" && (first != "r1" || second != "r2") || near == "c" && (first != "r3" || second != "r2") {
					t.Errorf("%v near %q: run %d lies in %s and %s", spread, near, run.Index, first, second)
				}
			}
		}
	}
}
