package placement

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"

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

// Demand is what was promised: Demand[r] is the sum of the wanted sizes, in
// bytes, of all volumes with r replicas.
type Demand [MaxReplicas + 1]int64

// Promised is the bytes of all replicas together, as if every volume were full.
func (d Demand) Promised() int64 { return d.beyond(0) }

// beyond is the part of the demand that cannot lie on any k nodes.
func (d Demand) beyond(k int) int64 {
	var sum int64
	for r := k + 1; r <= MaxReplicas; r++ {
		sum = add(sum, mul(d[r], int64(r-k)))
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

// Capacity says what is left of the room beside demand for volumes with so
// many replicas, in the cell or, if rack is not empty, in a rack. See
// DESIGN.md for the formula.
func (c Cell) Capacity(demand Demand, rack string, replicas int) Capacity {
	if replicas < 1 || replicas > MaxReplicas {
		return Capacity{}
	}
	cell := c.room("", demand).capacity(replicas)
	if rack == "" {
		return cell
	}
	all, part := c.room("", demand), c.room(rack, demand)
	for r := range part.demand {
		part.demand[r] = share(demand[r], part.limit(0), all.limit(0))
	}
	in := part.capacity(replicas)
	return Capacity{min(in.Available, cell.Available), min(in.MaximumVolumeSize, cell.MaximumVolumeSize)}
}

// CheckCreate returns ErrPrecondition or ErrNoSpace, naming what is missing and
// the remedy, unless a new volume of size bytes under the policy is accepted.
// Which nodes are up is not asked: the answer depends on the replicated state only.
func (c Cell) CheckCreate(demand Demand, p *metapb.Policy, size int64) error {
	if err := c.Feasible(p); err != nil {
		return err
	}
	return c.CheckGrowth(demand, p, size)
}

// CheckGrowth returns ErrNoSpace unless size more bytes under the policy may be promised.
func (c Cell) CheckGrowth(demand Demand, p *metapb.Policy, size int64) error {
	r := c.room("", demand)
	replicas := int(p.GetReplicas())
	if left := r.left(replicas); size > left {
		return fmt.Errorf("%w: %d bytes asked for with replicas %d, but at most %d more may be promised: "+
			"add disks, delete volumes or ask for less", block.ErrNoSpace, size, replicas, left)
	}
	return nil
}

// room is the promisable bytes of each node of the cell or of a rack, largest first.
type room struct {
	limits []int64
	online int // nodes with a disk that takes new extents
	demand Demand
}

func (c Cell) room(rack string, demand Demand) room {
	ratio, floor := int64(c.Overcommit), int64(0)
	if ratio == 0 {
		ratio, floor = DefaultOvercommit, block.MaxVolumeSize
	}
	capacity := map[string]int64{}
	online := map[string]bool{}
	for _, d := range c.Disks {
		if d.Node != "" && d.State != metapb.Disk_FAILED {
			capacity[d.Node] = add(capacity[d.Node], d.Capacity)
			if d.State == metapb.Disk_ONLINE {
				online[d.Node] = true
			}
		}
	}
	r := room{demand: demand}
	for _, n := range c.Nodes {
		bytes := capacity[n.Name]
		if bytes <= 0 || rack != "" && n.Rack != rack {
			continue
		}
		r.limits = append(r.limits, max(mul(bytes, ratio), floor))
		if online[n.Name] {
			r.online++
		}
	}
	slices.SortFunc(r.limits, func(a, b int64) int { return cmp.Compare(b, a) })
	return r
}

// limit is what all nodes but the k largest may be promised.
func (r room) limit(k int) int64 {
	var sum int64
	for _, l := range r.limits[min(k, len(r.limits)):] {
		sum = add(sum, l)
	}
	return sum
}

// left is how many bytes of volumes with so many replicas can still be promised.
func (r room) left(replicas int) int64 {
	left := int64(math.MaxInt64)
	for k := range replicas {
		left = min(left, (r.limit(k)-r.demand.beyond(k))/int64(replicas-k))
	}
	return quantum(left)
}

func (r room) capacity(replicas int) Capacity {
	if r.online < replicas {
		return Capacity{}
	}
	left := r.left(replicas)
	return Capacity{Available: left, MaximumVolumeSize: min(left, block.MaxVolumeSize)}
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
