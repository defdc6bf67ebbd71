package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/server/block"
)

// givenUp is the reason that a device has which an operator gave up.
const givenUp = "an operator gave it up"

// giveUp ends a device of this machine though it is used and its servers may be
// gone for good: all requests fail, what was not flushed is lost. It asks nobody.
func (a *app) giveUp(ctx context.Context, name string, d *devices) error {
	if consumer, err := nodeOf(d.state); err == nil && consumer != "" {
		d.node = consumer
	}
	d.log, d.machine = a.quietLog(), a.machine
	if err := d.open(nil); err != nil {
		return err
	}
	defer d.close()
	id, err := deviceNamed(d.manager, name)
	if err != nil {
		return err
	}
	err = d.manager.Fail(ctx, id, givenUp)
	if errors.Is(err, block.ErrInUse) {
		fmt.Fprintf(a.err, "gabion: %v; it fails all requests and goes with its last user\n", err)
		err = nil
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(a.out, "volume %s has no device any more; `gabion detach` ends its attachment, if it still has one, when servers are there\n", id)
	return nil
}

// deviceNamed finds a device of ours by its path or by its volume's id.
func deviceNamed(m *kernel.Manager, name string) (block.VolumeID, error) {
	all, err := m.Devices()
	if err != nil {
		return block.VolumeID{}, err
	}
	for _, d := range all {
		if d.Path == name || d.Volume.String() == name {
			return d.Volume, nil
		}
	}
	return block.VolumeID{}, fmt.Errorf("%w: %.60q is no device of Gabion's on this machine: name its path, such as /dev/nbd0, or the volume's id", block.ErrNotFound, name)
}
