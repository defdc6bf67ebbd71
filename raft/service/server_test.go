package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

// B147: strangers on the metadata port are closed, cost no memory, and nobody
// else notices.
func TestB147StrangersOnTheMetadataPort(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	noise := make([]byte, 64<<10)
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	noise[0] = 0xff // as a frame it is too large in any case
	preface := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	huge := append(bytes.Clone(preface), 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1) // a frame of 16 MiB
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range 200 {
		conn, err := net.Dial("tcp", w.listen.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		_, _ = conn.Write([][]byte{
			noise, []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), huge, append(bytes.Clone(preface), noise...), []byte("NBDMAGIC"),
		}[i%5])
		if i%5 < 4 { // closed, not left
			_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
			if _, err := io.Copy(io.Discard, conn); err != nil && strings.Contains(err.Error(), "timeout") {
				t.Errorf("seed %d: stranger %d is still connected", seed, i)
			}
		}
	}
	w.create("v", gib)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 16<<20 {
		t.Errorf("seed %d: %d bytes more", seed, grown)
	}
	if n := strings.Count(w.log.String(), "\n"); n > 1000 {
		t.Errorf("%d lines of log", n)
	}
}

func TestRequestsAreBounded(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	_, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: strings.Repeat("n", 2<<20), Size: gib})
	if !errors.Is(err, block.ErrTooLarge) {
		t.Errorf("got %.200v", err)
	}
	w.create("v", gib)
}

// A panic ends one call, not the server, and says nothing of the request.
func TestPanicEndsOneCall(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		clock := c.Clock
		c.Clock = func() time.Time {
			if pc := make([]uintptr, 64); strings.Contains(callers(pc), "ReportEvent") {
				panic("injected")
			}
			return clock()
		}
	})
	w.register("n1", disk(1, 100*gib))
	_, err := w.ReportEvent(t.Context(), &metapb.ReportEventRequest{Event: &metapb.Event{Type: "T", Message: "hush"}})
	if !errors.Is(err, metapb.ErrInternal) || code(err) != codes.Internal || strings.Contains(err.Error(), "injected") {
		t.Errorf("got %v", err)
	}
	if log := w.log.String(); !strings.Contains(log, "injected") || strings.Contains(log, "hush") {
		t.Error("the log")
	}
	w.create("v", gib)
}

func callers(pc []uintptr) string {
	var names []string
	frames := runtime.CallersFrames(pc[:runtime.Callers(2, pc)])
	for {
		f, more := frames.Next()
		names = append(names, f.Function)
		if !more {
			return strings.Join(names, " ")
		}
	}
}

func TestReady(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	if err := w.service.Ready(); err != nil {
		t.Error(err)
	}
}

func TestReadFault(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	if err := w.faults.Arm(fault.Rule{Point: "metadata.read", Error: "io", Count: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.ListNodes(t.Context(), &metapb.ListNodesRequest{}); !errors.Is(err, block.ErrIO) {
		t.Errorf("got %v", err)
	}
}

// A stop ends watchers and those who wait for a confirmation, and joins all.
func TestStopEndsWaiters(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	v := w.create("v", gib)
	w.attach("v", "c1")
	w.serve(v.Id, "n1", d)
	stream, err := w.Watch(t.Context(), &metapb.WatchRequest{Follow: true, History: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := w.service.Detach(t.Context(), &metapb.DetachRequest{Volume: byName("v"), Node: "c1"})
		done <- err
	}()
	for w.service.machine.View().Attachment(block.VolumeID{UUID: must(block.ParseUUID(v.Id))}, "c1").GetRevoking() == false {
		time.Sleep(time.Millisecond)
	}
	if err := w.faults.Arm(fault.Rule{Point: "metadata.create", Hold: true}); err != nil {
		t.Fatal(err)
	}
	held := make(chan error, 1)
	go func() {
		_, err := w.service.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "held", Size: gib})
		held <- err
	}()
	for w.faults.Hits("metadata.create") == 0 {
		time.Sleep(time.Millisecond)
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	w.service.Stop(ctx)
	if err := <-done; !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("detach: %v", err)
	}
	if err := <-held; err != nil {
		t.Errorf("held: %v", err)
	}
	for err == nil {
		_, err = stream.Recv()
	}
	if !errors.Is(err, block.ErrShutdown) {
		t.Errorf("watch: %v", err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// three are three metadata servers; each is registered as a node.
type three struct {
	t       *testing.T
	configs []consensus.Config
	listen  []string
	nodes   []*consensus.Node
	stop    []func()
}

func newThree(t *testing.T) *three {
	c := &three{t: t, nodes: make([]*consensus.Node, 3), stop: make([]func(), 3)}
	free := func() string {
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		defer func() { _ = l.Close() }()
		return l.Addr().String()
	}
	for i := range 3 {
		c.configs = append(c.configs, consensus.Config{
			Dir: t.TempDir(), Node: fmt.Sprint("n", i), Cluster: clusterID, Bootstrap: i == 0, Listen: free(),
			Log: slog.New(slog.DiscardHandler), Timing: consensus.Timing{Election: 400 * time.Millisecond, Lease: 350 * time.Millisecond},
			Policy: consensus.Policy{Segment: 256 << 10, Commands: 200},
		})
		c.listen = append(c.listen, free())
		c.start(i)
		t.Cleanup(func() { c.stop[i]() })
	}
	cl := c.client(c.listen...)
	for i := range 3 {
		node := node(c.configs[i].Node)
		node.MetadataAddress, node.RaftAddress = c.listen[i], c.configs[i].Listen
		if _, err := cl.RegisterNode(t.Context(), &metapb.RegisterNodeRequest{Node: node, Disks: []*metapb.Disk{disk(i+1, 1000*gib)}}); err != nil {
			t.Fatal(err)
		}
		for i > 0 && c.leader().AddVoter(t.Context(), node.Name, node.RaftAddress) != nil {
			time.Sleep(time.Millisecond)
		}
	}
	return c
}

func (c *three) start(i int) {
	c.t.Helper()
	config := c.configs[i]
	machine := NewMachine()
	config.Machine = machine
	node, err := consensus.Open(config)
	if err != nil {
		c.t.Fatal(err)
	}
	s := New(Config{Consensus: node, Machine: machine, Log: config.Log, DefaultReplicas: 1})
	l, err := net.Listen("tcp", c.listen[i])
	if err != nil {
		c.t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	c.nodes[i] = node
	c.stop[i] = sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		s.Stop(ctx)
		if err := errors.Join(<-served, node.Close()); err != nil {
			c.t.Error(err)
		}
	})
}

func (c *three) client(addresses ...string) *client.Client {
	cl := must(client.Dial(addresses))
	c.t.Cleanup(func() { _ = cl.Close() })
	return cl
}

func (c *three) leads() int {
	for {
		for i, n := range c.nodes {
			if state, _ := n.Leadership(); state.Leads {
				return i
			}
		}
		time.Sleep(time.Millisecond)
	}
}

func (c *three) leader() *consensus.Node { return c.nodes[c.leads()] }

// Any server answers.
func TestFollowersForward(t *testing.T) {
	c := newThree(t)
	for i := range 3 {
		cl := c.client(c.listen[i]) // this one only
		v, err := cl.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: fmt.Sprint("v", i), Size: gib})
		if err != nil || v.Name != fmt.Sprint("v", i) {
			t.Errorf("server %d: %v, %v", i, v, err)
		}
		_, err = cl.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: byName("none")})
		if !errors.Is(err, block.ErrNotFound) || !strings.Contains(err.Error(), `"none"`) {
			t.Errorf("server %d: %v", i, err)
		}
		s, err := cl.GetStatus(t.Context(), &metapb.GetStatusRequest{})
		if err != nil || s.Leader != c.leader().Name() || len(s.Voters) != 3 {
			t.Errorf("server %d: %v, %v", i, s, err)
		}
		l, err := cl.ListVolumes(t.Context(), &metapb.ListVolumesRequest{})
		if err != nil || len(l.Volumes) != i+1 {
			t.Errorf("server %d: %v, %v", i, l, err)
		}
	}
}

// B122, B057 through the API: the leader is stopped again and again; clients
// call until they have an answer; the state is exactly what was acknowledged.
func TestB122ThroughTheAPI(t *testing.T) {
	c := newThree(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	var mu sync.Mutex
	want := map[string]bool{} // attached or not, by the name of a live volume
	var wait sync.WaitGroup
	for k := range 8 {
		wait.Go(func() {
			cl := c.client(c.listen...)
			for i := range 30 {
				name := fmt.Sprintf("v%d-%d", k, i%4)
				if err := churn(ctx, cl, name, i, func(live, attached bool) {
					mu.Lock()
					defer mu.Unlock()
					if delete(want, name); live {
						want[name] = attached
					}
				}); err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
			}
		})
	}
	stop := make(chan struct{})
	var killer sync.WaitGroup
	killer.Go(func() {
		for range 5 {
			select {
			case <-stop:
				return
			case <-time.After(400 * time.Millisecond):
			}
			i := c.leads()
			c.stop[i]()
			c.start(i)
		}
	})
	wait.Wait()
	close(stop)
	killer.Wait()
	cl := c.client(c.listen...)
	l, err := cl.ListVolumes(ctx, &metapb.ListVolumesRequest{})
	if err != nil || len(l.Volumes) != len(want) {
		t.Errorf("%d volumes, want %d: %v", len(l.GetVolumes()), len(want), err)
	}
	for _, v := range l.GetVolumes() {
		attached, ok := want[v.Name]
		g, err := cl.GetVolume(ctx, &metapb.GetVolumeRequest{Volume: byID(v.Id)})
		if !ok || err != nil || attached != (len(g.Attachments) == 1) {
			t.Errorf("%s: there %v, attached %v: %v, %v", v.Name, ok, attached, g, err)
		}
	}
}

// churn does the i-th of a volume's calls and tells what was acknowledged.
func churn(ctx context.Context, cl *client.Client, name string, i int, acknowledged func(live, attached bool)) error {
	var err error
	switch i / 4 % 5 {
	case 0:
		_, err = cl.CreateVolume(ctx, &metapb.CreateVolumeRequest{Name: name, Size: gib})
		acknowledged(true, false)
	case 1:
		_, err = cl.Attach(ctx, &metapb.AttachRequest{Volume: byName(name), Node: "c"})
		acknowledged(true, true)
	case 2:
		_, err = cl.ResizeVolume(ctx, &metapb.ResizeVolumeRequest{Volume: byName(name), Size: 2 * gib})
	case 3:
		_, err = cl.Detach(ctx, &metapb.DetachRequest{Volume: byName(name), Node: "c"})
		acknowledged(true, false)
	case 4:
		_, err = cl.DeleteVolume(ctx, &metapb.DeleteVolumeRequest{Volume: byName(name)})
		acknowledged(false, false)
	}
	return err
}
