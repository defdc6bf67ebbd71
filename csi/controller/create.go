package controller

import (
	"context"
	"errors"
	"fmt"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/server/block"
)

// CreateVolume implements the Controller service. It is idempotent by name.
func (c *Controller) CreateVolume(ctx context.Context, in *csispec.CreateVolumeRequest) (*csispec.CreateVolumeResponse, error) {
	wish, sizes, p, err := wishOf(in)
	if err != nil {
		return nil, err
	}
	v, err := c.create(ctx, wish, sizes)
	if err != nil {
		return nil, err
	}
	return &csispec.CreateVolumeResponse{Volume: &csispec.Volume{
		VolumeId: v.ID.String(), CapacityBytes: v.Size, VolumeContext: p.context(), AccessibleTopology: topologyOf(v),
	}}, nil
}

// wishOf checks a request as far as that is possible without asking anybody.
func wishOf(in *csispec.CreateVolumeRequest) (w Wish, s span, p parameters, err error) {
	switch {
	case in.GetName() == "":
		return w, s, p, fmt.Errorf("%w: the request names no volume: name is empty", block.ErrInvalid)
	case in.GetVolumeContentSource() != nil:
		return w, s, p, fmt.Errorf("%w: this version makes no volumes from snapshots or from other volumes: create an empty one", block.ErrInvalid)
	case len(in.GetMutableParameters()) > 0:
		return w, s, p, fmt.Errorf("%w: this version has no mutable parameters: do without a VolumeAttributesClass", block.ErrInvalid)
	}
	if err := allSupported(in.GetVolumeCapabilities()); err != nil {
		return w, s, p, err
	}
	if p, err = parse(in.GetParameters()); err != nil {
		return w, s, p, err
	}
	if err := p.agree(in.GetVolumeCapabilities()); err != nil {
		return w, s, p, err
	}
	if s, err = spanOf(in.GetCapacityRange()); err != nil {
		return w, s, p, err
	}
	w = Wish{Name: in.GetName(), Policy: p.policy}
	w.Policy.FSType = p.formats(in.GetVolumeCapabilities())
	if w.Size, err = s.pick(minimum(in.GetVolumeCapabilities(), p.fsType)); err != nil {
		return w, s, p, err
	}
	w.Racks, err = racksOf(in.GetAccessibilityRequirements(), p.policy.Access)
	return w, s, p, err
}

// create makes the volume. One that is there with another size within the range,
// because it has grown or was asked for by another range, is asked for again with
// its own: whether all else agrees, the service says.
func (c *Controller) create(ctx context.Context, w Wish, s span) (Volume, error) {
	v, err := c.volumes.CreateVolume(ctx, w)
	if !errors.Is(err, block.ErrExists) {
		return v, err
	}
	is, lookErr := c.volumes.VolumeByName(ctx, w.Name)
	if lookErr != nil || is.Size == w.Size || !s.has(is.Size) {
		return v, err
	}
	w.Size = is.Size
	return c.volumes.CreateVolume(ctx, w)
}

// DeleteVolume implements the Controller service. What is not there is deleted.
func (c *Controller) DeleteVolume(ctx context.Context, in *csispec.DeleteVolumeRequest) (*csispec.DeleteVolumeResponse, error) {
	id, err := parseID(in.GetVolumeId())
	if err == nil {
		err = c.volumes.DeleteVolume(ctx, id)
	}
	if err != nil && !errors.Is(err, block.ErrNotFound) {
		return nil, err
	}
	return &csispec.DeleteVolumeResponse{}, nil
}

// ControllerExpandVolume implements the Controller service. A volume that is
// large enough stays as it is. The node always has its part: the device must
// see the new size, also of a raw volume.
func (c *Controller) ControllerExpandVolume(ctx context.Context, in *csispec.ControllerExpandVolumeRequest) (*csispec.ControllerExpandVolumeResponse, error) {
	if in.GetCapacityRange() == nil {
		return nil, fmt.Errorf("%w: the request has no capacity range", block.ErrInvalid)
	}
	if in.GetVolumeCapability() != nil {
		if _, err := supported(in.GetVolumeCapability()); err != nil {
			return nil, err
		}
	}
	sizes, err := spanOf(in.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	id, err := parseID(in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	v, err := c.volumes.VolumeByID(ctx, id)
	if err != nil {
		return nil, err
	}
	size := max(v.Size, roundUp(sizes.required))
	if !sizes.has(size) {
		return nil, outOfRange("volume %q has %d bytes and would get %d; the limit is %d, and volumes do not shrink", v.Name, v.Size, size, sizes.limit)
	}
	if v, err = c.volumes.ResizeVolume(ctx, id, size); err != nil { // also if it has that size already: it may not be served yet
		return nil, err
	}
	return &csispec.ControllerExpandVolumeResponse{CapacityBytes: v.Size, NodeExpansionRequired: true}, nil
}
