package node

import (
	"fmt"

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
