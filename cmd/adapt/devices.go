package adapt

import (
	"context"
	"errors"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/server/block"
)

// Devices is node.Attacher over the kernel's devices.
type Devices struct{ Manager *kernel.Manager }

var _ node.Attacher = Devices{}

// Attach implements node.Attacher.
func (d Devices) Attach(ctx context.Context, id block.VolumeID, readOnly bool) (node.Device, error) {
	return device(d.Manager.Attach(ctx, id, readOnly))
}

// Find implements node.Attacher.
func (d Devices) Find(_ context.Context, id block.VolumeID) (node.Device, error) {
	return device(d.Manager.Find(id))
}

// Detach implements node.Attacher.
func (d Devices) Detach(ctx context.Context, id block.VolumeID) error {
	err := d.Manager.Detach(ctx, id)
	if errors.Is(err, block.ErrNotFound) {
		return nil
	}
	return err
}

// Fail implements node.Attacher.
func (d Devices) Fail(ctx context.Context, id block.VolumeID, reason string) error {
	return d.Manager.Fail(ctx, id, reason)
}

// Resize implements node.Attacher.
func (d Devices) Resize(ctx context.Context, id block.VolumeID, size int64) (node.Device, error) {
	return device(d.Manager.Resize(ctx, id, size))
}

func device(d kernel.Device, err error) (node.Device, error) {
	if err != nil {
		return node.Device{}, err
	}
	return node.Device{
		Volume: d.Volume, Attachment: d.Attachment, Path: d.Path, Number: mount.Number{Major: d.Major, Minor: d.Minor},
		Size: d.Size, ReadOnly: d.ReadOnly, Condition: condition(d.Condition),
	}, nil
}

func condition(c kernel.Condition) node.Condition {
	switch c.Health {
	case kernel.Connected:
		return node.Condition{}
	case kernel.Waiting:
		return node.Condition{State: node.Waiting, Reason: "Disconnected", Message: c.Reason}
	case kernel.Zombie:
		return node.Condition{State: node.Failed, Reason: "StillOpen", Message: c.Reason}
	}
	return node.Condition{State: node.Failed, Reason: "Refused", Message: c.Reason, Lost: c.Lost()}
}
