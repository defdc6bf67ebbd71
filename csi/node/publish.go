package node

import (
	"errors"
	"fmt"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// publish shows a staged volume at a target.
func (s *Service) publish(f *flight, r publishRequest) error {
	now, err := s.look(f.ctx, r.id)
	if err != nil {
		return err
	}
	source, err := s.source(now, r)
	if err != nil {
		return err
	}
	shown, err := s.published(f, now, r)
	if shown || err != nil {
		return err
	}
	if users := now.users(r.point, r.marker(), r.target); r.alone && len(users) > 0 {
		return fmt.Errorf("%w: volume %s is published at %s, and its access mode allows one pod only", block.ErrPrecondition, r.id, users[0].Point)
	}
	if err := f.commit(); err != nil {
		return err
	}
	place, bind := s.cfg.Mounter.MakeDir, s.cfg.Mounter.BindFS
	if r.raw {
		place, bind = s.cfg.Mounter.MakeFile, s.cfg.Mounter.BindNode
	}
	made, err := place(r.target)
	if err != nil {
		return err
	}
	if err := bind(source, r.target, now.device.Number, r.readOnly); err != nil {
		if made {
			err = errors.Join(err, s.cfg.Mounter.Remove(r.target))
		}
		return fmt.Errorf("volume %s: %w", r.id, err)
	}
	return nil
}

// source is what is bound: there must be a staged volume of the caller's
// attachment, of the same access type, that does what it is published for.
func (s *Service) source(now facts, r publishRequest) (string, error) {
	stage := func(why string) error {
		return fmt.Errorf("%w: volume %s %s: stage it first", block.ErrPrecondition, r.id, why)
	}
	anew := func(why string) error {
		return fmt.Errorf("%w: volume %s %s: unstage it, then stage it", block.ErrPrecondition, r.id, why)
	}
	d := now.device
	node, bound := now.table.At(r.marker())
	fs, mounted := now.table.At(r.point)
	switch {
	case !now.attached:
		return "", stage("is not attached")
	case !r.attachment.IsZero() && r.attachment != d.Attachment:
		return "", anew("is still staged from an earlier attachment")
	case d.Condition.State == Failed:
		return "", anew("has a device that failed (" + d.Condition.Message + ")")
	case r.raw && mounted && fs.Number == d.Number:
		return "", fmt.Errorf("%w: volume %s is staged as a file system, not as raw block", block.ErrPrecondition, r.id)
	case r.raw && (!bound || node.Node != d.Number || node.Orphaned()):
		return "", stage("is not staged as raw block at " + r.point)
	case r.raw:
		if d.ReadOnly && !r.readOnly {
			return "", fmt.Errorf("%w: volume %s is attached read-only", block.ErrPrecondition, r.id)
		}
		return r.marker(), nil
	case bound && node.Node == d.Number:
		return "", fmt.Errorf("%w: volume %s is staged as raw block, not as a file system", block.ErrPrecondition, r.id)
	case !mounted || fs.Number != d.Number || fs.Node != mount.Number{} || fs.Root != "/":
		return "", stage("is not staged at " + r.point)
	case r.fs != "" && string(r.fs) != fs.Type:
		return "", fmt.Errorf("%w: volume %s is staged as %s, not %s", block.ErrPrecondition, r.id, fs.Type, r.fs)
	case r.readOnly:
		return r.point, nil
	case d.ReadOnly:
		return "", fmt.Errorf("%w: volume %s is attached read-only", block.ErrPrecondition, r.id)
	}
	if err := s.takesWrites(d, fs); err != nil {
		return "", fmt.Errorf("volume %s: %w: unstage it, then stage it", r.id, err)
	}
	return r.point, nil
}

// published reports whether the target shows the volume just as asked. What a
// device that has gone left there is removed.
func (s *Service) published(f *flight, now facts, r publishRequest) (bool, error) {
	e, mounted := now.table.At(r.target)
	d := now.device
	isFS := e.Node == mount.Number{} && e.Number == d.Number
	isNode := e.Node == d.Number && !e.Orphaned()
	switch {
	case !mounted:
		return false, nil
	case e.Orphaned():
		return false, s.clear(f, r.target)
	case r.raw && !isNode, !r.raw && (!isFS || e.Root != "/"):
		return false, fmt.Errorf("%w: %s has a mount of something else (%s, device %s): unpublish it first", block.ErrPrecondition, r.target, e.Type, e.Number)
	case e.ReadOnly != r.readOnly:
		return false, fmt.Errorf("%w: volume %s is published at %s, read-only: %t", block.ErrExists, r.id, r.target, e.ReadOnly)
	}
	return true, nil
}

// unpublish ends what publish made, by the mount table alone. What is mounted at the target is the target's.
func (s *Service) unpublish(f *flight, r pathRequest) error {
	if r.path == "" {
		return nil // its parent is not there
	}
	if err := s.clear(f, r.path); err != nil {
		return err
	}
	return s.cfg.Mounter.Remove(r.path)
}
