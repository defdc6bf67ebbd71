package main

import (
	"context"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
)

// countedExports counts what clients ask of each volume.
type countedExports struct {
	nbd.Exports
	traffic *daemon.TrafficTable
}

// Open implements nbd.Exports.
func (e countedExports) Open(ctx context.Context, name string, s block.Stream) (block.Device, error) {
	d, err := e.Exports.Open(ctx, name, s)
	if err != nil {
		return nil, err
	}
	id, err := block.ParseUUID(name[:min(len(name), 36)]) // a volume was opened by this name, so it begins with an id
	if err != nil {
		return d, nil
	}
	return countedDevice{d, e.traffic.Of(block.VolumeID{UUID: id})}, nil
}

// countedDevice is a Device and an nbd.Observer.
type countedDevice struct {
	block.Device
	*daemon.Traffic
}
