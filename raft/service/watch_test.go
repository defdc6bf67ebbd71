package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// collect reads a stream that does not follow.
func (w *world) collect(in *metapb.WatchRequest) ([]*metapb.Event, error) {
	w.t.Helper()
	stream, err := w.Watch(w.t.Context(), in)
	if err != nil {
		return nil, err
	}
	var list []*metapb.Event
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		list = append(list, e)
	}
}

func types(events []*metapb.Event) (list []string) {
	for _, e := range events {
		list = append(list, e.Type)
	}
	return list
}

func TestWatch(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	w.create("a", gib)
	all, err := w.collect(&metapb.WatchRequest{History: true})
	want := []string{metadata.NodeRegistered, metadata.DiskOnline, metadata.VolumeCreated}
	if err != nil || !slices.Equal(types(all), want) {
		t.Errorf("%v, %v", types(all), err)
	}
	if none, err := w.collect(&metapb.WatchRequest{}); err != nil || len(none) != 0 {
		t.Errorf("%v, %v", none, err)
	}
	if rest, err := w.collect(&metapb.WatchRequest{AfterIndex: all[1].Index}); err != nil || !slices.Equal(types(rest), want[2:]) {
		t.Errorf("%v, %v", types(rest), err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := w.Watch(ctx, &metapb.WatchRequest{AfterIndex: all[2].Index, Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		w.create(fmt.Sprint("b", i), 4096)
	}
	last := all[2].Index
	for i := range 50 {
		e, err := stream.Recv()
		if err != nil || e.VolumeName != fmt.Sprint("b", i) || e.Index <= last {
			t.Fatalf("%v, %v", e, err)
		}
		last = e.Index
	}
	cancel()
	if _, err := stream.Recv(); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// The index that a restart or a snapshot leaves is the same history.
func TestH77WatchResumesAcrossARestart(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	for i := range 10 {
		w.create(fmt.Sprint("v", i), 4096)
	}
	before, err := w.collect(&metapb.WatchRequest{History: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.node.Snapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.create("after", 4096)
	w.restart()
	w.create("last", 4096) // a server answers this when it has caught up
	rest, err := w.collect(&metapb.WatchRequest{AfterIndex: before[4].Index})
	want := append(types(before[5:]), metadata.VolumeCreated, metadata.VolumeCreated)
	if err != nil || !slices.Equal(types(rest), want) || rest[len(rest)-1].VolumeName != "last" {
		t.Errorf("%v, %v", types(rest), err)
	}
}

// H77: an index that is not kept any more, and a watcher that falls behind,
// are told; no event is missed silently.
func TestH77WatcherFallsBehind(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	first := w.create("v", gib)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	slow, err := w.Watch(ctx, &metapb.WatchRequest{History: true, Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := slow.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	// Large sentences fill the stream's window, so that the server cannot send on.
	text := strings.Repeat("x", 1000)
	var wait sync.WaitGroup
	for part := range 20 {
		wait.Go(func() {
			for i := part; i < metadata.EventsKept+300; i += 20 {
				_, err := w.ReportEvent(t.Context(), &metapb.ReportEventRequest{Event: &metapb.Event{
					Type: "T", VolumeId: first.Id, DiskId: block.UUID{byte(i), byte(i >> 8), 1}.String(), Message: text,
				}})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	if _, err := w.collect(&metapb.WatchRequest{AfterIndex: 1}); !errors.Is(err, metapb.ErrIndexGone) || code(err) != codes.OutOfRange {
		t.Errorf("index gone: %v", err)
	}
	if all, err := w.collect(&metapb.WatchRequest{History: true}); err != nil || len(all) != metadata.EventsKept {
		t.Errorf("history: %d, %v", len(all), err)
	}
	var last uint64
	got := 3
	for {
		e, err := slow.Recv()
		if err != nil {
			if !errors.Is(err, metapb.ErrSlowWatcher) || code(err) != codes.Aborted {
				t.Errorf("slow watcher: %v after %d events", err, got)
			}
			break
		}
		if e.Index <= last {
			t.Fatalf("index %d after %d", e.Index, last)
		}
		last = e.Index
		if got++; got == metadata.EventsKept+303 {
			t.Skip("the stream's window held everything: nothing to see")
		}
	}
}

// B162: reports of one thing are limited, each thing on its own.
func TestB162EventsAreLimited(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	v := w.create("v", gib)
	u := w.create("u", gib)
	entries := w.index()
	for range 100 {
		for _, id := range []string{v.Id, u.Id} {
			_, err := w.ReportEvent(t.Context(), &metapb.ReportEventRequest{Event: &metapb.Event{Type: "VolumeWaitsForSpace", VolumeId: id, Node: "n1", Message: "m"}})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := w.index() - entries; n != 2*eventBurst {
		t.Errorf("%d entries", n)
	}
	if _, err := w.ReportEvent(t.Context(), &metapb.ReportEventRequest{}); code(err) != codes.InvalidArgument {
		t.Errorf("no event: %v", err)
	}
}

func TestStatus(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.DefaultReplicas = 3 })
	status := func() (*metapb.GetStatusResponse, string) {
		t.Helper()
		s, err := w.GetStatus(t.Context(), &metapb.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for _, c := range s.Conditions {
			lines = append(lines, c.Object+": "+c.Problem+" "+c.Remedy)
		}
		return s, strings.Join(lines, "\n")
	}
	wants := func(parts ...string) {
		t.Helper()
		_, text := status()
		for _, p := range parts {
			if !strings.Contains(text, p) {
				t.Errorf("%q is not in:\n%s", p, text)
			}
		}
	}
	if _, err := w.ListVolumes(t.Context(), &metapb.ListVolumesRequest{}); err != nil {
		t.Fatal(err)
	}
	wants("No disk is registered")
	d := disk(1, 100*gib)
	w.register("n1", d)
	wants("3 replicas by default, and 1 node has disks", "--replicas 1")
	_, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib, Policy: &metapb.Policy{Replicas: 1}})
	if err != nil {
		t.Fatal(err)
	}
	report := func(wrong ...*metapb.Condition) {
		t.Helper()
		if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n1", Disks: []*metapb.Disk{d}, Conditions: wrong}); err != nil {
			t.Fatal(err)
		}
	}
	// What a node says is wrong stands for as long as it says so, however often it changes, and takes no log entry.
	entries := w.index()
	for range 3 * eventBurst {
		report(condition(metapb.Condition_ERROR, "volume v", "Writes wait for space.", "Add disks."))
		wants("volume v: Writes wait for space. Add disks.")
		report()
		if _, text := status(); strings.Contains(text, "volume v") {
			t.Fatalf("still there:\n%s", text)
		}
	}
	if n := w.index() - entries; n != 0 {
		t.Errorf("%d entries", n)
	}
	report(condition(metapb.Condition_ERROR, "volume v", "Writes wait for space.", "Add disks."))
	d.State, d.Problem = metapb.Disk_FAILED, "fsync: input/output error"
	if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n1", Disks: []*metapb.Disk{d}}); err != nil {
		t.Fatal(err)
	}
	wants("The disk at /disk1 on node n1 failed: fsync: input/output error.")
	d.State = metapb.Disk_FULL
	if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n1", Disks: []*metapb.Disk{d}}); err != nil {
		t.Fatal(err)
	}
	wants("is full")
	w.clock.pass(time.Minute)
	wants("node n1: The node is down: its server has not been heard of for 1m0s.")
	s, text := status()
	if strings.Contains(text, "volume v") {
		t.Errorf("what a node said that is down now:\n%s", text)
	}
	if s.ClusterId != clusterID.String() || s.Leader != "n1" || s.Term == 0 || s.Volumes != 1 || s.Nodes != 1 || s.NodesUp != 0 || s.Disks != 1 || s.DisksOnline != 0 || s.Capacity != 100*gib ||
		s.Provisioned != gib || s.FeatureLevel != metadata.Level || !slices.Equal(s.Voters, []string{"n1"}) {
		t.Errorf("%v", s)
	}
}
