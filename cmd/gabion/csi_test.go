package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/pflag"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
)

// plugged is a plugin inside the test process.
type plugged struct {
	*plugin
	log  logBuffer
	end  context.CancelFunc
	done chan error
	conn *grpc.ClientConn
}

// plugIn runs a plugin until unplug; it is ready when plugIn returns.
func plugIn(t *testing.T, c pluginConfig, servers string) *plugged {
	t.Helper()
	p := runPlugin(t, c, servers)
	var err error
	if p.conn, err = grpc.NewClient("unix:"+p.socket, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	return p
}

// runPlugin runs a plugin, or attachd, until its end is called.
func runPlugin(t *testing.T, c pluginConfig, servers string) *plugged {
	t.Helper()
	p := &plugged{done: make(chan error, 1)}
	if err := c.complete(servers); err != nil {
		t.Fatal(err)
	}
	var err error
	if p.plugin, err = newPlugin(c, &p.log); err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	p.end = end
	p.waitFor("it was not started")
	go func() { p.done <- p.run(ctx) }()
	for p.readiness() != nil {
		select {
		case err := <-p.done:
			t.Fatalf("the plugin ended: %v\n%s", err, p.log.String())
		case <-time.After(time.Millisecond):
		}
	}
	return p
}

func (p *plugged) unplug(t *testing.T) {
	t.Helper()
	_ = p.conn.Close()
	p.end()
	if err := <-p.done; err != nil {
		t.Errorf("the plugin's end: %v\n%s", err, p.log.String())
	}
	if _, err := os.Lstat(p.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

// pluginFlags are the flags' defaults and what args change.
func pluginFlags(t *testing.T, args ...string) (c pluginConfig) {
	t.Helper()
	f := pflag.NewFlagSet("csi", pflag.ContinueOnError)
	c.register(f)
	f.StringVar(&c.mode, "mode", "", "")
	f.StringVar(&c.endpoint, "endpoint", "", "")
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	return c
}

// The controller starts beside a server that is not there yet, serves, ends in order, and leaves nothing behind.
func TestCSIController(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	defer http.DefaultClient.CloseIdleConnections()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "disk"), 0o700); err != nil {
		t.Fatal(err)
	}
	ports, err := daemon.FreePorts(len(portNames) + 1)
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "new", "csi.sock")
	flags := []string{"--mode=controller", "--endpoint=unix://" + socket, "--node=n1", fmt.Sprintf("--http=127.0.0.1:%d", ports[len(portNames)])}
	p := plugIn(t, pluginFlags(t, flags...), fmt.Sprintf("127.0.0.1:%d", ports[0]))
	probe := func() bool {
		r, err := csispec.NewIdentityClient(p.conn).Probe(t.Context(), &csispec.ProbeRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetReady().GetValue()
	}
	if probe() {
		t.Error("ready without a metadata service")
	}
	if mode := stat(t, socket).Mode().Perm(); mode != 0o600 {
		t.Errorf("the socket has mode %v", mode)
	}
	if mode := stat(t, filepath.Dir(socket)).Mode().Perm(); mode != 0o700 {
		t.Errorf("its directory has mode %v", mode)
	}
	if second, err := newPlugin(p.pluginConfig, &p.log); err != nil {
		t.Error(err)
	} else if err := second.listen(t.Context()); !errors.Is(err, block.ErrInUse) {
		t.Errorf("a second plugin: %v", err)
	}

	r := start(t, dir, ports)
	if !probe() {
		t.Errorf("not ready\n%s", p.log.String())
	}
	controller := csispec.NewControllerClient(p.conn)
	made, err := controller.CreateVolume(t.Context(), &csispec.CreateVolumeRequest{
		Name: "pvc-1", Parameters: map[string]string{"durability": "flush"},
		VolumeCapabilities: []*csispec.VolumeCapability{{
			AccessType: &csispec.VolumeCapability_Mount{Mount: &csispec.VolumeCapability_MountVolume{}},
			AccessMode: &csispec.VolumeCapability_AccessMode{Mode: csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if out := r.gabion(t, "volume", "list"); !strings.Contains(out, made.GetVolume().GetVolumeId()) {
		t.Errorf("not in the cell: %s", out)
	}
	answer, err := http.Get("http://" + p.operator.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	if _, err := controller.DeleteVolume(t.Context(), &csispec.DeleteVolumeRequest{VolumeId: made.GetVolume().GetVolumeId()}); err != nil {
		t.Error(err)
	}
	if log := p.log.String(); !strings.Contains(log, `"method":"CreateVolume","name":"pvc-1"`) || !strings.Contains(log, "ready again") {
		t.Errorf("the log:\n%s", log)
	}
	r.stop(t)
	p.unplug(t)
}

func stat(t *testing.T, path string) os.FileInfo {
	t.Helper()
	i, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// A node plugin on a machine that cannot have devices says so before it serves.
func TestCSINodeRefusesAMachineWithoutDevices(t *testing.T) {
	if _, err := os.Stat("/sys/module/nbd"); err == nil {
		t.Skip("this machine can have devices")
	}
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dir := t.TempDir()
	c := pluginFlags(t, "--mode=node", "--endpoint=unix://"+filepath.Join(dir, "csi.sock"), "--node=n1", "--state="+filepath.Join(dir, "state"))
	if err := c.complete("127.0.0.1:1"); err != nil {
		t.Fatal(err)
	}
	var log logBuffer
	p, err := newPlugin(c, &log)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.run(t.Context()); err == nil || !strings.Contains(err.Error(), "kernel devices") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "csi.sock")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

func TestPluginUsage(t *testing.T) {
	good := []string{"--mode=controller", "--endpoint=unix:///tmp/csi.sock", "--node=n1"}
	for _, c := range []struct {
		args []string
		says string
	}{
		{nil, ""},
		{[]string{"--endpoint="}, "add --endpoint unix:///PATH"},
		{[]string{"--endpoint=tcp://1.2.3.4:5"}, "absolute path of a socket"},
		{[]string{"--node=a b"}, "--node"},
		{[]string{"--rack="}, "--rack"},
		{[]string{"--grace=0s"}, "--grace"},
		{[]string{"--http=7481"}, "127.0.0.1:7481"},
		{[]string{"--http=127.0.0.1:x"}, "127.0.0.1:7481"},
		{[]string{"--http=:7481"}, "127.0.0.1:7481"},
		{[]string{"--http=0.0.0.0:7481"}, "--insecure"},
		{[]string{"--http=0.0.0.0:7481", "--insecure"}, ""},
		{[]string{"--mode=", "--endpoint="}, ""}, // attachd
	} {
		config := pluginFlags(t, append(good, c.args...)...)
		err := config.complete("127.0.0.1:7400")
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v: %v", c.args, err)
		}
	}
}

// registry is a metadata service that knows consumers, and answers from a list of errors.
type consumerRegistry struct {
	metapb.MetadataClient
	mu      sync.Mutex
	answers []error
	heard   []*metapb.Consumer
}

func (r *consumerRegistry) RegisterConsumer(_ context.Context, in *metapb.Consumer, _ ...grpc.CallOption) (*metapb.RegisterConsumerResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heard = append(r.heard, in)
	if len(r.answers) == 0 {
		return &metapb.RegisterConsumerResponse{}, nil
	}
	err := r.answers[0]
	r.answers = r.answers[1:]
	return &metapb.RegisterConsumerResponse{}, err
}

// A node says who it is until it is heard, again and again after that, and tells its log of changes only.
func TestAnnouncer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &consumerRegistry{answers: []error{
			block.ErrUnavailable, block.ErrUnknown, nil, fmt.Errorf("%w: no such level", block.ErrPrecondition), fmt.Errorf("%w: no such level", block.ErrPrecondition),
		}}
		var log logBuffer
		p, err := newPlugin(pluginFlags(t, "--node=n1", "--rack=r1", "--log-format=text"), &log)
		if err != nil {
			t.Fatal(err)
		}
		a := p.announcer()
		a.api = r
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); a.run(ctx) }()
		time.Sleep(4*announceEvery + 10*time.Second)
		cancel()
		<-done
		if len(r.heard) != 7 || r.heard[0].GetName() != "n1" || r.heard[0].GetRack() != "r1" || r.heard[0].GetMaxVolumes() != 250 {
			t.Errorf("heard %d: %v", len(r.heard), r.heard[0])
		}
		text := log.String()
		for says, times := range map[string]int{"does not take": 1, "knows this node again": 2, "refuses": 1} {
			if strings.Count(text, says) != times {
				t.Errorf("%q not %d times:\n%s", says, times, text)
			}
		}
	})
}

// A machine has one name, whoever comes second.
func TestClaimNode(t *testing.T) {
	dir := t.TempDir()
	if name, err := nodeOf(dir); name != "" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
	for range 2 {
		if err := claimNode(dir, "n1"); err != nil {
			t.Fatal(err)
		}
	}
	if err := claimNode(dir, "n2"); !errors.Is(err, block.ErrPrecondition) || !strings.Contains(err.Error(), "--node n1") {
		t.Errorf("got %v", err)
	}
	if name, err := consumerAt(dir, ""); name != "n1" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
	if name, err := consumerAt(dir, "n3"); name != "n3" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
	d := &devices{state: dir}
	if watched, err := d.watched(false); watched || err != nil {
		t.Errorf("%v, %v", watched, err)
	}
	watcher := &devices{state: dir}
	if _, err := watcher.watched(true); err != nil {
		t.Fatal(err)
	}
	if watched, err := d.watched(false); !watched || err != nil {
		t.Errorf("%v, %v", watched, err)
	}
	_ = watcher.watch.Close()
	if watched, err := d.watched(false); watched || err != nil {
		t.Errorf("%v, %v", watched, err)
	}
}
