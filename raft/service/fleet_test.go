package service

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// peer is one of several metadata servers in this process.
type peer struct {
	name, rack, dir string
	node            *consensus.Node
	service         *Service
	listen          net.Listener
	served          chan error
	*client.Client
}

// startPeer starts a server that founds a cluster, or joins, and does not register.
func startPeer(t *testing.T, name, rack, dir string, founds bool) *peer {
	t.Helper()
	log := slog.New(slog.NewTextHandler(&record{}, nil))
	machine := NewMachine()
	p := &peer{name: name, rack: rack, dir: dir, served: make(chan error, 1)}
	var err error
	p.node, err = consensus.Open(consensus.Config{
		Dir: dir, Node: name, Cluster: clusterID, Bootstrap: founds, Listen: "127.0.0.1:0", Machine: machine, Log: log,
		Policy: consensus.Policy{Segment: 1 << 20}, Timing: consensus.Timing{Survey: 200 * time.Millisecond, Stable: time.Second},
	})
	if err != nil {
		t.Fatal(err)
	}
	p.service = New(Config{Consensus: p.node, Machine: machine, Log: log, DefaultReplicas: 1, DownAfter: time.Second})
	if p.listen, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	go func() { p.served <- p.service.Serve(p.listen) }()
	if p.Client, err = client.Dial([]string{p.listen.Addr().String()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.stop(t) })
	return p
}

func (p *peer) stop(t *testing.T) {
	t.Helper()
	if p.node == nil {
		return
	}
	_ = p.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	p.service.Stop(ctx)
	if err := errors.Join(<-p.served, p.node.Close()); err != nil {
		t.Error(err)
	}
	p.node = nil
}

// describe is what the peer registers.
func (p *peer) describe() *metapb.Node {
	n := node(p.name)
	n.Rack, n.RaftAddress, n.MetadataAddress, n.Directory = p.rack, p.node.Address(), p.listen.Addr().String(), p.node.Directory().String()
	return n
}

// enter registers the peer at another one, until it is in.
func (p *peer) enter(t *testing.T, at *peer) {
	t.Helper()
	if _, err := at.RegisterNode(t.Context(), &metapb.RegisterNodeRequest{Node: p.describe(), ClusterId: clusterID.String()}); err != nil {
		t.Fatal(err)
	}
}

// beat says that the peers are alive until it is called.
func beat(t *testing.T, peers ...*peer) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	nodes := make([]*metapb.Node, len(peers))
	for i, p := range peers {
		nodes[i] = p.describe()
	}
	at := peers[0].Client
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			for _, n := range nodes {
				_, _ = at.ReportDisks(ctx, &metapb.ReportDisksRequest{Node: n.GetName(), Process: n.GetProcess()})
			}
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}()
	end = func() { cancel(); <-done }
	t.Cleanup(end)
	return end
}

// nodesAt waits until what the server at says of the nodes is ok.
func nodesAt(t *testing.T, at *peer, ok func(map[string]metapb.Node_Role) bool) {
	t.Helper()
	var roles map[string]metapb.Node_Role
	for deadline := time.Now().Add(40 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		r, err := at.ListNodes(t.Context(), &metapb.ListNodesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		roles = map[string]metapb.Node_Role{}
		for _, n := range r.GetNodes() {
			roles[n.GetName()] = n.GetRole()
		}
		if ok(roles) {
			return
		}
	}
	t.Fatalf("the roles are %v", roles)
}

func voting(roles map[string]metapb.Node_Role) (n int) {
	for _, r := range roles {
		if r == metapb.Node_VOTER || r == metapb.Node_LEADER {
			n++
		}
	}
	return n
}

// Three servers become one metadata service, and one of them leaves again.
func TestServersJoinAndLeave(t *testing.T) {
	t.TempDir()
	n1 := startPeer(t, "n1", "r1", t.TempDir(), true)
	n2 := startPeer(t, "n2", "r2", t.TempDir(), false)
	n3 := startPeer(t, "n3", "r3", t.TempDir(), false)
	n1.enter(t, n1)
	n2.enter(t, n1)
	n2.enter(t, n1) // repeated: nothing more
	n3.enter(t, n1)
	end := beat(t, n1, n2, n3)
	nodesAt(t, n1, func(roles map[string]metapb.Node_Role) bool {
		return voting(roles) == 3 && roles["n1"] == metapb.Node_LEADER && roles["n3"] == metapb.Node_VOTER
	})
	s, err := n3.GetStatus(t.Context(), &metapb.GetStatusRequest{}) // forwarded
	if err != nil || s.GetEndurance() != "3 voters in 3 racks; survives the loss of any one server or rack" || s.GetNodesWithoutDisks() != 3 {
		t.Errorf("status: %v, %v", s, err)
	}
	if _, err := n2.RemoveNode(t.Context(), &metapb.RemoveNodeRequest{Name: "n3"}); !errors.Is(err, block.ErrPrecondition) || !strings.Contains(err.Error(), "is up") {
		t.Errorf("removing a node that is up: %v", err)
	}
	end()
	beat(t, n1, n2)
	n3.stop(t)
	for { // as soon as it counts as down
		if _, err = n2.RemoveNode(t.Context(), &metapb.RemoveNodeRequest{Name: "n3"}); err == nil {
			break
		}
		if !errors.Is(err, block.ErrPrecondition) {
			t.Fatal(err)
		}
	}
	nodesAt(t, n1, func(roles map[string]metapb.Node_Role) bool { return len(roles) == 2 && voting(roles) == 1 })
	if _, err := n1.RemoveNode(t.Context(), &metapb.RemoveNodeRequest{Name: "n3"}); err != nil {
		t.Errorf("removed again: %v", err)
	}
	another := startPeer(t, "n3", "r3", t.TempDir(), false) // the name is free
	another.enter(t, n1)
	nodesAt(t, n1, func(roles map[string]metapb.Node_Role) bool { return roles["n3"] == metapb.Node_LEARNER })
	voters, learners := n1.node.Members()
	if !slices.Equal(voters, []string{"n1"}) || !slices.Equal(learners, []string{"n2", "n3"}) {
		t.Errorf("members %v and %v", voters, learners)
	}
}

// Wrong joins, each with a sentence; none changes anything.
func TestWrongJoins(t *testing.T) {
	t.TempDir()
	n1 := startPeer(t, "n1", "r1", t.TempDir(), true)
	n2 := startPeer(t, "n2", "r2", t.TempDir(), false)
	n1.enter(t, n1)
	n2.enter(t, n1)
	another := startPeer(t, "n2", "r2", t.TempDir(), false)
	for name, c := range map[string]struct {
		change func(*metapb.RegisterNodeRequest)
		err    error
		says   string
	}{
		"the name of another directory": {func(r *metapb.RegisterNodeRequest) { r.Node = another.describe() }, block.ErrInUse, "another data directory"},
		"another cluster":               {func(r *metapb.RegisterNodeRequest) { r.ClusterId = block.NewUUID().String() }, block.ErrPrecondition, "--join of its own cluster"},
		"the address of another server": {func(r *metapb.RegisterNodeRequest) { r.Node.Name = "n3" }, block.ErrInUse, "is that of node \"n2\""},
		"an older binary": {func(r *metapb.RegisterNodeRequest) {
			r.Node.Name, r.Node.RaftAddress, r.Node.FeatureLevel = "n4", "127.0.0.1:1", metadata.Level-1
		}, block.ErrFormat, "start a newer binary"},
	} {
		index := n1.node.Stats().LastIndex
		r := &metapb.RegisterNodeRequest{Node: n2.describe(), ClusterId: clusterID.String()}
		c.change(r)
		if _, err := n1.RegisterNode(t.Context(), r); !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if now := n1.node.Stats().LastIndex; now != index {
			t.Errorf("%s: %d log entries", name, now-index)
		}
	}
}

// H81: while a server of before is registered the cell stays at its level: a node
// is not removed, and that one may come and go as it always did.
func TestH81OlderServerInTheCell(t *testing.T) {
	w := newWorld(t)
	old := node("n1")
	old.FeatureLevel = metadata.LevelServers - 1
	register := func(n *metapb.Node) error {
		_, err := w.RegisterNode(t.Context(), &metapb.RegisterNodeRequest{Node: n})
		return err
	}
	if err := register(old); err != nil {
		t.Fatal(err)
	}
	if v := w.service.machine.View(); v.Level() != metadata.LevelServers-1 {
		t.Fatalf("level %d", v.Level())
	}
	newer := node("n2")
	newer.Directory = "e2"
	if err := register(newer); err != nil {
		t.Fatal(err)
	}
	if got := w.service.machine.View().Node("n2").GetDirectory(); got != "" {
		t.Errorf("the older server would halt at directory %q", got)
	}
	w.clock.pass(time.Minute)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := w.RemoveNode(ctx, &metapb.RemoveNodeRequest{Name: "n2"}); !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), "upgrade the servers") {
		t.Errorf("removed at the older level: %v", err)
	}
	old.FeatureLevel, old.Directory = metadata.Level, "e1"
	if err := register(old); err != nil { // upgraded, and with it the cell
		t.Fatal(err)
	}
	if got := w.service.machine.View().Node("n1").GetDirectory(); got != "e1" {
		t.Errorf("directory %q after the upgrade", got)
	}
	if _, err := w.RemoveNode(t.Context(), &metapb.RemoveNodeRequest{Name: "n2"}); err != nil {
		t.Error(err)
	}
}

// A server without disks serves no volume.
func TestGrantWithoutDisks(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	w.register("n2")
	v := w.create("v", gib)
	if _, err := w.Grant(t.Context(), &metapb.GrantRequest{VolumeId: v.GetId(), Node: "n2", Process: proc}); !errors.Is(err, block.ErrPrecondition) {
		t.Errorf("granted: %v", err)
	}
}

// While primaries reach the disks of their own node only, a volume has one copy, all of it there, whatever other disks have room.
func TestLocalCopies(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.LocalCopies = true })
	full := disk(1, 100*gib)
	w.register("n1", full)
	w.register("n2", disk(2, 100*gib))
	_, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "two", Size: gib, Policy: &metapb.Policy{Replicas: 2}})
	if !errors.Is(err, block.ErrPrecondition) || !strings.Contains(err.Error(), "--replicas 1") {
		t.Errorf("two copies: %v", err)
	}
	v, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib, Policy: &metapb.Policy{Replicas: 1}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib, Policy: &metapb.Policy{Replicas: 2}})
	if !errors.Is(err, block.ErrExists) { // B051
		t.Errorf("two copies of what is there with one: %v", err)
	}
	for _, in := range []*metapb.GetCapacityRequest{{Replicas: 2}, {Policy: &metapb.Policy{Replicas: 2}}} {
		if c, err := w.GetCapacity(t.Context(), in); err != nil || c.GetAvailable() != 0 || c.GetMaximumVolumeSize() != 0 {
			t.Errorf("capacity for two copies: %v, %v", c, err)
		}
	}
	g, err := w.Grant(t.Context(), &metapb.GrantRequest{VolumeId: v.GetId(), Node: "n1", Process: proc})
	if err != nil {
		t.Fatal(err)
	}
	place := &metapb.PlaceRunsRequest{VolumeId: v.GetId(), Generation: g.GetGrant().GetGeneration(), Runs: []uint32{0}}
	r, err := w.PlaceRuns(t.Context(), place)
	if err != nil || !slices.Equal(r.GetRuns()[0].GetDisks(), []string{full.GetId()}) {
		t.Errorf("placed at %v, %v", r, err)
	}
	full.State, full.Available = metapb.Disk_FULL, 0
	if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n1", Process: proc, Disks: []*metapb.Disk{full}}); err != nil {
		t.Fatal(err)
	}
	if r, err := w.PlaceRuns(t.Context(), place); !errors.Is(err, block.ErrNoSpace) {
		t.Errorf("placed at %v, %v, where the primary has no room", r, err)
	}
}

// The disks of a removed node held nothing, so the status does not miss them.
func TestDisksOfRemovedNodeAreNotMissed(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	w.register("n2", disk(2, 100*gib))
	w.clock.pass(time.Minute)
	w.register("n1", disk(1, 100*gib))
	if _, err := w.RemoveNode(t.Context(), &metapb.RemoveNodeRequest{Name: "n2"}); err != nil {
		t.Fatal(err)
	}
	s, err := w.GetStatus(t.Context(), &metapb.GetStatusRequest{})
	if err != nil || s.GetDisks() != 1 || len(s.GetConditions()) != 0 {
		t.Errorf("status: %v, %v", s, err)
	}
}

// A volume without data is anybody's when its primary is down: whoever attaches is not sent there.
func TestEndpointsOfDownPrimary(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 200*gib))
	w.register("n2", disk(2, 100*gib))
	v := w.create("v", gib)
	if _, err := w.Grant(t.Context(), &metapb.GrantRequest{VolumeId: v.GetId(), Node: "n1", Process: proc}); err != nil {
		t.Fatal(err)
	}
	first := func() string {
		a, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: &metapb.VolumeRef{Id: v.GetId()}, Node: "k1"})
		if err != nil {
			t.Fatal(err)
		}
		return a.GetEndpoints()[0].GetNode()
	}
	if got := first(); got != "n1" {
		t.Errorf("the primary is n1, to connect to is %s", got)
	}
	w.clock.pass(time.Minute)
	w.register("n2", disk(2, 100*gib))
	if got := first(); got != "n2" {
		t.Errorf("n1 is down and has no data, to connect to is %s", got)
	}
}
