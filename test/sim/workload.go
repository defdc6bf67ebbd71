package sim

import (
	"errors"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// owner is the consumer of the volume in a random run: it keeps requests under
// way, has its device made anew when it was refused for good, and moves to
// another node now and then.
type owner struct {
	*sim
	dev        *device
	attachment *metapb.Attachment
	nodes      int // how often it moved
	moving     bool

	depth   int // requests under way
	overlap bool
	hot     []int64
	until   time.Duration // no new requests from then on
	asked   int
	think   time.Duration
}

func newOwner(s *sim) *owner {
	o := &owner{sim: s, depth: 1 + s.rand.IntN(12), overlap: s.chance(40), think: s.between(time.Millisecond, 60*time.Millisecond)}
	for _, at := range []int64{0, geometry.ExtentSize, runSize} { // and both sides of every boundary
		o.hot = append(o.hot, at, max(at, blockSize)-blockSize, at+geometry.RegionSize())
	}
	for range 4 {
		o.hot = append(o.hot, s.rand.Int64N(s.size/blockSize)*blockSize)
	}
	o.place()
	return o
}

// place attaches the volume to the next node and makes a device there.
func (o *owner) place() {
	a, err := o.attach([]string{"n1", "n2"}[o.nodes%2])
	if err != nil {
		o.failf("attach: %v", err)
	}
	o.attachment = a
	o.dev = o.stage(a)
}

// work keeps requests coming until a time.
func (o *owner) work(until time.Duration) {
	o.until = until
	for range o.depth {
		o.after(o.between(0, o.think), o.next)
	}
	o.after(0, o.care)
}

// care looks after the device: a broken one is made anew, once nothing of it can come any more.
func (o *owner) care() {
	defer o.after(50*time.Millisecond, o.care)
	switch {
	case o.moving && !o.attached(o.attachment.Id):
		o.dev.end()
		o.nodes++
		o.moving = false
		o.place()
	case o.moving || o.dev.broken == nil:
	case outcome(o.dev.broken) == block.ErrCacheLost.Error():
		o.learn()
		o.dev.end()
		o.dev = o.stage(o.attachment)
	default:
		o.failf("the device on %s was refused without reason: %v", o.dev.node, o.dev.broken)
	}
}

// move detaches the volume, to attach it elsewhere.
func (o *owner) move() {
	if !o.moving {
		o.moving = true
		o.detach(o.attachment.Id)
	}
}

func (o *owner) next() {
	if o.now >= o.until {
		return
	}
	again := func() { o.after(o.between(0, 2*o.think), o.next) }
	k := o.choose()
	if o.dev.broken != nil || !o.overlap && o.conflicts(k) {
		again()
		return
	}
	o.asked++
	dev := o.dev
	dev.submit(k)
	answered := false
	k.then = func() {
		if k.err != nil && !o.mayFail(k) {
			o.failf("%s: %v", k, k.err)
		}
		answered = true
		again()
	}
	o.after(30*time.Second, func() { // of a device that is gone nobody answers
		if !answered && (dev != o.dev || dev.broken != nil) {
			again()
		}
	})
}

// mayFail: a read of the only copy may, and what finds no space if the policy
// says so. Nothing else is an error because a disk or a server went away.
func (o *owner) mayFail(k *call) bool {
	switch {
	case k.op == block.OpRead:
		return errors.Is(k.err, block.ErrIO) && o.host.badReads > 0
	case k.op.Mutates():
		return errors.Is(k.err, block.ErrNoSpace) && o.errorOnFull
	}
	return false
}

func (o *owner) conflicts(k *call) bool {
	return k.op.Mutates() && slices.ContainsFunc(o.dev.pending, func(p *call) bool {
		return p.op.Mutates() && p.off < k.off+k.length && k.off < p.off+p.length
	})
}

func (o *owner) choose() *call {
	off := o.hot[o.rand.IntN(len(o.hot))]
	length := int64(blockSize)
	switch o.rand.IntN(10) {
	case 0, 1: // within a block
		at := o.rand.Int64N(blockSize / grain)
		off += at * grain
		length = (1 + o.rand.Int64N(blockSize/grain-at)) * grain
	case 2, 3:
		length = (2 + o.rand.Int64N(6)) * blockSize
	case 4: // across a boundary of sectors
		off += grain
		length = 2 * blockSize
	}
	if end := max(o.dev.size, runSize); off+length > end {
		off = max(0, end-length)
	}
	k := o.kind(off, length)
	k.fua = k.op.Mutates() && o.chance(8)
	return k
}

func (o *owner) kind(off, length int64) *call {
	switch n := o.rand.IntN(100); {
	case n < 52:
		return write(off, length)
	case n < 78:
		return read(off, length)
	case n < 84:
		return trim(off, length)
	case n < 88:
		return zero(off, length)
	case n < 90:
		k := zero(off, length)
		k.noHole = true
		return k
	}
	return flush()
}
