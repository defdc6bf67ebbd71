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
	scanEvery = 2 * time.Second
	lookEvery = time.Minute // at metadata, for each device; a third more or less
	maxLooks  = 8           // at one time
	tellAgain = time.Minute // of a trouble that has not changed
)

// Run keeps the devices connected until ctx ends: it adopts those it finds, also
// ones that other processes made, moves them to new sockets when theirs die,
// for ever, and ends those that are refused for good. It is called once.
func (m *Manager) Run(ctx context.Context) error {
	w := &watch{m: m, keepers: make(map[block.VolumeID]bool), looks: make(chan struct{}, maxLooks)}
	defer m.deaths.listen(m)()
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

// watch is one Run.
type watch struct {
	m       *Manager
	looks   chan struct{} // cap maxLooks
	running sync.WaitGroup

	mu      sync.Mutex
	keepers map[block.VolumeID]bool // volumes that one works on
}

// scan starts a keeper for each volume that needs one.
func (w *watch) scan(ctx context.Context) error {
	nodes, err := w.m.cfg.Kernel.Nodes()
	if err != nil {
		return err
	}
	there := make(map[string]bool)
	for _, n := range nodes {
		i, ours := ParseBackend(n.Backend)
		if !ours || !n.Configured {
			continue
		}
		there[n.Backend] = true
		r, err := w.m.state.load(i)
		if err != nil && !errors.Is(err, block.ErrCorrupt) {
			return err
		}
		if w.needed(n, r) {
			w.keep(ctx, i.Volume)
		}
	}
	w.m.conditions.prune(there)
	kept, err := w.m.state.list()
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
func (w *watch) needed(n Node, r *record) (yes bool) {
	w.m.conditions.with(n.Backend, func(k *memory) {
		now := time.Now()
		if k.nextLook.IsZero() { // a plugin that starts asks for all its devices, but not at once
			k.nextLook = now.Add(rand.N(lookEvery))
		}
		yes = now.After(k.nextLook) || !k.settled
	})
	if yes || r == nil || r.Index != n.Index || r.Phase == phaseEnding {
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
		}()
		k := &keeper{w: w, id: id, inquiry: inquiry{m: w.m, id: id}}
		k.run(ctx)
	})
}
