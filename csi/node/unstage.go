package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// unstage ends what stage made, by the mount table and the kernel alone: the
// metadata service and the servers need not be there.
func (s *Service) unstage(f *flight, r pathRequest) error {
	now, err := s.look(f.ctx, r.id)
	if err != nil {
		return err
	}
	at := stageRequest{point: r.path}
	if users := now.users(at.point, at.marker()); len(users) > 0 {
		return fmt.Errorf("%w: volume %s is still published at %s: unpublish it first", block.ErrInUse, r.id, users[0].Point)
	}
	if err := f.commit(); err != nil {
		return err
	}
	if err := s.letGo(f, now, at); err != nil {
		return fmt.Errorf("volume %s: %w", r.id, err)
	}
	if r.path != "" {
		if err := s.hide(f, at); err != nil {
			return fmt.Errorf("volume %s: %w", r.id, err)
		}
	}
	if r.id.IsZero() {
		return nil
	}
	if err := s.detach(f.ctx, r.id); err != nil {
		return fmt.Errorf("volume %s: its device stays: %w", r.id, err)
	}
	s.forget(r.id)
	if now.attached {
		s.cfg.Log.Info("volume unstaged", "volume_id", r.id, "device", now.device.Path, "staging", r.path)
	}
	return nil
}

// letGo ends the device under a file system that takes no changes any more after an
// error, if no server answers: there is nothing left to be saved, and the unmount
// would wait for a server all the same, to write what it cannot.
func (s *Service) letGo(f *flight, now facts, r stageRequest) error {
	e, mounted := now.table.At(r.point)
	d := now.device
	if !mounted || !now.attached || d.Condition.State != Waiting || d.ReadOnly || e.Number != d.Number || e.Node != (mount.Number{}) || !s.stopped(f, d, e) {
		return nil
	}
	s.cfg.Log.Warn("a device is ended under a file system that has stopped after an error, because no server answers", "volume_id", d.Volume, "device", d.Path, "staging", r.point)
	ctx, cancel := context.WithTimeout(f.ctx, detachPatience)
	defer cancel()
	err := s.cfg.Attacher.Fail(ctx, d.Volume, "its file system had stopped after an error, and it was unstaged while no server answered")
	if errors.Is(err, block.ErrInUse) { // by the mount, until it is gone
		return nil
	}
	return err
}

// stopped reports whether a file system takes no changes. It is asked only for what
// it knows without its device.
func (s *Service) stopped(f *flight, d Device, e mount.Entry) bool {
	if e.SuperReadOnly {
		return true
	}
	ctx, cancel := context.WithTimeout(f.ctx, stoppedPatience)
	defer cancel()
	_, err := s.asking.ask(ctx, d.Volume.String(), e.Point)
	return errors.Is(err, block.ErrIO)
}

// stoppedPatience is how long a file system may take to say that it has stopped.
const stoppedPatience = time.Second

// hide removes what is mounted at a staging path, and what raw staging put there.
func (s *Service) hide(f *flight, r stageRequest) error {
	if err := s.clear(f, r.marker()); err != nil {
		return err
	}
	if err := s.clear(f, r.point); err != nil {
		return err
	}
	return s.cfg.Mounter.Remove(r.marker())
}
