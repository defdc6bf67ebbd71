package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

func isNotFound(err error) bool { return errors.Is(err, block.ErrNotFound) }

// attempts bounds how often a call that met another one looks again.
const attempts = 8

// Attach implements the API. The attachment is made only at the version of the
// volume at which it was seen to be free, so that a call that hung in between
// undoes nothing that came after. Nor does it begin in the last moment before the
// caller's deadline: here the caller might seem to wait when it does no more.
func (s *Service) Attach(ctx context.Context, in *metapb.AttachRequest) (*metapb.AttachResponse, error) {
	ctx, cancel := s.pending(ctx)
	defer cancel()
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
		// Servers of before would not know, and clients of before are served all the same.
		Foreign: !in.GetReadOnly() && !in.GetRecordsFormat() && v.Level() >= metadata.LevelTerms,
		Alone:   in.GetAlone() && in.GetReadOnly(), // who writes is alone anyway
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
	return &metapb.AttachResponse{Volume: vol, Attachment: a, Endpoints: s.endpoints(v, id), ClusterId: v.Cluster().GetClusterId()}, nil
}

// GetAttachment implements the API. One that is being detached is gone for its
// consumer: its token opens nothing any more.
func (s *Service) GetAttachment(ctx context.Context, in *metapb.GetAttachmentRequest) (*metapb.AttachResponse, error) {
	if err := metadata.ValidateNodeName(in.GetNode()); err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	cluster := v.Cluster().GetClusterId()
	vol, id, a, err := attachment(v, in)
	if err != nil {
		return nil, metapb.WithDetail(err, metapb.DetailCluster, cluster)
	}
	return &metapb.AttachResponse{Volume: vol, Attachment: a, Endpoints: s.endpoints(v, id), ClusterId: cluster}, nil
}

func attachment(v *metadata.View, in *metapb.GetAttachmentRequest) (*metapb.Volume, block.VolumeID, *metapb.Attachment, error) {
	vol, id, err := find(v, in.GetVolume())
	if err != nil {
		return nil, id, nil, err
	}
	a := v.Attachment(id, in.GetNode())
	switch {
	case a == nil:
		err = fmt.Errorf("%w: volume %q is not attached to node %q", block.ErrNotFound, vol.GetName(), in.GetNode())
	case a.GetRevoking():
		err = fmt.Errorf("%w: volume %q is being detached from node %q", block.ErrNotFound, vol.GetName(), in.GetNode())
	}
	return vol, id, a, err
}

// endpoints are the nodes to connect to, the best first: the one that serves
// the volume, else one that has its data, else one of its rack, else the
// emptiest. Nodes that cannot serve, for want of a disk or because they are in
// another rack than a volume may lie in, are left out.
func (s *Service) endpoints(v *metadata.View, id block.VolumeID) []*metapb.Endpoint {
	room := map[string]int64{}
	for _, d := range s.nodes.disks(v) {
		if d.GetNode() != "" && d.GetState() != metapb.Disk_FAILED {
			room[d.GetNode()] += d.GetAvailable()
		}
	}
	holders, vol := holders(v, id), v.Volume(id)
	rank := func(n *metapb.Node) int {
		switch {
		case n.GetName() == v.Grant(id).GetNode() && (holders[n.GetName()] || s.nodes.up(n.GetName())):
			return 0
		case holders[n.GetName()]:
			return 1
		case s.nodes.up(n.GetName()) && n.GetRack() == vol.GetRack():
			return 2
		case s.nodes.up(n.GetName()):
			return 3
		}
		return 4
	}
	var list []*metapb.Node
	for _, n := range v.Nodes() {
		_, hasDisk := room[n.GetName()]
		if hasDisk && (holders[n.GetName()] || len(holders) == 0 && mayLie(vol, n)) || rank(n) == 0 {
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

// mayLie reports whether a copy of a volume may lie on a node.
func mayLie(v *metapb.Volume, n *metapb.Node) bool {
	return v.GetPolicy().GetAccess() != metapb.Policy_SAME_RACK || v.GetRack() == "" || n.GetRack() == v.GetRack()
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
// absent volume or attachment is detached. It acts on the attachments found at
// its start, or on the one that the call names, and on no newer one.
func (s *Service) Detach(ctx context.Context, in *metapb.DetachRequest) (*metapb.DetachResponse, error) {
	if in.GetNode() != "" {
		if err := metadata.ValidateNodeName(in.GetNode()); err != nil {
			return nil, fmt.Errorf("node: %w", err)
		}
	}
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	id, err := resolve(v, in.GetVolume())
	if err != nil || id.IsZero() {
		return &metapb.DetachResponse{}, err
	}
	name := v.Volume(id).GetName()
	if err := s.settle(ctx, id); err != nil {
		return nil, err
	}
	var list []*metapb.Attachment
	for _, a := range s.machine.View().Attachments(id) {
		if (in.GetNode() == "" || a.GetNode() == in.GetNode()) && (in.GetAttachmentId() == "" || a.GetId() == in.GetAttachmentId()) {
			list = append(list, a)
		}
	}
	return &metapb.DetachResponse{}, s.detach(ctx, id, name, list)
}

// detach ends attachments of a volume.
func (s *Service) detach(ctx context.Context, id block.VolumeID, name string, list []*metapb.Attachment) error {
	for _, a := range list {
		_, err := s.propose(ctx, &metapb.Command{Kind: &metapb.Command_DetachVolume{DetachVolume: &metapb.DetachVolume{
			VolumeId: id.String(), AttachmentId: a.GetId(),
		}}})
		if err != nil {
			return err
		}
	}
	wait, cancel := s.pending(ctx)
	defer cancel()
	left := func(v *metadata.View) (nodes []string) {
		for _, a := range v.Attachments(id) {
			if slices.ContainsFunc(list, func(b *metapb.Attachment) bool { return b.GetId() == a.GetId() }) {
				nodes = append(nodes, fmt.Sprintf("%q", a.GetNode()))
			}
		}
		return nodes
	}
	v, err := s.machine.until(wait, func(v *metadata.View) bool { return left(v) == nil })
	if err != nil {
		return s.unconfirmed(v, id, fmt.Sprintf("volume %q is to be detached from node %s", name, strings.Join(left(v), ", ")), err)
	}
	return nil
}

// underway are the attaches on their way through the log, by volume. A caller
// may have given up on one: a detach that finds nothing attached must not
// answer before it is known that nothing will be (B151). What another leader
// had accepted is settled before this one reads.
type underway struct {
	mu sync.Mutex
	of map[block.VolumeID][]chan struct{}
}

func newUnderway() *underway { return &underway{of: map[block.VolumeID][]chan struct{}{}} }

// begin counts an attach until the returned function is called.
func (u *underway) begin(id block.VolumeID) (end func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	over := make(chan struct{})
	u.of[id] = append(u.of[id], over)
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		close(over)
		if u.of[id] = slices.DeleteFunc(u.of[id], func(c chan struct{}) bool { return c == over }); len(u.of[id]) == 0 {
			delete(u.of, id)
		}
	}
}

// now are the attaches of a volume that have begun, each closed when it is over.
func (u *underway) now(id block.VolumeID) []chan struct{} {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.of[id])
}

// settle returns when all attaches of a volume that had begun are over.
func (s *Service) settle(ctx context.Context, id block.VolumeID) error {
	list := s.attaches.now(id)
	if list == nil {
		return nil
	}
	wait, cancel := s.pending(ctx)
	defer cancel()
	for _, over := range list {
		select {
		case <-over:
		case <-wait.Done():
			return fmt.Errorf("%w: an attach of volume %s is on its way through the metadata log: try again", block.ErrUnavailable, id)
		}
	}
	return nil
}

// applyAttach is apply for an attach. Once it is in the log it goes on without
// its caller, so that its end is known.
func (s *Service) applyAttach(ctx context.Context, a *metapb.Attachment, command []byte) (r metadata.Result, index uint64, err error) {
	id, err := metapb.ParseVolumeID("volume id", a.GetVolumeId())
	if err != nil {
		return r, 0, err
	}
	end := s.attaches.begin(id)
	if err := ctx.Err(); err != nil { // looked at after begin: whoever comes later waits, or this does not happen
		end()
		return r, 0, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	done := make(chan struct{})
	var out struct {
		r     metadata.Result
		index uint64
		err   error
	}
	s.wait.Go(func() {
		defer close(done)
		defer end()
		if out.err = s.config.Faults.Hit("metadata.log", a.GetVolumeId()); out.err == nil {
			out.r, out.index, out.err = s.apply(s.life, command)
		}
	})
	select {
	case <-done:
		return out.r, out.index, out.err
	case <-ctx.Done():
		return r, 0, fmt.Errorf("%w: the command was accepted, then: %w", block.ErrUnknown, ctx.Err())
	}
}
