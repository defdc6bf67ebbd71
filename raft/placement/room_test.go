package placement

import (
	"errors"
	"fmt"
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
		rack      string
		replicas  int
		available int64
		maximum   int64
	}{
		{"one replica uses all", uneven, Demand{}, "", 1, 120 * gib, 120 * gib},
		{"two replicas use what the largest node can be matched with", uneven, Demand{}, "", 2, 20 * gib, 20 * gib},
		{"three replicas use the smallest node", uneven, Demand{}, "", 3, 10 * gib, 10 * gib},
		{"demand of three replicas leaves nothing for two", uneven, Demand{3: 10 * gib}, "", 2, 0, 0},
		{"but something for one", uneven, Demand{3: 10 * gib}, "", 1, 90 * gib, 90 * gib},
		{"never negative", uneven, Demand{1: 500 * gib}, "", 1, 0, 0},
		{"a rack with its own nodes", uneven, Demand{}, "r1", 2, 10 * gib, 10 * gib},
		{"a rack with too few nodes", uneven, Demand{}, "r2", 2, 0, 0},
		{"a rack's share of the demand", uneven, Demand{1: 60 * gib}, "r2", 1, 5 * gib, 5 * gib},
		{"no such rack", uneven, Demand{}, "r9", 1, 0, 0},
		{"the largest volume fits a small machine", cell(0, "a r1 4096"), Demand{}, "", 1, 64 << 40, 64 << 40},
		{"ten times the capacity of a large one", cell(0, fmt.Sprint("a r1 ", int64(10<<40))), Demand{1: 1 << 40}, "", 1, 99 << 40, 64 << 40},
		{"replicas out of range", uneven, Demand{}, "", 4, 0, 0},
		{"absurd capacities do not wrap", cell(1000, fmt.Sprint("a r1 ", int64(1)<<62), fmt.Sprint("b r1 ", int64(1)<<62)), Demand{}, "", 1,
			1<<63 - 4096, 64 << 40},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := c.cell.Capacity(c.demand, c.rack, c.replicas)
			if want := (Capacity{c.available, c.maximum}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// TestMaximumIsAcceptedAndNotMore is B139, for any cell and demand.
func TestMaximumIsAcceptedAndNotMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawCell(t, 1)
		var demand Demand
		for r := 1; r <= MaxReplicas; r++ { // made by volumes that were accepted
			for range rapid.IntRange(0, 2).Draw(t, "volumes") {
				if most := c.Capacity(demand, "", r).MaximumVolumeSize; most > 0 {
					demand[r] += quantum(rapid.Int64Range(1, most).Draw(t, "size"))
				}
			}
		}
		for r := 1; r <= MaxReplicas; r++ {
			most := c.Capacity(demand, "", r).MaximumVolumeSize
			if err := c.CheckCreate(demand, policy(uint32(r)), most); most > 0 && err != nil {
				t.Fatalf("%d bytes with %d replicas: %v", most, r, err)
			}
			if err := c.CheckCreate(demand, policy(uint32(r)), most+block.SizeQuantum); err == nil && most < block.MaxVolumeSize {
				t.Fatalf("%d bytes with %d replicas are too much and accepted", most+block.SizeQuantum, r)
			}
		}
	})
}

// TestRoomIsExact compares the cuts with a placement by hand: a volume is
// accepted exactly if volumes can be cut into pieces that lie on distinct nodes.
func TestRoomIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := rapid.SliceOfN(rapid.Int64Range(0, 12), 1, 5).Draw(t, "limits")
		r := room{limits: append([]int64(nil), limits...)}
		sortDescending(r.limits)
		var volumes []int // replicas of each volume of one unit
		for range rapid.IntRange(0, 12).Draw(t, "volumes") {
			replicas := rapid.IntRange(1, MaxReplicas).Draw(t, "replicas")
			volumes = append(volumes, replicas)
			r.demand[replicas]++
		}
		fits := true
		for k := range MaxReplicas {
			fits = fits && r.demand.beyond(k) <= r.limit(k)
		}
		if want := placeable(limits, volumes); fits != want {
			t.Fatalf("nodes %v, volumes %v: cuts say %t, placing says %t", limits, volumes, fits, want)
		}
	})
}

// placeable places unit volumes, those with most replicas first, each on the
// emptiest nodes: for units that is always the best that can be done.
func placeable(limits []int64, volumes []int) bool {
	free := append([]int64(nil), limits...)
	for want := MaxReplicas; want > 0; want-- {
		for _, replicas := range volumes {
			if replicas != want {
				continue
			}
			sortDescending(free)
			for i := range replicas {
				if i >= len(free) || free[i] == 0 {
					return false
				}
				free[i]--
			}
		}
	}
	return true
}

func sortDescending(s []int64) {
	for i := range s {
		for j := i; j > 0 && s[j] > s[j-1]; j-- {
			s[j], s[j-1] = s[j-1], s[j]
		}
	}
}

// TestRacksAddUp is the last part of B138.
func TestRacksAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawCell(t, 1)
		demand := Demand{1: rapid.Int64Range(0, 1<<42).Draw(t, "demand")}
		racks, sum := map[string]bool{}, int64(0)
		for _, n := range c.Nodes {
			if !racks[n.Rack] {
				sum += c.Capacity(demand, n.Rack, 1).Available
			}
			racks[n.Rack] = true
		}
		all := c.Capacity(demand, "", 1).Available
		if rounding := int64(len(racks)+1) * 2 * block.SizeQuantum; sum > all || sum < all-rounding {
			t.Fatalf("racks have %d, the cell %d", sum, all)
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
		{"too few nodes", one.Feasible(policy(3)), block.ErrPrecondition,
			"3 replicas on distinct nodes were asked for, 1 node has a usable disk: add nodes or use --replicas 1"},
		{"too few nodes to place", place(one, policy(3)), block.ErrPrecondition, "add nodes or use --replicas 1"},
		{"no disk", failed.Feasible(policy(1)), block.ErrPrecondition, "1 replica was asked for, no node has a usable disk: start a server with --disk"},
		{"full", full.Feasible(policy(2)), block.ErrNoSpace, "1 node has a disk that is not full: add disks or delete data"},
		{"full to place", place(full, policy(2)), block.ErrNoSpace, "1 node has a disk with room: add disks or delete data"},
		{"down", down.Feasible(policy(2)), nil, ""},
		{"down to place", place(down, policy(2)), block.ErrUnavailable, "1 of 2 nodes with disks can be reached: start the others or add nodes"},
		{"rack", full.Feasible(inRack), block.ErrPrecondition, "in any one rack: add nodes or use --replicas 1 or --access cluster"},
		{"rack to place", place(full, inRack), block.ErrPrecondition, `in rack "r1"`},
		{"no room", one.CheckCreate(Demand{}, policy(1), 2<<30), block.ErrNoSpace, "at most 1073741824 more may be promised: add disks"},
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
