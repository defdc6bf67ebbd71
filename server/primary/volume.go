package primary

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// volume drives one Core: it holds the lock around it, runs what it starts and
// carries out its actions. Nothing under mu blocks.
type volume struct {
	m      *Manager
	id     block.VolumeID
	name   string // the id as text, for fault points
	ctx    context.Context
	cancel context.CancelFunc
	scraps sync.Pool      // of *scratch
	wg     sync.WaitGroup // every goroutine of this volume

	mu   sync.Mutex
	core *Core
	idle chan struct{} // closed when the core is over and nothing runs; made by close
	// settling is closed when the size that is being committed has its outcome; nil: none is.
	settling chan struct{}
}

const (
	sealTimeout     = 10 * time.Second // a seal that cannot drain by then: unreachable
	metadataTimeout = 10 * time.Second // after that the outcome is unknown
)

// scratch is what one goroutine needs to pump; reused, so that nothing is allocated per request.
type scratch struct {
	out      Output
	finished []*IO
	inline   inline
}

// newVolume is a volume that does nothing yet: the first event lets it begin.
func newVolume(m *Manager, mp Map) *volume {
	v := &volume{m: m, id: mp.Volume.ID, name: mp.Volume.ID.String(), core: NewCore(m.cfg.Geometry, mp)}
	v.ctx, v.cancel = context.WithCancel(context.Background())
	v.scraps.New = func() any {
		s := new(scratch)
		s.inline.handOff = func() { v.handOff(&s.inline) }
		return s
	}
	return v
}

// authorize finds the attachment whose token has this digest.
func (v *volume) authorize(digest [32]byte) (block.AttachmentID, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.core.Authorize(digest)
}

// event feeds the core and does what comes of it.
func (v *volume) event(f func(*Core)) {
	s := v.scraps.Get().(*scratch)
	v.mu.Lock()
	f(v.core)
	v.pump(s)
	v.scraps.Put(s)
}

// pump is called with mu held, after events, and returns without it. It does
// what the core wants and reports what it could do in line, until the rest is
// in other hands. It never waits for a client, and for a disk only in writeInline.
func (v *volume) pump(s *scratch) {
	for {
		v.core.Take(&s.out)
		v.checkIdle()
		v.mu.Unlock()
		for _, a := range s.out.Actions {
			v.do(a)
		}
		for _, r := range s.out.Done {
			complete(r)
		}
		for _, op := range s.out.Start {
			v.run(op, s)
		}
		if len(s.finished) == 0 {
			v.writeInline(s)
		}
		if len(s.finished) == 0 {
			return
		}
		v.mu.Lock()
		for _, io := range s.finished {
			v.core.Finished(io)
		}
		clear(s.finished)
		s.finished = s.finished[:0]
	}
}

// run does a request as far as that does not block, and hands off the rest.
func (v *volume) run(op *Op, s *scratch) {
	if r := op.Req; r.Op == block.OpRead {
		if r.Stream.TryReadBuffer(r) {
			v.read(op, s)
		} else {
			op.conn.Tag.(*device).later(op)
		}
		return
	}
	if v.m.cfg.Fault != nil {
		v.spawn(func(s *scratch) {
			err := v.m.cfg.Fault.Hit("primary.write", v.name)
			if err != nil {
				fail(op, err, s)
				return
			}
			v.write(op, s)
		})
		return
	}
	v.write(op, s)
}

// read fills the buffer of a read.
func (v *volume) read(op *Op, s *scratch) {
	r := op.Req
	n := len(op.IOs) // an IO handed off may be the last; op is not ours after that
	for i := range n {
		io := &op.IOs[i]
		io.Data = r.Data[io.Offset-r.Offset:][:io.Length]
	}
	for i := range n {
		io := &op.IOs[i]
		done := true
		if io.Copy == nil {
			clear(io.Data)
		} else {
			done, io.Err = io.Member.TryRead(io.Generation, io.Data, io.Offset)
		}
		if done || io.Err != nil {
			s.finished = append(s.finished, io)
		} else {
			io.Copy.Tag.(*lane).put(io)
		}
	}
}

// write reserves space for all of an operation before it begins with any of it.
func (v *volume) write(op *Op, s *scratch) {
	n := len(op.IOs)
	for i := range n {
		io := &op.IOs[i]
		if err := io.Member.Reserve(&io.IO); err != nil {
			for j := range i {
				op.IOs[j].Member.Release(&op.IOs[j].IO)
			}
			failOne(op, i, err, s)
			return
		}
	}
	for i := range n {
		io := &op.IOs[i]
		var done bool
		done, io.Err = io.Member.TryWrite(&io.IO)
		switch {
		case done || io.Err != nil:
			s.finished = append(s.finished, io)
		case !s.inline.put(io):
			io.Copy.Tag.(*lane).put(io)
		}
	}
}

// failOne finishes an op of which nothing was done because of its i-th IO.
func failOne(op *Op, i int, err error, s *scratch) {
	op.IOs[i].Err = err
	for k := range op.IOs {
		s.finished = append(s.finished, &op.IOs[k])
	}
}

func fail(op *Op, err error, s *scratch) { failOne(op, 0, err, s) }

// spawn runs f on a goroutine of its own and reports what it finished.
func (v *volume) spawn(f func(s *scratch)) {
	v.wg.Go(func() {
		s := v.scraps.Get().(*scratch)
		f(s)
		v.finish(s)
		v.scraps.Put(s)
	})
}

// finish reports s.finished and pumps.
func (v *volume) finish(s *scratch) {
	if len(s.finished) == 0 {
		return
	}
	v.mu.Lock()
	for _, io := range s.finished {
		v.core.Finished(io)
	}
	clear(s.finished)
	s.finished = s.finished[:0]
	v.pump(s)
}

// do carries out an action on a goroutine of its own, or at once if it cannot block.
func (v *volume) do(a Action) {
	switch a := a.(type) {
	case SyncCopy:
		l := a.Copy.Tag.(*lane)
		v.wg.Add(1)
		go l.sync()
	case Answer:
		a.Conn.Tag.(*device).answer <- a.Err
	case CloseConn:
		a.Conn.Stream.Close(a.Reason)
	case Report:
		v.m.report(a.Event)
	case Retire:
		v.m.retire(v, a.Reason)
	default:
		v.wg.Go(func() { v.call(a) })
	}
}

// call makes the call that an action asks for, and reports its outcome.
func (v *volume) call(a Action) {
	switch a := a.(type) {
	case SealCopy:
		v.seal(a)
	case BirthRuns:
		err := v.hit("primary.birth")
		if err == nil {
			err = a.Copy.Member.Birth(v.ctx, v.core.Generation(), a.Runs)
		}
		v.event(func(c *Core) { c.Born(a.Copy, err) })
	case GrowCopy:
		err := v.hit("primary.grow")
		if err == nil {
			err = a.Copy.Member.Grow(v.ctx, v.core.Generation(), a.Size)
		}
		v.event(func(c *Core) { c.Grown(a.Copy, err) })
	case ClearMarks:
		err := a.Copy.Member.ClearMarks(v.ctx, v.core.Generation(), a.Upto)
		v.event(func(c *Core) { c.Cleared(a.Copy, err) })
	case Place:
		ctx, cancel := context.WithTimeout(v.ctx, metadataTimeout)
		runs, err := v.m.cfg.Metadata.PlaceRuns(ctx, v.id, v.core.Generation(), a.Runs)
		cancel()
		v.event(func(c *Core) { c.Placed(runs, err) })
	case Send:
		v.send(a)
	case ReadMap:
		ctx, cancel := context.WithTimeout(v.ctx, metadataTimeout)
		m, err := v.m.cfg.Metadata.ReadMap(ctx, v.id)
		cancel()
		v.event(func(c *Core) { c.MapRead(m, err) })
	default:
		panic(fmt.Sprintf("primary: no such action: %T", a))
	}
}

func (v *volume) seal(a SealCopy) {
	var member Member
	var sealed Sealed
	err := v.hit("primary.seal")
	if err == nil {
		ctx, cancel := context.WithTimeout(v.ctx, sealTimeout)
		if member, err = v.m.cfg.Replicas.Member(ctx, a.Volume, a.Copy.Disk); err == nil {
			sealed, err = member.Seal(ctx, v.core.Generation(), a.Size, a.Born)
		}
		cancel()
	}
	v.event(func(c *Core) {
		if a.Copy.Tag == nil {
			a.Copy.Tag = newLane(v, a.Copy)
		}
		c.Sealed(a.Copy, member, sealed, err)
	})
}

func (v *volume) send(a Send) {
	if _, growth := a.Command.(ConfirmSize); growth {
		defer v.settle()()
	}
	var err error
	var version block.Version
	if _, detach := a.Command.(ConfirmDetach); detach {
		err = v.hit("primary.detach")
	}
	if err == nil {
		ctx, cancel := context.WithTimeout(v.ctx, metadataTimeout)
		version, err = v.m.cfg.Metadata.Propose(ctx, a.Fence, a.Command)
		cancel()
	}
	if _, births := a.Command.(CommitRuns); births && err == nil {
		err = v.hit("primary.birth-committed")
	}
	v.event(func(c *Core) { c.Proposed(version, err) })
}

func (v *volume) hit(point string) error { return v.m.cfg.Fault.Hit(point, v.name) }

// checkIdle lets close go on; mu is held.
func (v *volume) checkIdle() {
	if v.idle != nil && v.core.Running() == 0 {
		select {
		case <-v.idle:
		default:
			close(v.idle)
		}
	}
}

// close ends the volume in order: nothing new, what runs finishes, every
// member is synced, calls end, goroutines are joined. With ctx over it returns
// without having waited for the rest.
func (v *volume) close(ctx context.Context) error {
	v.mu.Lock()
	if v.idle == nil {
		v.idle = make(chan struct{})
	}
	idle := v.idle
	v.core.Stop()
	s := v.scraps.Get().(*scratch)
	v.pump(s)
	v.scraps.Put(s)
	select {
	case <-idle:
	case <-ctx.Done():
		v.cancel()
		return fmt.Errorf("%w: volume %s: requests are still in flight", block.ErrUnavailable, v.name)
	}
	err := v.syncAll(ctx)
	v.cancel()
	joined := make(chan struct{})
	go func() {
		v.wg.Wait()
		close(joined)
	}()
	select {
	case <-joined:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: volume %s: a call did not end", block.ErrUnavailable, v.name)
	}
}

// syncAll makes what was acknowledged durable; a deposed volume leaves that to
// whoever serves. Nothing is written after it, so that where every copy was
// synced no mark is needed: a reboot that follows an orderly stop costs nothing.
func (v *volume) syncAll(ctx context.Context) error {
	v.mu.Lock()
	g, upto, all := v.core.Generation(), v.core.sequence, true
	var members []Member
	for _, cp := range v.core.copies {
		switch {
		case !cp.counts():
		case cp.state == copyLive:
			members = append(members, cp.Member)
		default:
			all = false
		}
	}
	v.mu.Unlock()
	var errs []error
	for _, m := range members {
		err := m.Sync(ctx, g)
		all = all && err == nil
		if err != nil && !errors.Is(err, block.ErrStale) {
			errs = append(errs, fmt.Errorf("volume %s: last sync of disk %s: %w", v.name, m.Disk(), err))
		}
	}
	for _, m := range members {
		if all {
			_ = m.ClearMarks(ctx, g, upto) // a mark too many is harmless
		}
	}
	return errors.Join(errs...)
}

// settleTime bounds how long a new connection waits for a size that is being committed.
const settleTime = time.Second

// settle says that a size is being committed, until the returned function is called.
func (v *volume) settle() (settled func()) {
	ch := make(chan struct{})
	v.mu.Lock()
	v.settling = ch
	v.mu.Unlock()
	return func() {
		v.mu.Lock()
		v.settling = nil
		v.mu.Unlock()
		close(ch)
	}
}

// awaitSize waits for a size that is being committed: whoever asked for the growth is
// answered when the state machine has it, which is a moment before this server hears of it,
// and expects to find it by a new connection. Without the metadata service connections go on.
func (v *volume) awaitSize(ctx context.Context) {
	v.mu.Lock()
	ch := v.settling
	v.mu.Unlock()
	if ch == nil {
		return
	}
	t := time.NewTimer(settleTime)
	defer t.Stop()
	select {
	case <-ch:
	case <-t.C:
	case <-ctx.Done():
	}
}
