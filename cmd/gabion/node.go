package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/replica"
)

const (
	reportEvery = 2 * time.Second // also the node's heartbeat
	retryFirst  = 50 * time.Millisecond
	retryLast   = 2 * time.Second
	callLimit   = 10 * time.Second
)

// registrar tells the metadata service of this node and its disks.
type registrar struct {
	client  metapb.MetadataClient
	node    *metapb.Node
	cluster block.ClusterID
	disks   func() []replica.Report
	wrong   func() []*metapb.Condition // called by run only
	log     *slog.Logger
	changed chan struct{} // capacity 1: report now
}

// soon makes the next report come at once. It does not block.
func (r *registrar) soon() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// register announces this process until it is accepted or refused.
func (r *registrar) register(ctx context.Context) error {
	return retry(ctx, func() error {
		ctx, cancel := context.WithTimeout(ctx, callLimit)
		defer cancel()
		err := r.announce(ctx)
		if passing(err) && ctx.Err() == nil {
			r.log.Warn("the metadata service does not take this node's registration; it is tried again", "node", r.node.GetName(), "err", err)
		}
		return err
	})
}

func (r *registrar) announce(ctx context.Context) error {
	_, err := r.client.RegisterNode(ctx, &metapb.RegisterNodeRequest{Node: r.node, Disks: r.report(), ClusterId: r.cluster.String()})
	return err
}

// report is every disk that has an identity: one that could never be opened has none.
func (r *registrar) report() (list []*metapb.Disk) {
	for _, d := range r.disks() {
		if !d.ID.IsZero() {
			list = append(list, diskTo(r.node.GetName(), d))
		}
	}
	return list
}

// run reports until ctx ends.
func (r *registrar) run(ctx context.Context) {
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	told := true
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-r.changed:
		}
		err := r.send(ctx)
		if err != nil && told && ctx.Err() == nil {
			r.log.Warn("the metadata service does not take this node's reports", "node", r.node.GetName(), "err", err)
		}
		told = err == nil // one line when it starts to fail, not one for each report
	}
}

func (r *registrar) send(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	_, err := r.client.ReportDisks(ctx, &metapb.ReportDisksRequest{
		Node: r.node.GetName(), Process: r.node.GetProcess(), Disks: r.report(), Conditions: r.wrong(),
	})
	if errors.Is(err, block.ErrNotFound) { // a metadata service restored from before, or a predecessor's registration came late
		err = r.announce(ctx)
	}
	return err
}

func diskTo(node string, r replica.Report) *metapb.Disk {
	d := &metapb.Disk{
		Id: r.ID.String(), Node: node, Path: r.Path, Capacity: r.Capacity, Available: r.Available,
		State: metapb.Disk_FAILED, Problem: sentence(r.Problem), IoMode: r.Mode, Reflink: r.Reflink,
	}
	if r.Online {
		d.State = metapb.Disk_ONLINE
		if r.Full {
			d.State = metapb.Disk_FULL
		}
		d.Incarnation = incarnationTo(r.Incarnation)
	}
	return d
}

// retry calls f until it succeeds, is refused for good, or ctx ends.
func retry(ctx context.Context, f func() error) error {
	for pause := retryFirst; ; pause = min(2*pause, retryLast) {
		err := f()
		if !passing(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

// passing reports whether the same call may succeed later.
func passing(err error) bool {
	return errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrShutdown) || errors.Is(err, block.ErrUnknown) ||
		errors.Is(err, context.DeadlineExceeded)
}

// follower tells what changes in the metadata to those on this node who must know.
type follower struct {
	client  *client.Client
	changed func(block.VolumeID)
	deleted func(block.VolumeID)
	held    func() []block.VolumeID // what this node keeps in memory
	log     *slog.Logger
}

// run follows until ctx ends. What may have been missed is asked anew.
func (f *follower) run(ctx context.Context) {
	for ctx.Err() == nil {
		var from uint64
		err := retry(ctx, func() (err error) {
			from, err = f.all(ctx)
			return err
		})
		if err == nil {
			err = watch(ctx, f.client, from, f.event)
		}
		if ctx.Err() == nil && !errors.Is(err, metapb.ErrIndexGone) {
			f.log.Error("following the metadata service", "err", err)
			sleep(ctx, retryLast)
		}
	}
}

// all reports every volume as changed, those that were deleted meanwhile as
// that, and returns an index from before it looked.
func (f *follower) all(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s, err := f.client.GetStatus(ctx, &metapb.GetStatusRequest{})
	if err != nil {
		return 0, err
	}
	volumes, err := listVolumes(ctx, f.client)
	if err != nil {
		return 0, err
	}
	live := make(map[string]bool, len(volumes))
	for _, v := range volumes {
		live[v.GetId()] = true
		f.tell(f.changed, v.GetId())
	}
	for _, id := range f.held() {
		if live[id.String()] {
			continue
		}
		v, err := f.client.LookupVolume(ctx, &metapb.LookupVolumeRequest{VolumeId: id.String()})
		if err != nil {
			return 0, err
		}
		if v.GetState() == metapb.LookupVolumeResponse_TOMBSTONE {
			f.changed(id)
			f.deleted(id)
		}
	}
	return s.GetAppliedIndex(), nil
}

func (f *follower) event(e *metapb.Event) error {
	f.tell(f.changed, e.GetVolumeId())
	if e.GetType() == "VolumeDeleted" {
		f.tell(f.deleted, e.GetVolumeId())
	}
	return nil
}

// tell calls who for a volume; an event may concern none.
func (f *follower) tell(who func(block.VolumeID), id string) {
	if u, err := block.ParseUUID(id); err == nil {
		who(block.VolumeID{UUID: u})
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
