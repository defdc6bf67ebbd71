package kernel

import (
	"context"
	"errors"
	"maps"
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
	for all := true; ctx.Err() == nil; {
		touched, more := m.deaths.next()
		scan := w.scanAll
		if !all && !touched[-1] {
			scan = func(ctx context.Context) error { return w.scan(ctx, touched) }
		}
		err := scan(ctx)
		if err != nil {
			m.cfg.Log.Error("devices cannot be listed", "err", err)
		}
		select {
		case <-more:
			all = err != nil // or what was touched would be forgotten
		case <-tick.C:
			all = true
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
		k.silent = yes
	})
	return yes
}

// watch is one Run.
type watch struct {
	m       *Manager
	looks   chan struct{} // cap maxLooks
	running sync.WaitGroup

	mu      sync.Mutex
	well    map[string]*record      // by backend: devices whose sockets are alive, as the last scan, which alone sets it, found them; not changed
	keepers map[block.VolumeID]bool // volumes that one works on
}

// scanAll starts a keeper for each volume that needs one.
func (w *watch) scanAll(ctx context.Context) error {
	listed := time.Now()
	places, err := w.m.cfg.Kernel.Places()
	if err != nil {
		return err
	}
	there, well := make(map[string]bool), make(map[string]*record)
	for _, p := range places {
		if _, ours := ParseBackend(p.Backend); ours && p.Configured {
			there[p.Backend] = true
			if err := w.see(ctx, p, well); err != nil {
				return err
			}
		}
	}
	w.publish(well)
	w.m.conditions.prune(there, listed)
	return w.finishCutOff(ctx, there)
}

// scan is scanAll for some devices, by index. What it costs does not depend on how many others there are.
func (w *watch) scan(ctx context.Context, touched map[int]bool) error {
	well := maps.Clone(w.well)
	maps.DeleteFunc(well, func(_ string, r *record) bool { return touched[r.Index] })
	for index := range touched {
		n, err := w.m.cfg.Kernel.Node(index)
		if errors.Is(err, block.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		if err := w.see(ctx, n.Place, well); err != nil {
			return err
		}
	}
	w.publish(well)
	return nil
}

// see looks at one device, and adds it to those that are well if it is.
func (w *watch) see(ctx context.Context, p Place, well map[string]*record) error {
	i, ours := ParseBackend(p.Backend)
	if !ours || !p.Configured {
		return nil
	}
	r, err := w.m.state.load(i)
	if err != nil && !errors.Is(err, block.ErrCorrupt) {
		return err
	}
	if w.needed(p, r) {
		w.keep(ctx, i.Volume)
	}
	if r != nil && r.Phase == phaseConnected && r.Index == p.Index {
		well[p.Backend] = r
	}
	return nil
}

func (w *watch) publish(well map[string]*record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.well = well
}

// finishCutOff starts keepers for the records of devices that are not there: they were ended, or their making was cut off.
func (w *watch) finishCutOff(ctx context.Context, there map[string]bool) error {
	kept, err := w.m.state.list("")
	if err != nil {
		return err
	}
	for _, i := range kept {
		if !there[i.Backend()] {
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
		k := &keeper{w: w, id: id, inquiry: inquiry{m: w.m, id: id}}
		k.run(ctx)
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.keepers, id)
		for _, index := range k.indexes { // what happened to them meanwhile started no other
			w.m.deaths.touch(index)
		}
	})
}
