package kernel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	// endPatience is how long passers-by may have a device open (udev, blkid), and how long a device may take to go.
	endPatience = 3 * time.Second
	endLook     = 20 * time.Millisecond
	claimLook   = 100 * time.Millisecond // all processes are looked at each time
)

// end gives a device up that nobody uses. ErrInUse: somebody does; nothing was
// done, unless it says that the device is a zombie.
func (m *Manager) end(ctx context.Context, d found) error {
	r := d.rec
	if d.zombie {
		return m.awaitGone(ctx, r)
	}
	release, err := m.claim(ctx, r)
	if err != nil {
		return err
	}
	return m.endClaimed(ctx, r, release)
}

// endClaimed ends a device that is claimed. Unless the driver was asked to, which
// it may be still when it has not answered yet, the device is what it was.
func (m *Manager) endClaimed(ctx context.Context, r *record, release func()) error {
	was := r.Phase
	r.Phase = phaseEnding
	m.write(r)
	err := m.cfg.Faults.Hit("kernel.disconnect", r.Volume.String())
	if err == nil {
		err = m.disconnect(ctx, r)
	}
	if err != nil && !errors.Is(err, block.ErrUnknown) {
		r.Phase = was
		m.write(r)
	}
	release()
	if err == nil {
		err = m.cfg.Faults.Hit("kernel.disconnected", r.Volume.String())
	}
	if err == nil {
		err = m.awaitGone(ctx, r)
	}
	if err != nil {
		return err
	}
	m.cfg.Log.Info("detached", "volume_id", r.Volume, "device", r.path())
	return m.state.remove(r.Identity)
}

// claim makes sure that nobody uses a device, and that nobody begins to. What is
// claimed keeps its number, even if another program ends it meanwhile. Without
// that proof nothing is ended: a device that cannot be opened in time may be
// mounted where this process does not see it.
func (m *Manager) claim(ctx context.Context, r *record) (release func(), err error) {
	patience, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	for {
		u, err := m.cfg.Kernel.Users(r.Index)
		if err != nil {
			return nil, err
		}
		if u.Any() {
			err = fmt.Errorf("%w: %s of volume %s is %v", block.ErrInUse, r.path(), r.Volume, u)
		} else if release, err = m.tryClaim(ctx, r); err == nil {
			return release, nil
		}
		if !errors.Is(err, block.ErrInUse) || len(u.Mounts) > 0 || len(u.Holders) > 0 || pause(patience, claimLook) != nil {
			return nil, err
		}
	}
}

func (m *Manager) tryClaim(ctx context.Context, r *record) (release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	return m.cfg.Kernel.Claim(ctx, r.Index)
}

// fail ends a device for good, used or not: all its requests get EIO.
func (m *Manager) fail(ctx context.Context, d found, reason string) error {
	r := d.rec
	if d.lost && d.zombie { // its record, if there is one, is of the device that has taken its place
		return m.awaitGone(ctx, r)
	}
	r.Phase, r.Refused = phaseEnding, reason
	m.write(r)
	if !d.zombie {
		m.cfg.Log.Error("a device is ended for good", "volume_id", r.Volume, "device", r.path(), "reason", reason)
		if err := m.endSockets(ctx, r); err != nil {
			m.cfg.Log.Warn("its connections are not all ended", "volume_id", r.Volume, "device", r.path(), "err", err)
		}
		if err := m.disconnect(ctx, r); err != nil {
			return err
		}
	}
	if err := m.awaitGone(ctx, r); err != nil {
		return err
	}
	return m.state.remove(r.Identity)
}

// disconnect ends a device. Towards a server that does not take what was sent to
// it, its sockets go first: the driver would wait for them, with a lock that all
// devices need. The driver goes by the number alone, which may be another
// device's since this one was found: that is looked at when the call has its turn.
func (m *Manager) disconnect(ctx context.Context, r *record) error {
	if !m.quiet(r) {
		if err := m.destroy(r.Sockets); err != nil {
			m.cfg.Log.Warn("connections cannot be ended", "volume_id", r.Volume, "device", r.path(), "err", err)
		}
	}
	return m.calls.do(ctx, call{
		name: "disconnecting " + r.path(), rescue: m.destroyer(r),
		do: func() error {
			if there, err := m.there(r); err != nil || !there {
				return err
			}
			return m.cfg.Kernel.Disconnect(r.Index)
		},
	})
}

// there reports whether the kernel shows the record's device at its number, connected or a zombie.
func (m *Manager) there(r *record) (bool, error) {
	n, err := m.cfg.Kernel.Node(r.Index)
	if errors.Is(err, block.ErrNotFound) {
		return false, nil
	}
	return err == nil && n.Configured && n.Backend == r.Backend(), err
}

// quiet reports whether a word on each of the device's sockets would leave at once.
func (m *Manager) quiet(r *record) bool {
	for _, id := range r.Sockets {
		if i, err := m.cfg.Kernel.Socket(id); err == nil && (!i.Established || i.Unsent > 0) {
			return false
		}
	}
	return true
}

// awaitGone waits until the kernel shows a device gone that was ended. ErrInUse:
// it is a zombie.
func (m *Manager) awaitGone(ctx context.Context, r *record) error {
	patience, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	for {
		if there, err := m.there(r); err == nil && !there {
			return nil
		}
		if pause(patience, endLook) != nil {
			break
		}
	}
	u, err := m.cfg.Kernel.Users(r.Index)
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: %s of volume %s is disconnected and still open: %v", block.ErrInUse, r.path(), r.Volume, u)
}
