package nodetest

import (
	"context"
	"fmt"
	"sync"

	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/server/block"
)

// Volumes is a metadata service in memory: what is attached to one node.
type Volumes struct {
	host *Host

	mu   sync.Mutex
	all  map[block.VolumeID]node.Volume
	away error // what every call returns instead; nil: nothing
}

var _ node.Volumes = (*Volumes)(nil)

// NewVolumes returns a service without volumes. Whether a volume was ever
// written to it learns from what the host says that it holds.
func NewVolumes(h *Host) *Volumes { return &Volumes{host: h, all: map[block.VolumeID]node.Volume{}} }

// Add attaches a new, blank volume.
func (v *Volumes) Add(size int64) block.VolumeID {
	id := block.VolumeID{UUID: block.NewUUID()}
	v.Attach(id, func(vol *node.Volume) { vol.Size = size })
	return id
}

// Attach attaches a volume anew, changed.
func (v *Volumes) Attach(id block.VolumeID, change func(*node.Volume)) block.AttachmentID {
	v.mu.Lock()
	defer v.mu.Unlock()
	vol := v.all[id]
	vol.Attachment = block.AttachmentID{UUID: block.NewUUID()}
	if change != nil {
		change(&vol)
	}
	v.all[id] = vol
	return vol.Attachment
}

// Set changes an attached volume.
func (v *Volumes) Set(id block.VolumeID, change func(*node.Volume)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	vol := v.all[id]
	change(&vol)
	v.all[id] = vol
}

// Get is what the service has of a volume.
func (v *Volumes) Get(id block.VolumeID) node.Volume {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.all[id]
}

// Detach revokes a volume's attachment.
func (v *Volumes) Detach(id block.VolumeID) { v.mu.Lock(); defer v.mu.Unlock(); delete(v.all, id) }

// Away makes every call fail; nil: no more.
func (v *Volumes) Away(err error) { v.mu.Lock(); defer v.mu.Unlock(); v.away = err }

// Describe implements node.Volumes.
func (v *Volumes) Describe(ctx context.Context, id block.VolumeID) (node.Volume, error) {
	if err := ctx.Err(); err != nil {
		return node.Volume{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	vol, ok := v.all[id]
	switch {
	case v.away != nil:
		return vol, v.away
	case !ok:
		return vol, fmt.Errorf("%w: not attached to this node", block.ErrNotFound)
	}
	v.host.Do(id, func(d *Disk) { vol.Born = vol.Born || d.Type != "" || d.Data })
	return vol, nil
}

// SetFormat implements node.Volumes.
func (v *Volumes) SetFormat(ctx context.Context, id block.VolumeID, a block.AttachmentID, f node.FormatState) error {
	vol, err := v.Describe(ctx, id)
	if err != nil {
		return err
	}
	if vol.Attachment != a || vol.ReadOnly {
		return fmt.Errorf("%w: attachment %s", block.ErrPrecondition, a)
	}
	if f == node.FormatStarted && vol.Format != node.FormatStarted && (vol.Format != node.FormatNone || vol.Born) {
		return fmt.Errorf("%w: it was written to", block.ErrPrecondition)
	}
	v.Set(id, func(vol *node.Volume) { vol.Format = f })
	return nil
}
