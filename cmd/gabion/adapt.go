package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/image"
	"github.com/gabion-storage/gabion/server/primary"
	"github.com/gabion-storage/gabion/server/replica"
)

// The two halves meet here and nowhere else: primaries ask for what they need
// of the metadata service and of the disks in their own words.

// metadataOf is primary.Metadata and replica.Registry over the metadata API,
// on behalf of one server process.
type metadataOf struct {
	api     metapb.MetadataClient
	node    string
	process block.UUID
}

func (m metadataOf) Grant(ctx context.Context, id block.VolumeID) (primary.Map, error) {
	r, err := m.api.Grant(ctx, &metapb.GrantRequest{VolumeId: id.String(), Node: m.node, Process: m.process.String()})
	if err != nil {
		return primary.Map{}, err
	}
	return mapFrom(r)
}

func (m metadataOf) ReadMap(ctx context.Context, id block.VolumeID) (primary.Map, error) {
	r, err := m.api.ReadMap(ctx, &metapb.ReadMapRequest{VolumeId: id.String()})
	if err != nil {
		return primary.Map{}, err
	}
	return mapFrom(r)
}

func (m metadataOf) PlaceRuns(ctx context.Context, id block.VolumeID, g block.Generation, runs []block.RunIndex) ([]primary.Run, error) {
	req := &metapb.PlaceRunsRequest{VolumeId: id.String(), Generation: uint64(g)}
	for _, r := range runs {
		req.Runs = append(req.Runs, uint32(r))
	}
	r, err := m.api.PlaceRuns(ctx, req)
	if err != nil {
		return nil, err
	}
	return runsFrom(r.Runs)
}

func (m metadataOf) Propose(ctx context.Context, f primary.Fence, c primary.Command) (block.Version, error) {
	req := &metapb.ProposeRequest{Fence: &metapb.Fence{
		VolumeId: f.Volume.String(), Generation: uint64(f.Generation), Version: uint64(f.Version),
	}}
	switch c := c.(type) {
	case primary.Takeover:
		req.Command = &metapb.ProposeRequest_Takeover{Takeover: &metapb.Takeover{Members: membersTo(c.Members), RaiseCacheEpoch: c.RaiseCacheEpoch}}
	case primary.CommitRuns:
		req.Command = &metapb.ProposeRequest_CommitRuns{CommitRuns: &metapb.CommitRuns{Runs: runsTo(c.Runs), Members: membersTo(c.Members)}}
	case primary.ConfirmSize:
		req.Command = &metapb.ProposeRequest_ConfirmSize{ConfirmSize: &metapb.ConfirmSize{Size: c.Size}}
	case primary.ConfirmDetach:
		req.Command = &metapb.ProposeRequest_ConfirmDetach{ConfirmDetach: &metapb.ConfirmDetach{AttachmentId: c.Attachment.String()}}
	default:
		panic(fmt.Sprintf("a primary's command of type %T has no form in the metadata API", c))
	}
	r, err := m.api.Propose(ctx, req)
	if err != nil {
		return 0, err
	}
	return block.Version(r.Version), nil
}

func (m metadataOf) ReportEvent(ctx context.Context, e primary.Event) error {
	ev := &metapb.Event{Type: e.Type, VolumeId: e.Volume.String(), Node: m.node, Message: sentence(e.Message)}
	if !e.Disk.IsZero() {
		ev.DiskId = e.Disk.String()
	}
	_, err := m.api.ReportEvent(ctx, &metapb.ReportEventRequest{Event: ev})
	return err
}

// Fate implements replica.Registry.
func (m metadataOf) Fate(ctx context.Context, cluster block.ClusterID, id block.VolumeID) (replica.Fate, error) {
	r, err := m.api.LookupVolume(ctx, &metapb.LookupVolumeRequest{VolumeId: id.String()})
	if err != nil {
		return replica.Unknown, err
	}
	if r.ClusterId != cluster.String() {
		return replica.Unknown, fmt.Errorf("%w: the metadata service is cluster %s, the disks belong to %s",
			block.ErrPrecondition, r.ClusterId, cluster)
	}
	switch r.State {
	case metapb.LookupVolumeResponse_LIVE:
		return replica.Live, nil
	case metapb.LookupVolumeResponse_TOMBSTONE:
		return replica.Tombstone, nil
	}
	return replica.Unknown, nil
}

// copiesOf is primary.Replicas over the disks of this node.
type copiesOf struct{ store *replica.Store }

func (c copiesOf) Member(_ context.Context, v primary.VolumeInfo, disk block.DiskID) (primary.Member, error) {
	cp, err := c.store.Copy(image.Description{
		ID: v.ID, Name: v.Name, Size: v.Size, Version: v.Version,
		Policy: map[string]string{
			"replicas":    strconv.Itoa(v.Replicas),
			"block-size":  strconv.FormatInt(v.BlockSize, 10),
			"durability":  choose(v.WriteThrough, "write-through", "flush"),
			"on-full":     choose(v.WaitWhenFull, "wait", "error"),
			"cache-epoch": strconv.FormatUint(uint64(v.CacheEpoch), 10),
		},
	}, disk)
	if err != nil {
		return nil, err
	}
	return member{cp}, nil
}

func (c copiesOf) CheckUnwritten(ctx context.Context, id block.VolumeID, members []primary.Membership) error {
	except := make([]block.DiskID, 0, len(members))
	for _, m := range members {
		except = append(except, m.Disk)
	}
	checked := make(chan error, 1)
	go func() { checked <- c.store.CheckUnwritten(id, except) }() // a disk may hang
	select {
	case err := <-checked:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: looking for volume %s on the disks here: %w", block.ErrUnavailable, id, ctx.Err())
	}
}

// member is a local copy in the primary's words.
type member struct{ *replica.Copy }

func (m member) Seal(ctx context.Context, g block.Generation, size int64, born []block.RunIndex) (primary.Sealed, error) {
	s, err := m.Copy.Seal(ctx, g, size, born)
	return primary.Sealed(s), err
}

func choose(b bool, yes, no string) string {
	if b {
		return yes
	}
	return no
}

func mapFrom(m *metapb.VolumeMap) (primary.Map, error) {
	v, p := m.GetVolume(), m.GetVolume().GetPolicy()
	id, err := metapb.ParseVolumeID("volume.id", v.GetId())
	if err != nil {
		return primary.Map{}, err
	}
	out := primary.Map{
		Index: m.Index,
		Volume: primary.VolumeInfo{
			ID: id, Name: v.Name, Size: v.Size, WantedSize: v.WantedSize,
			WriteThrough: p.GetDurability() == metapb.Policy_WRITE_THROUGH,
			WaitWhenFull: p.GetOnFull() != metapb.Policy_ERROR,
			BlockSize:    int64(p.GetBlockSize()), Replicas: int(p.GetReplicas()),
			Version: block.Version(v.Version), CacheEpoch: block.CacheEpoch(v.CacheEpoch),
		},
		Generation: block.Generation(m.Grant.GetGeneration()),
		Node:       m.Grant.GetNode(),
		Process:    m.Grant.GetProcess(),
		Opened:     m.Grant.GetOpened(),
	}
	if out.Runs, err = runsFrom(m.Runs); err != nil {
		return primary.Map{}, err
	}
	for _, mb := range m.Members {
		x, err := memberFrom(mb)
		if err != nil {
			return primary.Map{}, err
		}
		out.Members = append(out.Members, x)
	}
	for _, a := range m.Attachments {
		id, err := block.ParseUUID(a.Id)
		if err != nil {
			return primary.Map{}, err
		}
		x := primary.Attachment{ID: block.AttachmentID{UUID: id}, Node: a.Node, ReadOnly: a.ReadOnly, Revoking: a.Revoking}
		if copy(x.TokenDigest[:], a.TokenDigest) != len(x.TokenDigest) {
			return primary.Map{}, fmt.Errorf("%w: attachment %s has a token digest of %d bytes", block.ErrCorrupt, a.Id, len(a.TokenDigest))
		}
		out.Attachments = append(out.Attachments, x)
	}
	return out, nil
}

func runsFrom(runs []*metapb.Run) ([]primary.Run, error) {
	out := make([]primary.Run, 0, len(runs))
	for _, r := range runs {
		x := primary.Run{Index: block.RunIndex(r.Index)}
		for _, d := range r.Disks {
			id, err := block.ParseUUID(d)
			if err != nil {
				return nil, err
			}
			x.Disks = append(x.Disks, block.DiskID{UUID: id})
		}
		out = append(out, x)
	}
	return out, nil
}

func runsTo(runs []primary.Run) []*metapb.Run {
	out := make([]*metapb.Run, 0, len(runs))
	for _, r := range runs {
		x := &metapb.Run{Index: uint32(r.Index)}
		for _, d := range r.Disks {
			x.Disks = append(x.Disks, d.String())
		}
		out = append(out, x)
	}
	return out
}

func memberFrom(m *metapb.Member) (primary.Membership, error) {
	id, err := block.ParseUUID(m.DiskId)
	if err != nil {
		return primary.Membership{}, err
	}
	inc, err := incarnationFrom(m.Incarnation)
	return primary.Membership{
		Disk: block.DiskID{UUID: id}, In: m.State == metapb.Member_IN,
		Incarnation: inc, Admitted: block.Generation(m.AdmittedGeneration),
	}, err
}

func membersTo(members []primary.Membership) []*metapb.Member {
	out := make([]*metapb.Member, 0, len(members))
	for _, m := range members {
		out = append(out, memberTo(m))
	}
	return out
}

func memberTo(m primary.Membership) *metapb.Member {
	state := metapb.Member_OUT
	if m.In {
		state = metapb.Member_IN
	}
	return &metapb.Member{
		DiskId: m.Disk.String(), State: state,
		Incarnation: incarnationTo(m.Incarnation), AdmittedGeneration: uint64(m.Admitted),
	}
}

func incarnationTo(i block.Incarnation) *metapb.Incarnation {
	return &metapb.Incarnation{Boot: i.Boot.String(), Process: i.Process.String(), Instance: i.Instance.String()}
}

func incarnationFrom(i *metapb.Incarnation) (out block.Incarnation, err error) {
	if i == nil {
		return out, nil
	}
	for _, f := range []struct {
		to   *block.UUID
		from string
	}{{&out.Boot, i.Boot}, {&out.Process, i.Process}, {&out.Instance, i.Instance}} {
		if *f.to, err = block.ParseUUID(f.from); err != nil {
			return out, err
		}
	}
	return out, nil
}
