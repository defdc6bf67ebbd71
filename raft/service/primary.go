package service

import (
	"context"
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

// Grant implements the API. The map is read after the grant was applied here.
func (s *Service) Grant(ctx context.Context, in *metapb.GrantRequest) (*metapb.VolumeMap, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	vol, id, err := findID(v, in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := s.mayServe(v, vol, id, in.GetNode()); err != nil {
		return nil, err
	}
	_, err = s.propose(ctx, &metapb.Command{Kind: &metapb.Command_GrantPrimary{GrantPrimary: &metapb.GrantPrimary{
		VolumeId: id.String(), Node: in.GetNode(), Process: in.GetProcess(),
	}}})
	if err != nil {
		return nil, err
	}
	v = s.machine.View()
	s.nodes.heard(v, in.GetNode(), nil)
	return mapOf(v, id)
}

// mayServe refuses a node that has no copy of a volume that has one, and one
// that would take the volume from a node that is up and serves it: a client
// that connects to the wrong node must not end the right one's service.
func (s *Service) mayServe(v *metadata.View, vol *metapb.Volume, id block.VolumeID, node string) error {
	holders := holders(v, id)
	if len(holders) > 0 && !holders[node] {
		return fmt.Errorf("%w: node %q has no copy of volume %q; connect to node %s", block.ErrPrecondition, node, vol.GetName(), names(holders))
	}
	if n := v.Node(node); len(holders) == 0 && n != nil && !mayLie(vol, n) {
		return fmt.Errorf("%w: volume %q lies in rack %q, and node %q is in rack %q; connect to a node of its rack",
			block.ErrPrecondition, vol.GetName(), vol.GetRack(), node, n.GetRack())
	}
	if len(holders) == 0 && v.Node(node) != nil && !nodesWithDisks(v)[node] {
		return fmt.Errorf("%w: node %q has no disk; connect to one that has", block.ErrPrecondition, node)
	}
	holder := v.Grant(id).GetNode()
	if holder != "" && holder != node && s.nodes.up(holder) && (len(holders) == 0 || holders[holder]) {
		return fmt.Errorf("%w: volume %q is served by node %q; connect there", block.ErrInUse, vol.GetName(), holder)
	}
	return nil
}

// nodesWithDisks are those that can serve at all: a server without disks takes
// part in the metadata service only.
func nodesWithDisks(v *metadata.View) map[string]bool {
	equipped := map[string]bool{}
	for _, d := range v.Disks() {
		equipped[d.GetNode()] = true
	}
	return equipped
}

func names(set map[string]bool) string {
	var list []string
	for name := range set {
		list = append(list, fmt.Sprintf("%q", name))
	}
	slices.Sort(list)
	if len(list) == 1 {
		return list[0]
	}
	return fmt.Sprintf("one of %v", list)
}

func mapOf(v *metadata.View, id block.VolumeID) (*metapb.VolumeMap, error) {
	if m := v.Map(id); m != nil {
		return m, nil
	}
	_, _, err := findID(v, id.String())
	return nil, err
}

// ReadMap implements the API.
func (s *Service) ReadMap(ctx context.Context, in *metapb.ReadMapRequest) (*metapb.VolumeMap, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	id, err := metapb.ParseVolumeID("volume id", in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return mapOf(v, id)
}

// LookupVolume implements the API.
func (s *Service) LookupVolume(ctx context.Context, in *metapb.LookupVolumeRequest) (*metapb.LookupVolumeResponse, error) {
	id, err := metapb.ParseVolumeID("volume id", in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	out := &metapb.LookupVolumeResponse{ClusterId: v.Cluster().GetClusterId(), State: metapb.LookupVolumeResponse_UNKNOWN, Index: v.Index()}
	if v.Volume(id) != nil {
		out.State = metapb.LookupVolumeResponse_LIVE
	} else if _, ok := v.Tombstone(id); ok {
		out.State = metapb.LookupVolumeResponse_TOMBSTONE
	}
	return out, nil
}

const maxRuns = 256

// PlaceRuns implements the API. A run that is born already is answered as it is.
func (s *Service) PlaceRuns(ctx context.Context, in *metapb.PlaceRunsRequest) (*metapb.PlaceRunsResponse, error) {
	if n := len(in.GetRuns()); n == 0 || n > maxRuns {
		return nil, fmt.Errorf("%w: %d runs; one call takes 1 to %d", block.ErrInvalid, n, maxRuns)
	}
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	vol, id, err := findID(v, in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	grant := v.Grant(id)
	if grant.GetGeneration() != in.GetGeneration() {
		return nil, fmt.Errorf("%w: volume %q is in generation %d, not %d", block.ErrStale, vol.GetName(), grant.GetGeneration(), in.GetGeneration())
	}
	out := &metapb.PlaceRunsResponse{}
	q := placement.Request{
		Volume: id, Policy: vol.GetPolicy(), ExtentSize: v.Cluster().GetExtentSize(), Near: grant.GetNode(), Rack: v.RackOf(id),
	}
	for _, r := range in.GetRuns() {
		if int64(r) >= v.Geometry().Runs(vol.GetWantedSize()) {
			return nil, fmt.Errorf("%w: volume %q of %d bytes has no run %d", block.ErrInvalid, vol.GetName(), vol.GetWantedSize(), r)
		}
		if born := v.Run(id, block.RunIndex(r)); born != nil {
			out.Runs = append(out.Runs, born)
			continue
		}
		q.Runs = append(q.Runs, block.RunIndex(r))
	}
	if len(q.Runs) > 0 {
		placed, err := s.placesFor(v, grant.GetNode()).Place(q)
		if err != nil {
			return nil, fmt.Errorf("volume %q: %w", vol.GetName(), err)
		}
		out.Runs = append(out.Runs, placed...)
	}
	return out, nil
}

// placesFor is the part of the cell that a primary on a node can reach.
func (s *Service) placesFor(v *metadata.View, node string) placement.Cell {
	cell := s.nodes.cell(v)
	if s.config.LocalCopies {
		cell.Disks = slices.DeleteFunc(cell.Disks, func(d *metapb.Disk) bool { return d.GetNode() != node })
	}
	return cell
}

// Propose implements the API.
func (s *Service) Propose(ctx context.Context, in *metapb.ProposeRequest) (*metapb.ProposeResponse, error) {
	f := &metapb.FencedCommand{Fence: in.GetFence()}
	switch k := in.GetCommand().(type) {
	case *metapb.ProposeRequest_Takeover:
		f.Kind = &metapb.FencedCommand_Takeover{Takeover: k.Takeover}
	case *metapb.ProposeRequest_CommitRuns:
		f.Kind = &metapb.FencedCommand_CommitRuns{CommitRuns: k.CommitRuns}
	case *metapb.ProposeRequest_ConfirmSize:
		f.Kind = &metapb.FencedCommand_ConfirmSize{ConfirmSize: k.ConfirmSize}
	case *metapb.ProposeRequest_ConfirmDetach:
		f.Kind = &metapb.FencedCommand_ConfirmDetach{ConfirmDetach: k.ConfirmDetach}
	default:
		return nil, fmt.Errorf("%w: no command, or one that this server does not know", block.ErrInvalid)
	}
	if _, err := s.cluster(ctx); err != nil { // for the early refusal
		return nil, err
	}
	r, index, err := s.commit(ctx, &metapb.Command{Kind: &metapb.Command_Fenced{Fenced: f}})
	if err != nil {
		return nil, err
	}
	vol, err := value[*metapb.Volume](r)
	if err != nil {
		return nil, err
	}
	return &metapb.ProposeResponse{Index: index, Version: vol.GetVersion()}, nil
}
