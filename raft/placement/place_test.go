package placement

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

const extent = 64 << 20

// TestPlaceKeepsThePromises places in any cell that can be placed in.
func TestPlaceKeepsThePromises(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawCell(t, rapid.SampledFrom([]int64{1, extent, extent}).Draw(t, "least"))
		racks := map[string]string{}
		for _, n := range c.Nodes {
			n.Up = rapid.IntRange(0, 4).Draw(t, "up") > 0
			racks[n.Name] = n.Rack
		}
		for _, d := range c.Disks {
			d.State = metapb.Disk_State(rapid.SampledFrom([]int32{1, 1, 1, 1, 2, 3}).Draw(t, "state"))
		}
		p := policy(rapid.Uint32Range(1, MaxReplicas).Draw(t, "replicas"))
		p.Spread = rapid.SampledFrom([]metapb.Policy_Spread{metapb.Policy_RACK, metapb.Policy_NODE}).Draw(t, "spread")
		p.Access = rapid.SampledFrom([]metapb.Policy_Access{metapb.Policy_CLUSTER, metapb.Policy_SAME_RACK}).Draw(t, "access")
		q := Request{Volume: block.VolumeID{UUID: block.UUID{1}}, Policy: p, ExtentSize: extent, Runs: []block.RunIndex{0, 1, 2, 77},
			Near: rapid.SampledFrom(c.Nodes).Draw(t, "near").Name}

		eligible := map[string]*metapb.Disk{}
		nodes, openRacks := map[string]bool{}, map[string]bool{}
		for _, d := range c.Disks {
			up := slices.ContainsFunc(c.Nodes, func(n *metapb.Node) bool { return n.Name == d.Node && n.Up })
			here := p.Access == metapb.Policy_CLUSTER || racks[d.Node] == racks[q.Near]
			if up && here && d.State == metapb.Disk_ONLINE && d.Available >= extent {
				eligible[d.Id], nodes[d.Node], openRacks[racks[d.Node]] = d, true, true
			}
		}
		runs, err := c.Place(q)
		if (err == nil) != (len(nodes) >= int(p.Replicas)) {
			t.Fatalf("%d eligible nodes for %d replicas: %v", len(nodes), p.Replicas, err)
		}
		for i, run := range runs {
			usedNodes, usedRacks := map[string]bool{}, map[string]bool{}
			for _, id := range run.Disks {
				if eligible[id] == nil {
					t.Fatalf("run %d on disk %s, which is not eligible", run.Index, id)
				}
				usedNodes[eligible[id].Node], usedRacks[racks[eligible[id].Node]] = true, true
			}
			if run.Index != uint32(q.Runs[i]) || len(run.Disks) != int(p.Replicas) || len(usedNodes) != int(p.Replicas) {
				t.Fatalf("run %v is not on %d nodes", run, p.Replicas)
			}
			if p.Spread == metapb.Policy_RACK && len(usedRacks) < min(int(p.Replicas), len(openRacks)) {
				t.Fatalf("run %v is in %d of %d racks", run, len(usedRacks), len(openRacks))
			}
			first := eligible[run.Disks[0]].Node
			if nodes[q.Near] && first != q.Near || openRacks[racks[q.Near]] && racks[first] != racks[q.Near] {
				t.Fatalf("run %v starts at %s, not near %s", run, first, q.Near)
			}
		}
		if again, _ := c.Place(q); fmt.Sprint(again) != fmt.Sprint(runs) {
			t.Fatal("the same question has two answers")
		}
	})
}

// TestPlaceEvensOut fills equal disks to 60 % with runs of several volumes: no
// disk is off by more than 5 % of the mean. Figures are refreshed after every batch.
func TestPlaceEvensOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := Cell{}
		replicas := rapid.Uint32Range(1, 3).Draw(t, "replicas")
		racks := rapid.IntRange(int(replicas), 4).Draw(t, "racks")
		const perDisk = 1000 // extents
		for i := range racks * 2 {
			name := fmt.Sprint("n", i)
			c.Nodes = append(c.Nodes, &metapb.Node{Name: name, Rack: fmt.Sprint("r", i%racks), Up: true})
			c.Disks = append(c.Disks, disk(name, i, perDisk*extent))
		}
		byID := map[string]*metapb.Disk{}
		for _, d := range c.Disks {
			byID[d.Id] = d
		}
		var volume block.VolumeID
		volume.UUID[3] = rapid.Byte().Draw(t, "volume")
		target := perDisk * len(c.Disks) * 6 / 10 / int(replicas)
		for next := block.RunIndex(0); int(next) < target; next += 8 {
			volume.UUID[9] = byte(next / 100)
			q := Request{Volume: volume, Policy: policy(replicas), ExtentSize: extent}
			for i := range block.RunIndex(8) {
				q.Runs = append(q.Runs, next+i)
			}
			runs, err := c.Place(q)
			if err != nil {
				t.Fatal(err)
			}
			for _, run := range runs {
				for _, id := range run.Disks {
					byID[id].Available -= extent
				}
			}
		}
		var sum, most, least int64
		least = 1 << 62
		for _, d := range c.Disks {
			used := (d.Capacity - d.Available) / extent
			sum, most, least = sum+used, max(most, used), min(least, used)
		}
		mean := float64(sum) / float64(len(c.Disks))
		if float64(most) > mean*1.05 || float64(least) < mean*0.95 {
			t.Fatalf("%d disks hold %d to %d runs, %.0f on average", len(c.Disks), least, most, mean)
		}
	})
}

// TestPlaceFollowsTheWeights asks with figures that never change: disks that
// are equally full get runs in proportion to their room.
func TestPlaceFollowsTheWeights(t *testing.T) {
	c := Cell{Nodes: []*metapb.Node{{Name: "n", Rack: "r", Up: true}}}
	for i, size := range []int64{1, 1, 3, 3} {
		c.Disks = append(c.Disks, disk("n", i, size*1000*extent))
	}
	count := map[string]int{}
	const asked = 4000
	for i := range block.RunIndex(asked) {
		runs, err := c.Place(Request{Volume: block.VolumeID{UUID: block.UUID{9}}, Policy: policy(1), Runs: []block.RunIndex{i}, ExtentSize: extent})
		if err != nil {
			t.Fatal(err)
		}
		count[runs[0].Disks[0]]++
	}
	for _, d := range c.Disks {
		if got, weight := float64(count[d.Id])/asked, float64(d.Capacity)/(8000*extent); got < weight*0.8 || got > weight*1.2 {
			t.Errorf("a disk with %.3f of the room got %.3f of the runs", weight, got)
		}
	}
}

// TestPlaceHandlesWhatALargeBatchNeeds: one answer per run, however small the disks are (births take no space).
func TestPlaceHandlesWhatALargeBatchNeeds(t *testing.T) {
	c := cell(1, fmt.Sprint("a r1 ", extent+1))
	q := Request{Policy: policy(1), ExtentSize: extent}
	for i := range block.RunIndex(256) {
		q.Runs = append(q.Runs, i)
	}
	if runs, err := c.Place(q); err != nil || len(runs) != 256 {
		t.Fatal(len(runs), err)
	}
}
