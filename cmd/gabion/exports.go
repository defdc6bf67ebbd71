package main

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/image"
	"github.com/gabion-storage/gabion/server/replica"
)

// remoteDevices refuses this host's own kernel while one of the disks here is
// buffered (H87): writing back a device's pages would need pages of the disk's
// file, which may have to be written back first. Any disk counts, since any may
// get the next run of the volume. A plain client has no pages to write back.
type remoteDevices struct {
	nbd.Exports
	disks func() []replica.Report
}

// Open implements nbd.Exports.
func (e remoteDevices) Open(ctx context.Context, name string, s block.Stream) (block.Device, error) {
	client, known := s.(nbd.Client)
	if !known || !ofDevice(name) {
		return e.Exports.Open(ctx, name, s)
	}
	path, here := e.buffered(), false
	if path != "" {
		var err error
		if here, err = onThisHost(client.RemoteAddr()); err != nil {
			return nil, err
		}
	}
	if !here {
		return e.Exports.Open(ctx, name, s)
	}
	if _, err := e.Describe(ctx, name); err != nil { // a stranger hears no more than that
		return nil, err
	}
	return nil, fmt.Errorf("%w: the server's own host cannot use the volume as a device, because the disk at %s is accessed through the page cache (buffered): "+
		"start the server with --io-mode direct, or attach the volume on another node", block.ErrPrecondition, path)
}

// ofDevice reports whether an export name is that of a numbered session, which only devices have.
func ofDevice(name string) bool { return strings.Count(name, "/") == 3 }

// buffered is the path of a disk that is accessed through the page cache, or empty.
func (e remoteDevices) buffered() string {
	for _, d := range e.disks() {
		if d.Online && d.Mode == image.Buffered.String() {
			return d.Path
		}
	}
	return ""
}

// onThisHost reports whether an address is one of this host's.
func onThisHost(a net.Addr) (bool, error) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok || tcp.IP.IsLoopback() {
		return true, nil // a UNIX socket reaches no further
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return false, fmt.Errorf("%w: this host's addresses: %w", block.ErrUnavailable, err)
	}
	for _, o := range own {
		if n, ok := o.(*net.IPNet); ok && n.IP.Equal(tcp.IP) {
			return true, nil
		}
	}
	return false, nil
}

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
