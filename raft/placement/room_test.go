package placement

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// cell makes a cell of nodes with one disk each, written "node rack capacity".
func cell(overcommit uint32, nodes ...string) Cell {
	c := Cell{Overcommit: overcommit}
	for _, text := range nodes {
		var name, rack string
		var capacity int64
		if _, err := fmt.Sscan(text, &name, &rack, &capacity); err != nil {
			panic(err)
		}
		c.Nodes = append(c.Nodes, &metapb.Node{Name: name, Rack: rack, Up: true})
		c.Disks = append(c.Disks, disk(name, len(c.Disks), capacity))
	}
	return c
}

func disk(node string, number int, capacity int64) *metapb.Disk {
	return &metapb.Disk{Id: fmt.Sprintf("00000000-0000-4000-8000-%012d", number), Node: node, Capacity: capacity, Available: capacity,
		State: metapb.Disk_ONLINE}
}

func policy(replicas uint32) *metapb.Policy {
	return &metapb.Policy{Replicas: replicas, Spread: metapb.Policy_RACK, Access: metapb.Policy_CLUSTER}
}

// TestCapacityTable is the formula of DESIGN.md by hand (B138).
func TestCapacityTable(t *testing.T) {
	const gib = 1 << 30
	uneven := cell(1, "a r1 107374182400", "b r1 10737418240", "c r2 10737418240") // 100, 10, 10 GiB
	for _, c := range []struct {
		name      string
		cell      Cell
		demand    Demand
		pinned    map[string]Demand
		rack      string
		replicas  int
		available int64
		maximum   int64
	}{
		{"one replica uses all", uneven, Demand{}, nil, "", 1, 120 * gib, 120 * gib},
		{"two replicas use what the largest node can be matched with", uneven, Demand{}, nil, "", 2, 20 * gib, 20 * gib},
		{"three replicas use the smallest node", uneven, Demand{}, nil, "", 3, 10 * gib, 10 * gib},
		{"demand of three replicas leaves nothing for two", uneven, Demand{3: 10 * gib}, nil, "", 2, 0, 0},
		{"but something for one", uneven, Demand{3: 10 * gib}, nil, "", 1, 90 * gib, 90 * gib},
		{"never negative", uneven, Demand{1: 500 * gib}, nil, "", 1, 0, 0},
		{"a rack with its own nodes", uneven, Demand{}, nil, "r1", 2, 10 * gib, 10 * gib},
		{"a rack with too few nodes", uneven, Demand{}, nil, "r2", 2, 0, 0},
		{"a rack's share of the demand", uneven, Demand{1: 60 * gib}, nil, "r2", 1, 5 * gib, 5 * gib},
		{"no such rack", uneven, Demand{}, nil, "r9", 1, 0, 0},
		{"the largest volume fits a small machine", cell(0, "a r1 4096"), Demand{}, nil, "", 1, 64 << 40, 64 << 40},
		{"ten times the capacity of a large one", cell(0, fmt.Sprint("a r1 ", int64(10<<40))), Demand{1: 1 << 40}, nil, "", 1, 99 << 40, 64 << 40},
		{"replicas out of range", uneven, Demand{}, nil, "", 4, 0, 0},
		{"absurd capacities do not wrap", cell(1000, fmt.Sprint("a r1 ", int64(1)<<62), fmt.Sprint("b r1 ", int64(1)<<62)), Demand{}, nil, "", 1,
			1<<63 - 4096, 64 << 40},
		{"promises to a rack are its own", uneven, Demand{}, map[string]Demand{"r1": {1: 60 * gib}}, "r2", 1, 10 * gib, 10 * gib},
		{"and take from the rack", uneven, Demand{}, map[string]Demand{"r1": {1: 60 * gib}}, "r1", 1, 50 * gib, 50 * gib},
		{"and from the cell", uneven, Demand{}, map[string]Demand{"r1": {1: 60 * gib}}, "", 1, 60 * gib, 60 * gib},
		{"two copies in a rack fill its smaller node", uneven, Demand{}, map[string]Demand{"r1": {2: 10 * gib}}, "r1", 1, 90 * gib, 90 * gib},
		{"what lies in a rack leaves its partner none", uneven, Demand{}, map[string]Demand{"r2": {1: 10 * gib}}, "", 3, 0, 0},
		{"a rack that lost its nodes burdens nobody", uneven, Demand{}, map[string]Demand{"r9": {1: 500 * gib}}, "r2", 1, 10 * gib, 10 * gib},
		{"nor does one that is promised too much", uneven, Demand{}, map[string]Demand{"r1": {1: 500 * gib}}, "", 1, 10 * gib, 10 * gib},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := c.cell.Capacity(Promises{Free: c.demand, Racks: c.pinned}, c.rack, c.replicas)
			if want := (Capacity{c.available, c.maximum}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// TestMaximumIsAcceptedAndNotMore is B139, for any cell and promises, for the cell and each rack.
func TestMaximumIsAcceptedAndNotMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawCell(t, 1)
		promised := drawPromises(t, c)
		for r := 1; r <= MaxReplicas; r++ {
			for _, rack := range append(c.racks(), "", "r9") {
				most := c.Capacity(promised, rack, r).MaximumVolumeSize
				p := policy(uint32(r))
				if rack != "" {
					p.Access = metapb.Policy_SAME_RACK
				}
				if err := c.CheckCreate(promised, p, rack, most); most > 0 && err != nil {
					t.Fatalf("%d bytes with %d replicas in %q: %v", most, r, rack, err)
				}
				if err := c.CheckCreate(promised, p, rack, most+block.SizeQuantum); err == nil && most < block.MaxVolumeSize {
					t.Fatalf("%d bytes with %d replicas in %q are too much and accepted", most+block.SizeQuantum, r, rack)
				}
			}
		}
	})
}

// drawPromises promises to volumes that are accepted.
func drawPromises(t *rapid.T, c Cell) Promises {
	promised := Promises{Racks: map[string]Demand{}}
	for range rapid.IntRange(0, 6).Draw(t, "volumes") {
		rack := rapid.SampledFrom(append(c.racks(), "")).Draw(t, "in")
		r := rapid.IntRange(1, MaxReplicas).Draw(t, "replicas")
		most := c.Capacity(promised, rack, r).MaximumVolumeSize
		if most == 0 {
			continue
		}
		promise(&promised, rack, r, quantum(rapid.Int64Range(1, most).Draw(t, "size")))
	}
	return promised
}

func promise(p *Promises, rack string, replicas int, size int64) {
	if rack == "" {
		p.Free[replicas] += size
		return
	}
	d := p.Racks[rack]
	d[replicas] += size
	p.Racks[rack] = d
}

// TestAcceptedFits: whatever is accepted can be cut into pieces that lie on
// distinct nodes, those of a rack's volumes in the rack; and a volume that may
// lie anywhere is refused only if it could not.
func TestAcceptedFits(t *testing.T) {
	const unit = block.SizeQuantum
	rapid.Check(t, func(t *rapid.T) {
		c := Cell{Overcommit: 1}
		for i, n := range rapid.SliceOfN(rapid.IntRange(0, 5), 1, 5).Draw(t, "units") {
			name := fmt.Sprint("n", i)
			c.Nodes = append(c.Nodes, &metapb.Node{Name: name, Rack: fmt.Sprint("r", rapid.IntRange(0, 2).Draw(t, "rack")), Up: true})
			c.Disks = append(c.Disks, disk(name, i, int64(n)*unit))
		}
		promised := Promises{Racks: map[string]Demand{}}
		var volumes []unitVolume
		for range rapid.IntRange(1, 14).Draw(t, "volumes") {
			v := unitVolume{rapid.SampledFrom(append(c.racks(), "", "")).Draw(t, "in"), rapid.IntRange(1, MaxReplicas).Draw(t, "replicas")}
			p := policy(uint32(v.replicas))
			if v.rack != "" {
				p.Access = metapb.Policy_SAME_RACK
			}
			accepted := c.CheckGrowth(promised, p, v.rack, unit) == nil
			fits := placeable(c, append(slices.Clone(volumes), v))
			if accepted && !fits || v.rack == "" && fits && !accepted {
				t.Fatalf("%v beside %v: accepted %t, fits %t", v, volumes, accepted, fits)
			}
			if accepted {
				promise(&promised, v.rack, v.replicas, unit)
				volumes = append(volumes, v)
			}
		}
	})
}

// unitVolume is a volume of one unit.
type unitVolume struct {
	rack     string
	replicas int
}

// placeable looks for a placement by augmenting paths: it is a flow from volumes to nodes.
func placeable(c Cell, volumes []unitVolume) bool {
	free := make([]int64, len(c.Nodes))
	for i, d := range c.Disks {
		free[i] = d.Capacity / block.SizeQuantum
	}
	on := make([]map[int]bool, len(volumes)) // nodes of each volume
	var place func(v int, tried map[int]bool) bool
	place = func(v int, tried map[int]bool) bool {
		for n, node := range c.Nodes {
			if tried[n] || on[v][n] || volumes[v].rack != "" && volumes[v].rack != node.Rack {
				continue
			}
			tried[n] = true
			if free[n] > 0 {
				free[n]--
				on[v][n] = true
				return true
			}
			for other := range volumes { // make room: move somebody's copy away
				if on[other][n] && place(other, tried) {
					delete(on[other], n)
					on[v][n] = true
					return true
				}
			}
		}
		return false
	}
	for v := range volumes {
		on[v] = map[int]bool{}
	}
	for v, volume := range volumes {
		for range volume.replicas {
			if !place(v, map[int]bool{}) {
				return false
			}
		}
	}
	return true
}

// TestRacksAddUp is the last part of B138.
func TestRacksAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawCell(t, 1)
		promised := Promises{Racks: map[string]Demand{}}
		for range 3 {
			rack := rapid.SampledFrom(append(c.racks(), "", "")).Draw(t, "in")
			promise(&promised, rack, 1, rapid.Int64Range(0, c.Capacity(promised, rack, 1).Available).Draw(t, "promised"))
		}
		sum := int64(0)
		for _, rack := range c.racks() {
			sum += c.Capacity(promised, rack, 1).Available
		}
		all := c.Capacity(promised, "", 1).Available
		if rounding := int64(len(c.racks())+1) * 2 * block.SizeQuantum; sum > all || sum < all-rounding {
			t.Fatalf("racks have %d, the cell %d", sum, all)
		}
		if of := c.CapacityOfRacks(promised, 1).Available; of != sum {
			t.Fatalf("racks have %d, together they say %d", sum, of)
		}
	})
}

// drawCell draws nodes with one or two disks of at least so many bytes.
func drawCell(t *rapid.T, least int64) Cell {
	c := Cell{Overcommit: rapid.Uint32Range(0, 20).Draw(t, "overcommit")}
	for i := range rapid.IntRange(1, 6).Draw(t, "nodes") {
		name := fmt.Sprint("n", i)
		c.Nodes = append(c.Nodes, &metapb.Node{Name: name, Rack: fmt.Sprint("r", rapid.IntRange(0, 2).Draw(t, "rack")), Up: true})
		for range rapid.IntRange(1, 2).Draw(t, "disks") {
			c.Disks = append(c.Disks, disk(name, len(c.Disks), rapid.Int64Range(least, 1<<42).Draw(t, "capacity")))
		}
	}
	return c
}

// TestRefusals checks that an error says what is missing and what to do.
func TestRefusals(t *testing.T) {
	one := cell(1, "a r1 1073741824")
	down := cell(1, "a r1 1073741824", "b r2 1073741824")
	down.Nodes[1].Up = false
	full := cell(1, "a r1 1073741824", "b r2 1073741824")
	full.Disks[1].State, full.Disks[1].Available = metapb.Disk_FULL, 0
	failed := cell(1, "a r1 1073741824")
	failed.Disks[0].State = metapb.Disk_FAILED
	inRack := policy(2)
	inRack.Access = metapb.Policy_SAME_RACK
	place := func(c Cell, p *metapb.Policy) error {
		_, err := c.Place(Request{Policy: p, Runs: []block.RunIndex{0}, ExtentSize: 1 << 20, Near: "a"})
		return err
	}
	for _, c := range []struct {
		name string
		err  error
		want error
		says string
	}{
		{"too few nodes", one.feasible(policy(3), ""), block.ErrPrecondition,
			"3 replicas on distinct nodes were asked for, 1 node has a usable disk: add nodes or use --replicas 1"},
		{"too few nodes to place", place(one, policy(3)), block.ErrPrecondition, "add nodes or use --replicas 1"},
		{"no disk", failed.feasible(policy(1), ""), block.ErrPrecondition, "1 replica was asked for, no node has a usable disk: start a server with --disk"},
		{"full", full.feasible(policy(2), ""), block.ErrNoSpace, "1 node has a disk that is not full: add disks or delete data"},
		{"full to place", place(full, policy(2)), block.ErrNoSpace, "1 node has a disk with room: add disks or delete data"},
		{"down", down.feasible(policy(2), ""), nil, ""},
		{"down to place", place(down, policy(2)), block.ErrUnavailable, "1 of 2 nodes with disks can be reached: start the others or add nodes"},
		{"rack", full.feasible(inRack, ""), block.ErrPrecondition, "in any one rack: add nodes or use --replicas 1 or --access cluster"},
		{"rack to place", place(full, inRack), block.ErrPrecondition, `in rack "r1"`},
		{"no room", one.CheckCreate(Promises{}, policy(1), "", 2<<30), block.ErrNoSpace, "at most 1073741824 more may be promised: add disks"},
		{"replicas", place(one, policy(0)), block.ErrInvalid, "replicas must be 1 to 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !errors.Is(c.err, c.want) || c.want == nil && c.err != nil {
				t.Fatalf("got %v, want %v", c.err, c.want)
			}
			if c.err != nil && !strings.Contains(c.err.Error(), c.says) {
				t.Errorf("%q does not say %q", c.err, c.says)
			}
		})
	}
}
