package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// keeper does what one volume's devices need, until they need nothing.
type keeper struct {
	w       *watch
	id      block.VolumeID
	inquiry inquiry
	indexes []int // of the volume's devices, as the last turn found them

	yielded bool // the last turn was given up half-way: the next one is not, or calls that come and come would stop all moves

	told   string // the last trouble that was logged
	toldAt time.Time
}

func (k *keeper) run(ctx context.Context) {
	for b := (backoff{}); ctx.Err() == nil; {
		err := k.turn(ctx)
		if err == nil {
			return
		}
		k.tell(ctx, err)
		_ = b.wait(ctx)
	}
}

// tell logs a trouble when it is new, and from time to time.
func (k *keeper) tell(ctx context.Context, err error) {
	quiet := tellOther
	if err.Error() == k.told {
		quiet = tellAgain
	}
	if ctx.Err() != nil || errors.Is(err, context.Canceled) || k.told != "" && time.Since(k.toldAt) < quiet {
		return
	}
	k.told, k.toldAt = err.Error(), time.Now()
	k.w.m.cfg.Log.Warn("a device waits", "volume_id", k.id, "err", err)
}

// turn looks at the volume's devices once and does what is due. nil: nothing is left to do.
func (k *keeper) turn(ctx context.Context) error {
	turn, leave, err := k.w.m.lanes.enter(ctx, k.id, !k.yielded)
	if err != nil {
		return err
	}
	defer leave()
	defer func() { k.yielded = turn.Err() != nil && ctx.Err() == nil }()
	return k.work(turn)
}

func (k *keeper) work(ctx context.Context) error {
	m := k.w.m
	all, err := m.find(ctx, k.id)
	if err != nil {
		return err
	}
	k.indexes = k.indexes[:0]
	var errs []error
	for _, d := range all {
		k.indexes = append(k.indexes, d.Index)
		err := k.mind(ctx, d)
		m.conditions.with(d.Backend, func(c *memory) {
			c.settled, c.trouble = err == nil, ""
			if err != nil {
				c.trouble = err.Error()
			}
		})
		errs = append(errs, err)
	}
	return errors.Join(append(errs, m.forgetGone(k.id))...)
}

// mind does what one device needs.
func (k *keeper) mind(ctx context.Context, d found) error {
	m, r := k.w.m, d.rec
	switch {
	case d.zombie, r.Refused != "":
		return k.bury(ctx, d)
	case d.lost:
		return k.claim(ctx, d)
	case r.Phase == phaseConnecting:
		return m.adopt(ctx, d)
	case r.Phase == phaseEnding:
		return k.finish(ctx, d)
	}
	if err := k.look(ctx, d, m.alive(r)); err != nil || d.rec.Refused != "" {
		return err
	}
	if r.Hasty && m.alive(r) {
		if err := m.calm(ctx, r); err != nil {
			return err
		}
	}
	silent := k.silent(r)
	if silent || !m.alive(r) {
		a, err := k.inquiry.glance(ctx)
		if reason := r.verdict(a, err); reason != "" {
			return k.refuse(ctx, d, reason)
		}
		if err == nil {
			r.learn(a)
		}
	}
	var err error
	if silent {
		err = m.endSockets(ctx, r)
	}
	if err == nil {
		err = m.mend(ctx, r, false)
	}
	if err == nil {
		return nil
	}
	return k.judge(ctx, d, err)
}

// silent reports whether the watch has found so, and it is so still.
func (k *keeper) silent(r *record) (yes bool) {
	sockets := k.w.m.sockets(r)
	k.w.m.conditions.with(r.Backend(), func(c *memory) {
		yes, c.silent = c.silent && (taken(sockets) == c.taken || c.hearing.deaf(sockets)), false
	})
	return yes && k.w.m.cfg.Kernel.InFlight(r.Index) > 0
}

// bury ends what was refused for good. A zombie stays until its last user closes
// it, which is nothing to wait for here.
func (k *keeper) bury(ctx context.Context, d found) error {
	if !d.zombie {
		return k.refuse(ctx, d, d.rec.Refused)
	}
	k.looked(d)
	if d.lost || d.rec.Phase == phaseEnding {
		return nil
	}
	d.rec.Phase, d.rec.Refused = phaseEnding, endedReason
	k.w.m.write(d.rec)
	return nil
}

// finish ends a device whose detach was cut off, if it can be shown that nobody
// has begun to use it since. Any other one is kept: who wants it away asks again.
func (k *keeper) finish(ctx context.Context, d found) error {
	m := k.w.m
	release, used := m.claim(ctx, d.rec)
	if used == nil {
		return m.endClaimed(ctx, d.rec, release)
	}
	if err := m.adopt(ctx, d); err != nil {
		return err
	}
	m.cfg.Log.Warn("a detach that was cut off is not finished", "volume_id", k.id, "device", d.rec.path(), "err", used)
	return nil
}

// claim makes a record of a device of which there is none, if metadata knows it.
// If it does not, the device may be another Gabion's and is left alone.
func (k *keeper) claim(ctx context.Context, d found) error {
	a, err := k.inquiry.get(ctx, inquiryTimeout)
	if errors.Is(err, block.ErrNotFound) {
		k.looked(d)
		k.w.m.cfg.Log.Warn("a device is left alone: there is no record of it, and the metadata service does not know its attachment",
			"volume_id", k.id, "device", d.rec.path(), "remedy", "`gabion detach --give-up "+d.rec.path()+"` ends it")
		return nil
	}
	if err != nil {
		return err
	}
	if reason := d.rec.verdict(a, nil); reason != "" {
		return k.refuse(ctx, d, reason)
	}
	d.rec.learn(a)
	if err := k.w.m.adopt(ctx, d); err != nil {
		return err
	}
	return k.w.m.mend(ctx, d.rec, false)
}

// look asks metadata about a device when that is due. well: its sockets are alive.
func (k *keeper) look(ctx context.Context, d found, well bool) error {
	m, due := k.w.m, false
	m.conditions.with(d.Backend, func(c *memory) { due = time.Now().After(c.nextLook) })
	if !due || !well {
		return nil
	}
	select {
	case k.w.looks <- struct{}{}:
		defer func() { <-k.w.looks }()
	case <-ctx.Done():
		return ctx.Err()
	}
	a, err := k.inquiry.get(ctx, inquiryTimeout)
	k.looked(d)
	if reason := d.rec.verdict(a, err); reason != "" {
		return k.refuse(ctx, d, reason)
	}
	if errors.Is(err, block.ErrPrecondition) {
		m.cfg.Log.Warn("what the metadata service says of a device is not believed", "volume_id", k.id, "device", d.rec.path(), "err", err)
	}
	if err != nil || len(a.Addresses) == 0 { // the device works: nothing to do about it
		return nil
	}
	elsewhere := a.Addresses[0] != d.rec.Server && d.rec.Server != ""
	if d.rec.knows(a) && !elsewhere {
		return nil
	}
	d.rec.learn(a)
	m.write(d.rec)
	if elsewhere {
		k.moveTo(ctx, d.rec, a.Addresses[0])
	}
	return nil
}

// moveTo tries one server, while the sockets that are there stay until it has taken the session.
func (k *keeper) moveTo(ctx context.Context, r *record, address string) {
	all := r.Addresses
	r.Addresses = []string{address}
	err := k.w.m.move(ctx, r, true)
	r.Addresses = all
	if err != nil {
		k.w.m.cfg.Log.Warn("a device cannot move to its volume's primary", "volume_id", r.Volume, "device", r.path(), "server", address, "err", err)
	}
	k.w.m.write(r)
}

func (k *keeper) looked(d found) {
	k.w.m.conditions.with(d.Backend, func(c *memory) { c.nextLook = time.Now().Add(lookEvery*2/3 + rand.N(lookEvery*2/3)) })
}

// judge decides what a failed move means. Only what metadata says is for good;
// while it says nothing the device waits.
func (k *keeper) judge(ctx context.Context, d found, failure error) error {
	if there, err := k.w.m.there(d.rec); err != nil || !there {
		return err // nil: it is gone
	}
	if errors.Is(failure, errEnded) {
		d.zombie = true
		return k.bury(ctx, d)
	}
	if !errors.Is(failure, errSilent) {
		k.inquiry.pause = 0 // the volume may be elsewhere the next moment; a silent server may just be waiting for space
	}
	ask := k.inquiry.glance
	if errors.Is(failure, errNoAccess) || d.rec.Token == "" { // metadata knows why
		ask = func(ctx context.Context) (Attachment, error) { return k.inquiry.get(ctx, inquiryTimeout) }
	}
	a, err := ask(ctx)
	if reason := d.rec.verdict(a, err); reason != "" {
		return k.refuse(ctx, d, reason)
	}
	if errors.Is(err, errAsked) {
		return failure
	}
	if err != nil {
		return fmt.Errorf("%w; %w", failure, err)
	}
	d.rec.learn(a)
	k.w.m.write(d.rec)
	return failure
}

func (k *keeper) refuse(ctx context.Context, d found, reason string) error {
	err := k.w.m.fail(ctx, d, reason)
	if errors.Is(err, block.ErrInUse) { // a zombie now, as it should be
		return nil
	}
	return err
}
