package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
	if r.path != "" {
		release := s.guard(f, now, at)
		err := s.hide(f, at)
		release()
		if err != nil {
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

// guard ends the device under a file system that takes no changes any more after an
// error, if no server answers before or while it is unmounted: there is nothing left
// to be saved, and the unmount would wait for a server all the same, to write what it
// cannot. It goes on until release.
func (s *Service) guard(f *flight, now facts, r stageRequest) (release func()) {
	e, mounted := now.table.At(r.point)
	d := now.device
	if !mounted || !now.attached || d.ReadOnly || e.Number != d.Number || e.Node != (mount.Number{}) || !s.stopped(f, d, e) {
		return func() {}
	}
	if s.letGo(f.ctx, d.Volume) {
		return func() {}
	}
	ctx, cancel := context.WithCancel(f.ctx)
	var done sync.WaitGroup
	done.Go(func() {
		t := time.NewTicker(guardLook)
		defer t.Stop()
		for ended := false; !ended; {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
				ended = s.letGo(ctx, d.Volume)
			}
		}
	})
	return func() { cancel(); done.Wait() }
}

// guardLook is how often the guard looks whether a server answers.
const guardLook = 500 * time.Millisecond

// letGo ends a volume's device if it waits for a server, and reports whether it has ended.
func (s *Service) letGo(ctx context.Context, id block.VolumeID) (ended bool) {
	d, err := s.cfg.Attacher.Find(ctx, id)
	if err != nil || d.Condition.State != Waiting {
		return isNotFound(err) || err == nil && d.Condition.State == Failed
	}
	s.cfg.Log.Warn("a device is ended under a file system that has stopped after an error, because no server answers", "volume_id", id, "device", d.Path)
	ctx, cancel := context.WithTimeout(ctx, detachPatience)
	defer cancel()
	err = s.cfg.Attacher.Fail(ctx, id, "its file system had stopped after an error, and it was unstaged while no server answered")
	if err == nil || errors.Is(err, block.ErrInUse) { // by the mount, until it is gone
		return true
	}
	s.cfg.Log.Warn("it is not ended", "volume_id", id, "device", d.Path, "err", err)
	return false
}

// stopped reports whether a file system takes no changes. It is asked only for what
// it knows without its device. Any other error than its own word that it has stopped
// proves nothing: a server may come back, and what is unwritten be saved.
func (s *Service) stopped(f *flight, d Device, e mount.Entry) bool {
	if e.SuperReadOnly {
		return true
	}
	ctx, cancel := context.WithTimeout(f.ctx, stoppedPatience)
	defer cancel()
	u, err := s.asking.ask(ctx, d.Volume.String(), e.Point)
	// Stage has ext4 checked before it mounts it, so that what it counts came after that.
	return errors.Is(err, mount.ErrShutDown) || err == nil && u.Errors > 0 && e.StopsOnError
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
