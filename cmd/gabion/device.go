package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// deviceView is a volume's device as -o json shows it.
type deviceView struct {
	Volume   volumeView `json:"volume"`
	Node     string     `json:"node"`
	Device   string     `json:"device"`
	Size     int64      `json:"size"`
	ReadOnly bool       `json:"read_only"`
}

func (a *app) attachdCommand() *cobra.Command {
	var c pluginConfig
	cmd := &cobra.Command{
		Use:   "attachd",
		Short: "Keep the devices of `gabion attach --device` connected",
		Long: `Keep this machine's devices connected to their volumes when servers restart, move
or fall silent, and end those that lost the right to theirs. Devices stay while
this is not running; requests that need another connection wait for it.

A machine that runs the CSI node plugin needs no attachd.`,
		Args: cobra.NoArgs,
		RunE: a.act(func(ctx context.Context, _ []string) error { return a.runPlugin(ctx, c) }),
	}
	cmd.Flags().SortFlags = false
	c.register(cmd.Flags())
	return cmd
}

// consumerAt is the name by which volumes are attached here: the one that was
// typed, else the one that this machine's devices go by, else the host's.
func consumerAt(state, typed string) (string, error) {
	if typed != "" {
		return typed, nil
	}
	if name, err := nodeOf(state); err == nil { // who may not read it has no devices
		return consumerName(name)
	}
	return consumerName("")
}

// attachDevice attaches a volume to this machine and makes it a device. If there
// is no device in the end the attachment stays: it may be another call's, whose
// device works.
func (a *app) attachDevice(ctx context.Context, c *client.Client, found *metapb.GetVolumeResponse, d *devices, readOnly bool) error {
	d.log, d.machine = a.quietLog(), a.machine
	if err := d.own(c); err != nil {
		return err
	}
	defer d.close()
	r, err := c.Attach(ctx, &metapb.AttachRequest{Volume: byID(found), Node: d.node, ReadOnly: readOnly})
	if err != nil {
		return err
	}
	id, err := metapb.ParseVolumeID("volume id", r.GetVolume().GetId())
	if err != nil {
		return err
	}
	device, err := d.manager.Attach(ctx, id, readOnly)
	if err != nil {
		fmt.Fprintf(a.err, "gabion: the volume stays attached to %s: attach it again, or detach it\n", d.node)
		return err
	}
	if watched, err := d.watched(false); err == nil && !watched {
		fmt.Fprintln(a.err, "gabion: nothing here connects the device again when its server restarts: run `gabion attachd`")
	}
	view := deviceView{viewVolume(r.GetVolume()), d.node, device.Path, device.Size, device.ReadOnly}
	return a.print(view, func(t *table) { t.row(view.Device) })
}

// detachDevice ends a volume's device if this machine has one. ErrInUse: it is
// mounted or held, and stays.
func (a *app) detachDevice(ctx context.Context, c *client.Client, found *metapb.GetVolumeResponse, d *devices) error {
	id, err := metapb.ParseVolumeID("volume id", found.GetVolume().GetId())
	if err != nil {
		return err
	}
	if name, err := nodeOf(d.state); err == nil && name != "" && name != d.node {
		return nil // another consumer than this machine
	}
	if here, err := a.devicesOf(id); err != nil || len(here) == 0 {
		return err
	}
	d.log, d.machine = a.quietLog(), a.machine
	if err := d.open(c); err != nil {
		return err
	}
	defer d.close()
	return d.manager.Detach(ctx, id)
}

// devicesOf are the paths of a volume's devices on this machine, by their
// attachments' ids. It asks the kernel only, and needs no rights.
func (a *app) devicesOf(id block.VolumeID) (map[string]string, error) {
	k := a.machine.kernel
	if k == nil {
		k = kernel.NewLinux()
	}
	places, err := k.Places()
	if err != nil {
		return nil, err
	}
	paths := make(map[string]string)
	for _, p := range places {
		if i, ours := kernel.ParseBackend(p.Backend); ours && i.Volume == id {
			paths[i.Attachment.String()] = fmt.Sprintf("/dev/nbd%d", p.Index)
		}
	}
	return paths, nil
}

// quietLog is for a command that a person waits for: what fails is its error.
func (a *app) quietLog() *slog.Logger { return slog.New(slog.DiscardHandler) }
