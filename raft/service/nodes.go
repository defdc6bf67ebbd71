package service

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

// nodes is what the leader knows beyond the replicated state: who was heard
// of when, and what the disks and nodes reported last. It is a failure detector
// and a fresher look; nothing that must be right depends on it.
type nodes struct {
	downAfter time.Duration
	clock     func() time.Time

	mu      sync.Mutex
	seen    map[string]time.Time
	reports map[string]*metapb.Disk        // by disk id
	wrong   map[string][]*metapb.Condition // by node, as it reported last
}

func newNodes(downAfter time.Duration, clock func() time.Time) *nodes {
	return &nodes{
		downAfter: downAfter, clock: clock,
		seen: map[string]time.Time{}, reports: map[string]*metapb.Disk{}, wrong: map[string][]*metapb.Condition{},
	}
}

// begin forgets; every node has until downAfter to be heard of.
func (n *nodes) begin(v *metadata.View) {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.seen)
	clear(n.reports)
	clear(n.wrong)
	for _, node := range v.Nodes() {
		n.seen[node.GetName()] = n.clock()
	}
}

// heard records a sign of life of a registered node, with its disks if it
// reported them. What the state does not know is not kept, so this is bounded.
func (n *nodes) heard(v *metadata.View, node string, disks []*metapb.Disk) {
	if v.Node(node) == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen[node] = n.clock()
	for _, d := range disks {
		if known := diskOf(v, d.GetId()); known.GetNode() == node {
			d = proto.CloneOf(d)
			d.Node = node
			n.reports[d.GetId()] = d
		}
	}
}

// complains records what a registered node says is wrong there.
func (n *nodes) complains(v *metadata.View, node string, wrong []*metapb.Condition) {
	if v.Node(node) == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wrong[node] = wrong
}

// complaints are what the nodes that are up say is wrong. What one that is down
// said may be over; that it is down is said elsewhere.
func (n *nodes) complaints(v *metadata.View) (list []*metapb.Condition) {
	for _, node := range v.Nodes() {
		if n.up(node.GetName()) {
			n.mu.Lock()
			list = append(list, n.wrong[node.GetName()]...)
			n.mu.Unlock()
		}
	}
	return list
}

func diskOf(v *metadata.View, id string) *metapb.Disk {
	u, err := block.ParseUUID(id)
	if err != nil {
		return nil
	}
	return v.Disk(block.DiskID{UUID: u})
}

func (n *nodes) lastSeen(node string) (time.Time, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	at, ok := n.seen[node]
	return at, ok && n.clock().Sub(at) < n.downAfter
}

func (n *nodes) up(node string) bool {
	_, up := n.lastSeen(node)
	return up
}

// all are the registered nodes, with what the leader knows of them.
func (n *nodes) all(v *metadata.View) []*metapb.Node {
	list := v.Nodes()
	for i, node := range list {
		node = proto.CloneOf(node)
		at, up := n.lastSeen(node.GetName())
		if node.Up = up; !at.IsZero() {
			node.SeenAt = at.UnixNano()
		}
		list[i] = node
	}
	return list
}

// disks are the registered disks, as they reported last.
func (n *nodes) disks(v *metadata.View) []*metapb.Disk {
	list := v.Disks()
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, d := range list {
		if r := n.reports[d.GetId()]; r != nil && r.GetNode() == d.GetNode() {
			list[i] = r
		}
	}
	return list
}

// cell is what placement sees.
func (n *nodes) cell(v *metadata.View) placement.Cell {
	return placement.Cell{Nodes: n.all(v), Disks: n.disks(v), Overcommit: v.Cluster().GetOvercommit()}
}

// forget drops what is known of a node that was removed.
func (n *nodes) forget(node string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.seen, node)
	delete(n.wrong, node)
}

// RegisterNode implements the API. It answers when the node is a member of the
// metadata cluster, too, so that who joins is told when it is in.
func (s *Service) RegisterNode(ctx context.Context, in *metapb.RegisterNodeRequest) (*metapb.RegisterNodeResponse, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	name := in.GetNode().GetName()
	if has, says := v.Cluster().GetClusterId(), in.GetClusterId(); says != "" && has != says {
		return nil, fmt.Errorf("%w: the server of node %q, or a disk of it, belongs to cluster %s, and this is cluster %s: "+
			"start it with --join of its own cluster, or with an empty --data and empty disks", block.ErrPrecondition, name, says, has)
	}
	if err := mayRegister(v, in.GetNode()); err != nil {
		return nil, err
	}
	if err := s.register(ctx, in); err != nil {
		return nil, err
	}
	s.nodes.heard(s.machine.View(), name, in.GetDisks())
	if address := in.GetNode().GetRaftAddress(); address != "" {
		if err := s.consensus.Admit(ctx, name, address); err != nil {
			return nil, fmt.Errorf("node %q is registered, and not a member of the metadata service yet: %w", name, err)
		}
	}
	return &metapb.RegisterNodeResponse{ClusterId: v.Cluster().GetClusterId(), ExtentSize: v.Cluster().GetExtentSize()}, nil
}

// mayRegister refuses what would end badly later: a server that could not apply
// what is in the log, and one where raft expects another.
func mayRegister(v *metadata.View, n *metapb.Node) error {
	if v.Node(n.GetName()) == nil && n.GetFeatureLevel() < v.Level() {
		return fmt.Errorf("%w: node %q has feature level %d, and the cluster is at %d: start a newer binary", block.ErrFormat, n.GetName(), n.GetFeatureLevel(), v.Level())
	}
	for _, other := range v.Nodes() {
		if a := n.GetRaftAddress(); a != "" && a == other.GetRaftAddress() && other.GetName() != n.GetName() {
			return fmt.Errorf("%w: the Raft address %s of node %q is that of node %q: give one of them another, or, if that node is gone for good, `gabion node remove %s` first",
				block.ErrInUse, a, n.GetName(), other.GetName(), other.GetName())
		}
	}
	return nil
}

// register commits what a node says of itself, if it is news. A cell that was at
// a lower level until this very node said so gets the rest then.
func (s *Service) register(ctx context.Context, in *metapb.RegisterNodeRequest) error {
	for {
		v, node := s.machine.View(), in.GetNode()
		complete := true
		if node != nil {
			node = proto.CloneOf(node)
			node.Up, node.SeenAt, node.Role = false, 0, metapb.Node_ROLE_UNSPECIFIED
			if complete = v.Level() >= metadata.LevelServers || node.GetDirectory() == ""; !complete {
				node.Directory = ""
			}
		}
		put := &metapb.PutNode{Node: node, Disks: in.GetDisks(), MovedDisks: s.moved(v, node.GetName(), in.GetDisks())}
		if !sameNode(v, put) {
			if _, err := s.propose(ctx, &metapb.Command{Kind: &metapb.Command_PutNode{PutNode: put}}); err != nil {
				return err
			}
		}
		if complete || s.machine.View().Level() < metadata.LevelServers {
			return nil
		}
	}
}

// moved are the disks whose last node is down, so that they may change hands.
func (s *Service) moved(v *metadata.View, node string, disks []*metapb.Disk) []string {
	var ids []string
	for _, d := range disks {
		if old := diskOf(v, d.GetId()).GetNode(); old != "" && old != node && !s.nodes.up(old) {
			ids = append(ids, d.GetId())
		}
	}
	return ids
}

// sameNode reports whether a registration says nothing that matters and is not known.
func sameNode(v *metadata.View, put *metapb.PutNode) bool {
	node := put.GetNode()
	if node == nil {
		return false
	}
	if !proto.Equal(v.Node(node.GetName()), node) {
		return false
	}
	known := 0
	for _, d := range v.Disks() {
		if d.GetNode() == node.GetName() {
			known++
		}
	}
	return known == len(put.GetDisks()) && sameDisks(v, node.GetName(), put.GetDisks())
}

// sameDisks reports whether nothing that matters has changed: free space does
// by a hundredth of the capacity.
func sameDisks(v *metadata.View, node string, disks []*metapb.Disk) bool {
	for _, d := range disks {
		old := diskOf(v, d.GetId())
		if old == nil {
			return false
		}
		next := proto.CloneOf(d)
		next.Node = node
		moved := next.GetAvailable() - old.GetAvailable()
		if max(moved, -moved) < old.GetCapacity()/100 {
			next.Available = old.GetAvailable()
		}
		if !proto.Equal(old, next) {
			return false
		}
	}
	return true
}

// ReportDisks implements the API; it is a node's heartbeat, too.
func (s *Service) ReportDisks(ctx context.Context, in *metapb.ReportDisksRequest) (*metapb.ReportDisksResponse, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	node := v.Node(in.GetNode())
	if node == nil {
		return nil, fmt.Errorf("%w: node %.300q is not registered", block.ErrNotFound, in.GetNode())
	}
	if p := in.GetProcess(); p != "" && p != node.GetProcess() {
		return nil, fmt.Errorf("%w: server process %.300q of node %q is not the registered one", block.ErrNotFound, p, in.GetNode())
	}
	if !sameDisks(v, in.GetNode(), in.GetDisks()) {
		put := &metapb.PutDisks{Node: in.GetNode(), Disks: in.GetDisks()}
		if _, err := s.propose(ctx, &metapb.Command{Kind: &metapb.Command_PutDisks{PutDisks: put}}); err != nil {
			return nil, err
		}
	}
	v = s.machine.View()
	s.nodes.heard(v, in.GetNode(), in.GetDisks())
	s.nodes.complains(v, in.GetNode(), in.GetConditions())
	return &metapb.ReportDisksResponse{}, nil
}

// ListNodes implements the API.
func (s *Service) ListNodes(ctx context.Context, _ *metapb.ListNodesRequest) (*metapb.ListNodesResponse, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	list := s.nodes.all(v)
	roles := s.roles()
	for _, n := range list {
		n.Role = roles[n.GetName()]
	}
	return &metapb.ListNodesResponse{Nodes: list}, nil
}

// ListDisks implements the API.
func (s *Service) ListDisks(ctx context.Context, _ *metapb.ListDisksRequest) (*metapb.ListDisksResponse, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	return &metapb.ListDisksResponse{Disks: s.nodes.disks(v)}, nil
}
