package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/primary"
)

// volume drives one core as primary.volume does: it runs what the core starts
// and carries out its actions, at times that the world chooses.
type volume struct {
	*server
	id      block.VolumeID
	core    *primary.Core // nil: the grant is under way
	waiting []func(*volume, error)
	early   bool // changed before it was open
	out     primary.Output
	failed  []*primary.IO // finished in line
	busy    bool          // pump runs
}

// opened is the end of the grant.
func (v *volume) opened(m primary.Map, err error) {
	waiting := v.waiting
	v.waiting = nil
	if err != nil {
		v.volumes = slices.DeleteFunc(v.volumes, func(o *volume) bool { return o == v })
		if v.early { // somebody has to look at it all the same
			v.server.changed(v.id)
		}
	} else {
		v.core = primary.NewCore(v.geometry, m)
		v.tracef("volume: opened in generation %d, cache epoch %d", m.Generation, m.Volume.CacheEpoch)
		v.event(func(c *primary.Core) {
			c.Tick(v.now)
			if v.early {
				c.Changed()
			}
		})
	}
	for _, f := range waiting {
		f(v, err)
	}
}

func (v *volume) changed() {
	if v.core == nil {
		v.early = true
		return
	}
	v.event((*primary.Core).Changed)
}

func (v *volume) connect(c *conn, id block.AttachmentID) {
	if !c.served { // it closed while its volume was opened
		return
	}
	c.volume = v
	c.core = primary.Conn{Attachment: id, Epoch: c.name.epoch, Number: c.name.session, Tag: c}
	v.event(func(core *primary.Core) { core.Connect(&c.core) })
}

// event feeds the core and does what comes of it.
func (v *volume) event(f func(*primary.Core)) {
	if v.core == nil {
		return
	}
	f(v.core)
	v.pump()
}

func (v *volume) pump() {
	if v.busy {
		v.failf("sim: an event while the core's output is carried out")
	}
	v.busy = true
	for {
		v.core.Take(&v.out)
		if len(v.out.Actions)+len(v.out.Done)+len(v.out.Start) == 0 {
			break
		}
		for _, a := range v.out.Actions {
			v.do(a)
		}
		for _, r := range v.out.Done {
			r.Slot.(*conn).complete(r)
		}
		for _, op := range v.out.Start {
			v.run(op)
		}
		for _, io := range v.failed {
			v.core.Finished(io)
		}
		v.failed = v.failed[:0]
	}
	v.busy = false
}

// diskOf is the disk that holds a copy.
func (v *volume) diskOf(id block.DiskID) *disk {
	for _, d := range v.host.disks {
		if d.id == id {
			return d
		}
	}
	return nil
}

// call is one call on a copy: it takes effect once, some time after it was
// made, and is answered some time after that. A process that ends in between
// leaves the effect without an answer.
func (v *volume) call(k kind, on block.DiskID, effect func() error, answer func(error)) {
	life := v.life
	d := v.diskOf(on)
	if d == nil {
		v.later(time.Millisecond, func() { answer(fmt.Errorf("%w: no disk %s", block.ErrUnavailable, on)) })
		return
	}
	v.after(v.delay(k), func() {
		d.do(k, func() {
			if v.server.life != life || v.host.dead {
				return
			}
			err := effect()
			if v.host.dead { // struck in the middle of it: nobody hears of the outcome
				return
			}
			if d.check() {
				v.reopen(d)
			}
			v.after(v.delay(k), func() {
				if v.host.dead {
					return
				}
				v.post(life, func() { answer(err) })
			})
		})
	})
}

// delay is half the time an operation takes. A sync may take effect at once:
// what is written while it is under way is not covered.
func (v *volume) delay(k kind) time.Duration {
	switch k {
	case reads, writes:
		if v.chance(2) {
			return v.between(0, 100*time.Millisecond)
		}
		return v.between(0, 500*time.Microsecond)
	case syncs:
		if v.chance(50) {
			return 0
		}
		return v.between(0, 8*time.Millisecond)
	}
	return v.between(100*time.Microsecond, 5*time.Millisecond)
}

// run executes an operation that the core started.
func (v *volume) run(op *primary.Op) {
	if op.Req.Op == block.OpRead {
		op.Req.Data = make([]byte, op.Req.Length)
	}
	for i := range op.IOs {
		io := &op.IOs[i]
		if op.Req.Op == block.OpRead {
			io.Data = op.Req.Data[io.Offset-op.Req.Offset:][:io.Length]
			continue
		}
		if err := io.Member.Reserve(&io.IO); err != nil {
			for j := range i {
				op.IOs[j].Member.Release(&op.IOs[j].IO)
			}
			io.Err = err
			for j := range op.IOs {
				v.failed = append(v.failed, &op.IOs[j])
			}
			return
		}
	}
	for i := range op.IOs {
		v.runIO(&op.IOs[i])
	}
}

func (v *volume) runIO(io *primary.IO) {
	done := func(err error) {
		io.Err = err
		v.event(func(c *primary.Core) { c.Finished(io) })
	}
	switch {
	case io.Copy == nil: // unborn: zeros
		v.later(0, func() { done(nil) })
	case io.Op == block.OpRead:
		v.call(reads, io.Copy.Disk, func() error { return io.Member.Read(io.Generation, io.Data, io.Offset) }, done)
	default:
		if drag := io.Request().Req.Slot.(*conn).drag; drag > 0 {
			v.later(drag, func() { v.write(io, done) })
			return
		}
		v.write(io, done)
	}
}

func (v *volume) write(io *primary.IO, done func(error)) {
	v.call(writes, io.Copy.Disk, func() error {
		err := io.Member.Write(&io.IO)
		v.effects++
		v.tracef("disk: %s [%d, +%d) seq %d: %s", io.Op, io.Offset, io.Length, io.Sequence, outcome(err))
		return err
	}, done)
}

// do carries out an action.
func (v *volume) do(a primary.Action) {
	ctx, g := context.Background(), v.core.Generation()
	switch a := a.(type) {
	case primary.SealCopy:
		v.seal(a)
	case primary.SyncCopy:
		m := a.Copy.Member
		v.call(syncs, a.Copy.Disk, func() error {
			err := m.Sync(ctx, g)
			v.tracef("disk: sync: %s", outcome(err))
			return err
		}, func(err error) { v.event(func(c *primary.Core) { c.Synced(a.Copy, err) }) })
	case primary.BirthRuns:
		m := a.Copy.Member
		v.call(births, a.Copy.Disk, func() error {
			err := m.Birth(ctx, g, a.Runs)
			v.tracef("disk: birth of %v: %s", a.Runs, outcome(err))
			return err
		}, func(err error) { v.event(func(c *primary.Core) { c.Born(a.Copy, err) }) })
	case primary.GrowCopy:
		m := a.Copy.Member
		v.call(grows, a.Copy.Disk, func() error { return m.Grow(ctx, g, a.Size) },
			func(err error) { v.event(func(c *primary.Core) { c.Grown(a.Copy, err) }) })
	case primary.ClearMarks:
		m := a.Copy.Member
		v.call(clears, a.Copy.Disk, func() error {
			err := m.ClearMarks(ctx, g, a.Upto)
			v.tracef("disk: clear marks up to %d: %s", a.Upto, outcome(err))
			return err
		}, func(err error) { v.event(func(c *primary.Core) { c.Cleared(a.Copy, err) }) })
	case primary.Place:
		life := v.life
		v.cell.place(v.node, v.id, a.Runs, func(runs []primary.Run, err error) {
			v.post(life, func() { v.event(func(c *primary.Core) { c.Placed(runs, err) }) })
		})
	case primary.Send:
		v.send(a)
	case primary.ReadMap:
		life := v.life
		v.cell.read("map", v.id, func(m primary.Map, err error) {
			v.post(life, func() { v.event(func(c *primary.Core) { c.MapRead(m, err) }) })
		})
	case primary.CloseConn:
		c := a.Conn.Tag.(*conn)
		v.tracef("conn %d: closed by the server: %s", c.n, outcome(a.Reason))
		v.later(0, c.serverClose)
	case primary.Answer:
		a.Conn.Tag.(*conn).answer(a.Err)
	case primary.Report:
		v.tracef("report: %s", a.Event.Type)
		v.reports = append(v.reports, a.Event)
	case primary.Retire:
		v.tracef("volume: retired: %s", outcome(a.Reason))
		v.volumes = slices.DeleteFunc(v.volumes, func(o *volume) bool { return o == v })
	default:
		v.failf("sim: no such action: %T", a)
	}
}

func (v *volume) seal(a primary.SealCopy) {
	var m primary.Member
	var sealed primary.Sealed
	g := v.core.Generation()
	v.call(seals, a.Copy.Disk, func() (err error) {
		if m, err = v.diskOf(a.Copy.Disk).member(a.Volume); err == nil {
			sealed, err = m.Seal(context.Background(), g, a.Size, a.Born)
		}
		v.tracef("disk: seal at %d: %s, unflushed %t, lost %v", g, outcome(err), sealed.Unflushed, sealed.Lost)
		return err
	}, func(err error) { v.event(func(c *primary.Core) { c.Sealed(a.Copy, m, sealed, err) }) })
}

func (v *volume) send(a primary.Send) {
	life := v.life
	kind, cmd := fenced(a.Fence, a.Command)
	v.cell.submit(kind, cmd, func(r metadata.Result, err error) {
		if err == nil {
			err = r.Err
		}
		v.post(life, func() {
			v.event(func(c *primary.Core) { c.Proposed(a.Fence.Version+1, err) })
		})
	})
}

// errGone is what a client is told when its server is not there.
var errGone = errors.New("connection reset")
