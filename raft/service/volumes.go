package service

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

// CreateVolume implements the API. A name that is there already with the same
// size and policy is that volume.
func (s *Service) CreateVolume(ctx context.Context, in *metapb.CreateVolumeRequest) (*metapb.Volume, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	c := &metapb.CreateVolume{
		Id: block.NewUUID().String(), Name: in.GetName(), Size: in.GetSize(), Policy: fill(in.GetPolicy(), v.Cluster()),
	}
	if err := s.mayHave(c.Policy); err != nil && v.VolumeByName(c.Name) == nil { // else it differs from what is there, or is it
		return nil, fmt.Errorf("volume %q: %w", c.Name, err)
	}
	wish, err := racksOf(in.GetRacks())
	if err != nil {
		return nil, err
	}
	if err := s.config.Faults.Hit("metadata.create", in.GetName()); err != nil {
		return nil, err
	}
	for {
		if c.Rack, err = s.rackFor(v, c, wish); err != nil {
			return nil, fmt.Errorf("volume %q: %w", c.Name, err)
		}
		r, index, err := s.commit(ctx, &metapb.Command{Kind: &metapb.Command_CreateVolume{CreateVolume: c}})
		if err == nil {
			return value[*metapb.Volume](r)
		}
		// Refused by what came between the choice of the rack and the log, or the look ahead: another rack
		// may do. Each round means that somebody else's command went through, so this comes to an end.
		met := errors.Is(err, block.ErrNoSpace) || errors.Is(err, block.ErrExists)
		chosen := v.Index()
		v = s.machine.View()
		if index == 0 && v.Index() == chosen || !met || c.Rack == "" {
			return nil, err
		}
	}
}

// mayHave refuses a policy that primaries cannot keep.
func (s *Service) mayHave(p *metapb.Policy) error {
	if n := p.GetReplicas(); s.config.LocalCopies && n > 1 && n <= placement.MaxReplicas {
		return fmt.Errorf("%w: %d replicas were asked for, and this version keeps one: use --replicas 1", block.ErrPrecondition, n)
	}
	return nil
}

// maxRacks bounds a wish.
const maxRacks = 1024

// racksOf is a wish without repetitions.
func racksOf(racks []string) ([]string, error) {
	if len(racks) > maxRacks {
		return nil, fmt.Errorf("%w: %d racks; at most %d can be asked for", block.ErrTooLarge, len(racks), maxRacks)
	}
	var wish []string
	for _, rack := range racks {
		if err := metadata.ValidateRack(rack); err != nil {
			return nil, err
		}
		if !slices.Contains(wish, rack) {
			wish = append(wish, rack)
		}
	}
	return wish, nil
}

// rackFor chooses the rack of a volume that is to be created, empty for none.
// What is wrong with the rest of the command is left to the state machine.
func (s *Service) rackFor(v *metadata.View, c *metapb.CreateVolume, wish []string) (string, error) {
	if metadata.ValidatePolicy(c.GetPolicy()) != nil || block.ValidateSize(c.GetSize()) != nil {
		return "", nil
	}
	oneRack := c.GetPolicy().GetAccess() == metapb.Policy_SAME_RACK
	old := v.VolumeByName(c.GetName())
	switch {
	case old != nil && oneRack && len(wish) > 0 && !slices.Contains(wish, old.GetRack()):
		return wish[0], nil // refused, naming both
	case old != nil:
		return old.GetRack(), nil
	case v.Level() < 2 && len(wish) > 0 && oneRack:
		return wish[0], nil // refused until all servers know of racks
	case v.Level() < 2:
		return "", nil
	}
	if len(wish) > 0 && !slices.ContainsFunc(wish, v.KnowsRack) {
		return "", fmt.Errorf("%w: no node and no consumer is in %s: ask for a rack of the cluster", block.ErrNoSpace, rackNames(wish))
	}
	cell := placement.Cell{Nodes: s.nodes.all(v), Disks: v.Disks(), Overcommit: v.Cluster().GetOvercommit()}
	return cell.PickRack(v.Promises(), c.GetPolicy(), c.GetSize(), wish)
}

func rackNames(wish []string) string {
	if len(wish) == 1 {
		return fmt.Sprintf("rack %q", wish[0])
	}
	return fmt.Sprintf("any of the %d racks asked for, %q the first", len(wish), wish[0])
}

// value is a command's result as the type that the command has.
func value[T proto.Message](r metadata.Result) (T, error) {
	v, ok := r.Value.(T)
	if !ok {
		return v, fmt.Errorf("%w: the command's result is a %T", metapb.ErrInternal, r.Value)
	}
	return v, nil
}

// fill takes defaults for what a policy leaves open.
func fill(p *metapb.Policy, cluster *metapb.InitCluster) *metapb.Policy {
	q := &metapb.Policy{}
	if p != nil {
		q = proto.CloneOf(p)
	}
	setDefault(&q.Replicas, cluster.GetDefaultReplicas())
	setDefault(&q.Spread, metapb.Policy_RACK)
	setDefault(&q.Access, metapb.Policy_CLUSTER)
	setDefault(&q.OnFull, metapb.Policy_WAIT)
	setDefault(&q.BlockSize, 4096)
	if q.Replicas == 1 { // nothing else has what one disk loses
		setDefault(&q.Durability, metapb.Policy_WRITE_THROUGH)
	}
	setDefault(&q.Durability, metapb.Policy_FLUSH)
	return q
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// GetVolume implements the API. It waits for attaches on their way through the
// log: what it does not show as attached will not be, unless somebody attaches
// anew. Clients detach what they found by it, and conclude from nothing found.
func (s *Service) GetVolume(ctx context.Context, in *metapb.GetVolumeRequest) (*metapb.GetVolumeResponse, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	_, id, err := find(v, in.GetVolume())
	if err != nil {
		return nil, err
	}
	if err := s.settle(ctx, id); err != nil {
		return nil, err
	}
	v = s.machine.View()
	vol, _, err := findID(v, id.String())
	if err != nil {
		return nil, err
	}
	out := &metapb.GetVolumeResponse{Volume: vol, Grant: v.Grant(id), BornExtents: v.BornExtents(id), Members: v.Members(id)}
	out.Attachments = shown(v.Attachments(id))
	out.Conditions = s.volumeConditions(v, vol, id)
	return out, nil
}

// shown are attachments without their tokens.
func shown(list []*metapb.Attachment) []*metapb.Attachment {
	var out []*metapb.Attachment
	for _, a := range list {
		out = append(out, metadata.WithoutToken(a))
	}
	return out
}

// find resolves a reference in a state.
func find(v *metadata.View, ref *metapb.VolumeRef) (*metapb.Volume, block.VolumeID, error) {
	switch {
	case (ref.GetId() == "") == (ref.GetName() == ""):
		return nil, block.VolumeID{}, fmt.Errorf("%w: a volume is named by its id or its name, one of them", block.ErrInvalid)
	case ref.GetId() != "":
		return findID(v, ref.GetId())
	}
	vol := v.VolumeByName(ref.GetName())
	if vol == nil {
		return nil, block.VolumeID{}, fmt.Errorf("%w: there is no volume %q", block.ErrNotFound, ref.GetName())
	}
	id, err := metapb.ParseVolumeID("volume", vol.GetId())
	return vol, id, err
}

// findID resolves an id. The error of a deleted one has the detail "tombstone".
func findID(v *metadata.View, text string) (*metapb.Volume, block.VolumeID, error) {
	id, err := metapb.ParseVolumeID("volume id", text)
	if err != nil {
		return nil, id, err
	}
	if vol := v.Volume(id); vol != nil {
		return vol, id, nil
	}
	if at, ok := v.Tombstone(id); ok {
		return nil, id, metapb.WithDetail(fmt.Errorf("%w: volume %s was deleted at index %d", block.ErrNotFound, id, at), "tombstone", id.String())
	}
	return nil, id, fmt.Errorf("%w: there is no volume %s", block.ErrNotFound, id)
}

const (
	defaultPage = 500
	maxPage     = 5000
)

// ListVolumes implements the API.
func (s *Service) ListVolumes(ctx context.Context, in *metapb.ListVolumesRequest) (*metapb.ListVolumesResponse, error) {
	if in.GetMaxEntries() < 0 {
		return nil, fmt.Errorf("%w: max_entries is %d; it takes 0 (the server's choice) or more", block.ErrInvalid, in.GetMaxEntries())
	}
	after, err := parseToken(in.GetStartingToken())
	if err != nil {
		return nil, err
	}
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	limit := min(int(in.GetMaxEntries()), maxPage)
	if limit == 0 {
		limit = defaultPage
	}
	page := v.Volumes(after, limit+1)
	out := &metapb.ListVolumesResponse{Volumes: page}
	if len(page) > limit {
		out.Volumes = page[:limit]
		if out.NextToken, err = newPageToken(page[limit-1]); err != nil {
			return nil, err
		}
	}
	for _, vol := range out.Volumes {
		id, err := metapb.ParseVolumeID("volume id", vol.GetId())
		if err != nil {
			return nil, err
		}
		out.Attachments = append(out.Attachments, shown(v.Attachments(id))...)
	}
	return out, nil
}

// A page token is the id and the name of the last volume seen, so that it
// stays right whatever comes and goes.

func newPageToken(last *metapb.Volume) (string, error) {
	id, err := block.ParseUUID(last.GetId())
	return base64.RawURLEncoding.EncodeToString(append(id[:], last.GetName()...)), err
}

func parseToken(token string) (metadata.Position, error) {
	if token == "" {
		return metadata.Position{}, nil
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err != nil || len(b) <= len(block.UUID{}) || metadata.ValidateName(string(b[len(block.UUID{}):])) != nil {
		return metadata.Position{}, fmt.Errorf("%w: starting_token %.40q was not given out by this service: start from the first page", metapb.ErrPageToken, token)
	}
	return metadata.Position{ID: block.VolumeID{UUID: block.UUID(b[:16])}, Name: string(b[16:])}, nil
}

// ResizeVolume implements the API: the intent is committed, then the primary's
// confirmation is waited for.
func (s *Service) ResizeVolume(ctx context.Context, in *metapb.ResizeVolumeRequest) (*metapb.Volume, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	vol, id, err := find(v, in.GetVolume())
	if err != nil {
		return nil, err
	}
	c := &metapb.ResizeVolume{Id: id.String(), Size: in.GetSize()}
	if _, err := s.propose(ctx, &metapb.Command{Kind: &metapb.Command_ResizeVolume{ResizeVolume: c}}); err != nil {
		return nil, err
	}
	wait, cancel := s.pending(ctx)
	defer cancel()
	v, err = s.machine.until(wait, func(v *metadata.View) bool { return v.Volume(id) == nil || v.Volume(id).GetSize() >= in.GetSize() })
	if err != nil {
		return nil, s.unconfirmed(v, id, fmt.Sprintf("volume %q is to grow to %d bytes", vol.GetName(), in.GetSize()), err)
	}
	if vol, _, err = findID(v, id.String()); err != nil {
		return nil, err
	}
	return vol, nil
}

// unconfirmed says whose confirmation is missing. The intent stands.
func (s *Service) unconfirmed(v *metadata.View, id block.VolumeID, what string, err error) error {
	node := v.Grant(id).GetNode()
	state := "which is up; try again, or look at its log"
	if !s.nodes.up(node) {
		state = "which is down; it is done when that node is back"
	}
	return fmt.Errorf("%w: %s, but node %q has not confirmed it yet, %s: %w", block.ErrUnavailable, what, node, state, err)
}

// DeleteVolume implements the API. An absent volume is deleted.
func (s *Service) DeleteVolume(ctx context.Context, in *metapb.DeleteVolumeRequest) (*metapb.DeleteVolumeResponse, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	id, err := resolve(v, in.GetVolume())
	if err != nil || id.IsZero() {
		return &metapb.DeleteVolumeResponse{}, err
	}
	_, err = s.propose(ctx, &metapb.Command{Kind: &metapb.Command_DeleteVolume{DeleteVolume: &metapb.DeleteVolume{Id: id.String()}}})
	if err != nil {
		return nil, err
	}
	return &metapb.DeleteVolumeResponse{}, nil
}

// resolve is find where an absent volume is no error: the id is zero then.
func resolve(v *metadata.View, ref *metapb.VolumeRef) (block.VolumeID, error) {
	vol, id, err := find(v, ref)
	if vol == nil && isNotFound(err) {
		return block.VolumeID{}, nil
	}
	return id, err
}
