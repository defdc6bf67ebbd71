package service

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

func TestConsumers(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	get := func(name string) (*metapb.Consumer, error) {
		return w.GetConsumer(t.Context(), &metapb.GetConsumerRequest{Name: name})
	}
	if _, err := get("k1"); code(err) != codes.NotFound || !strings.Contains(err.Error(), `"k1"`) {
		t.Errorf("unknown: %v", err)
	}
	w.consumer("k1", "far", 7)
	w.consumer("k2", "r1", 0)
	entries := w.index()
	for range 5 { // as at every start
		w.consumer("k1", "far", 7)
	}
	if w.index() != entries {
		t.Error("a repeated registration makes a log entry")
	}
	w.restart()
	for name, want := range map[string]uint32{"k1": 7, "k2": 250} {
		if c, err := get(name); err != nil || c.MaxVolumes != want || c.RegisteredAt == 0 {
			t.Errorf("%v, %v", c, err)
		}
	}
	for _, bad := range []*metapb.Consumer{{}, {Name: "k"}, {Rack: "r"}, {Name: "k", Rack: "a\x00"}} {
		if _, err := w.RegisterConsumer(t.Context(), bad); code(err) != codes.InvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if _, err := get(""); code(err) != codes.InvalidArgument {
		t.Errorf("no name: %v", err)
	}
}

// H81: what needs a newer level waits until every server has announced it, and
// says so; what an older server can do goes on.
func TestH81OlderServerInTheCluster(t *testing.T) {
	w := newWorld(t)
	old := node("n1")
	old.FeatureLevel = 1
	register := func() {
		if _, err := w.RegisterNode(t.Context(), &metapb.RegisterNodeRequest{Node: old, Disks: []*metapb.Disk{disk(1, 100*gib)}}); err != nil {
			t.Fatal(err)
		}
	}
	register()
	w.create("v", gib)
	a := w.attach("v", "k1").Attachment
	for what, call := range map[string]func(contextT) error{
		"consumer": func(ctx contextT) error {
			return second(w.RegisterConsumer(ctx, &metapb.Consumer{Name: "k1", Rack: "r1"}))
		},
		"format": func(ctx contextT) error {
			return second(w.SetFormat(ctx, &metapb.SetFormatRequest{Volume: byName("v"), AttachmentId: a.Id, Format: metapb.Volume_STARTED}))
		},
		"rack": func(ctx contextT) error {
			return second(w.CreateVolume(ctx, &metapb.CreateVolumeRequest{Name: "u", Size: gib, Racks: []string{"r1"}, Policy: sameRack(1)}))
		},
	} {
		ctx, cancel := contextFor(t, 200*time.Millisecond)
		err := call(ctx)
		cancel()
		if !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), "upgrade the servers") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "wish", Size: gib, Racks: []string{"r1"}}); err != nil {
		t.Errorf("a wish that binds nobody: %v", err)
	}
	old.FeatureLevel = 2
	register()
	w.consumer("k1", "r1", 0)
	w.detach("v", "k1")
	if a := w.attach("v", "k1").Attachment; a.Foreign { // it is made, though nothing can be noted of it yet
		t.Errorf("at level 2: %v", a)
	}
}

func TestGetAttachment(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	w.register("n2", disk(2, 200*gib))
	v := w.create("v", gib)
	get := func(node string) (*metapb.AttachResponse, error) {
		return w.GetAttachment(t.Context(), &metapb.GetAttachmentRequest{Volume: byID(v.Id), Node: node})
	}
	refused := func(what, node string) {
		t.Helper()
		_, err := get(node)
		if code(err) != codes.NotFound || !errors.Is(err, block.ErrNotFound) {
			t.Errorf("%s: %v", what, err)
		}
		if e := (*metapb.Error)(nil); !errors.As(err, &e) || e.Detail(metapb.DetailCluster) != clusterID.String() {
			t.Errorf("%s: it does not say whose word it is", what)
		}
	}
	refused("never attached", "k1")
	made := w.attach("v", "k1")
	w.serve(v.Id, "n1", d)
	entries := w.index()
	a, err := get("k1")
	if err != nil || a.Attachment.Id != made.Attachment.Id || !bytes.Equal(a.Attachment.Token, made.Attachment.Token) || a.Volume.Format != metapb.Volume_NONE {
		t.Fatalf("%v, %v", a, err)
	}
	if a.ClusterId != clusterID.String() || made.ClusterId != clusterID.String() {
		t.Errorf("of clusters %q and %q", made.ClusterId, a.ClusterId)
	}
	if len(a.Endpoints) == 0 || a.Endpoints[0].Node != "n1" {
		t.Errorf("the primary is not the first of %v", a.Endpoints)
	}
	refused("another node", "k2")
	if _, err := w.GetAttachment(t.Context(), &metapb.GetAttachmentRequest{Volume: byName("none"), Node: "k1"}); code(err) != codes.NotFound {
		t.Errorf("no volume: %v", err)
	}
	if _, err := get(""); code(err) != codes.InvalidArgument {
		t.Errorf("no node: %v", err)
	}
	if w.index() != entries {
		t.Error("a look made a log entry")
	}
	ctx, cancel := contextFor(t, 200*time.Millisecond)
	defer cancel()
	_, _ = w.Detach(ctx, &metapb.DetachRequest{Volume: byID(v.Id), Node: "k1"}) // nobody confirms
	refused("being detached", "k1")
}

// B068, B069: formatting is allowed while nothing was ever born, or once it began.
func TestSetFormat(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	v := w.create("v", gib)
	w.create("raw", gib)
	attach := func(name string) *metapb.Attachment {
		return w.attachAs(&metapb.AttachRequest{Volume: byName(name), Node: "k1", RecordsFormat: true}).Attachment
	}
	a, raw := attach("v"), attach("raw")
	set := func(volume string, a *metapb.Attachment, f metapb.Volume_Format) error {
		got, err := w.SetFormat(t.Context(), &metapb.SetFormatRequest{Volume: byName(volume), AttachmentId: a.Id, Format: f})
		if err == nil && got.Format != f {
			t.Errorf("%s became %s", volume, got.Format)
		}
		return err
	}
	for _, id := range []string{v.Id, raw.VolumeId} {
		p := w.serve(id, "n1", d)
		if id == v.Id {
			if err := set("v", a, metapb.Volume_STARTED); err != nil {
				t.Fatal(err)
			}
			p.refresh()
		}
		p.must(&metapb.ProposeRequest_CommitRuns{CommitRuns: &metapb.CommitRuns{Runs: []*metapb.Run{{Index: 0, Disks: []string{d.Id}}}}})
	}
	entries := w.index()
	for range 5 {
		if err := set("v", a, metapb.Volume_STARTED); err != nil { // mkfs again
			t.Error(err)
		}
		if err := set("raw", raw, metapb.Volume_STARTED); code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "must not be formatted") {
			t.Errorf("in use and never formatted: %v", err)
		}
		if err := set("v", raw, metapb.Volume_DONE); code(err) != codes.NotFound {
			t.Errorf("another volume's attachment: %v", err)
		}
	}
	if w.index() != entries {
		t.Error("calls that change nothing made log entries")
	}
	if err := set("v", a, metapb.Volume_DONE); err != nil || w.volume("v").Volume.Format != metapb.Volume_DONE {
		t.Error(err)
	}
	if err := set("v", a, metapb.Volume_STARTED); code(err) != codes.FailedPrecondition {
		t.Errorf("formatted before: %v", err)
	}
	if err := set("raw", raw, metapb.Volume_DONE); err != nil {
		t.Error(err)
	}
}

// B069: formatting begins again after a node's death, but not after anybody had
// the volume who did not promise to say what he writes.
func TestB069BegunAndThenForeign(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	for _, tt := range []struct {
		name string
		then *metapb.AttachRequest // before the volume is formatted anew; nil: nobody
		want metapb.Volume_Format
	}{
		{"nobody", nil, metapb.Volume_STARTED},
		{"a reader", &metapb.AttachRequest{Node: "k2", ReadOnly: true}, metapb.Volume_STARTED},
		{"who records", &metapb.AttachRequest{Node: "k2", RecordsFormat: true}, metapb.Volume_STARTED},
		{"a writer", &metapb.AttachRequest{Node: "k2"}, metapb.Volume_DONE},
	} {
		for _, same := range []bool{false, true} { // the same node, without a detach
			name := fmt.Sprint(tt.name, " ", same)
			w.create(name, gib)
			format := func() error {
				a := w.attachAs(&metapb.AttachRequest{Volume: byName(name), Node: "k1", RecordsFormat: true}).Attachment
				_, err := w.SetFormat(t.Context(), &metapb.SetFormatRequest{Volume: byName(name), AttachmentId: a.Id, Format: metapb.Volume_STARTED})
				return err
			}
			if err := format(); err != nil {
				t.Fatal(err)
			}
			if tt.then != nil && !(same && tt.then.ReadOnly) {
				in := proto.CloneOf(tt.then)
				if in.Volume = byName(name); same {
					in.Node = "k1"
				} else {
					w.detach(name, "k1")
				}
				w.attachAs(in)
				if !same {
					w.detach(name, in.Node)
				}
			}
			err := format()
			if got := w.volume(name).Volume.Format; got != tt.want || (err == nil) != (tt.want == metapb.Volume_STARTED) {
				t.Errorf("%s: %s, %v", name, got, err)
			}
			if err != nil && code(err) != codes.FailedPrecondition {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// B065: a node takes so many volumes and no more, each of a detach and an attach in its turn.
func TestB065AttachLimit(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	w.consumer("k1", "r1", 3)
	for i := range 4 {
		w.create(fmt.Sprint("v", i), gib)
	}
	for i := range 3 {
		w.attach(fmt.Sprint("v", i), "k1")
	}
	entries := w.index()
	for range 5 {
		_, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v3"), Node: "k1"})
		if code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), `node "k1" takes 3 volumes`) {
			t.Errorf("one too many: %v", err)
		}
		w.attach("v1", "k1")
	}
	if w.index() != entries {
		t.Error("refusals made log entries")
	}
	w.attach("v3", "k2")
	w.detach("v0", "k1")
	w.detach("v3", "")
	w.attach("v3", "k1")
}

// What is wrong with a volume is in the answer about it.
func TestVolumeConditions(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	w.register("n2", disk(2, 100*gib))
	v := w.create("v", gib)
	w.create("other", gib)
	w.attach("v", "k1")
	p := w.serve(v.Id, "n1", d)
	p.must(&metapb.ProposeRequest_CommitRuns{CommitRuns: &metapb.CommitRuns{Runs: []*metapb.Run{{Index: 0, Disks: []string{d.Id}}}}})
	expect := func(name string, problems ...string) {
		t.Helper()
		list := w.volume(name).Conditions
		if len(list) != len(problems) {
			t.Fatalf("%s: %v", name, list)
		}
		for i, c := range list {
			if !strings.Contains(c.Problem, problems[i]) || c.Remedy == "" || c.Object == "" || c.Severity == 0 {
				t.Errorf("%v does not say %q", c, problems[i])
			}
		}
	}
	expect("v")
	report := func(state metapb.Disk_State, wrong ...*metapb.Condition) {
		t.Helper()
		d.State = state
		if state == metapb.Disk_FAILED {
			d.Problem = "it clicks"
		}
		if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n1", Disks: []*metapb.Disk{d}, Conditions: wrong}); err != nil {
			t.Fatal(err)
		}
	}
	full := &metapb.Condition{Severity: metapb.Condition_ERROR, Object: "volume v", Problem: "Its writes wait for space.", Remedy: "Add disks."}
	another := &metapb.Condition{Severity: metapb.Condition_ERROR, Object: "volume other", Problem: "It is odd.", Remedy: "Look."}
	report(metapb.Disk_FULL, full, another)
	expect("v", "is full", "wait for space")
	expect("other", "It is odd")
	report(metapb.Disk_FAILED)
	expect("v", "it clicks")
	report(metapb.Disk_ONLINE)
	expect("v")
	short := func(call func(ctx contextT) error) {
		t.Helper()
		ctx, cancel := contextFor(t, 200*time.Millisecond)
		defer cancel()
		if err := call(ctx); err == nil {
			t.Error("confirmed by nobody")
		}
	}
	short(func(ctx contextT) error {
		return second(w.ResizeVolume(ctx, &metapb.ResizeVolumeRequest{Volume: byName("v"), Size: 2 * gib}))
	})
	expect("v", "is to grow to 2147483648 bytes, and node n1")
	short(func(ctx contextT) error {
		return second(w.Detach(ctx, &metapb.DetachRequest{Volume: byName("v"), Node: "k1"}))
	})
	expect("v", "being detached from node k1", "is to grow")
	w.clock.pass(time.Minute)
	expect("v", "primary, node n1, is down", "being detached", "is to grow")
	w.register("n1", d)
	expect("v", "being detached", "is to grow")
}
