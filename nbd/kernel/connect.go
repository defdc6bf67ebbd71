package kernel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
)

const (
	maxTries     = 64              // indexes that others take meanwhile
	openPatience = 5 * time.Second // for who has a new device open: given up, it stays until the next attach takes it
	openPause    = 20 * time.Millisecond
)

// connect makes a device. If it fails there is none in the end, and no record, or
// both can be found by the next call.
func (m *Manager) connect(ctx context.Context, r *record, readOnly bool) error {
	r.Phase = phaseConnecting
	s, err := m.openSession(ctx, r)
	if err != nil {
		return errors.Join(err, m.state.remove(r.Identity))
	}
	r.Server, r.Flags, r.Sockets = s.server, s.export.Flags&knownFlags, s.ids()
	flags := r.Flags
	if readOnly {
		flags |= wire.TransReadOnly
	}
	if err = m.take(ctx, r, s, flags); errors.Is(err, block.ErrUnknown) {
		return err // the sockets are closed when the kernel has answered
	}
	s.close()
	if err != nil {
		return errors.Join(err, m.state.remove(r.Identity))
	}
	if err = m.cfg.Faults.Hit("kernel.connected", r.Volume.String()); err == nil {
		err = m.verify(r)
	}
	if err == nil {
		r.Phase = phaseConnected
		err = m.state.save(r)
	}
	if err != nil {
		return m.undo(ctx, r, err)
	}
	if err := m.cfg.Kernel.Tune(r.Index); err != nil {
		m.cfg.Log.Warn("a device keeps small requests", "volume_id", r.Volume, "device", r.path(), "err", err)
	}
	m.conditions.with(r.Backend(), func(k *memory) { *k = memory{made: time.Now(), phase: r.Phase, settled: true} })
	m.deaths.touch(r.Index) // the watch sees that there is another, and feels whether its server is silent
	m.cfg.Log.Info("attached", "volume_id", r.Volume, "device", r.path(), "server", r.Server, "size", r.Size)
	return nil
}

// take connects the session's sockets at the lowest index that nobody has.
func (m *Manager) take(ctx context.Context, r *record, s *session, flags uint16) error {
	var refusal error
	for tries, from := 0, 0; tries < maxTries; tries++ {
		index, err := m.reserve(from)
		if err != nil {
			return err
		}
		from, r.Index = index+1, index
		err = m.takePatiently(ctx, r, s, flags)
		m.release(index)
		if !errors.Is(err, block.ErrInUse) {
			return err
		}
		m.begun(index)
		refusal = err
		if !m.alive(r) {
			return fmt.Errorf("%w: connecting: %w", block.ErrUnavailable, err)
		}
	}
	return fmt.Errorf("%w: no nbd device is free, the last one tried: %v", block.ErrUnavailable, refusal)
}

// takePatiently connects at an index that had no device. The driver makes the
// device first, and a device manager that looks at what is new may have it open
// just then, which refuses the call: given up, a device would stay that nobody uses.
func (m *Manager) takePatiently(ctx context.Context, r *record, s *session, flags uint16) error {
	for end := time.Now().Add(openPatience); ; {
		err := m.takeAt(ctx, r, s, flags)
		if !errors.Is(err, block.ErrInUse) || time.Now().After(end) {
			return err
		}
		if n, nodeErr := m.cfg.Kernel.Node(r.Index); nodeErr != nil || n.Configured || pause(ctx, openPause) != nil {
			return err
		}
	}
}

func (m *Manager) takeAt(ctx context.Context, r *record, s *session, flags uint16) error {
	if err := m.state.save(r); err != nil {
		return err
	}
	if err := m.cfg.Faults.Hit("kernel.connect", r.Volume.String()); err != nil {
		return err
	}
	m.deaths.reset(r.Index)
	c := Connect{
		Index: r.Index, Backend: r.Backend(), Size: r.Size, BlockSize: r.BlockSize, Flags: flags,
		Timeout: r.Timeout, DeadTimeout: r.DeadTimeout, Sockets: s.sockets,
	}
	return m.calls.do(ctx, call{
		name: "connecting " + r.path(), do: func() error { return m.cfg.Kernel.Connect(c) },
		rescue: m.destroyer(r), abandon: s.close,
	})
}

// reserve finds the lowest index, at least from, that has no device, or one that
// was begun, and no bound device node. It is kept from other calls until it is released.
func (m *Manager) reserve(from int) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	places, err := m.cfg.Kernel.Places()
	if err != nil {
		return 0, err
	}
	for index := from; ; index++ {
		taken := slices.ContainsFunc(places, func(p Place) bool { return p.Index == index && (p.Configured || !m.blank[index]) })
		if taken || m.reserved[index] {
			continue
		}
		u, err := m.cfg.Kernel.Users(index)
		if err != nil {
			return 0, err
		}
		if len(u.Mounts) == 0 {
			delete(m.blank, index)
			m.reserved[index] = true
			return index, nil
		}
	}
}

// begun remembers a device that a call has made and could not connect. Only a
// device that was connected goes when it ends, so the next call is to take it.
func (m *Manager) begun(index int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n, err := m.cfg.Kernel.Node(index); err == nil && !n.Configured {
		m.blank[index] = true
	}
}

func (m *Manager) release(index int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.reserved, index)
}

// verify looks whether the kernel has made what it was told to.
func (m *Manager) verify(r *record) error {
	n, err := m.cfg.Kernel.Node(r.Index)
	switch {
	case err != nil:
		return err
	case n.Backend != r.Backend() || n.Size != r.Size || n.BlockSize != r.BlockSize:
		return fmt.Errorf("%w: %s has %d bytes in blocks of %d for %q; made were %d, %d and %q", block.ErrCorrupt,
			r.path(), n.Size, n.BlockSize, n.Backend, r.Size, r.BlockSize, r.Backend())
	case !m.alive(r):
		return fmt.Errorf("%w: the connections of %s ended at once", block.ErrUnavailable, r.path())
	}
	return nil
}

// undo ends a device that was just made, and that nobody has been told of, if it is
// there still, and returns the failure for which it is ended. One that may be there
// after all is not for a second try, which would make another: the next call finds it.
func (m *Manager) undo(ctx context.Context, r *record, failure error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endPatience)
	defer cancel()
	if err := errors.Join(m.disconnect(ctx, r), m.awaitGone(ctx, r)); err != nil {
		return fmt.Errorf("%w: %s may still be there: %v; it was to be ended because of: %v", block.ErrUnknown, r.path(), err, failure)
	}
	return errors.Join(failure, m.state.remove(r.Identity))
}
