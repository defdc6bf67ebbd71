package main

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/gabion-storage/gabion/cmd/adapt"
	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/raft/metapb"
)

// nodeService is the CSI Node service over this machine.
func (p *plugin) nodeService() *node.Service {
	return node.New(node.Config{
		Name: p.node, Rack: p.rack,
		Attacher: adapt.Devices{Manager: p.devices.manager},
		Volumes:  adapt.Node{API: p.client, Name: p.node},
		Mounter:  mount.NewLinux(),
		StateDir: filepath.Join(p.state, "csi"),
		Log:      p.log,
	})
}

// announcer makes a node known as one that volumes can be published to.
type announcer struct {
	api      metapb.MetadataClient
	consumer *metapb.Consumer
	log      *slog.Logger
	every    time.Duration
}

func (p *plugin) announcer() *announcer {
	return &announcer{
		api: p.client, log: p.log, every: announceEvery,
		consumer: &metapb.Consumer{Name: p.node, Rack: p.rack, MaxVolumes: node.MaxVolumes},
	}
}

// announceEvery is how often a node says again that it is there: a cell that was
// restored from before its first word learns of it.
const announceEvery = time.Minute

// run announces until ctx ends. What is refused is said, and tried again as
// seldom as what is accepted: an operator, or an upgrade, changes it.
func (a *announcer) run(ctx context.Context) {
	told := ""
	for ctx.Err() == nil {
		err := retry(ctx, func() error {
			err := a.once(ctx)
			if told == "" && passing(err) && ctx.Err() == nil {
				told = err.Error()
				a.log.Warn("the metadata service does not take this node's registration; it is tried again", "node", a.consumer.GetName(), "err", err)
			}
			return err
		})
		switch {
		case ctx.Err() != nil:
		case err == nil && told != "":
			a.log.Info("the metadata service knows this node again", "node", a.consumer.GetName())
			told = ""
		case err != nil && told != err.Error():
			told = err.Error()
			a.log.Error("the metadata service refuses this node's registration", "node", a.consumer.GetName(), "err", err)
		}
		sleep(ctx, a.every)
	}
}

func (a *announcer) once(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err := a.api.RegisterConsumer(ctx, a.consumer)
	return err
}
