package service

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/gabion-storage/gabion/raft/consensus"
	state "github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// fleet is the registered servers in the words of consensus.
type fleet struct{ *Service }

// Servers implements consensus.Application.
func (f fleet) Servers() (list []consensus.Server) {
	for _, n := range f.machine.View().Nodes() {
		list = append(list, consensus.Server{
			Name: n.GetName(), Rack: n.GetRack(), Address: n.GetRaftAddress(), Alive: f.nodes.up(n.GetName()),
		})
	}
	return list
}

// Progress implements consensus.Application.
func (f fleet) Progress(ctx context.Context, server consensus.Server) (consensus.Progress, error) {
	address := f.machine.View().Node(server.Name).GetMetadataAddress()
	if address == "" {
		return consensus.Progress{}, fmt.Errorf("%w: node %q has no metadata address", block.ErrUnavailable, server.Name)
	}
	conn, err := f.forward.conn(address)
	if err != nil {
		return consensus.Progress{}, err
	}
	ctx = metadata.AppendToOutgoingContext(ctx, forwarded, "1")
	r, err := metapb.NewMetadataClient(conn).GetProgress(ctx, &metapb.GetProgressRequest{Node: server.Name})
	if err != nil {
		return consensus.Progress{}, metapb.FromStatus(err)
	}
	return consensus.Progress{LastContact: time.Duration(r.GetLastContact()), LastTerm: r.GetLastTerm(), LastIndex: r.GetLastIndex()}, nil
}

// GetProgress implements the API.
func (s *Service) GetProgress(_ context.Context, in *metapb.GetProgressRequest) (*metapb.GetProgressResponse, error) {
	if in.GetNode() != s.consensus.Name() {
		return nil, fmt.Errorf("%w: this is the server of node %q, not of %.300q", block.ErrNotFound, s.consensus.Name(), in.GetNode())
	}
	p := s.consensus.Progress()
	return &metapb.GetProgressResponse{LastContact: int64(p.LastContact), LastTerm: p.LastTerm, LastIndex: p.LastIndex}, nil
}

// roles are the members' parts in the metadata service, by name.
func (s *Service) roles() map[string]metapb.Node_Role {
	voters, learners := s.consensus.Members()
	roles := map[string]metapb.Node_Role{}
	for _, name := range learners {
		roles[name] = metapb.Node_LEARNER
	}
	for _, name := range voters {
		roles[name] = metapb.Node_VOTER
	}
	if leader, _ := s.consensus.Leader(); leader != "" {
		roles[leader] = metapb.Node_LEADER
	}
	return roles
}

// electors are the registered servers, as the leader knows them, and the voters
// that were removed and still count: the pilot takes them out one by one.
func (s *Service) electors(v *state.View) (list []consensus.Elector) {
	roles := s.roles()
	for _, n := range s.nodes.all(v) {
		role, up := roles[n.GetName()], n.GetUp()
		list = append(list, consensus.Elector{
			Name: n.GetName(), Rack: n.GetRack(), Alive: up || role == metapb.Node_LEADER,
			Voter: role == metapb.Node_VOTER || role == metapb.Node_LEADER, Leader: role == metapb.Node_LEADER,
		})
	}
	for _, name := range slices.Sorted(maps.Keys(roles)) {
		if v.Node(name) == nil && roles[name] == metapb.Node_VOTER {
			list = append(list, consensus.Elector{Name: name, Voter: true})
		}
	}
	return list
}

// RemoveNode implements the API. Once the node has left the state, the leader
// takes its server out of the metadata cluster.
func (s *Service) RemoveNode(ctx context.Context, in *metapb.RemoveNodeRequest) (*metapb.RemoveNodeResponse, error) {
	if err := state.ValidateNodeName(in.GetName()); err != nil {
		return nil, err
	}
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	if at, up := s.nodes.lastSeen(in.GetName()); v.Node(in.GetName()) != nil && up {
		return nil, fmt.Errorf("%w: node %q is up, or was %v ago: stop its server first; it counts as down when it was not heard of for %v",
			block.ErrPrecondition, in.GetName(), s.config.Clock().Sub(at).Round(time.Second), s.nodes.downAfter)
	}
	_, err = s.propose(ctx, &metapb.Command{Kind: &metapb.Command_RemoveNode{RemoveNode: &metapb.RemoveNode{Name: in.GetName()}}})
	if err != nil {
		return nil, err
	}
	s.nodes.forget(in.GetName())
	return &metapb.RemoveNodeResponse{}, nil
}
