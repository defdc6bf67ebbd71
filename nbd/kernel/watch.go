package kernel

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	pulseEvery = 250 * time.Millisecond
	scanEvery  = 2 * time.Second
	lookEvery  = time.Minute      // at metadata, for each device; a third more or less
	maxLooks   = 8                // at one time
	tellAgain  = time.Minute      // of a trouble that has not changed
	tellOther  = 10 * time.Second // of one that has
)

// Run keeps the devices connected until ctx ends: it adopts those it finds, also
// ones that other processes made, moves them to new sockets when theirs die,
// for ever, and ends those that are refused for good. It is called once.
func (m *Manager) Run(ctx context.Context) error {
	w := &watch{m: m, keepers: make(map[block.VolumeID]bool), looks: make(chan struct{}, maxLooks)}
	defer m.deaths.listen(m)()
	w.running.Go(func() { w.feel(ctx) })
	tick := time.NewTicker(scanEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		died := m.deaths.next()
		if err := w.scan(ctx); err != nil {
			m.cfg.Log.Error("devices cannot be listed", "err", err)
		}
		select {
		case <-died:
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	w.running.Wait()
	return nil
}

// feel looks for servers that have fallen silent, before the driver's timer does:
// that would only send a request again on the next silent socket, where it would
// wait for another T when that socket is ended.
func (w *watch) feel(ctx context.Context) {
	tick := time.NewTicker(pulseEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		w.mu.Lock()
		well := w.well
		w.mu.Unlock()
		for _, r := range well {
			if w.silent(r) {
				w.keep(ctx, r.Volume)
			}
		}
	}
}

// silent reports whether requests have waited for three quarters of T, and none
// was answered, or answers lie in a socket that the driver does not take.
func (w *watch) silent(r *record) (yes bool) {
	waiting := w.m.cfg.Kernel.InFlight(r.Index) > 0
	var sockets []SocketInfo
	if waiting {
		sockets = w.m.sockets(r)
	}
	sum := taken(sockets)
	w.m.conditions.with(r.Backend(), func(k *memory) {
		now := time.Now()
		if k.session != 0 && k.session != r.Session { // another process has moved it
			k.progress, k.hearing = now.Add(r.Timeout), hearing{}
		}
		k.session = r.Session
		if !waiting || sum != k.taken || k.progress.IsZero() {
			k.taken = sum
			if now.After(k.progress) {
				k.progress = now
			}
		}
		yes = now.Sub(k.progress) >= r.Timeout*3/4 || k.hearing.deaf(sockets)
		k.silent = k.silent || yes
	})
	return yes
}

// watch is one Run.
type watch struct {
	m       *Manager
	looks   chan struct{} // cap maxLooks
	running sync.WaitGroup

	mu      sync.Mutex
	well    []*record               // devices whose sockets are alive, as the last scan found them; not changed
	keepers map[block.VolumeID]bool // volumes that one works on
}

// scan starts a keeper for each volume that needs one.
func (w *watch) scan(ctx context.Context) error {
	listed := time.Now()
	places, err := w.m.cfg.Kernel.Places()
	if err != nil {
		return err
	}
	there := make(map[string]bool)
	var well []*record
	for _, p := range places {
		i, ours := ParseBackend(p.Backend)
		if !ours || !p.Configured {
			continue
		}
		there[p.Backend] = true
		r, err := w.m.state.load(i)
		if err != nil && !errors.Is(err, block.ErrCorrupt) {
			return err
		}
		if w.needed(p, r) {
			w.keep(ctx, i.Volume)
		}
		if r != nil && r.Phase == phaseConnected && r.Index == p.Index {
			well = append(well, r)
		}
	}
	w.mu.Lock()
	w.well = well
	w.mu.Unlock()
	w.m.conditions.prune(there, listed)
	kept, err := w.m.state.list("")
	if err != nil {
		return err
	}
	for _, i := range kept {
		if !there[i.Backend()] { // ended, or its making was cut off
			w.keep(ctx, i.Volume)
		}
	}
	return nil
}

// needed reports whether there is something to do about a device.
func (w *watch) needed(p Place, r *record) (yes bool) {
	var at phase // none without a record
	if r != nil {
		at = r.Phase
	}
	w.m.conditions.with(p.Backend, func(k *memory) {
		if k.phase != at { // perhaps by another process, which may be no more, or the record is lost
			k.phase, k.settled = at, false
		}
		now := time.Now()
		if k.nextLook.IsZero() { // a plugin that starts asks for all its devices, but not at once
			k.nextLook = now.Add(rand.N(lookEvery))
		}
		yes = now.After(k.nextLook) || !k.settled
	})
	if yes || r == nil || r.Index != p.Index || r.Phase == phaseEnding {
		return yes
	}
	return r.Hasty || r.Phase != phaseConnected || !w.m.alive(r)
}

// keep starts a keeper, unless the volume has one.
func (w *watch) keep(ctx context.Context, id block.VolumeID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.keepers[id] {
		return
	}
	w.keepers[id] = true
	w.running.Go(func() {
		defer func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			delete(w.keepers, id)
			w.m.deaths.note(-1) // the scan sees what has changed
		}()
		k := &keeper{w: w, id: id, inquiry: inquiry{m: w.m, id: id}}
		k.run(ctx)
	})
}
