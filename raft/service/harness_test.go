package service

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	gib  = 1 << 30
	proc = "3b241101-e2bb-4255-8caf-4136c566a962"
)

var clusterID = block.ClusterID{UUID: block.UUID{0xc1}}

// world is one metadata server, a real voter on a real directory, and its client.
type world struct {
	t       *testing.T
	dir     string
	faults  *fault.Set
	clock   *clock
	log     *record
	config  func(*Config)
	node    *consensus.Node
	service *Service
	listen  net.Listener
	*client.Client
	served chan error
}

type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// record keeps everything that is logged, at the lowest level.
type record struct {
	mu    sync.Mutex
	bytes []byte
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes = append(r.bytes, p...)
	if os.Getenv("GABION_TEST_LOG") != "" {
		return os.Stderr.Write(p)
	}
	return len(p), nil
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return string(r.bytes)
}

func newWorld(t *testing.T, config ...func(*Config)) *world {
	t.Helper()
	w := &world{
		t: t, dir: t.TempDir(), faults: &fault.Set{}, log: &record{}, clock: &clock{now: time.Unix(1e9, 0)},
		config: func(c *Config) {
			for _, f := range config {
				f(c)
			}
		},
	}
	w.start()
	t.Cleanup(w.stop)
	return w
}

func (w *world) start() {
	w.t.Helper()
	machine := NewMachine()
	log := slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	node, err := consensus.Open(consensus.Config{
		Dir: w.dir, Node: "n1", Cluster: clusterID, Bootstrap: true, Listen: "127.0.0.1:0", Machine: machine, Log: log,
		Policy: consensus.Policy{Segment: 1 << 20},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.node = node
	c := Config{Consensus: node, Machine: machine, Log: log, Faults: w.faults, DefaultReplicas: 1, Clock: w.clock.Now}
	w.config(&c)
	w.service = New(c)
	if w.listen, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		w.t.Fatal(err)
	}
	w.served = make(chan error, 1)
	go func() { w.served <- w.service.Serve(w.listen) }()
	if w.Client, err = client.Dial([]string{w.listen.Addr().String()}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) stop() {
	w.t.Helper()
	if w.node == nil {
		return
	}
	w.faults.Clear("")
	_ = w.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	w.service.Stop(ctx)
	if err := <-w.served; err != nil {
		w.t.Error(err)
	}
	if err := w.node.Close(); err != nil {
		w.t.Error(err)
	}
	w.node = nil
}

func (w *world) restart() {
	w.stop()
	w.start()
}

func disk(n int, capacity int64) *metapb.Disk {
	return &metapb.Disk{
		Id: block.UUID{0xd0, byte(n)}.String(), Path: fmt.Sprintf("/disk%d", n), Capacity: capacity, Available: capacity,
		State: metapb.Disk_ONLINE, IoMode: "direct",
	}
}

func node(name string) *metapb.Node {
	return &metapb.Node{Name: name, Rack: "r1", Process: proc, NbdAddress: "127.0.0.1:10809", FeatureLevel: metadata.Level}
}

// register announces a node with disks of these sizes.
func (w *world) register(name string, disks ...*metapb.Disk) {
	w.t.Helper()
	w.registerIn("r1", name, disks...)
}

func (w *world) registerIn(rack, name string, disks ...*metapb.Disk) {
	w.t.Helper()
	n := node(name)
	n.Rack = rack
	if _, err := w.RegisterNode(w.t.Context(), &metapb.RegisterNodeRequest{Node: n, Disks: disks}); err != nil {
		w.t.Fatal(err)
	}
}

// consumer makes a node known that volumes can be published to.
func (w *world) consumer(name, rack string, most uint32) {
	w.t.Helper()
	if _, err := w.RegisterConsumer(w.t.Context(), &metapb.Consumer{Name: name, Rack: rack, MaxVolumes: most}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) detach(name, node string) {
	w.t.Helper()
	if _, err := w.Detach(w.t.Context(), &metapb.DetachRequest{Volume: byName(name), Node: node}); err != nil {
		w.t.Fatal(err)
	}
}

// volume is a volume as the API shows it.
func (w *world) volume(name string) *metapb.GetVolumeResponse {
	w.t.Helper()
	v, err := w.GetVolume(w.t.Context(), &metapb.GetVolumeRequest{Volume: byName(name)})
	if err != nil {
		w.t.Fatal(err)
	}
	return v
}

func (w *world) create(name string, size int64) *metapb.Volume {
	w.t.Helper()
	v, err := w.CreateVolume(w.t.Context(), &metapb.CreateVolumeRequest{Name: name, Size: size})
	if err != nil {
		w.t.Fatal(err)
	}
	return v
}

func (w *world) attach(name, node string) *metapb.AttachResponse {
	w.t.Helper()
	return w.attachAs(&metapb.AttachRequest{Volume: byName(name), Node: node})
}

func (w *world) attachAs(in *metapb.AttachRequest) *metapb.AttachResponse {
	w.t.Helper()
	a, err := w.Attach(w.t.Context(), in)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

func byName(name string) *metapb.VolumeRef { return &metapb.VolumeRef{Name: name} }
func byID(id string) *metapb.VolumeRef     { return &metapb.VolumeRef{Id: id} }

// serve makes a node the primary of a volume, with one disk, and opens it.
func (w *world) serve(id, node string, disk *metapb.Disk) *primary {
	w.t.Helper()
	m, err := w.Grant(w.t.Context(), &metapb.GrantRequest{VolumeId: id, Node: node, Process: proc})
	if err != nil {
		w.t.Fatal(err)
	}
	p := &primary{w: w, fence: &metapb.Fence{VolumeId: id, Generation: m.Grant.Generation, Version: m.Volume.Version}}
	p.must(&metapb.ProposeRequest_Takeover{Takeover: &metapb.Takeover{Members: []*metapb.Member{{
		DiskId: disk.Id, State: metapb.Member_IN, AdmittedGeneration: m.Grant.Generation,
		Incarnation: &metapb.Incarnation{Boot: proc, Process: proc, Instance: proc},
	}}}})
	return p
}

// primary proposes as the server of a volume would.
type primary struct {
	w     *world
	fence *metapb.Fence
}

func (p *primary) propose(request *metapb.ProposeRequest) error {
	request.Fence = p.fence
	r, err := p.w.Propose(p.w.t.Context(), request)
	if err == nil {
		p.fence.Version = r.Version
	}
	return err
}

func (p *primary) must(command any) {
	p.w.t.Helper()
	r := &metapb.ProposeRequest{}
	switch c := command.(type) {
	case *metapb.ProposeRequest_Takeover:
		r.Command = c
	case *metapb.ProposeRequest_CommitRuns:
		r.Command = c
	case *metapb.ProposeRequest_ConfirmSize:
		r.Command = c
	case *metapb.ProposeRequest_ConfirmDetach:
		r.Command = c
	}
	if err := p.propose(r); err != nil {
		p.w.t.Fatal(err)
	}
}

// refresh reads the version as a primary that follows the watch would.
func (p *primary) refresh() *metapb.VolumeMap {
	p.w.t.Helper()
	m, err := p.w.ReadMap(p.w.t.Context(), &metapb.ReadMapRequest{VolumeId: p.fence.VolumeId})
	if err != nil {
		p.w.t.Fatal(err)
	}
	p.fence.Version = m.Volume.Version
	return m
}

// index is the newest log index: it tells whether a call made an entry.
func (w *world) index() uint64 { return w.node.Stats().LastIndex }
