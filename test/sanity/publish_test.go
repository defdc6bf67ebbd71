package sanity

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gabion-storage/gabion/csi/driver"
	nbd "github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Who loops on a volume that is gone keeps nobody from publishing to the same node.
func TestB059HopelessPublishesStarveNobody(t *testing.T) {
	r := newRig(t)
	gone := r.create(wish("gone", mib)).GetVolumeId()
	if err := r.delete(gone); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for i := range 50 {
		ids = append(ids, r.create(wish(name("v%d", i), mib)).GetVolumeId())
	}
	ctx, stop := context.WithCancel(t.Context())
	var loops, wait sync.WaitGroup
	for range 20 {
		loops.Go(func() {
			for ctx.Err() == nil {
				if _, err := r.publish(ctx, gone, "n1", raw(rwo), false); ctx.Err() == nil {
					if code := status.Code(err); code != codes.NotFound && code != codes.Aborted {
						t.Errorf("gone: %v", err)
					}
				}
			}
		})
	}
	var mu sync.Mutex
	attachments := map[string]bool{}
	begin := time.Now()
	for _, id := range ids {
		wait.Go(func() {
			got, err := r.publish(t.Context(), id, "n1", raw(rwo), false)
			if err != nil {
				t.Errorf("good: %v", err)
			}
			mu.Lock()
			defer mu.Unlock()
			attachments[got[driver.AttachmentKey]] = true
		})
	}
	wait.Wait()
	took := time.Since(begin)
	stop()
	loops.Wait()
	if len(attachments) != len(ids) || took > 20*time.Second {
		t.Errorf("%d attachments of %d in %v", len(attachments), len(ids), took)
	}
}

func TestB060WhatIsGone(t *testing.T) {
	r := newRig(t)
	id := r.create(wish("v", mib)).GetVolumeId()
	unknown := block.NewUUID().String()
	for range 2 {
		for what, err := range map[string]error{
			"unknown node": r.unpublish(id, "n9"), "unknown volume": r.unpublish(unknown, "n1"), "no volume's id": r.unpublish("x", "n1"),
			"never published": r.unpublish(id, "n2"), "all nodes": r.unpublish(id, ""), "all nodes of an unknown volume": r.unpublish(unknown, ""),
		} {
			want(t, what, err, codes.OK)
		}
	}
	_, err := r.publish(t.Context(), id, "n9", raw(rwo), false)
	want(t, "publish to an unknown node", err, codes.NotFound, "n9")
	_, err = r.publish(t.Context(), unknown, "n1", raw(rwo), false)
	want(t, "publish of an unknown volume", err, codes.NotFound, unknown)
	for _, n := range []string{"n1", "n2"} {
		if _, err := r.publish(t.Context(), id, n, raw(rox), true); err != nil {
			t.Fatal(err)
		}
	}
	want(t, "all nodes", r.unpublish(id, ""), codes.OK)
	if nodes := r.listed()[id].GetStatus().GetPublishedNodeIds(); len(nodes) > 0 {
		t.Errorf("still published to %v", nodes)
	}
}

func TestB061DeleteOfAVolumeInUse(t *testing.T) {
	r := newRig(t)
	id := r.create(wish("v", gib)).GetVolumeId()
	r.mustPublish(id, "n1")
	c := r.connect(r.target(id, "n1"))
	data := bytes.Repeat([]byte{7}, 4096)
	if _, err := c.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	want(t, "published", r.delete(id), codes.FailedPrecondition, "n1")
	got := make([]byte, 4096)
	if _, err := c.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) || r.listed()[id] == nil {
		t.Errorf("it is not intact: %v", err)
	}
	want(t, "unpublish", r.unpublish(id, "n1"), codes.OK)
	for range 2 {
		want(t, "delete", r.delete(id), codes.OK)
	}
}

// The total is a constant; one volume more is refused, and repeats are not counted.
func TestB065AttachLimit(t *testing.T) {
	r := newRig(t)
	info, err := r.node.NodeGetInfo(t.Context(), &csispec.NodeGetInfoRequest{})
	if err != nil || info.GetMaxVolumesPerNode() != 250 || info.GetNodeId() != "n1" {
		t.Fatalf("%v, %v", info, err)
	}
	var ids []string
	for i := range int(info.GetMaxVolumesPerNode()) + 1 {
		ids = append(ids, r.create(wish(name("v%d", i), mib)).GetVolumeId())
	}
	last := ids[len(ids)-1]
	var wait sync.WaitGroup
	for part := range 10 {
		wait.Go(func() {
			for i := part; i < len(ids)-1; i += 10 {
				if _, err := r.publish(t.Context(), ids[i], "n1", raw(rwo), false); err != nil {
					t.Errorf("%d: %v", i, err)
				}
			}
		})
	}
	wait.Wait()
	_, err = r.publish(t.Context(), last, "n1", raw(rwo), false)
	want(t, "one more", err, codes.ResourceExhausted, "n1")
	r.mustPublish(ids[0], "n1") // again
	r.mustPublish(last, "n2")
	if again, err := r.node.NodeGetInfo(t.Context(), &csispec.NodeGetInfoRequest{}); err != nil || again.GetMaxVolumesPerNode() != 250 {
		t.Errorf("when full: %v, %v", again, err)
	}
	want(t, "unpublish", r.unpublish(ids[0], "n1"), codes.OK)
	want(t, "unpublish", r.unpublish(last, "n2"), codes.OK)
	r.mustPublish(last, "n1")
}

// Which nodes may have a volume together, and how.
func TestB066ModesOnSeveralNodes(t *testing.T) {
	r := newRig(t)
	id := r.create(wish("v", mib)).GetVolumeId()
	r.mustPublish(id, "n1")
	_, err := r.publish(t.Context(), id, "n1", raw(rwo), true)
	want(t, "same node, read-only", err, codes.AlreadyExists)
	_, err = r.publish(t.Context(), id, "n2", raw(rox), true)
	want(t, "a reader beside a writer", err, codes.FailedPrecondition, "n1")
	want(t, "unpublish", r.unpublish(id, "n1"), codes.OK)
	for _, n := range []string{"n1", "n2"} {
		if _, err := r.publish(t.Context(), id, n, raw(rox), false); err != nil {
			t.Errorf("reader on %s: %v", n, err)
		}
	}
	_, err = r.publish(t.Context(), id, "n3", raw(rwo), false)
	want(t, "a writer beside readers", err, codes.FailedPrecondition)
	_, err = r.publish(t.Context(), id, "n3", raw(csispec.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY), true)
	want(t, "a reader that wants to be alone", err, codes.FailedPrecondition, "n1")
	c := r.connect(r.target(id, "n1"))
	if _, err := c.WriteAt(make([]byte, 4096), 0); err == nil {
		t.Error("a reader wrote")
	}
}

// A node that was forced off cannot write any more, whatever it still has.
func TestB114ForcedDetach(t *testing.T) {
	r := newRig(t)
	id := r.create(wish("v", gib)).GetVolumeId()
	r.mustPublish(id, "n1")
	old := r.target(id, "n1")
	c := r.connect(old)
	var acked atomic.Int64
	written := make(chan struct{})
	go func() { // until it gets an error
		defer close(written)
		for i := int64(0); ; i++ {
			b := bytes.Repeat([]byte{byte(i%250) + 1}, 4096)
			if _, err := c.WriteAt(b, i*4096%(64*mib)); err != nil {
				return
			}
			acked.Store(i + 1)
		}
	}()
	for acked.Load() < 100 {
		time.Sleep(time.Millisecond)
	}
	want(t, "unpublish without a node call", r.unpublish(id, "n1"), codes.OK)
	<-written
	n := acked.Load()
	if again, err := nbd.Dial(t.Context(), old, nbd.Config{}); err == nil {
		again.Abort()
		t.Error("the old token opens the volume")
	}
	r.mustPublish(id, "n2")
	d := r.connect(r.target(id, "n2"))
	got := make([]byte, 4096)
	for i := max(0, n-1000); i < n; i++ {
		if _, err := d.ReadAt(got, i*4096%(64*mib)); err != nil || got[0] != byte(i%250)+1 || got[4095] != got[0] {
			t.Fatalf("write %d of %d acknowledged ones is gone: %d, %v", i, n, got[0], err)
		}
	}
}

// A controller keeps nothing in mind: what is published stands in the cell.
func TestB150SecondNode(t *testing.T) {
	r := newRig(t)
	id := r.create(wish("v", mib)).GetVolumeId()
	r.mustPublish(id, "n1")
	_, err := r.publish(t.Context(), id, "n2", raw(rwo), false)
	want(t, "second node", err, codes.FailedPrecondition, "n1")
	if nodes := r.listed()[id].GetStatus().GetPublishedNodeIds(); len(nodes) != 1 || nodes[0] != "n1" {
		t.Errorf("published to %v", nodes)
	}
	want(t, "unpublish", r.unpublish(id, "n1"), codes.OK)
	r.mustPublish(id, "n2")
	want(t, "unpublish", r.unpublish(id, "n2"), codes.OK)
	for round := range 500 {
		results := make(chan string, 2)
		for _, n := range []string{"n1", "n2"} {
			go func() {
				if _, err := r.publish(t.Context(), id, n, raw(rwo), false); err == nil {
					results <- n
				} else {
					want(t, "the loser", err, codes.FailedPrecondition)
					results <- ""
				}
			}()
		}
		winner := <-results + <-results
		if len(winner) != 2 {
			t.Fatalf("round %d: winners %q", round, winner)
		}
		want(t, "unpublish", r.unpublish(id, winner), codes.OK)
	}
}

// A publish that was given up and finished behind its caller's back is undone by the unpublish that came after.
func TestB151LatePublish(t *testing.T) {
	for _, point := range []string{"metadata.commit", "metadata.log"} {
		r := newRig(t)
		id := r.create(wish("v", mib)).GetVolumeId()
		r.fault(`{"point": "` + point + `", "hold": true}`) // the server's own reports meet it, too
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := r.publish(ctx, id, "n1", raw(rwo), false)
		cancel()
		if err == nil {
			t.Fatal("it was not delayed")
		}
		done := make(chan error, 1)
		go func() { done <- r.unpublish(id, "n1") }() // may wait for what is held
		select {
		case err := <-done:
			want(t, "unpublish", err, codes.OK)
			r.fault("")
		case <-time.After(2 * time.Second):
			r.fault("")
			want(t, "unpublish", <-done, codes.OK)
		}
		r.create(wish("after", mib)) // whatever was held has reached the log before this
		if nodes := r.listed()[id].GetStatus().GetPublishedNodeIds(); len(nodes) > 0 {
			t.Errorf("%s: published to %v", point, nodes)
		}
		if _, err := r.api.GetAttachment(t.Context(), &metapb.GetAttachmentRequest{Volume: &metapb.VolumeRef{Id: id}, Node: "n1"}); err == nil {
			t.Errorf("%s: there is a credential", point)
		}
		r.mustPublish(id, "n2")
	}
}

// Calls that fail again and again cost the cell nothing.
func TestB161RetriesWithoutPause(t *testing.T) {
	r := newRig(t)
	id := r.create(wish("v", mib)).GetVolumeId()
	r.mustPublish(id, "n1")
	for i := 0; r.capacity(&csispec.GetCapacityRequest{}).GetAvailableCapacity() > 64*tib; i++ {
		r.create(wish(name("fill%d", i), 64*tib))
	}
	r.create(wish("rest", r.capacity(&csispec.GetCapacityRequest{}).GetMaximumVolumeSize().GetValue()))
	unknown, entries := block.NewUUID().String(), r.applied()
	logged, err := os.Stat(filepath.Join(r.dir, "driver.log"))
	if err != nil {
		t.Fatal(err)
	}
	calls := 1200 // a minute of twenty a second
	if os.Getenv("GABION_SOAK") != "" {
		calls *= 5
	}
	for range calls / 4 {
		_, err := r.tryCreate(t.Context(), wish("full", gib))
		want(t, "full", err, codes.ResourceExhausted)
		_, err = r.publish(t.Context(), unknown, "n1", raw(rwo), false)
		want(t, "unknown", err, codes.NotFound)
		_, err = r.publish(t.Context(), id, "n2", raw(rwo), false)
		want(t, "taken", err, codes.FailedPrecondition)
		_, err = r.node.NodeStageVolume(t.Context(), &csispec.NodeStageVolumeRequest{
			VolumeId: unknown, StagingTargetPath: filepath.Join(r.dir, "staging"), VolumeCapability: raw(rwo), PublishContext: map[string]string{driver.AttachmentKey: unknown},
		})
		want(t, "stage", err, codes.NotFound)
	}
	if n := r.applied() - entries; n > uint64(calls/60) { // the server's own reports
		t.Errorf("%d log entries for %d failing calls", n, calls)
	}
	now, err := os.Stat(filepath.Join(r.dir, "driver.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes of log for %d failing calls, at debug level", now.Size()-logged.Size(), calls)
	want(t, "unpublish", r.unpublish(id, "n1"), codes.OK)
	r.mustPublish(id, "n2")
}

// Two pods on one node, as the access mode says. Unpublish of one leaves the other.
func TestB154TwoPodsOneNode(t *testing.T) {
	r := newRig(t)
	for mode, second := range map[csispec.VolumeCapability_AccessMode_Mode]codes.Code{
		csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        codes.OK,
		csispec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  codes.OK,
		csispec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: codes.FailedPrecondition,
	} {
		c := mounted("", mode)
		v := r.create(wish(mode.String(), gib, as(c), with(driver.FSTypeKey, "xfs")))
		id := v.GetVolumeId()
		published, err := r.publish(t.Context(), id, "n1", c, false)
		if err != nil {
			t.Fatal(err)
		}
		staging := filepath.Join(r.dir, mode.String())
		if err := os.Mkdir(staging, 0o750); err != nil {
			t.Fatal(err)
		}
		if _, err := r.node.NodeStageVolume(t.Context(), &csispec.NodeStageVolumeRequest{
			VolumeId: id, StagingTargetPath: staging, VolumeCapability: c, PublishContext: published, VolumeContext: v.GetVolumeContext(),
		}); err != nil {
			t.Fatal(err)
		}
		if e, ok := r.host.Table().At(staging); !ok || e.Type != "xfs" {
			t.Errorf("%v: %v is mounted", mode, e)
		}
		show := func(target string) error {
			_, err := r.node.NodePublishVolume(t.Context(), &csispec.NodePublishVolumeRequest{
				VolumeId: id, StagingTargetPath: staging, TargetPath: filepath.Join(r.dir, mode.String()+target), VolumeCapability: c, PublishContext: published, VolumeContext: v.GetVolumeContext(),
			})
			return err
		}
		hide := func(target string) error {
			_, err := r.node.NodeUnpublishVolume(t.Context(), &csispec.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: filepath.Join(r.dir, mode.String()+target)})
			return err
		}
		want(t, mode.String(), show("-a"), codes.OK)
		want(t, mode.String()+" again", show("-a"), codes.OK)
		want(t, mode.String()+" second", show("-b"), second)
		want(t, mode.String()+" hide", hide("-a"), codes.OK)
		if _, ok := r.host.Table().At(filepath.Join(r.dir, mode.String()+"-b")); ok != (second == codes.OK) {
			t.Errorf("%v: the other target is there: %v", mode, ok)
		}
		want(t, mode.String()+" hide", hide("-b"), codes.OK)
		if _, err := r.node.NodeUnstageVolume(t.Context(), &csispec.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
			t.Error(err)
		}
		want(t, "unpublish", r.unpublish(id, "n1"), codes.OK)
	}
	if residue := r.host.Residue(); residue != "" {
		t.Errorf("left behind: %s", residue)
	}
}

// Markers where secrets may be are in no log and in nothing that the cell keeps.
func TestB166SecretsReachNobody(t *testing.T) {
	r := newRig(t, "--log-level", "debug")
	secrets := func(rpc string) map[string]string { return map[string]string{"passphrase": "MARKER-" + rpc} }
	c := mounted("", rwo)
	c.GetMount().MountFlags = []string{"noatime", "password=MARKER-flag"}
	in := wish("v", gib, as(c))
	in.Secrets = secrets("create")
	v := r.create(in)
	id := v.GetVolumeId()
	published, err := r.controller.ControllerPublishVolume(t.Context(), &csispec.ControllerPublishVolumeRequest{
		VolumeId: id, NodeId: "n1", VolumeCapability: c, Secrets: secrets("publish"), VolumeContext: map[string]string{"x": "MARKER-context"},
	})
	if err != nil {
		t.Fatal(err)
	}
	token := r.target(id, "n1").Export
	staging := filepath.Join(r.dir, "staging")
	if err := os.Mkdir(staging, 0o750); err != nil {
		t.Fatal(err)
	}
	var failed []error
	for _, context := range []map[string]string{published.GetPublishContext(), {driver.AttachmentKey: "MARKER-attachment"}, {"other": "MARKER-other"}} {
		_, err := r.node.NodeStageVolume(t.Context(), &csispec.NodeStageVolumeRequest{
			VolumeId: id, StagingTargetPath: staging, VolumeCapability: c, PublishContext: context, Secrets: secrets("stage"),
		})
		failed = append(failed, err)
		_, err = r.node.NodePublishVolume(t.Context(), &csispec.NodePublishVolumeRequest{
			VolumeId: id, StagingTargetPath: staging, TargetPath: filepath.Join(r.dir, "target"), VolumeCapability: c, PublishContext: context, Secrets: secrets("show"),
		})
		failed = append(failed, err)
	}
	_, err = r.controller.ControllerExpandVolume(t.Context(), &csispec.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csispec.CapacityRange{RequiredBytes: 1, LimitBytes: 2}, VolumeCapability: c, Secrets: secrets("expand"),
	})
	failed = append(failed, err)
	_, err = r.controller.DeleteVolume(t.Context(), &csispec.DeleteVolumeRequest{VolumeId: id, Secrets: secrets("delete")})
	failed = append(failed, err)
	for i, err := range failed {
		if err == nil || strings.Contains(err.Error(), "MARKER") {
			t.Errorf("call %d: %v", i, err)
		}
	}
	_, secret, _ := strings.Cut(token, "/")
	err = filepath.WalkDir(r.dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if bytes.Contains(b, []byte("MARKER")) {
			t.Errorf("a marker is in %s", path)
		}
		if strings.HasSuffix(path, ".log") && bytes.Contains(b, []byte(secret)) {
			t.Errorf("a token is in %s", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
