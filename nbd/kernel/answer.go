package kernel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	answerTime = time.Second // for a request that is sent now, on a device that is well
	answerLook = 20 * time.Millisecond
	deafTime   = 500 * time.Millisecond
)

// errSilent: requests are in flight, and the connections are alive.
var errSilent = fmt.Errorf("%w: silent", block.ErrUnavailable)

// answers returns nil if the device's server answers requests: one that is in
// flight, or else, if ask is set, one on each of its sockets that is made for it.
// Sockets are ended that the driver does not receive from.
func (m *Manager) answers(ctx context.Context, r *record, ask bool, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var poked chan error
	var h hearing
	before := m.sockets(r)
	look := time.NewTicker(answerLook)
	defer look.Stop()
	for {
		n, err := m.cfg.Kernel.Node(r.Index)
		if err != nil {
			return err
		}
		now := m.sockets(r)
		heard := progress(before, now)
		switch {
		case !established(now):
			return fmt.Errorf("%w: the connections of %s have ended", block.ErrUnavailable, r.path())
		case h.deaf(now) || m.conditions.silent(r):
			if err := m.endSockets(ctx, r); err != nil {
				return err
			}
			return fmt.Errorf("%w: %s was silent; its connections are replaced", errSilent, r.path())
		case ask && heard >= min(n.Queues, len(now)), !ask && (n.InFlight == 0 || heard > 0):
			return nil
		case poked == nil && (n.InFlight == 0 || heard > 0): // what is never answered must not become more and more
			poked = make(chan error, 1)
			m.running.Go(func() { poked <- m.cfg.Kernel.Poke(ctx, r.Index, n.Size) })
		}
		select {
		case err := <-poked:
			if err == nil || errors.Is(err, block.ErrUnsupported) {
				return nil
			}
			if ctx.Err() == nil {
				return err
			}
		case <-look.C:
		case <-ctx.Done():
		}
		if ctx.Err() == nil {
			continue
		}
		now = m.sockets(r)
		if progress(before, now) > 0 && !slices.ContainsFunc(now, func(s SocketInfo) bool { return s.Untaken > 0 }) {
			return nil // an error is an answer, too: that a page cannot be read is for who reads it
		}
		return fmt.Errorf("%w: the server of %s has not answered for %v", errSilent, r.path(), patience)
	}
}

// sockets is how the device's sockets are; one that is no more is not established.
func (m *Manager) sockets(r *record) []SocketInfo {
	all := make([]SocketInfo, len(r.Sockets))
	for i, id := range r.Sockets {
		if s, err := m.cfg.Kernel.Socket(id); err == nil {
			all[i] = s
		}
	}
	return all
}

// established reports whether there are sockets, and all of them are alive.
func established(all []SocketInfo) bool {
	for _, s := range all {
		if !s.Established {
			return false
		}
	}
	return len(all) > 0
}

// progress counts the sockets from which the driver has taken something in between.
func progress(before, now []SocketInfo) (n int) {
	for i := range now {
		if now[i].Taken > before[i].Taken {
			n++
		}
	}
	return n
}

// taken counts the bytes that the driver has taken from the device's sockets.
func taken(all []SocketInfo) (sum uint64) {
	for _, s := range all {
		sum += s.Taken
	}
	return sum
}

// hearing looks for sockets that have bytes for the driver, of which it takes
// none. Before Linux 7.0 a workqueue that cannot have threads quickly enough gives
// all receivers of a device to one thread, which never comes to the second.
type hearing struct {
	taken []uint64
	since []time.Time // taken was that, and something more was there
}

// deaf reports whether it has been so for deafTime.
func (h *hearing) deaf(sockets []SocketInfo) (yes bool) {
	if len(h.taken) != len(sockets) {
		h.taken, h.since = make([]uint64, len(sockets)), make([]time.Time, len(sockets))
	}
	now := time.Now()
	for i, s := range sockets {
		if s.Untaken == 0 || s.Taken != h.taken[i] || h.since[i].IsZero() {
			h.taken[i], h.since[i] = s.Taken, now
		}
		yes = yes || now.Sub(h.since[i]) >= deafTime
	}
	return yes
}
