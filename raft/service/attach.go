package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

func isNotFound(err error) bool { return errors.Is(err, block.ErrNotFound) }

// attempts bounds how often a call that met another one looks again.
const attempts = 8

// Attach implements the API. The attachment is made only at the version of the
// volume at which it was seen to be free, so that a call that hung in between
// undoes nothing that came after.
func (s *Service) Attach(ctx context.Context, in *metapb.AttachRequest) (*metapb.AttachResponse, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	vol, id, err := find(v, in.GetVolume())
	if err != nil {
		return nil, err
	}
	a := &metapb.Attachment{
		Id: block.NewUUID().String(), VolumeId: id.String(), Node: in.GetNode(), ReadOnly: in.GetReadOnly(), Token: newToken(),
	}
	for range attempts {
		r, err := s.propose(ctx, &metapb.Command{Kind: &metapb.Command_AttachVolume{AttachVolume: &metapb.AttachVolume{
			Attachment: a, Version: vol.GetVersion(),
		}}})
		if err == nil {
			return s.attached(id, r)
		}
		if !errors.Is(err, block.ErrStale) {
			return nil, err
		}
		if v, err = s.cluster(ctx); err != nil { // the volume changed meanwhile, but the call goes on: look again
			return nil, err
		}
		if vol, _, err = findID(v, id.String()); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w: volume %q changes all the time: try again", block.ErrUnavailable, vol.GetName())
}

func (s *Service) attached(id block.VolumeID, r metadata.Result) (*metapb.AttachResponse, error) {
	a, err := value[*metapb.Attachment](r)
	if err != nil {
		return nil, err
	}
	v := s.machine.View()
	vol := v.Volume(id)
	if vol == nil {
		return nil, fmt.Errorf("%w: volume %s was deleted meanwhile", block.ErrNotFound, id)
	}
	return &metapb.AttachResponse{Volume: vol, Attachment: a, Endpoints: s.endpoints(v, id)}, nil
}

// endpoints are the nodes to connect to, the best first: the one that serves
// the volume, else one that has its data, else the emptiest. Nodes without a
// disk cannot serve and are left out.
func (s *Service) endpoints(v *metadata.View, id block.VolumeID) []*metapb.Endpoint {
	room := map[string]int64{}
	for _, d := range s.nodes.disks(v) {
		if d.GetNode() != "" && d.GetState() != metapb.Disk_FAILED {
			room[d.GetNode()] += d.GetAvailable()
		}
	}
	holders := holders(v, id)
	rank := func(n *metapb.Node) int {
		switch {
		case n.GetName() == v.Grant(id).GetNode():
			return 0
		case holders[n.GetName()]:
			return 1
		case s.nodes.up(n.GetName()):
			return 2
		}
		return 3
	}
	var list []*metapb.Node
	for _, n := range v.Nodes() {
		_, hasDisk := room[n.GetName()]
		if hasDisk && (len(holders) == 0 || holders[n.GetName()]) || rank(n) == 0 {
			list = append(list, n)
		}
	}
	slices.SortStableFunc(list, func(a, b *metapb.Node) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(room[b.GetName()], room[a.GetName()]))
	})
	var out []*metapb.Endpoint
	for _, n := range list {
		out = append(out, &metapb.Endpoint{Node: n.GetName(), NbdAddress: n.GetNbdAddress(), NbdSocket: n.GetNbdSocket()})
	}
	return out
}

// holders are the nodes that have a copy of the volume that counts.
func holders(v *metadata.View, id block.VolumeID) map[string]bool {
	names := map[string]bool{}
	for _, m := range v.Members(id) {
		if u, err := block.ParseUUID(m.GetDiskId()); err == nil && m.GetState() == metapb.Member_IN {
			if node := v.Disk(block.DiskID{UUID: u}).GetNode(); node != "" {
				names[node] = true
			}
		}
	}
	return names
}

// Detach implements the API: the intent is committed, then the primary's
// confirmation that the sessions are closed and drained is waited for. An
// absent volume or attachment is detached. It acts on the attachment found at
// its start, or on the one that the call names, and on no newer one.
func (s *Service) Detach(ctx context.Context, in *metapb.DetachRequest) (*metapb.DetachResponse, error) {
	if err := metadata.ValidateNodeName(in.GetNode()); err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	id, err := resolve(v, in.GetVolume())
	if err != nil || id.IsZero() {
		return &metapb.DetachResponse{}, err
	}
	a := v.Attachment(id, in.GetNode())
	if a == nil || in.GetAttachmentId() != "" && a.GetId() != in.GetAttachmentId() {
		return &metapb.DetachResponse{}, nil
	}
	name := v.Volume(id).GetName()
	_, err = s.propose(ctx, &metapb.Command{Kind: &metapb.Command_DetachVolume{DetachVolume: &metapb.DetachVolume{
		VolumeId: id.String(), AttachmentId: a.GetId(),
	}}})
	if err != nil {
		return nil, err
	}
	wait, cancel := s.pending(ctx)
	defer cancel()
	v, err = s.machine.until(wait, func(v *metadata.View) bool {
		return !slices.ContainsFunc(v.Attachments(id), func(b *metapb.Attachment) bool { return b.GetId() == a.GetId() })
	})
	if err != nil {
		return nil, s.unconfirmed(v, id, fmt.Sprintf("volume %q is to be detached from node %q", name, a.GetNode()), err)
	}
	return &metapb.DetachResponse{}, nil
}
