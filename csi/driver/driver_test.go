package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/gabion-storage/gabion/server/block"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stub is a service that does what do says.
type stub struct {
	csispec.UnimplementedControllerServer
	csispec.UnimplementedNodeServer
	do func(ctx context.Context, req any) error
}

func (s *stub) CreateVolume(ctx context.Context, in *csispec.CreateVolumeRequest) (*csispec.CreateVolumeResponse, error) {
	return &csispec.CreateVolumeResponse{}, s.do(ctx, in)
}

func (s *stub) DeleteVolume(ctx context.Context, in *csispec.DeleteVolumeRequest) (*csispec.DeleteVolumeResponse, error) {
	return &csispec.DeleteVolumeResponse{}, s.do(ctx, in)
}

func (s *stub) ControllerPublishVolume(ctx context.Context, in *csispec.ControllerPublishVolumeRequest) (*csispec.ControllerPublishVolumeResponse, error) {
	return &csispec.ControllerPublishVolumeResponse{}, s.do(ctx, in)
}

func (s *stub) ListVolumes(ctx context.Context, in *csispec.ListVolumesRequest) (*csispec.ListVolumesResponse, error) {
	return &csispec.ListVolumesResponse{}, s.do(ctx, in)
}

func (s *stub) NodeStageVolume(ctx context.Context, in *csispec.NodeStageVolumeRequest) (*csispec.NodeStageVolumeResponse, error) {
	return &csispec.NodeStageVolumeResponse{}, s.do(ctx, in)
}

func (s *stub) NodeGetVolumeStats(ctx context.Context, in *csispec.NodeGetVolumeStatsRequest) (*csispec.NodeGetVolumeStatsResponse, error) {
	return &csispec.NodeGetVolumeStatsResponse{}, s.do(ctx, in)
}

// logbook is a log that many goroutines write and a test reads.
type logbook struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// endpoint is a server and a connection to it.
type endpoint struct {
	*grpc.ClientConn
	server *Server
	log    *logbook
	served chan error
}

func serve(t *testing.T, level slog.Level, c Config) *endpoint {
	t.Helper()
	path := filepath.Join(t.TempDir(), "csi.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	e := &endpoint{log: &logbook{}, served: make(chan error, 1)}
	c.Log = slog.New(slog.NewTextHandler(e.log, &slog.HandlerOptions{Level: level}))
	e.server = New(c)
	go func() { e.served <- e.server.Serve(l) }()
	if e.ClientConn, err = grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = e.Close()
		e.server.Stop(t.Context())
		if err := <-e.served; err != nil {
			t.Error(err)
		}
	})
	return e
}

// both serves s as Controller and Node.
func both(t *testing.T, level slog.Level, do func(ctx context.Context, req any) error) *endpoint {
	s := &stub{do: do}
	return serve(t, level, Config{Controller: s, Node: s})
}

func (e *endpoint) create(ctx context.Context, in *csispec.CreateVolumeRequest) error {
	_, err := csispec.NewControllerClient(e).CreateVolume(ctx, in)
	return err
}

func TestIdentity(t *testing.T) {
	s := &stub{do: func(context.Context, any) error { return nil }}
	var missing error
	ready := func(context.Context) error { return missing }
	for name, c := range map[string]struct {
		config Config
		want   string
	}{
		"controller": {Config{Controller: s}, "VOLUME_ACCESSIBILITY_CONSTRAINTS ONLINE CONTROLLER_SERVICE"},
		"node":       {Config{Node: s}, "VOLUME_ACCESSIBILITY_CONSTRAINTS ONLINE"},
		"all":        {Config{Controller: s, Node: s}, "VOLUME_ACCESSIBILITY_CONSTRAINTS ONLINE CONTROLLER_SERVICE"},
	} {
		t.Run(name, func(t *testing.T) {
			c.config.Version, c.config.Ready = "v1.2.3", ready
			e := serve(t, slog.LevelInfo, c.config)
			identity := csispec.NewIdentityClient(e)
			info, err := identity.GetPluginInfo(t.Context(), &csispec.GetPluginInfoRequest{})
			if err != nil || info.GetName() != Name || info.GetVendorVersion() != "v1.2.3" {
				t.Errorf("%v, %v", info, err)
			}
			r, err := identity.GetPluginCapabilities(t.Context(), &csispec.GetPluginCapabilitiesRequest{})
			var got []string
			for _, p := range r.GetCapabilities() {
				if p.GetVolumeExpansion() != nil {
					got = append(got, p.GetVolumeExpansion().GetType().String())
				} else {
					got = append(got, p.GetService().GetType().String())
				}
			}
			if err != nil || strings.Join(got, " ") != c.want {
				t.Errorf("%v, %v", got, err)
			}
			// A service that is not served is not there.
			_, nodeErr := csispec.NewNodeClient(e).NodeStageVolume(t.Context(), &csispec.NodeStageVolumeRequest{})
			if wantNode := c.config.Node != nil; (status.Code(nodeErr) == codes.Unimplemented) == wantNode {
				t.Errorf("node: %v", nodeErr)
			}
			if err := e.create(t.Context(), &csispec.CreateVolumeRequest{}); (status.Code(err) == codes.Unimplemented) == (c.config.Controller != nil) {
				t.Errorf("controller: %v", err)
			}
		})
	}
	e := serve(t, slog.LevelInfo, Config{Controller: s, Ready: ready})
	for _, missing = range []error{nil, errors.New("no leader"), errors.New("no leader"), nil} {
		r, err := csispec.NewIdentityClient(e).Probe(t.Context(), &csispec.ProbeRequest{})
		if err != nil || r.GetReady().GetValue() != (missing == nil) {
			t.Errorf("%v: %v, %v", missing, r, err)
		}
	}
	if log := e.log.String(); strings.Count(log, "no leader") != 1 || strings.Count(log, "ready again") != 1 {
		t.Errorf("the log does not tell the change once:\n%s", log)
	}
}

// A panic of one call is that call's failure, and the volume is free again.
func TestPanicIsInternal(t *testing.T) {
	first := true
	e := both(t, slog.LevelInfo, func(context.Context, any) error {
		if first {
			first = false
			panic("broken invariant")
		}
		return nil
	})
	in := &csispec.CreateVolumeRequest{Name: "v"}
	err := e.create(t.Context(), in)
	if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "broken") {
		t.Errorf("got %v", err)
	}
	if err := e.create(t.Context(), in); err != nil {
		t.Errorf("after it: %v", err)
	}
	if log := e.log.String(); !strings.Contains(log, "broken invariant") || !strings.Contains(log, "driver_test.go") {
		t.Errorf("the log has no stack:\n%s", log)
	}
}

// The answer leaves before the caller stops listening; without a deadline there is one.
func TestDeadlines(t *testing.T) {
	left := make(chan time.Duration, 1)
	e := both(t, slog.LevelInfo, func(ctx context.Context, req any) error {
		end, _ := ctx.Deadline()
		left <- time.Until(end)
		if req.(*csispec.CreateVolumeRequest).GetName() == "waits" {
			<-ctx.Done()
			return fmt.Errorf("%w: node n1 has not confirmed: %w", block.ErrUnavailable, ctx.Err())
		}
		return nil
	})
	if err := e.create(t.Context(), &csispec.CreateVolumeRequest{Name: "v"}); err != nil {
		t.Error(err)
	}
	if d := <-left; d <= 0 || d > patience {
		t.Errorf("without a deadline: %v left", d)
	}
	const whole = 5 * time.Second // wide: the machine is shared
	ctx, cancel := context.WithTimeout(t.Context(), whole)
	defer cancel()
	err := e.create(ctx, &csispec.CreateVolumeRequest{Name: "waits"})
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "n1 has not confirmed") {
		t.Errorf("got %v", err)
	}
	if d := <-left; d > whole*95/100 {
		t.Errorf("with %v: %v left", whole, d)
	}
}

func TestStop(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	e := both(t, slog.LevelInfo, func(ctx context.Context, _ any) error {
		close(entered)
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	called := make(chan error, 1)
	go func() { called <- e.create(t.Context(), &csispec.CreateVolumeRequest{Name: "v"}) }()
	<-entered
	stopped := make(chan struct{})
	go func() { e.server.Stop(t.Context()); close(stopped) }()
	close(release)
	<-stopped
	if err := <-called; err != nil {
		t.Errorf("a call in progress was not finished: %v", err)
	}
}

// What outlasts the grace is cancelled, and waited for.
func TestStopCancels(t *testing.T) {
	entered, ended := make(chan struct{}), make(chan struct{})
	e := both(t, slog.LevelInfo, func(ctx context.Context, _ any) error {
		close(entered)
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	})
	called := make(chan error, 1)
	go func() { called <- e.create(t.Context(), &csispec.CreateVolumeRequest{Name: "v"}) }()
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	e.server.Stop(ctx)
	select {
	case <-ended:
	default:
		t.Error("Stop did not wait")
	}
	if err := <-called; err == nil {
		t.Error("the call succeeded")
	}
}

func TestRequestsAreBounded(t *testing.T) {
	e := both(t, slog.LevelInfo, func(context.Context, any) error { return nil })
	err := e.create(t.Context(), &csispec.CreateVolumeRequest{Name: strings.Repeat("n", maxRequest)})
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v", err)
	}
}
