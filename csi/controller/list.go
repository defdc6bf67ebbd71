package controller

import (
	"context"
	"fmt"
	"strings"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

// ListVolumes implements the Controller service.
func (c *Controller) ListVolumes(ctx context.Context, in *csispec.ListVolumesRequest) (*csispec.ListVolumesResponse, error) {
	page, err := c.page(ctx, in.GetMaxEntries(), in.GetStartingToken())
	if err != nil {
		return nil, err
	}
	out := &csispec.ListVolumesResponse{NextToken: page.Next}
	for _, v := range page.Volumes {
		status := &csispec.ListVolumesResponse_VolumeStatus{PublishedNodeIds: v.Nodes}
		setCondition(status, v)
		out.Entries = append(out.Entries, &csispec.ListVolumesResponse_Entry{Volume: describe(v), Status: status})
	}
	return out, nil
}

func (c *Controller) page(ctx context.Context, limit int32, token string) (Page, error) {
	if limit < 0 {
		return Page{}, fmt.Errorf("%w: max_entries is %d; it takes 0 (the driver's choice) or more", block.ErrInvalid, limit)
	}
	return c.volumes.ListVolumes(ctx, int(limit), token)
}

func describe(v Volume) *csispec.Volume {
	return &csispec.Volume{VolumeId: v.ID.String(), CapacityBytes: v.Size, AccessibleTopology: topologyOf(v)}
}

// ControllerGetVolume implements the Controller service.
func (c *Controller) ControllerGetVolume(ctx context.Context, in *csispec.ControllerGetVolumeRequest) (*csispec.ControllerGetVolumeResponse, error) {
	v, err := c.find(ctx, in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	status := &csispec.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: v.Nodes}
	setCondition(status, v)
	return &csispec.ControllerGetVolumeResponse{Volume: describe(v), Status: status}, nil
}

// setCondition says in one sentence what health says in a list.
func setCondition(status proto.Message, v Volume) {
	var all []string
	for _, t := range v.Trouble {
		all = append(all, t.Message)
	}
	driver.SetCondition(status, len(all) > 0, strings.Join(all, " "))
}

func (c *Controller) find(ctx context.Context, id string) (Volume, error) {
	parsed, err := parseID(id)
	if err != nil {
		return Volume{}, err
	}
	return c.volumes.VolumeByID(ctx, parsed)
}

// ControllerGetVolumeHealth implements the Controller service.
func (c *Controller) ControllerGetVolumeHealth(ctx context.Context, in *csispec.ControllerGetVolumeHealthRequest) (*csispec.ControllerGetVolumeHealthResponse, error) {
	v, err := c.find(ctx, in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csispec.ControllerGetVolumeHealthResponse{VolumeHealth: health(v)}, nil
}

// ControllerListVolumeHealth implements the Controller service. A page may have
// fewer entries than it could, or none: it is a page of volumes of which those
// are told that something is wrong with.
func (c *Controller) ControllerListVolumeHealth(ctx context.Context, in *csispec.ControllerListVolumeHealthRequest) (*csispec.ControllerListVolumeHealthResponse, error) {
	out := &csispec.ControllerListVolumeHealthResponse{}
	for token := in.GetStartingToken(); ; token = out.NextToken {
		page, err := c.page(ctx, in.GetMaxEntries(), token)
		if err != nil {
			return nil, err
		}
		for _, v := range page.Volumes {
			if len(v.Trouble) > 0 {
				out.Entries = append(out.Entries, health(v))
			}
		}
		out.NextToken = page.Next
		if page.Next == "" || in.GetMaxEntries() > 0 { // without a limit the answer is all of them
			return out, nil
		}
	}
}

// health is what is wrong with a volume, each (status, reason) once, as the specification wants it.
func health(v Volume) *csispec.VolumeHealth {
	out := &csispec.VolumeHealth{VolumeId: v.ID.String()}
	seen := map[string]*csispec.VolumeHealth_VolumeHealthEntry{}
	for _, t := range v.Trouble {
		status := csispec.VolumeHealthErrorType_DEGRADED
		if t.Severe {
			status = csispec.VolumeHealthErrorType_INACCESSIBLE
		}
		key := status.String() + t.Reason
		if same := seen[key]; same != nil {
			same.Message += " " + t.Message
			continue
		}
		seen[key] = &csispec.VolumeHealth_VolumeHealthEntry{Status: status, Reason: t.Reason, Message: t.Message}
		out.HealthStatuses = append(out.HealthStatuses, seen[key])
	}
	return out
}

// GetCapacity implements the Controller service: what volumes with these
// parameters can still take, of a rack if the topology names one.
func (c *Controller) GetCapacity(ctx context.Context, in *csispec.GetCapacityRequest) (*csispec.GetCapacityResponse, error) {
	p, err := parse(in.GetParameters())
	if err != nil {
		return nil, err
	}
	if len(in.GetVolumeCapabilities()) > 0 && allSupported(in.GetVolumeCapabilities()) != nil {
		return &csispec.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}, nil // nothing can be made for them
	}
	segments := in.GetAccessibleTopology().GetSegments()
	rack, named := segments[driver.TopologyRack]
	var capacity Capacity
	if named || len(segments) == 0 || p.policy.Access != AccessRack { // else a place without a rack, for volumes that must lie in one
		if capacity, err = c.volumes.Capacity(ctx, p.policy, rack); err != nil {
			return nil, err
		}
	}
	return &csispec.GetCapacityResponse{
		AvailableCapacity: capacity.Available,
		MaximumVolumeSize: wrapperspb.Int64(capacity.Largest),
		MinimumVolumeSize: wrapperspb.Int64(minimum(in.GetVolumeCapabilities(), p.fsType)),
	}, nil
}
