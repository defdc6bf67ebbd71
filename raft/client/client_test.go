package client

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is a server that answers from a list of errors, nil being success,
// and remembers its calls.
type script struct {
	metapb.UnimplementedMetadataServer
	mu      sync.Mutex
	answers []error
	calls   []string
	get     *metapb.GetVolumeResponse
	block   bool // until the call ends
}

func (s *script) next(ctx context.Context, call string) error {
	s.mu.Lock()
	s.calls = append(s.calls, call)
	var err error
	if len(s.answers) > 0 {
		err, s.answers = s.answers[0], s.answers[1:]
	}
	block := s.block
	s.mu.Unlock()
	if block {
		<-ctx.Done()
		return ctx.Err()
	}
	return metapb.ToStatus(err)
}

func (s *script) made() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.calls, " ")
}

func (s *script) CreateVolume(ctx context.Context, _ *metapb.CreateVolumeRequest) (*metapb.Volume, error) {
	return &metapb.Volume{}, s.next(ctx, "create")
}

func (s *script) Propose(ctx context.Context, _ *metapb.ProposeRequest) (*metapb.ProposeResponse, error) {
	return &metapb.ProposeResponse{}, s.next(ctx, "propose")
}

func (s *script) ReadMap(ctx context.Context, _ *metapb.ReadMapRequest) (*metapb.VolumeMap, error) {
	return &metapb.VolumeMap{}, s.next(ctx, "map")
}

func (s *script) GetVolume(ctx context.Context, in *metapb.GetVolumeRequest) (*metapb.GetVolumeResponse, error) {
	return s.get, s.next(ctx, "get:"+in.GetVolume().GetName())
}

func (s *script) DeleteVolume(ctx context.Context, in *metapb.DeleteVolumeRequest) (*metapb.DeleteVolumeResponse, error) {
	return &metapb.DeleteVolumeResponse{}, s.next(ctx, "delete:"+in.GetVolume().GetId())
}

func (s *script) Detach(ctx context.Context, in *metapb.DetachRequest) (*metapb.DetachResponse, error) {
	return &metapb.DetachResponse{}, s.next(ctx, "detach:"+in.GetVolume().GetId()+"/"+in.GetAttachmentId())
}

func serve(t *testing.T, s *script) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	metapb.RegisterMetadataServer(server, s)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// dead is an address where nobody listens.
func dead(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func dial(t *testing.T, addresses ...string) *Client {
	t.Helper()
	c, err := Dial(addresses)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// connected is dial with the connection made, for calls that have little time.
func connected(t *testing.T, address string) *Client {
	t.Helper()
	c := dial(t, address)
	if err := c.list.servers[0].ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c
}

// B122, H80, the client's part: what may be repeated is, what may not is told.
func TestB122WhatIsRepeated(t *testing.T) {
	create := func(ctx context.Context, c *Client) error {
		_, err := c.CreateVolume(ctx, &metapb.CreateVolumeRequest{})
		return err
	}
	propose := func(ctx context.Context, c *Client) error {
		_, err := c.Propose(ctx, &metapb.ProposeRequest{})
		return err
	}
	read := func(ctx context.Context, c *Client) error {
		_, err := c.ReadMap(ctx, &metapb.ReadMapRequest{})
		return err
	}
	for _, c := range []struct {
		name    string
		call    func(context.Context, *Client) error
		answers []error
		calls   string
		want    error
	}{
		{"unavailable", create, []error{block.ErrUnavailable, block.ErrShutdown, nil}, "create create create", nil},
		{"keyed, unknown", create, []error{block.ErrUnknown, nil}, "create create", nil},
		{"keyed, refused", create, []error{block.ErrExists}, "create", block.ErrExists},
		{"fenced, unknown", propose, []error{block.ErrUnknown, nil}, "propose", block.ErrUnknown},
		{"fenced, surely not", propose, []error{block.ErrUnavailable, nil}, "propose propose", nil},
		{"fenced, stale", propose, []error{block.ErrStale}, "propose", block.ErrStale},
		{"read", read, []error{block.ErrUnavailable, nil}, "map map", nil},
	} {
		s := &script{answers: c.answers}
		err := c.call(t.Context(), dial(t, serve(t, s)))
		if !errors.Is(err, c.want) || s.made() != c.calls {
			t.Errorf("%s: %v after %q", c.name, err, s.made())
		}
	}
	for _, c := range []struct {
		name string
		call func(context.Context, *Client) error
		want error
	}{
		{"create", create, block.ErrUnknown}, {"propose", propose, block.ErrUnknown}, {"read", read, block.ErrUnavailable},
	} {
		patient := connected(t, serve(t, &script{block: true}))
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		err := c.call(ctx, patient)
		cancel()
		if !errors.Is(err, c.want) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("no answer to %s: %v", c.name, err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
		err = c.call(ctx, dial(t, dead(t)))
		cancel()
		if !errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrUnknown) {
			t.Errorf("nobody there for %s: %v", c.name, err)
		}
	}
}

// What gRPC turns down by itself is not repeated.
func TestRefusedByGRPC(t *testing.T) {
	c := dial(t, serve(t, &script{}))
	if _, err := c.Grant(t.Context(), &metapb.GrantRequest{}); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("not implemented: %v", err)
	}
	if _, err := c.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: strings.Repeat("n", 8<<20)}); !errors.Is(err, block.ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
}

// A name that is no text reaches no server, and is no server's silence.
func TestRequestThatCannotBeWritten(t *testing.T) {
	server := &script{}
	c := dial(t, serve(t, server))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := c.CreateVolume(ctx, &metapb.CreateVolumeRequest{Name: "a\xff"})
	if !errors.Is(err, block.ErrInvalid) || errors.Is(err, block.ErrUnknown) || server.made() != "" {
		t.Errorf("%v, calls %q", err, server.made())
	}
}

// The last sentence of a server says more than that the time is up.
func TestTheReasonSurvivesTheDeadline(t *testing.T) {
	s := &script{}
	for range 100 {
		s.answers = append(s.answers, errors.Join(block.ErrUnavailable, errors.New("node n1 has not confirmed")))
	}
	c := connected(t, serve(t, s))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := c.CreateVolume(ctx, &metapb.CreateVolumeRequest{})
	if !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), "n1 has not confirmed") {
		t.Errorf("got %v", err)
	}
}

func TestPassesOverDeadServers(t *testing.T) {
	s := &script{}
	c := dial(t, dead(t), dead(t), serve(t, s))
	for range 2 {
		if _, err := c.ReadMap(t.Context(), &metapb.ReadMapRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := c.Watch(t.Context(), &metapb.WatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}

// H74, the client's part: a key is resolved once, repetitions act on the id.
func TestH74KeysAreResolvedOnce(t *testing.T) {
	s := &script{
		get: &metapb.GetVolumeResponse{
			Volume: &metapb.Volume{Id: "id"}, Attachments: []*metapb.Attachment{{Id: "a1", Node: "c1"}, {Id: "a2", Node: "c2"}},
		},
		answers: []error{nil, block.ErrUnknown, block.ErrUnavailable, nil},
	}
	c := dial(t, serve(t, s))
	if _, err := c.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: &metapb.VolumeRef{Name: "v"}}); err != nil {
		t.Fatal(err)
	}
	if want := "get:v delete:id delete:id delete:id"; s.made() != want {
		t.Errorf("got %q", s.made())
	}
	s.calls, s.answers = nil, []error{nil, block.ErrUnknown, nil}
	if _, err := c.Detach(t.Context(), &metapb.DetachRequest{Volume: &metapb.VolumeRef{Name: "v"}, Node: "c2"}); err != nil {
		t.Fatal(err)
	}
	if want := "get:v detach:id/a2 detach:id/a2"; s.made() != want {
		t.Errorf("got %q", s.made())
	}
	s.calls = nil
	if _, err := c.Detach(t.Context(), &metapb.DetachRequest{Volume: &metapb.VolumeRef{Name: "v"}, Node: "c3"}); err != nil || s.made() != "get:v" {
		t.Errorf("not attached: %v, %q", err, s.made())
	}
	s.calls, s.answers = nil, []error{nil, nil, nil}
	if _, err := c.Detach(t.Context(), &metapb.DetachRequest{Volume: &metapb.VolumeRef{Name: "v"}}); err != nil {
		t.Fatal(err)
	}
	made := strings.Fields(s.made())
	slices.Sort(made)
	if want := []string{"detach:id/a1", "detach:id/a2", "get:v"}; !slices.Equal(made, want) {
		t.Errorf("from all nodes: %q", made)
	}
	s.calls, s.answers = nil, []error{block.ErrNotFound}
	if _, err := c.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: &metapb.VolumeRef{Name: "v"}}); err != nil || s.made() != "get:v" {
		t.Errorf("absent: %v, %q", err, s.made())
	}
}

func TestDialChecksAddresses(t *testing.T) {
	for _, bad := range [][]string{nil, {""}, {"host"}, {"127.0.0.1:7400", "x"}} {
		if _, err := Dial(bad); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// Every method of the API has been thought about.
func TestEveryMethodHasAKind(t *testing.T) {
	for _, m := range metapb.Metadata_ServiceDesc.Methods {
		if _, ok := kinds["/"+metapb.Metadata_ServiceDesc.ServiceName+"/"+m.MethodName]; !ok {
			t.Errorf("%s has no kind", m.MethodName)
		}
	}
}
