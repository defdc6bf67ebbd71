package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// canned is a metadata service that says what a test tells it to; see testdata/script for the real one.
type canned struct {
	metapb.UnimplementedMetadataServer
	get    func(*metapb.GetVolumeRequest) (*metapb.GetVolumeResponse, error)
	list   func(*metapb.ListVolumesRequest) (*metapb.ListVolumesResponse, error)
	attach func(*metapb.AttachRequest) (*metapb.AttachResponse, error)
	detach func(*metapb.DetachRequest) (*metapb.DetachResponse, error)
	watch  func(*metapb.WatchRequest, grpc.ServerStreamingServer[metapb.Event]) error
	fate   map[string]metapb.LookupVolumeResponse_State
	wrong  []*metapb.Condition
}

func (c *canned) LookupVolume(_ context.Context, r *metapb.LookupVolumeRequest) (*metapb.LookupVolumeResponse, error) {
	return &metapb.LookupVolumeResponse{State: c.fate[r.GetVolumeId()]}, nil
}

func (c *canned) GetVolume(_ context.Context, r *metapb.GetVolumeRequest) (*metapb.GetVolumeResponse, error) {
	v, err := c.get(r)
	return v, metapb.ToStatus(err)
}

func (c *canned) ListVolumes(_ context.Context, r *metapb.ListVolumesRequest) (*metapb.ListVolumesResponse, error) {
	v, err := c.list(r)
	return v, metapb.ToStatus(err)
}

func (c *canned) Attach(_ context.Context, r *metapb.AttachRequest) (*metapb.AttachResponse, error) {
	v, err := c.attach(r)
	return v, metapb.ToStatus(err)
}

func (c *canned) Detach(_ context.Context, r *metapb.DetachRequest) (*metapb.DetachResponse, error) {
	v, err := c.detach(r)
	return v, metapb.ToStatus(err)
}

func (c *canned) Watch(r *metapb.WatchRequest, s grpc.ServerStreamingServer[metapb.Event]) error {
	return metapb.ToStatus(c.watch(r, s))
}

func (c *canned) GetStatus(context.Context, *metapb.GetStatusRequest) (*metapb.GetStatusResponse, error) {
	return &metapb.GetStatusResponse{AppliedIndex: 10, Conditions: c.wrong}, nil
}

// serve returns the address of a server that ends with the test.
func (c *canned) serve(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	metapb.RegisterMetadataServer(s, c)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String()
}

// gabion runs a command line against the service.
func (c *canned) gabion(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	var o, e bytes.Buffer
	code = newApp(&o, &e).run(t.Context(), append([]string{"--server", c.serve(t)}, args...))
	return code, o.String(), e.String()
}

var id1 = "6f1b7a52-4d51-4bd9-9a51-111111111111"

func aVolume(attached ...string) *metapb.GetVolumeResponse {
	r := &metapb.GetVolumeResponse{Volume: &metapb.Volume{Id: id1, Name: "db", Size: 10 << 30, WantedSize: 10 << 30}}
	for _, n := range attached {
		r.Attachments = append(r.Attachments, &metapb.Attachment{Id: "att-" + n, VolumeId: id1, Node: n})
	}
	return r
}

func TestListReadsAllPages(t *testing.T) {
	c := &canned{list: func(r *metapb.ListVolumesRequest) (*metapb.ListVolumesResponse, error) {
		switch r.GetStartingToken() {
		case "":
			return &metapb.ListVolumesResponse{Volumes: []*metapb.Volume{{Name: "a"}, {Name: "b"}}, NextToken: "b"}, nil
		case "b":
			return &metapb.ListVolumesResponse{Volumes: []*metapb.Volume{{Name: "c"}}}, nil
		}
		return nil, fmt.Errorf("%w: token", metapb.ErrPageToken)
	}}
	code, out, errs := c.gabion(t, "volume", "list", "-o", "json")
	var got []volumeView
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil || len(got) != 3 || got[2].Name != "c" {
		t.Errorf("exit %d %s\n%s", code, errs, out)
	}
}

// B062: a name is told apart from what stands around it, and from any other.
func TestB062NamesAreShownUnambiguously(t *testing.T) {
	for name, want := range map[string]string{
		"db": "db", "a/b": "a/b", "🧱": "🧱", "-rf": "-rf", "pvc-6f1b": "pvc-6f1b", "é": "é",
		"a\tb": `"a\tb"`, "a\nb": `"a\nb"`, "a\r": `"a\r"`, "a b": `"a b"`, " ": `" "`, `a\tb`: `"a\\tb"`, `"db"`: `"\"db\""`,
		"\u2028": `"\u2028"`, "\u202edb": `"\u202edb"`, "\u00a0": `"\u00a0"`,
	} {
		if got := quoted(name); got != want {
			t.Errorf("%q is shown as %s", name, got)
		}
	}
	v := aVolume()
	v.Volume.Name = "a\nb"
	v.Conditions = []*metapb.Condition{{Object: "volume a\nb", Problem: "It waits.", Remedy: "Wait."}}
	c := &canned{
		list: func(*metapb.ListVolumesRequest) (*metapb.ListVolumesResponse, error) {
			return &metapb.ListVolumesResponse{Volumes: []*metapb.Volume{v.Volume, {Name: "db"}}}, nil
		},
		get:    func(*metapb.GetVolumeRequest) (*metapb.GetVolumeResponse, error) { return v, nil },
		detach: func(*metapb.DetachRequest) (*metapb.DetachResponse, error) { return &metapb.DetachResponse{}, nil },
		wrong:  v.Conditions,
		attach: func(*metapb.AttachRequest) (*metapb.AttachResponse, error) {
			return &metapb.AttachResponse{Volume: v.Volume, Attachment: &metapb.Attachment{Id: "att", Node: "k1"}}, nil
		},
	}
	for _, args := range [][]string{{"volume", "list"}, {"volume", "show", "x"}, {"detach", "x", "--node", "k1"}, {"status"}, {"attach", "x"}} {
		_, out, errs := c.gabion(t, args...)
		if all := out + errs; !strings.Contains(all, `"a\nb"`) || strings.Contains(all, "a\nb") {
			t.Errorf("%v:\n%s", args, all)
		}
	}
	if _, out, _ := c.gabion(t, "__complete", "volume", "show", ""); !strings.HasPrefix(out, "db\n") {
		t.Errorf("a shell is offered %q", out)
	}
}

// A name wins over an id; what is typed as an id is found all the same.
func TestVolumeByNameOrID(t *testing.T) {
	var asked []string
	c := &canned{get: func(r *metapb.GetVolumeRequest) (*metapb.GetVolumeResponse, error) {
		asked = append(asked, r.GetVolume().GetName()+"|"+r.GetVolume().GetId())
		if r.GetVolume().GetId() == id1 || r.GetVolume().GetName() == "db" {
			return aVolume(), nil
		}
		return nil, fmt.Errorf("%w: no volume %s", block.ErrNotFound, r.GetVolume().GetName())
	}}
	if code, out, _ := c.gabion(t, "volume", "show", id1); code != 0 || !strings.Contains(out, "10GiB (10737418240 bytes)") {
		t.Errorf("exit %d\n%s", code, out)
	}
	if code, _, errs := c.gabion(t, "volume", "show", "nothing"); code != 1 || !strings.Contains(errs, "no volume nothing") {
		t.Errorf("exit %d %s", code, errs)
	}
	if want := id1 + "| |" + id1 + " nothing|"; strings.Join(asked, " ") != want {
		t.Errorf("asked %v, want %s", asked, want)
	}
}

func TestAttachWithoutServer(t *testing.T) {
	c := &canned{
		get: func(*metapb.GetVolumeRequest) (*metapb.GetVolumeResponse, error) { return aVolume(), nil },
		attach: func(*metapb.AttachRequest) (*metapb.AttachResponse, error) {
			return &metapb.AttachResponse{Volume: aVolume().Volume}, nil
		},
	}
	if code, _, errs := c.gabion(t, "attach", "db"); code != 1 || !strings.Contains(errs, "no server can serve volume db now") {
		t.Errorf("exit %d %s", code, errs)
	}
}

func TestDetachNamesTheHolder(t *testing.T) {
	var detached *metapb.DetachRequest
	c := &canned{
		get: func(*metapb.GetVolumeRequest) (*metapb.GetVolumeResponse, error) { return aVolume("n1"), nil },
		detach: func(r *metapb.DetachRequest) (*metapb.DetachResponse, error) {
			detached = r
			return &metapb.DetachResponse{}, nil
		},
	}
	if code, _, errs := c.gabion(t, "detach", "db", "--node", "n2"); code != 1 || !strings.Contains(errs, "attached to n1, not to n2: add --node n1") {
		t.Errorf("exit %d %s", code, errs)
	}
	if detached != nil {
		t.Error("the service was asked all the same")
	}
	code, out, errs := c.gabion(t, "detach", "db", "--node", "n1")
	if code != 0 || out != "volume db (10GiB) is detached from n1\n" {
		t.Errorf("exit %d %s%s", code, out, errs)
	}
	if detached.GetVolume().GetId() != id1 || detached.GetAttachmentId() != "att-n1" { // H74: what was found, not what is there by then
		t.Errorf("detached %v", detached)
	}
}

// A follower that lost its server goes on where it was, and shows nothing twice.
func TestEventsResume(t *testing.T) {
	event := func(index uint64, ordinal uint32) *metapb.Event {
		return &metapb.Event{Index: index, Ordinal: ordinal, Type: "T", Message: fmt.Sprintf("%d.%d", index, ordinal)}
	}
	streams := [][]*metapb.Event{
		{event(1, 0)},
		{event(1, 0), event(1, 1), event(7, 0)},
		{event(7, 0), event(7, 1)},
	}
	var asked []string
	c := &canned{watch: func(r *metapb.WatchRequest, s grpc.ServerStreamingServer[metapb.Event]) error {
		asked = append(asked, fmt.Sprintf("%d %v", r.GetAfterIndex(), r.GetHistory()))
		if len(streams) == 0 {
			return fmt.Errorf("%w: enough", metapb.ErrIndexGone)
		}
		for _, e := range streams[0] {
			_ = s.Send(e)
		}
		streams = streams[1:]
		return fmt.Errorf("%w: leader gone", block.ErrUnavailable)
	}}
	code, out, errs := c.gabion(t, "events", "--follow", "-o", "json")
	if code != 1 || !strings.Contains(errs, "enough") {
		t.Errorf("exit %d %s", code, errs)
	}
	var messages []string
	for line := range strings.Lines(out) {
		var e eventView
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		messages = append(messages, e.Message)
	}
	if got := strings.Join(messages, " "); got != "1.0 1.1 7.0 7.1" {
		t.Errorf("shown: %s", got)
	}
	// Several events may have one index, so a stream that broke is resumed before its last one's.
	if got := strings.Join(asked, ", "); got != "0 true, 0 true, 6 false, 6 false" {
		t.Errorf("asked for: %s", got)
	}
}

func TestServerNotThere(t *testing.T) {
	var out, errs bytes.Buffer
	code := newApp(&out, &errs).run(t.Context(), []string{"--server", "127.0.0.1:1,127.0.0.1:2", "volume", "list"})
	if says := "no metadata server listens at 127.0.0.1:1, 127.0.0.1:2: start `gabion server`"; code != 1 || !strings.Contains(errs.String(), says) {
		t.Errorf("exit %d, %s", code, errs.String())
	}
}
