package adapt

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/gabion-storage/gabion/csi/controller"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Volumes is controller.VolumeService over the metadata API.
type Volumes struct{ API metapb.MetadataClient }

var _ controller.VolumeService = Volumes{}

// CreateVolume implements controller.VolumeService.
func (v Volumes) CreateVolume(ctx context.Context, w controller.Wish) (controller.Volume, error) {
	r, err := v.API.CreateVolume(ctx, &metapb.CreateVolumeRequest{Name: w.Name, Size: w.Size, Policy: policyTo(w.Policy), Racks: w.Racks})
	if err != nil {
		return controller.Volume{}, err
	}
	return volumeFrom(r)
}

// VolumeByName implements controller.VolumeService.
func (v Volumes) VolumeByName(ctx context.Context, name string) (controller.Volume, error) {
	return v.get(ctx, &metapb.VolumeRef{Name: name})
}

// VolumeByID implements controller.VolumeService.
func (v Volumes) VolumeByID(ctx context.Context, id block.VolumeID) (controller.Volume, error) {
	return v.get(ctx, byID(id))
}

func (v Volumes) get(ctx context.Context, ref *metapb.VolumeRef) (controller.Volume, error) {
	r, err := v.API.GetVolume(ctx, &metapb.GetVolumeRequest{Volume: ref})
	if err != nil {
		return controller.Volume{}, err
	}
	out, err := volumeFrom(r.GetVolume())
	out.Nodes = nodesOf(r.GetAttachments(), r.GetVolume().GetId())
	for _, c := range r.GetConditions() {
		out.Trouble = append(out.Trouble, troubleFrom(c))
	}
	return out, err
}

// ListVolumes implements controller.VolumeService. What is wrong is asked once for all.
func (v Volumes) ListVolumes(ctx context.Context, limit int, token string) (controller.Page, error) {
	r, err := v.API.ListVolumes(ctx, &metapb.ListVolumesRequest{MaxEntries: int32(min(limit, math.MaxInt32)), StartingToken: token})
	if errors.Is(err, metapb.ErrPageToken) {
		return controller.Page{}, fmt.Errorf("%w: %w", block.ErrStale, err)
	}
	if err != nil {
		return controller.Page{}, err
	}
	status, err := v.API.GetStatus(ctx, &metapb.GetStatusRequest{})
	if err != nil {
		return controller.Page{}, err
	}
	trouble := map[string][]controller.Trouble{}
	for _, c := range status.GetConditions() {
		trouble[c.GetObject()] = append(trouble[c.GetObject()], troubleFrom(c))
	}
	page := controller.Page{Next: r.GetNextToken()}
	for _, vol := range r.GetVolumes() {
		out, err := volumeFrom(vol)
		if err != nil {
			return controller.Page{}, err
		}
		out.Nodes = nodesOf(r.GetAttachments(), vol.GetId())
		out.Trouble = trouble["volume "+vol.GetName()]
		page.Volumes = append(page.Volumes, out)
	}
	return page, nil
}

// ResizeVolume implements controller.VolumeService.
func (v Volumes) ResizeVolume(ctx context.Context, id block.VolumeID, size int64) (controller.Volume, error) {
	r, err := v.API.ResizeVolume(ctx, &metapb.ResizeVolumeRequest{Volume: byID(id), Size: size})
	if err != nil {
		return controller.Volume{}, err
	}
	return volumeFrom(r)
}

// DeleteVolume implements controller.VolumeService.
func (v Volumes) DeleteVolume(ctx context.Context, id block.VolumeID) error {
	_, err := v.API.DeleteVolume(ctx, &metapb.DeleteVolumeRequest{Volume: byID(id)})
	return err
}

// Attach implements controller.VolumeService. The token stays behind.
func (v Volumes) Attach(ctx context.Context, id block.VolumeID, node string, t controller.Terms) (controller.Attachment, error) {
	r, err := v.API.Attach(ctx, &metapb.AttachRequest{Volume: byID(id), Node: node, ReadOnly: t.ReadOnly, Alone: t.Alone, RecordsFormat: true})
	if err != nil {
		return controller.Attachment{}, err
	}
	a, err := attachmentID(r.GetAttachment())
	return controller.Attachment{ID: a, ReadOnly: r.GetAttachment().GetReadOnly()}, err
}

// Detach implements controller.VolumeService.
func (v Volumes) Detach(ctx context.Context, id block.VolumeID, node string) error {
	_, err := v.API.Detach(ctx, &metapb.DetachRequest{Volume: byID(id), Node: node})
	return err
}

// Consumer implements controller.VolumeService.
func (v Volumes) Consumer(ctx context.Context, name string) (controller.Consumer, error) {
	r, err := v.API.GetConsumer(ctx, &metapb.GetConsumerRequest{Name: name})
	if err != nil {
		return controller.Consumer{}, err
	}
	return controller.Consumer{Name: r.GetName(), Rack: r.GetRack()}, nil
}

// Capacity implements controller.VolumeService.
func (v Volumes) Capacity(ctx context.Context, p controller.Policy, rack string) (controller.Capacity, error) {
	r, err := v.API.GetCapacity(ctx, &metapb.GetCapacityRequest{Rack: rack, Replicas: p.Replicas, Policy: policyTo(p)})
	if err != nil {
		return controller.Capacity{}, err
	}
	return controller.Capacity{Available: r.GetAvailable(), Largest: r.GetMaximumVolumeSize()}, nil
}

func byID(id block.VolumeID) *metapb.VolumeRef { return &metapb.VolumeRef{Id: id.String()} }

func volumeFrom(v *metapb.Volume) (controller.Volume, error) {
	id, err := metapb.ParseVolumeID("volume id", v.GetId())
	if err != nil {
		return controller.Volume{}, fmt.Errorf("%w: the metadata service's answer: %w", block.ErrCorrupt, err)
	}
	return controller.Volume{ID: id, Name: v.GetName(), Size: v.GetWantedSize(), Policy: policyFrom(v.GetPolicy()), Rack: v.GetRack()}, nil
}

func attachmentID(a *metapb.Attachment) (block.AttachmentID, error) {
	id, err := block.ParseUUID(a.GetId())
	if err != nil {
		return block.AttachmentID{}, fmt.Errorf("%w: the metadata service's answer: attachment: %w", block.ErrCorrupt, err)
	}
	return block.AttachmentID{UUID: id}, nil
}

// nodesOf are those that have the volume; one whose detach is under way still has.
func nodesOf(list []*metapb.Attachment, volume string) (nodes []string) {
	for _, a := range list {
		if a.GetVolumeId() == volume {
			nodes = append(nodes, a.GetNode())
		}
	}
	return nodes
}

func troubleFrom(c *metapb.Condition) controller.Trouble {
	t := controller.Trouble{Reason: "Impaired", Message: c.GetProblem() + " " + c.GetRemedy()}
	if c.GetSeverity() == metapb.Condition_ERROR {
		t.Severe, t.Reason = true, "NotServed"
	}
	return t
}

// The words of a policy on both sides.
var (
	spreads      = words[controller.Spread, metapb.Policy_Spread]{{controller.SpreadRack, metapb.Policy_RACK}, {controller.SpreadNode, metapb.Policy_NODE}}
	accesses     = words[controller.Access, metapb.Policy_Access]{{controller.AccessCell, metapb.Policy_CLUSTER}, {controller.AccessRack, metapb.Policy_SAME_RACK}}
	durabilities = words[controller.Durability, metapb.Policy_Durability]{{controller.Flush, metapb.Policy_FLUSH}, {controller.WriteThrough, metapb.Policy_WRITE_THROUGH}}
	onFulls      = words[controller.OnFull, metapb.Policy_OnFull]{{controller.OnFullWait, metapb.Policy_WAIT}, {controller.OnFullError, metapb.Policy_ERROR}}
)

// words pairs what both sides call the same; what is in no pair is the zero value of the other side.
type words[A, B comparable] []struct {
	ours   A
	theirs B
}

func (w words[A, B]) to(a A) (b B) {
	for _, pair := range w {
		if pair.ours == a {
			return pair.theirs
		}
	}
	return b
}

func (w words[A, B]) from(b B) (a A) {
	for _, pair := range w {
		if pair.theirs == b {
			return pair.ours
		}
	}
	return a
}

func policyTo(p controller.Policy) *metapb.Policy {
	return &metapb.Policy{
		Replicas: p.Replicas, Spread: spreads.to(p.Spread), Access: accesses.to(p.Access),
		Durability: durabilities.to(p.Durability), OnFull: onFulls.to(p.OnFull), BlockSize: p.BlockSize, FsType: p.FSType,
	}
}

func policyFrom(p *metapb.Policy) controller.Policy {
	return controller.Policy{
		Replicas: p.GetReplicas(), Spread: spreads.from(p.GetSpread()), Access: accesses.from(p.GetAccess()),
		Durability: durabilities.from(p.GetDurability()), OnFull: onFulls.from(p.GetOnFull()), BlockSize: p.GetBlockSize(), FSType: p.GetFsType(),
	}
}
