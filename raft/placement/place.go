package placement

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Request is a question to Place.
type Request struct {
	Volume     block.VolumeID // seeds the draw
	Policy     *metapb.Policy // every field filled in
	Runs       []block.RunIndex
	ExtentSize int64  // bytes a disk must have room for
	Near       string // node that the first replica should be on, else in its rack; may be empty
	// Rack is the volume's. If the policy's access is SAME_RACK all replicas must be there; empty: in
	// Near's rack. Else one of them should be: the first, if no disk of Near can take it.
	Rack string
}

// Place chooses disks for every run of the request, the first near q.Near. Only
// nodes whose Up is set are used. It returns ErrPrecondition if no such cluster
// as this can place the policy, ErrUnavailable if it could were its nodes up,
// ErrNoSpace if disks are full; each says what is missing and the remedy.
func (c Cell) Place(q Request) ([]*metapb.Run, error) {
	want := q.Policy.GetReplicas()
	if want < 1 || want > MaxReplicas {
		return nil, fmt.Errorf("%w: replicas must be 1 to %d, not %d", block.ErrInvalid, MaxReplicas, want)
	}
	p := c.placer(q)
	if err := p.shortage(c); err != nil {
		return nil, err
	}
	runs := make([]*metapb.Run, 0, len(q.Runs))
	for _, index := range q.Runs {
		run := &metapb.Run{Index: uint32(index)}
		for _, d := range p.choose(index, int(want)) {
			run.Disks = append(run.Disks, d.id)
		}
		runs = append(runs, run)
	}
	return runs, nil
}

// candidate is an eligible disk while a request is answered.
type candidate struct {
	id, node, rack string
	hash           uint64 // of its id
	capacity       float64
	available      float64 // less what this request gave to it
}

func (d *candidate) share() float64 { return d.available / d.capacity }

type placer struct {
	q     Request
	rack  string          // the only rack allowed, if not empty
	near  string          // rack of q.Near
	nodes map[string]bool // nodes that are up, with a disk that is not failed; true: one has room
	disks []*candidate    // eligible, by id
}

func (c Cell) placer(q Request) *placer {
	p := &placer{q: q, nodes: map[string]bool{}}
	racks, up := map[string]string{}, map[string]bool{}
	for _, n := range c.Nodes {
		racks[n.Name], up[n.Name] = n.Rack, n.Up
	}
	p.near = racks[q.Near]
	if q.Policy.GetAccess() == metapb.Policy_SAME_RACK {
		if p.rack = q.Rack; p.rack == "" {
			p.rack = p.near
		}
	}
	for _, d := range c.Disks {
		rack, known := racks[d.Node]
		if !known || !up[d.Node] || d.State == metapb.Disk_FAILED || p.rack != "" && rack != p.rack {
			continue
		}
		room := d.State == metapb.Disk_ONLINE && d.Capacity > 0 && d.Available >= max(q.ExtentSize, 1)
		p.nodes[d.Node] = p.nodes[d.Node] || room
		if room {
			p.disks = append(p.disks, &candidate{id: d.Id, node: d.Node, rack: rack,
				hash: mixString(d.Id), capacity: float64(d.Capacity), available: float64(d.Available)})
		}
	}
	slices.SortFunc(p.disks, func(a, b *candidate) int { return strings.Compare(a.id, b.id) })
	return p
}

// choose picks disks on want distinct nodes; there are enough.
func (p *placer) choose(run block.RunIndex, want int) []*candidate {
	chosen := make([]*candidate, 0, want)
	for len(chosen) < want {
		d := p.draw(p.candidates(chosen), run, len(chosen))
		d.available = max(d.available-float64(p.q.ExtentSize), 1)
		chosen = append(chosen, d)
	}
	return chosen
}

// candidates narrows the disks to the best nonempty choice for the next replica.
func (p *placer) candidates(chosen []*candidate) []*candidate {
	all := filter(p.disks, func(d *candidate) bool {
		return !slices.ContainsFunc(chosen, func(o *candidate) bool { return o.node == d.node })
	})
	in := func(rack string) []*candidate {
		return filter(all, func(d *candidate) bool { return rack != "" && d.rack == rack })
	}
	if len(chosen) == 0 {
		if on := filter(all, func(d *candidate) bool { return d.node == p.q.Near }); len(on) > 0 {
			return on
		}
	}
	if !slices.ContainsFunc(chosen, func(o *candidate) bool { return o.rack == p.q.Rack }) {
		if wished := in(p.q.Rack); len(wished) > 0 {
			return wished
		}
	}
	if len(chosen) == 0 {
		if near := in(p.near); len(near) > 0 {
			return near
		}
	}
	if p.q.Policy.GetSpread() == metapb.Policy_RACK {
		fresh := filter(all, func(d *candidate) bool {
			return !slices.ContainsFunc(chosen, func(o *candidate) bool { return o.rack == d.rack })
		})
		if len(fresh) > 0 {
			return fresh
		}
	}
	return all
}

// draw takes the emptier of two disks drawn with weights.
func (p *placer) draw(from []*candidate, run block.RunIndex, replica int) *candidate {
	seed := mix(binary.BigEndian.Uint64(p.q.Volume.UUID[:8]) ^
		mix(binary.BigEndian.Uint64(p.q.Volume.UUID[8:])^mix(uint64(run)<<8|uint64(replica))))
	var first, second *candidate
	best, next := math.Inf(-1), math.Inf(-1)
	for _, d := range from {
		// With u uniform in (0, 1), the largest ln(u)/weight is d's with a probability in proportion to its weight.
		u := (float64(mix(seed^d.hash)>>11) + 0.5) / (1 << 53)
		switch score := math.Log(u) / d.available; {
		case score > best:
			first, second, best, next = d, first, score, best
		case score > next:
			second, next = d, score
		}
	}
	if second != nil && second.share() > first.share() {
		return second
	}
	return first
}

func filter(disks []*candidate, keep func(*candidate) bool) []*candidate {
	var kept []*candidate
	for _, d := range disks {
		if keep(d) {
			kept = append(kept, d)
		}
	}
	return kept
}

// mix is the finalizer of SplitMix64: every bit of x moves every bit of the result.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func mixString(s string) uint64 {
	h := uint64(len(s))
	for i := range len(s) {
		h = mix(h ^ uint64(s[i]))
	}
	return h
}
