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
	goneLook    = 5 * time.Millisecond
	gonePatient = time.Second // for sockets that were ended to be gone
)

// move gives a device the sockets of a new session. If it fails the device is as
// it was or without sockets, and its requests wait; it can be repeated always.
// planned: its sockets are alive, so they are ended only when new ones are there.
func (m *Manager) move(ctx context.Context, r *record, planned bool) error {
	lost := len(r.Sockets) == 0
	if !planned {
		if err := m.endSockets(ctx, r); err != nil {
			return err
		}
	}
	s, err := m.openSession(ctx, r)
	if err != nil {
		return err
	}
	if lost { // nobody knows the old sockets, but their server closes them for a newer session
		m.deaths.wait(ctx, r.Index, r.Connections)
	}
	if err = m.handOver(ctx, r, s); errors.Is(err, block.ErrUnknown) {
		return err // the sockets are closed when the kernel has answered
	}
	s.close()
	if err != nil {
		return err
	}
	// What the kernel did not take has ended with our own reference.
	r.Sockets = s.ids()
	if !m.alive(r) {
		return fmt.Errorf("%w: the driver did not take all sockets, or they ended at once", block.ErrUnavailable)
	}
	r.Phase, r.Server, r.Hasty = phaseConnected, s.server, false
	m.write(r)
	m.conditions.moved(r)
	m.deaths.touch(r.Index)
	m.cfg.Log.Info("connected anew", "volume_id", r.Volume, "device", r.path(), "server", r.Server, "session", r.Session)
	return nil
}

// errEnded: the driver takes no sockets for a device, because it was disconnected.
var errEnded = fmt.Errorf("%w: %s", block.ErrPrecondition, endedReason)

const endedReason = "it was disconnected by another program"

// handOver gives the driver a session's sockets, once it has no others.
func (m *Manager) handOver(ctx context.Context, r *record, s *session) error {
	old := r.Sockets
	r.Phase, r.Sockets = phaseMoving, append(s.ids(), old...)
	if r.Flags == 0 {
		r.Flags = s.export.Flags & knownFlags
	}
	m.write(r)
	if err := m.endThese(ctx, r, old); err != nil {
		return err
	}
	if err := m.cfg.Faults.Hit("kernel.move", r.Volume.String()); err != nil {
		return err
	}
	m.deaths.reset(r.Index)
	err := m.calls.do(ctx, call{
		name: "moving " + r.path(),
		do: func() error {
			return m.cfg.Kernel.Reconfigure(r.Index, r.Backend(), Change{Sockets: s.sockets, DeadTimeout: r.DeadTimeout})
		},
		rescue: m.destroyer(r), abandon: s.close,
	})
	if errors.Is(err, block.ErrNotFound) {
		return fmt.Errorf("%w: %v", errEnded, err)
	}
	if err != nil {
		return err
	}
	return m.cfg.Faults.Hit("kernel.moved", r.Volume.String())
}

// endSockets ends all sockets that the device may have. It returns when they are
// gone and the driver has noticed, for it replaces only those that it knows to be dead.
func (m *Manager) endSockets(ctx context.Context, r *record) error {
	if err := m.endThese(ctx, r, r.Sockets); err != nil {
		return err
	}
	r.Sockets = nil
	return nil
}

func (m *Manager) endThese(ctx context.Context, r *record, ids []SocketID) error {
	if len(ids) == 0 {
		return nil
	}
	defer m.deaths.listen(m)()
	if err := m.destroy(ids); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, gonePatient)
	defer cancel()
	for _, id := range ids {
		for {
			if i, err := m.cfg.Kernel.Socket(id); errors.Is(err, block.ErrNotFound) || err == nil && !i.Established {
				break
			}
			if err := pause(ctx, goneLook); err != nil {
				return fmt.Errorf("%w: a socket of %s cannot be ended: %w", block.ErrUnavailable, r.path(), err)
			}
		}
	}
	m.deaths.wait(ctx, r.Index, r.Connections)
	return nil
}

// destroy ends sockets and does not wait for it.
func (m *Manager) destroy(ids []SocketID) error {
	var errs []error
	for _, id := range ids {
		errs = append(errs, m.cfg.Kernel.Destroy(id))
	}
	return errors.Join(errs...)
}

// destroyer is what frees a call that hangs on a device.
func (m *Manager) destroyer(r *record) func() {
	ids := slices.Clone(r.Sockets)
	return func() {
		m.cfg.Log.Warn("the nbd driver hangs; its device's connections are ended", "volume_id", r.Volume, "device", r.path())
		if err := m.destroy(ids); err != nil {
			m.cfg.Log.Error("connections cannot be ended", "volume_id", r.Volume, "device", r.path(), "err", err)
		}
	}
}

// alive reports whether all sockets of the record are.
func (m *Manager) alive(r *record) bool {
	return len(r.Sockets) > 0 && !slices.ContainsFunc(r.Sockets, func(id SocketID) bool {
		i, err := m.cfg.Kernel.Socket(id)
		return err != nil || !i.Established
	})
}

// write saves the record of a device that is there. Should that fail, a device
// that goes on without a record is better than one that stands still.
func (m *Manager) write(r *record) {
	if err := m.state.save(r); err != nil {
		m.cfg.Log.Error("a device's state cannot be kept", "volume_id", r.Volume, "device", r.path(), "err", err)
	}
}
