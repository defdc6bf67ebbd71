package service

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

func TestAttach(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	v := w.create("v", gib)
	a := w.attach("v", "c1")
	if len(a.Attachment.Token) != 32 || a.Attachment.VolumeId != v.Id || a.Volume.Id != v.Id {
		t.Errorf("%v", a)
	}
	if len(a.Endpoints) != 1 || a.Endpoints[0].Node != "n1" || a.Endpoints[0].NbdAddress == "" {
		t.Errorf("endpoints %v", a.Endpoints)
	}
	if again := w.attach("v", "c1"); again.Attachment.Id != a.Attachment.Id || !bytes.Equal(again.Attachment.Token, a.Attachment.Token) {
		t.Error("another attachment for the same key")
	}
	_, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v"), Node: "c2"})
	if code(err) != codes.FailedPrecondition || !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), `"c1"`) {
		t.Errorf("second consumer: %v", err)
	}
	if _, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v"), Node: "c1", ReadOnly: true}); code(err) != codes.AlreadyExists {
		t.Errorf("other mode: %v", err)
	}
	if _, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v")}); code(err) != codes.InvalidArgument {
		t.Errorf("no consumer: %v", err)
	}
	g, err := w.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: byName("v")})
	if err != nil || len(g.Attachments) != 1 || g.Attachments[0].Token != nil || len(g.Attachments[0].TokenDigest) != 32 {
		t.Errorf("%v, %v", g, err)
	}
	for range 2 { // never granted: nobody has to confirm; and absent is done
		if _, err := w.Detach(t.Context(), &metapb.DetachRequest{Volume: byName("v"), Node: "c1"}); err != nil {
			t.Error(err)
		}
	}
	if _, err := w.Detach(t.Context(), &metapb.DetachRequest{Volume: byName("never"), Node: "c1"}); err != nil {
		t.Error(err)
	}
	if b := w.attach("v", "c1"); b.Attachment.Id == a.Attachment.Id || bytes.Equal(b.Attachment.Token, a.Attachment.Token) {
		t.Error("identity of an attachment that ended is used again")
	}
}

// H72, API part: a detach is answered when the primary confirmed, and until
// then nobody else gets in.
func TestDetachWaitsForThePrimary(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	v := w.create("v", gib)
	w.attach("v", "c1")
	p := w.serve(v.Id, "n1", d)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := w.Detach(ctx, &metapb.DetachRequest{Volume: byName("v"), Node: "c1"})
	if !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), `node "n1" has not confirmed`) {
		t.Errorf("got %v", err)
	}
	if _, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v"), Node: "c2"}); !errors.Is(err, block.ErrInUse) {
		t.Errorf("attach meanwhile: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := w.Detach(t.Context(), &metapb.DetachRequest{Volume: byName("v"), Node: "c1"})
		done <- err
	}()
	m := p.refresh()
	if len(m.Attachments) != 1 || !m.Attachments[0].Revoking || m.Attachments[0].Token != nil {
		t.Fatalf("map: %v", m.Attachments)
	}
	p.must(&metapb.ProposeRequest_ConfirmDetach{ConfirmDetach: &metapb.ConfirmDetach{AttachmentId: m.Attachments[0].Id}})
	if err := <-done; err != nil {
		t.Error(err)
	}
	w.attach("v", "c2")
}

// H74: a call that hung after its look-up touches nothing that came after.
func TestH74LateDuplicates(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	// hung runs call, which stops before its command, runs meanwhile, and lets it go on.
	hung := func(call func(context.Context) error, meanwhile func()) error {
		t.Helper()
		if err := w.faults.Arm(fault.Rule{Point: "metadata.commit", Hold: true, Count: 1}); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { done <- call(ctx) }()
		for w.faults.Hits("metadata.commit") == 0 {
			time.Sleep(time.Millisecond)
		}
		meanwhile()
		w.faults.Clear("")
		return <-done
	}
	detach := func(ctx context.Context) error {
		_, err := w.Detach(ctx, &metapb.DetachRequest{Volume: byName("v"), Node: "c1"})
		return err
	}
	attach := func(ctx context.Context) error {
		_, err := w.Attach(ctx, &metapb.AttachRequest{Volume: byName("v"), Node: "c1"})
		return err
	}
	remove := func(ctx context.Context) error {
		_, err := w.DeleteVolume(ctx, &metapb.DeleteVolumeRequest{Volume: byName("v")})
		return err
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	old := w.create("v", gib)
	w.attach("v", "c1")

	var newer string
	must(hung(detach, func() {
		must(detach(t.Context()))
		newer = w.attach("v", "c1").Attachment.Id
	}))
	if got := w.attach("v", "c1").Attachment.Id; got != newer {
		t.Error("a late detach ended a newer attachment")
	}
	must(detach(t.Context()))

	var made string
	must(hung(remove, func() {
		must(remove(t.Context()))
		made = w.create("v", gib).Id
	}))
	g, err := w.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: byName("v")})
	if err != nil || g.Volume.Id != made || made == old.Id {
		t.Errorf("a late delete ended a newer volume: %v, %v", g, err)
	}

	// A publish whose caller has gone, after attach and detach by others.
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan struct{})
	err = hung(func(context.Context) error { defer close(left); return attach(ctx) }, func() {
		w.attach("v", "c2")
		if _, err := w.Detach(t.Context(), &metapb.DetachRequest{Volume: byName("v"), Node: "c2"}); err != nil {
			t.Fatal(err)
		}
		cancel()
		<-left
		w.volume("v") // what was said on the connection before this answer, the server has heard
	})
	if !errors.Is(err, block.ErrUnknown) {
		t.Errorf("cancelled: %v", err)
	}
	if g, err = w.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: byName("v")}); err != nil || len(g.Attachments) != 0 {
		t.Errorf("a cancelled attach came late: %v, %v", g, err)
	}
}

// A repeated detach that names its attachment cannot meet a newer one.
func TestDetachByAttachment(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	w.create("v", gib)
	old := w.attach("v", "c1").Attachment.Id
	detach := func() {
		t.Helper()
		if _, err := w.Detach(t.Context(), &metapb.DetachRequest{Volume: byName("v"), Node: "c1", AttachmentId: old}); err != nil {
			t.Fatal(err)
		}
	}
	detach()
	newer := w.attach("v", "c1").Attachment.Id
	detach()
	if got := w.attach("v", "c1").Attachment.Id; got != newer {
		t.Error("the newer attachment is gone")
	}
}

// H80 through the API: what the state machine refuses after the log took it
// is the caller's error.
func TestH80RefusalReachesTheCaller(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	v := w.create("v", gib)
	first := w.serve(v.Id, "n1", d)
	second := w.serve(v.Id, "n1", d)
	err := first.propose(&metapb.ProposeRequest{Command: &metapb.ProposeRequest_ConfirmSize{ConfirmSize: &metapb.ConfirmSize{Size: gib}}})
	if !errors.Is(err, block.ErrStale) || code(err) != codes.Aborted {
		t.Errorf("older generation: %v", err)
	}
	late := &metapb.Fence{VolumeId: v.Id, Generation: second.fence.Generation, Version: second.fence.Version}
	second.must(&metapb.ProposeRequest_CommitRuns{CommitRuns: &metapb.CommitRuns{Runs: []*metapb.Run{{Index: 0, Disks: []string{d.Id}}}}})
	_, err = w.Propose(t.Context(), &metapb.ProposeRequest{Fence: late, Command: &metapb.ProposeRequest_CommitRuns{CommitRuns: &metapb.CommitRuns{}}})
	if !errors.Is(err, block.ErrStale) || !strings.Contains(err.Error(), "version") {
		t.Errorf("older version: %v", err)
	}
	if _, err = w.Propose(t.Context(), &metapb.ProposeRequest{Fence: second.fence}); code(err) != codes.InvalidArgument {
		t.Errorf("no command: %v", err)
	}
}

// H77: the map is read at an index not below the grant, and holds what was
// committed just before.
func TestH77MapAfterGrant(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 1000*gib)
	w.register("n1", d)
	v := w.create("v", 100*gib)
	p := w.serve(v.Id, "n1", d)
	for run := range uint32(20) {
		p.must(&metapb.ProposeRequest_CommitRuns{CommitRuns: &metapb.CommitRuns{Runs: []*metapb.Run{{Index: run, Disks: []string{d.Id}}}}})
		before := w.index()
		m, err := w.Grant(t.Context(), &metapb.GrantRequest{VolumeId: v.Id, Node: "n1", Process: proc})
		if err != nil {
			t.Fatal(err)
		}
		if m.Index <= before || len(m.Runs) != int(run)+1 || m.Grant.Opened || m.Grant.Generation != p.fence.Generation+1 {
			t.Errorf("run %d: index %d after %d, %d runs, %v", run, m.Index, before, len(m.Runs), m.Grant)
		}
		p = w.serve(v.Id, "n1", d)
	}
}

func TestGrantIsRefused(t *testing.T) {
	w := newWorld(t)
	d1, d2 := disk(1, 100*gib), disk(2, 100*gib)
	w.register("n1", d1)
	w.register("n2", d2)
	v := w.create("v", gib)
	grant := func(node, process string) error {
		_, err := w.Grant(t.Context(), &metapb.GrantRequest{VolumeId: v.Id, Node: node, Process: process})
		return err
	}
	if err := grant("n1", "another"); !errors.Is(err, block.ErrStale) {
		t.Errorf("another process: %v", err)
	}
	if err := grant("n3", proc); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("unknown node: %v", err)
	}
	if err := grant("n1", proc); err != nil {
		t.Error(err)
	}
	if err := grant("n2", proc); !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), `"n1"`) {
		t.Errorf("served elsewhere: %v", err)
	}
	w.clock.pass(time.Minute)
	if err := grant("n2", proc); err != nil {
		t.Errorf("the other is down, and nothing was written: %v", err)
	}
	p := w.serve(v.Id, "n2", d2)
	p.must(&metapb.ProposeRequest_CommitRuns{CommitRuns: &metapb.CommitRuns{Runs: []*metapb.Run{{Index: 0, Disks: []string{d2.Id}}}}})
	w.clock.pass(time.Minute)
	if err := grant("n1", proc); !errors.Is(err, block.ErrPrecondition) || !strings.Contains(err.Error(), `"n2"`) {
		t.Errorf("no copy: %v", err)
	}
	if e := w.attach("v", "c1").Endpoints; len(e) != 1 || e[0].Node != "n2" {
		t.Errorf("endpoints %v", e)
	}
}

func TestPlaceRuns(t *testing.T) {
	w := newWorld(t)
	d1, d2 := disk(1, 100*gib), disk(2, 1000*gib)
	w.register("n1", d1)
	w.register("n2", d2)
	v := w.create("v", 64*gib)
	p := w.serve(v.Id, "n1", d1)
	place := func(generation uint64, runs ...uint32) (*metapb.PlaceRunsResponse, error) {
		return w.PlaceRuns(t.Context(), &metapb.PlaceRunsRequest{VolumeId: v.Id, Generation: generation, Runs: runs})
	}
	r, err := place(p.fence.Generation, 0, 1, 2)
	if err != nil || len(r.Runs) != 3 {
		t.Fatalf("%v, %v", r, err)
	}
	for _, run := range r.Runs {
		if len(run.Disks) != 1 || run.Disks[0] != d1.Id {
			t.Errorf("away from the primary: %v", run)
		}
	}
	if _, err := place(p.fence.Generation-1, 0); !errors.Is(err, block.ErrStale) {
		t.Errorf("generation: %v", err)
	}
	if _, err := place(p.fence.Generation, 64); code(err) != codes.InvalidArgument {
		t.Errorf("beyond: %v", err)
	}
	if _, err := place(p.fence.Generation); code(err) != codes.InvalidArgument {
		t.Errorf("none: %v", err)
	}
	if _, err := place(p.fence.Generation, make([]uint32, 257)...); code(err) != codes.InvalidArgument {
		t.Errorf("too many: %v", err)
	}
}

// B166: a token is in the answers to Attach and GetAttachment, in the log and in snapshots (which
// are the secret's store), and nowhere else.
func TestB166TokensAreNotLogged(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	v := w.create("v", gib)
	a := w.attach("v", "c1").Attachment
	w.serve(v.Id, "n1", d)
	var said []string
	say := func(x any, err error) { said = append(said, fmt.Sprint(x), fmt.Sprint(err)) }
	say(w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v"), Node: "c2"}))
	say(w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v"), Node: "c1", ReadOnly: true}))
	say(w.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: byName("v")}))
	say(w.ReadMap(t.Context(), &metapb.ReadMapRequest{VolumeId: v.Id}))
	say(w.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: byName("v")}))
	say(w.ListVolumes(t.Context(), &metapb.ListVolumesRequest{}))
	say(w.GetAttachment(t.Context(), &metapb.GetAttachmentRequest{Volume: byName("v"), Node: "c2"}))
	say(w.SetFormat(t.Context(), &metapb.SetFormatRequest{Volume: byName("v"), AttachmentId: a.Id, Format: metapb.Volume_NONE}))
	say(w.SetFormat(t.Context(), &metapb.SetFormatRequest{Volume: byName("v"), AttachmentId: a.Id, Format: metapb.Volume_DONE}))
	if again, err := w.GetAttachment(t.Context(), &metapb.GetAttachmentRequest{Volume: byName("v"), Node: "c1"}); err != nil || !bytes.Equal(again.Attachment.Token, a.Token) {
		t.Error("the token is not given to whom it belongs")
	}
	stream, err := w.Watch(t.Context(), &metapb.WatchRequest{History: true})
	if err != nil {
		t.Fatal(err)
	}
	for {
		e, err := stream.Recv()
		if err != nil {
			break
		}
		said = append(said, e.String())
	}
	say(w.GetStatus(t.Context(), &metapb.GetStatusRequest{}))
	w.restart()
	said = append(said, w.log.String())
	text := strings.Join(said, "\n")
	for form, secret := range map[string]string{
		"raw": string(a.Token), "hex": hex.EncodeToString(a.Token), "quoted": strings.Trim(fmt.Sprintf("%q", a.Token), `"`),
		"base64": base64.StdEncoding.EncodeToString(a.Token), "url": base64.RawURLEncoding.EncodeToString(a.Token), "list": fmt.Sprint(a.Token),
	} {
		if strings.Contains(text, secret) {
			t.Errorf("the token appears, %s", form)
		}
	}
	if !strings.Contains(text, "Attached") {
		t.Error("nothing was looked at")
	}
	for _, name := range []string{"log", "snapshots"} { // where tokens are at rest
		info, err := os.Stat(filepath.Join(w.dir, name))
		if err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}
