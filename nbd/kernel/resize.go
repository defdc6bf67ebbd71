package kernel

import (
	"context"
	"fmt"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// hastyDeadTimeout is how long the driver waits for new sockets should the server end during a size change:
// nobody can hand it any then, and all devices of the machine wait with it.
const hastyDeadTimeout = 10 * time.Second

// resize makes a device larger, which is well at this moment; see DESIGN.md for
// what happens if it is not.
func (m *Manager) resize(ctx context.Context, r *record, size int64) error {
	if err := m.answers(ctx, r, true, answerTime); err != nil {
		return err
	}
	r.Hasty = true
	if err := m.state.save(r); err != nil {
		return err
	}
	err := m.change(ctx, r, Change{DeadTimeout: hastyDeadTimeout})
	if err == nil {
		err = m.change(ctx, r, Change{Size: size})
	}
	calm, cancel := context.WithTimeout(context.WithoutCancel(ctx), endPatience)
	defer cancel()
	if calmed := m.calm(calm, r); err == nil { // else the watch does it
		err = calmed
	}
	if err != nil {
		return err
	}
	n, err := m.cfg.Kernel.Node(r.Index)
	if err == nil && n.Size != size {
		err = fmt.Errorf("%w: %s has %d bytes after it was given %d", block.ErrUnavailable, r.path(), n.Size, size)
	}
	if err != nil {
		return err
	}
	r.Size = size
	m.cfg.Log.Info("resized", "volume_id", r.Volume, "device", r.path(), "size", size)
	return m.state.save(r)
}

// calm gives a device its patience back.
func (m *Manager) calm(ctx context.Context, r *record) error {
	if err := m.change(ctx, r, Change{DeadTimeout: r.DeadTimeout}); err != nil {
		return err
	}
	r.Hasty, r.Phase = false, phaseConnected
	return m.state.save(r)
}

// change is not helped by ending sockets: what a size change waits for is their answers.
func (m *Manager) change(ctx context.Context, r *record, c Change) error {
	return m.calls.do(ctx, call{
		name: "changing " + r.path(), do: func() error { return m.cfg.Kernel.Reconfigure(r.Index, r.Backend(), c) },
	})
}
