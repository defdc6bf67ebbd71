package sim

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
)

// fate is what becomes of one call to the metadata service.
type fate uint8

const (
	answered    fate = iota
	unavailable      // refused at once; nothing happened
	lost             // never applied; the caller learns nothing
	unanswered       // applied; the caller learns nothing
	late             // the caller learns nothing; applied after that
	fates
)

func (f fate) String() string {
	return [...]string{"answered", "unavailable", "lost", "unanswered", "late"}[f]
}

// cell is the metadata service: the real state machine under a model of its
// log. It answers linearizably or not at all.
type cell struct {
	*world
	state *metadata.State
	index uint64
	down  bool // the majority is gone

	trouble int               // of 100 calls, how many have another fate than answered
	fates   map[string][]fate // what the next calls of a kind meet, for scripts
	delay   time.Duration     // of late commands; 0: random
	watch   []func(block.VolumeID)
}

func newCell(w *world) *cell {
	return &cell{world: w, state: metadata.New(), fates: map[string][]fate{}}
}

// next makes the coming calls of a kind meet these fates.
func (c *cell) next(kind string, f ...fate) { c.fates[kind] = append(c.fates[kind], f...) }

func (c *cell) fate(kind string) fate {
	if f := c.fates[kind]; len(f) > 0 {
		c.fates[kind] = f[1:]
		return f[0]
	}
	switch {
	case c.down:
		return []fate{unavailable, lost}[c.rand.IntN(2)]
	case c.chance(c.trouble):
		return 1 + fate(c.rand.IntN(int(fates)-1))
	}
	return answered
}

var (
	errNoLeader = fmt.Errorf("%w: no leader", block.ErrUnavailable)
	errNoAnswer = fmt.Errorf("%w: no answer", block.ErrUnknown)
)

// submit proposes a command; done comes exactly once.
func (c *cell) submit(kind string, cmd *metapb.Command, done func(metadata.Result, error)) {
	f := c.fate(kind)
	c.tracef("cell: %s is %s", kind, f)
	there, back := c.between(time.Millisecond, 6*time.Millisecond), c.between(time.Millisecond, 6*time.Millisecond)
	silence := c.between(50*time.Millisecond, 12*time.Second)
	nothing := func() { done(metadata.Result{}, errNoAnswer) }
	switch f {
	case unavailable:
		c.after(there, func() { done(metadata.Result{}, errNoLeader) })
	case lost:
		c.after(silence, nothing)
	case unanswered:
		c.after(there, func() { c.apply(kind, cmd) })
		c.after(there+silence, nothing)
	case late:
		later := c.delay
		if later == 0 {
			later = c.between(0, 5*time.Second)
		}
		c.after(silence, nothing)
		c.after(silence+later, func() { c.apply(kind, cmd) })
	default:
		c.after(there, func() {
			r := c.apply(kind, cmd)
			c.after(back, func() { done(r, nil) })
		})
	}
}

// apply is a log entry becoming state.
func (c *cell) apply(kind string, cmd *metapb.Command) metadata.Result {
	c.index++
	before := c.state.View()
	cmd = proto.CloneOf(cmd)
	cmd.Level, cmd.Time = metadata.Level, int64(c.now)
	r := c.state.Apply(c.index, cmd)
	after := c.state.View()
	if err := errors.Join(metadata.Check(after), metadata.CheckTransition(before, after)); err != nil {
		c.failf("metadata invariant broken by %s: %v", kind, err)
	}
	c.tracef("cell: %d %s -> %s", c.index, kind, outcome(r.Err))
	for _, e := range r.Events {
		if id, err := block.ParseUUID(e.VolumeId); err == nil {
			for _, f := range c.watch {
				f(block.VolumeID{UUID: id})
			}
		}
	}
	return r
}

// outcome is an error's kind, for the trace: texts may hold what differs between equal runs.
func outcome(err error) string {
	if err == nil {
		return "ok"
	}
	for _, e := range []error{
		block.ErrStale, block.ErrCacheLost, block.ErrNoSpace, block.ErrUnknown, block.ErrUnavailable, block.ErrNotFound, block.ErrIO,
		block.ErrShutdown, block.ErrPermission, block.ErrInUse, block.ErrPrecondition, block.ErrExists, block.ErrInvalid, block.ErrCorrupt,
		block.ErrReadOnly,
	} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	return "error"
}

// read is a linearizable read of a volume's map.
func (c *cell) read(kind string, id block.VolumeID, done func(primary.Map, error)) {
	f := c.fate(kind)
	if f != answered {
		c.tracef("cell: %s is %s", kind, f)
		c.after(c.between(time.Millisecond, time.Second), func() { done(primary.Map{}, errNoLeader) })
		return
	}
	c.after(c.between(time.Millisecond, 5*time.Millisecond), func() {
		m, err := mapOf(c.state.View(), id)
		// A slow answer is an old one: whoever asked may know better by then.
		back := c.between(time.Millisecond, 5*time.Millisecond)
		if c.chance(c.trouble) {
			back = c.between(0, 3*time.Second)
		}
		c.after(back, func() { done(m, err) })
	})
}

// place answers PlaceRuns.
func (c *cell) place(node string, id block.VolumeID, runs []block.RunIndex, done func([]primary.Run, error)) {
	if f := c.fate("place"); f != answered {
		c.tracef("cell: place is %s", f)
		c.after(c.between(time.Millisecond, time.Second), func() { done(nil, errNoLeader) })
		return
	}
	c.after(c.between(time.Millisecond, 10*time.Millisecond), func() {
		v := c.state.View()
		vol := v.Volume(id)
		if vol == nil {
			done(nil, block.ErrNotFound)
			return
		}
		var nodes []*metapb.Node
		for _, n := range v.Nodes() {
			n = proto.CloneOf(n)
			n.Up = true
			nodes = append(nodes, n)
		}
		placed, err := placement.Cell{Nodes: nodes, Disks: v.Disks()}.Place(placement.Request{
			Volume: id, Policy: vol.Policy, Runs: runs, ExtentSize: v.Geometry().ExtentSize, Near: node,
		})
		done(runsOf(placed), err)
	})
}
