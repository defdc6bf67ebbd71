package sanity

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/gabion-storage/gabion/cmd/adapt"
	"github.com/gabion-storage/gabion/csi/controller"
	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/csi/node/nodetest"
	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/test/cluster"
)

var binary string // of the server under test

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "gabion-sanity-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if binary, err = cluster.Binary(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// rig is a server, and a driver with all services on its socket.
type rig struct {
	t      *testing.T
	dir    string
	server *cluster.Server
	api    *client.Client
	host   *nodetest.Host
	socket string

	controller csispec.ControllerClient
	node       csispec.NodeClient
}

// newRig starts both, the server alone in rack r1; three nodes are made known, of which n1 is the driver's own and n3 is in r2.
func newRig(t *testing.T, flags ...string) *rig {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	server, err := cluster.Start(t.Context(), cluster.Options{Binary: binary, Dir: filepath.Join(dir, "server"), Flags: append([]string{"--default-replicas", "1", "--fault-injection"}, flags...)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Kill)
	r := &rig{t: t, dir: dir, server: server, host: nodetest.NewHost(), socket: filepath.Join(dir, "csi.sock")}
	if r.api, err = client.Dial([]string{fmt.Sprintf("127.0.0.1:%d", server.Ports.Metadata)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.api.Close() })
	for name, rack := range map[string]string{"n1": "r1", "n2": "r1", "n3": "r2"} {
		if _, err := r.api.RegisterConsumer(t.Context(), &metapb.Consumer{Name: name, Rack: rack, MaxVolumes: node.MaxVolumes}); err != nil {
			t.Fatal(err)
		}
	}
	r.serve()
	return r
}

// serve runs the driver until the test's end.
func (r *rig) serve() {
	r.t.Helper()
	file, err := os.Create(filepath.Join(r.dir, "driver.log"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = file.Close() })
	log := slog.New(slog.NewTextHandler(file, &slog.HandlerOptions{Level: slog.LevelDebug}))
	here := nodetest.NewPlugin(r.host, adapt.Node{API: r.api, Name: "n1"}, nil)
	stager := node.New(node.Config{
		Name: "n1", Rack: "r1", Attacher: here, Volumes: here, Mounter: here, StateDir: filepath.Join(r.dir, "state"), Log: log,
	})
	d := driver.New(driver.Config{Version: "test", Controller: controller.New(adapt.Volumes{API: r.api}), Node: stager, Log: log})
	l, err := net.Listen("unix", r.socket)
	if err != nil {
		r.t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- d.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+r.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	r.controller, r.node = csispec.NewControllerClient(conn), csispec.NewNodeClient(conn)
	r.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		_ = conn.Close()
		d.Stop(ctx)
		if err := <-served; err != nil {
			r.t.Error(err)
		}
		if err := stager.Close(ctx); err != nil {
			r.t.Error(err)
		}
		for _, b := range r.host.Broken() {
			r.t.Errorf("broken: %s", b)
		}
	})
}
