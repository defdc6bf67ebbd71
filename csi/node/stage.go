package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// stage attaches a volume and shows it at the staging path.
func (s *Service) stage(f *flight, r stageRequest) error {
	now, err := s.look(f.ctx, r.id)
	if err != nil {
		return err
	}
	staged, err := s.staged(f, now, r)
	if staged || err != nil {
		return err
	}
	v, err := s.describe(f.ctx, r)
	if err != nil {
		return err
	}
	r.readOnly = r.readOnly || v.ReadOnly
	undo := &undo{s: s, id: r.id}
	dev, err := s.attach(f.ctx, now, r, v)
	if err != nil {
		undo.run() // there may be a device that does not answer, or cannot be read
		return fmt.Errorf("volume %s: %w", r.id, err)
	}
	if err := s.show(f, dev, v, r, undo); err != nil {
		undo.run()
		return fmt.Errorf("volume %s on %s: %w", r.id, dev.Path, err)
	}
	s.cfg.Log.Info("volume staged", "volume_id", r.id, "device", dev.Path, "staging", r.point)
	return nil
}

// show is the part of stage that has a device.
func (s *Service) show(f *flight, dev Device, v Volume, r stageRequest, undo *undo) error {
	if err := s.compare(dev, v, r); err != nil {
		return err
	}
	if r.raw {
		return s.showNode(f, dev, v, r, undo)
	}
	return s.showFS(f, dev, v, r, undo)
}

// staged reports whether the volume is staged just as asked. An error: it is
// in a way that only unstaging ends.
func (s *Service) staged(f *flight, now facts, r stageRequest) (bool, error) {
	fs, mounted := now.table.At(r.point)
	node, bound := now.table.At(r.marker())
	if bound && now.attached && node.Node == now.device.Number && node.Orphaned() {
		return false, s.clear(f, r.marker()) // of a device that had the number before
	}
	if !mounted && !bound {
		return false, unusedElsewhere(now, r)
	}
	unstage := func(why string) error {
		return fmt.Errorf("%w: volume %s: %s at %s: unstage it first", block.ErrPrecondition, r.id, why, r.point)
	}
	d := now.device
	switch {
	case !now.attached, mounted && (fs.Number != d.Number || fs.Node != mount.Number{}), bound && node.Node != d.Number:
		return false, unstage("there is still a mount of another or an earlier device")
	case !r.attachment.IsZero() && r.attachment != d.Attachment:
		return false, unstage("it is still staged from an earlier attachment")
	case d.Condition.State == Failed:
		return false, unstage("its device has failed (" + d.Condition.Message + ") and is still staged")
	case bound != r.raw:
		return false, fmt.Errorf("%w: volume %s is staged at %s with another access type", block.ErrExists, r.id, r.point)
	case r.readOnly && !d.ReadOnly:
		return false, fmt.Errorf("%w: volume %s is staged at %s for writing", block.ErrExists, r.id, r.point)
	case r.raw:
		return true, nil
	case r.fs != "" && string(r.fs) != fs.Type:
		return false, fmt.Errorf("%w: volume %s is staged at %s as %s, not %s", block.ErrExists, r.id, r.point, fs.Type, r.fs)
	}
	if was, known := s.recall(r.id, r.point); known {
		if o, err := r.options(mount.FS(fs.Type)); err != nil || !slices.Equal(was, o.Strings()) {
			return false, fmt.Errorf("%w: volume %s is staged at %s with other mount options", block.ErrExists, r.id, r.point)
		}
	}
	return s.usable(f, now, r, fs)
}

// unusedElsewhere refuses a volume that is mounted, but not where it is to be staged.
func unusedElsewhere(now facts, r stageRequest) error {
	if users := now.users(); len(users) > 0 {
		return fmt.Errorf("%w: volume %s is in use at %s and not staged at %s", block.ErrInUse, r.id, users[0].Point, r.point)
	}
	return nil
}

// usable reports whether a staged file system does. One that has turned
// read-only after an error, and that nobody uses, is let go to be checked and mounted anew.
func (s *Service) usable(f *flight, now facts, r stageRequest, fs mount.Entry) (bool, error) {
	err := s.takesWrites(now.device, fs)
	if err == nil {
		return true, nil
	}
	if users := now.users(r.point); len(users) > 0 {
		return false, fmt.Errorf("%w; it is in use at %s: end what uses it", err, users[0].Point)
	}
	s.cfg.Log.Warn("a staged file system is mounted anew", "volume_id", r.id, "device", now.device.Path, "err", err)
	return false, s.clear(f, r.point)
}

// takesWrites returns an error if a file system on a device for writing does
// not. One whose device waits for a server is not asked.
func (s *Service) takesWrites(d Device, fs mount.Entry) error {
	if d.ReadOnly {
		return nil
	}
	why := "it is mounted read-only"
	if !fs.ReadOnly && !fs.SuperReadOnly {
		if d.Condition.State != Healthy {
			return nil
		}
		err := s.cfg.Mounter.Writable(fs.Point)
		if err == nil {
			return nil
		}
		why = err.Error()
	}
	return fmt.Errorf("%w: the file system at %s has stopped taking changes after an error (%s)", block.ErrPrecondition, fs.Point, why)
}

// clear unmounts whatever is mounted at a path.
func (s *Service) clear(f *flight, point string) error {
	if err := f.commit(); err != nil {
		return err
	}
	const most = 64 // mounts on top of each other; a real one has one
	for range most {
		table, err := s.cfg.Mounter.Table()
		if err != nil {
			return err
		}
		if _, mounted := table.At(point); !mounted {
			return nil
		}
		if err := s.cfg.Mounter.Unmount(point); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: %s stays mounted", block.ErrInUse, point)
}

// describe asks what is attached. What the caller means must be what there is:
// a call that comes late, from an earlier attachment, does nothing.
func (s *Service) describe(ctx context.Context, r stageRequest) (Volume, error) {
	ctx, cancel := context.WithTimeout(ctx, metadataPatience)
	defer cancel()
	v, err := s.cfg.Volumes.Describe(ctx, r.id)
	if err != nil {
		return v, fmt.Errorf("volume %s: %w", r.id, err)
	}
	if !r.attachment.IsZero() && r.attachment != v.Attachment {
		return v, fmt.Errorf("%w: volume %s is attached anew since this call was made: repeat it with the new publish context", block.ErrPrecondition, r.id)
	}
	return v, nil
}

// attach returns the volume's device. One that an earlier attachment or mode
// left behind, and that nobody uses, goes first.
func (s *Service) attach(ctx context.Context, now facts, r stageRequest, v Volume) (Device, error) {
	d := now.device
	if now.attached && (d.Attachment != v.Attachment || d.ReadOnly != r.readOnly || d.Condition.State == Failed) {
		s.cfg.Log.Info("a device is left over and goes first", "volume_id", r.id, "device", d.Path)
		err := s.detach(ctx, r.id)
		if err != nil && (d.Condition.State != Failed || !errors.Is(err, block.ErrInUse)) {
			return Device{}, err
		} // one that has failed harms nobody while somebody still has it open: another is made beside it
	}
	return s.cfg.Attacher.Attach(ctx, r.id, r.readOnly)
}

func (s *Service) detach(ctx context.Context, id block.VolumeID) error {
	ctx, cancel := context.WithTimeout(ctx, detachPatience)
	defer cancel()
	return s.cfg.Attacher.Detach(ctx, id)
}

// compare says whether the device is what it is said to be: by the kernel's own
// facts, before anything is read from it or written to it.
func (s *Service) compare(d Device, v Volume, r stageRequest) error {
	b, err := s.cfg.Mounter.Inspect(d.Path)
	switch {
	case err != nil:
		return err
	case d.Volume != r.id, d.Attachment != v.Attachment:
		return fmt.Errorf("%w: the device is of volume %s, attachment %s", block.ErrCorrupt, d.Volume, d.Attachment)
	case b.Number != d.Number:
		return fmt.Errorf("%w: the node is of device %s, not %s", block.ErrCorrupt, b.Number, d.Number)
	case b.Size != d.Size || b.Size == 0:
		return fmt.Errorf("%w: the kernel shows %d bytes, not %d", block.ErrUnavailable, b.Size, d.Size)
	case b.Size > v.Size:
		return fmt.Errorf("%w: the device has %d bytes, the volume %d: it changes, or is another", block.ErrUnavailable, b.Size, v.Size)
	case b.ReadOnly != r.readOnly || d.ReadOnly != r.readOnly:
		return fmt.Errorf("%w: the device is read-only: %t, wanted: %t", block.ErrUnavailable, b.ReadOnly, r.readOnly)
	}
	return nil
}

// undo takes back what a failed stage did, in reverse order. What cannot be
// taken back is found by the next call.
type undo struct {
	s     *Service
	id    block.VolumeID
	steps []func() error
}

func (u *undo) add(step func() error) { u.steps = append(u.steps, step) }

func (u *undo) run() {
	for _, step := range slices.Backward(u.steps) {
		if err := step(); err != nil {
			u.s.cfg.Log.Warn("a failed stage is not undone; the next call finds what is left", "volume_id", u.id, "err", err)
			return
		}
	}
	// The caller may have left: to detach is not his errand.
	if err := u.s.detach(context.Background(), u.id); err != nil {
		u.s.cfg.Log.Warn("the device of a failed stage stays; the next call finds it", "volume_id", u.id, "err", err)
	}
	u.s.forget(u.id)
}
