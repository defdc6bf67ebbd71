package placement

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

const (
	// MaxReplicas is the largest number of replicas a policy may ask for.
	MaxReplicas = 3
	// DefaultOvercommit is how many bytes may be promised per byte of capacity in a cluster that names no ratio.
	DefaultOvercommit = 10
	// MaxOvercommit bounds the ratio.
	MaxOvercommit = 1000
)

// Demand is sizes by number of replicas: Demand[r] is the sum of the wanted
// sizes, in bytes, of volumes with r replicas.
type Demand [MaxReplicas + 1]int64

// beyond is the part of a demand that cannot lie on any k nodes.
func (d Demand) beyond(k int) int64 {
	var sum int64
	for r := k + 1; r <= MaxReplicas; r++ {
		sum = add(sum, mul(d[r], int64(r-k)))
	}
	return sum
}

// Promises is what was promised to volumes.
type Promises struct {
	Free  Demand            // of volumes whose copies may lie anywhere
	Racks map[string]Demand // of volumes whose copies lie in one rack, by that rack
}

// Total is the bytes of all replicas together, as if every volume were full.
func (p Promises) Total() int64 {
	sum := p.Free.beyond(0)
	for _, d := range p.Racks {
		sum = add(sum, d.beyond(0))
	}
	return sum
}

// Cell is what placement knows: the nodes and disks in any order, and the
// overcommit ratio (0: the default).
type Cell struct {
	Nodes      []*metapb.Node
	Disks      []*metapb.Disk
	Overcommit uint32
}

// Capacity answers how much more can be promised. Both are logical bytes of a
// volume, multiples of block.SizeQuantum, never negative.
type Capacity struct {
	Available         int64 // in all, over any number of volumes
	MaximumVolumeSize int64 // of the largest volume that is accepted now
}

// Capacity says what is left beside the promises for volumes with so many
// replicas: in the cell or, if rack is not empty, for volumes all of whose
// copies lie in that rack. See DESIGN.md for the formula.
func (c Cell) Capacity(promised Promises, rack string, replicas int) Capacity {
	if replicas < 1 || replicas > MaxReplicas || c.counts()[rack].online < replicas {
		return Capacity{}
	}
	return c.room(promised).capacity(replicas, rack)
}

// CapacityOfRacks is Capacity for volumes whose rack is still to be chosen.
func (c Cell) CapacityOfRacks(promised Promises, replicas int) Capacity {
	if replicas < 1 || replicas > MaxReplicas {
		return Capacity{}
	}
	r, counts := c.room(promised), c.counts()
	var all Capacity
	for _, rack := range c.racks() {
		if counts[rack].online >= replicas {
			in := r.capacity(replicas, rack)
			all.Available = add(all.Available, in.Available)
			all.MaximumVolumeSize = max(all.MaximumVolumeSize, in.MaximumVolumeSize)
		}
	}
	all.Available = min(all.Available, r.left(replicas, ""))
	return all
}

// CheckCreate returns ErrPrecondition or ErrNoSpace, naming what is missing and
// the remedy, unless a new volume of size bytes under the policy is accepted. If
// rack is not empty all its copies are to lie there, and it is ErrNoSpace always.
// Which nodes are up is not asked: the answer depends on the replicated state only.
func (c Cell) CheckCreate(promised Promises, p *metapb.Policy, rack string, size int64) error {
	if err := c.feasible(p, rack); err != nil {
		return err
	}
	return c.CheckGrowth(promised, p, rack, size)
}

// CheckGrowth returns ErrNoSpace unless size more bytes under the policy, in a
// rack or anywhere, may be promised.
func (c Cell) CheckGrowth(promised Promises, p *metapb.Policy, rack string, size int64) error {
	replicas := int(p.GetReplicas())
	if left := c.room(promised).left(replicas, rack); size > left {
		return fmt.Errorf("%w: %d bytes asked for with replicas %d, but at most %d more may be promised%s: "+
			"add disks, delete volumes or ask for less", block.ErrNoSpace, size, replicas, left, inRack(rack))
	}
	return nil
}

// room is the promisable bytes rack by rack, in order of their names.
type room struct {
	racks []rackRoom
	free  Demand
}

// rackRoom is a rack's part of a room.
type rackRoom struct {
	name string
	// slack[k] is what all nodes but the k largest may still be promised, beside what
	// must lie on them of the volumes that lie in this rack. Never negative, not even
	// where nodes have gone: what the rack cannot hold does not burden the others.
	slack [MaxReplicas]int64
}

func (c Cell) room(promised Promises) room {
	ratio, floor := int64(c.Overcommit), int64(0)
	if ratio == 0 {
		ratio, floor = DefaultOvercommit, block.MaxVolumeSize
	}
	capacity := map[string]int64{}
	for _, d := range c.Disks {
		if d.Node != "" && d.State != metapb.Disk_FAILED {
			capacity[d.Node] = add(capacity[d.Node], d.Capacity)
		}
	}
	limits := map[string][]int64{}
	for _, n := range c.Nodes {
		if bytes := capacity[n.Name]; bytes > 0 {
			limits[n.Rack] = append(limits[n.Rack], max(mul(bytes, ratio), floor))
		}
	}
	r := room{free: promised.Free}
	for name, of := range limits {
		slices.SortFunc(of, func(a, b int64) int { return cmp.Compare(b, a) })
		in := rackRoom{name: name}
		for k := range in.slack {
			var limit int64
			for _, l := range of[min(k, len(of)):] {
				limit = add(limit, l)
			}
			in.slack[k] = max(limit-promised.Racks[name].beyond(k), 0)
		}
		r.racks = append(r.racks, in)
	}
	slices.SortFunc(r.racks, func(a, b rackRoom) int { return strings.Compare(a.name, b.name) })
	return r
}

func (r room) capacity(replicas int, rack string) Capacity {
	left := r.left(replicas, rack)
	return Capacity{Available: left, MaximumVolumeSize: min(left, block.MaxVolumeSize)}
}

// left is how many bytes of volumes with so many replicas can still be
// promised, anywhere or in a rack.
func (r room) left(replicas int, rack string) int64 {
	if rack != "" {
		return r.leftIn(rack, replicas)
	}
	left := int64(math.MaxInt64)
	for k := range replicas {
		left = min(left, (r.least(k, "")-r.free.beyond(k))/int64(replicas-k))
	}
	return quantum(left)
}

func (r room) leftIn(rack string, replicas int) int64 {
	i, ok := slices.BinarySearchFunc(r.racks, rack, func(in rackRoom, name string) int { return strings.Compare(in.name, name) })
	if !ok {
		return 0
	}
	own, all := r.racks[i], r.least(0, "")
	var part Demand // of the free demand that this rack is expected to carry
	for n := range part {
		part[n] = share(r.free[n], own.slack[0], all)
	}
	left := int64(math.MaxInt64)
	for k := range replicas {
		bytes := own.slack[k] - part.beyond(k)
		for others := range MaxReplicas - k { // cuts through other racks, too
			bytes = min(bytes, add(own.slack[k], r.least(others, rack))-r.free.beyond(k+others))
		}
		left = min(left, bytes/int64(replicas-k))
	}
	return quantum(left)
}

// least is the slack of all racks but one, without those k nodes whose absence costs most.
func (r room) least(k int, except string) int64 {
	lost := func(i, k int) int64 { return r.racks[i].slack[0] - r.racks[i].slack[k] }
	first, second, both := -1, -1, -1 // racks that lose most by one node, second most, and most by two
	for i := range r.racks {
		if r.racks[i].name == except {
			continue
		}
		switch {
		case first < 0 || lost(i, 1) > lost(first, 1):
			first, second = i, first
		case second < 0 || lost(i, 1) > lost(second, 1):
			second = i
		}
		if both < 0 || lost(i, 2) > lost(both, 2) {
			both = i
		}
	}
	without := func(nodes ...int) int64 { // nodes: a rack for each node that is absent
		var sum int64
		for i, in := range r.racks {
			absent := 0
			for _, n := range nodes {
				if n == i {
					absent++
				}
			}
			if in.name != except {
				sum = add(sum, in.slack[absent])
			}
		}
		return sum
	}
	switch k {
	case 0:
		return without()
	case 1:
		return without(first)
	}
	return min(without(first, second), without(both, both))
}

// quantum rounds down to a size that a volume can have, or 0.
func quantum(n int64) int64 { return max(n-n%block.SizeQuantum, 0) }

// share is ceil(n · part / whole), for 0 ≤ part ≤ whole.
func share(n, part, whole int64) int64 {
	if whole <= 0 || n <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(n), uint64(part))
	q, rem := bits.Div64(hi, lo, uint64(whole))
	if rem > 0 {
		q++
	}
	return int64(q)
}

// add and mul stop at the largest number: sums of capacities may be absurd, never wrap.
func add(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}

func mul(a, b int64) int64 {
	if hi, lo := bits.Mul64(uint64(a), uint64(b)); hi != 0 || lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return a * b
}
