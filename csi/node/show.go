package node

import (
	"context"
	"fmt"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// showFS makes or checks the file system and mounts it at the staging path.
func (s *Service) showFS(f *flight, dev Device, v Volume, r stageRequest, undo *undo) error {
	// From here on the call is not given up: a device that does not answer holds
	// up whoever reads it, and mkfs or fsck that are begun are ended.
	if err := f.commit(); err != nil {
		return err
	}
	content, err := s.cfg.Mounter.Probe(dev.Path)
	if err != nil {
		return err
	}
	p, err := decide(v, content.Type, r.fs, r.readOnly)
	if err != nil {
		return err
	}
	options, err := r.options(p.fs)
	if err != nil {
		return err
	}
	m := mount.FileSystem{Device: dev.Path, Type: p.fs, Options: options, ReadOnly: r.readOnly}
	if err := s.prepare(f.ctx, v, r, p, m); err != nil {
		return err
	}
	made, err := s.cfg.Mounter.MakeDir(r.point)
	if err != nil {
		return err
	}
	if made {
		undo.add(func() error { return s.cfg.Mounter.Remove(r.point) })
	}
	s.remember(r.id, r.point, options.Strings())
	undo.add(func() error { return s.clear(f, r.point) })
	if err := s.cfg.Mounter.Mount(m, r.point); err != nil {
		return err
	}
	table, err := s.cfg.Mounter.Table()
	if err != nil {
		return err
	}
	if e, _ := table.At(r.point); e.Number != dev.Number || e.Root != "/" {
		return fmt.Errorf("%w: the mount table does not show the device at %s", block.ErrIO, r.point)
	}
	return nil
}

// prepare makes the file system, or checks it, as planned. That it is there is
// recorded before it can be seen.
func (s *Service) prepare(ctx context.Context, v Volume, r stageRequest, p plan, m mount.FileSystem) error {
	if !p.format {
		if r.readOnly {
			return nil // as it is: a check would write
		}
		return s.cfg.Mounter.Check(m.Device, p.fs)
	}
	if p.resume && s.cfg.Mounter.Try(m) == nil {
		s.cfg.Log.Info("an earlier mkfs had come to its end", "volume_id", r.id, "device", m.Device, "fs", string(p.fs))
		return s.setFormat(ctx, r, v, FormatDone)
	}
	if err := s.setFormat(ctx, r, v, FormatStarted); err != nil {
		return err
	}
	s.cfg.Log.Info("a blank volume is formatted", "volume_id", r.id, "device", m.Device, "fs", string(p.fs))
	if err := s.cfg.Mounter.Format(mount.Format{Device: m.Device, Type: p.fs, Blank: p.blank}); err != nil {
		return err
	}
	if err := s.cfg.Mounter.Try(m); err != nil {
		return fmt.Errorf("the new file system: %w", err)
	}
	return s.setFormat(ctx, r, v, FormatDone)
}

func (s *Service) setFormat(ctx context.Context, r stageRequest, v Volume, to FormatState) error {
	ctx, cancel := context.WithTimeout(ctx, metadataPatience)
	defer cancel()
	if err := s.cfg.Volumes.SetFormat(ctx, r.id, v.Attachment, to); err != nil {
		return fmt.Errorf("the format state is not recorded: %w", err)
	}
	return nil
}

// showNode shows the device itself in the staging path.
func (s *Service) showNode(f *flight, dev Device, v Volume, r stageRequest, undo *undo) error {
	// Whoever gets the device may write what no mkfs of ours may follow.
	if v.Format == FormatStarted && !r.readOnly {
		if err := s.setFormat(f.ctx, r, v, FormatDone); err != nil {
			return err
		}
	}
	made, err := s.cfg.Mounter.MakeDir(r.point)
	if err != nil {
		return err
	}
	if made {
		undo.add(func() error { return s.cfg.Mounter.Remove(r.point) })
	}
	if _, err = s.cfg.Mounter.MakeFile(r.marker()); err != nil {
		return err
	}
	undo.add(func() error { return s.cfg.Mounter.Remove(r.marker()) }) // whoever made it
	if err := f.commit(); err != nil {
		return err
	}
	undo.add(func() error { return s.clear(f, r.marker()) })
	return s.cfg.Mounter.BindNode(dev.Path, r.marker(), dev.Number, r.readOnly)
}
