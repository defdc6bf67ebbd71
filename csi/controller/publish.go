package controller

import (
	"context"
	"errors"
	"fmt"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

// ControllerPublishVolume implements the Controller service: it gives the node
// the right to the volume, which storage itself enforces.
func (c *Controller) ControllerPublishVolume(ctx context.Context, in *csispec.ControllerPublishVolumeRequest) (*csispec.ControllerPublishVolumeResponse, error) {
	if in.GetNodeId() == "" {
		return nil, fmt.Errorf("%w: the request names no node: node_id is empty", block.ErrInvalid)
	}
	mode, err := supported(in.GetVolumeCapability())
	if err != nil {
		return nil, err
	}
	id, err := parseID(in.GetVolumeId()) // last: what is missing is said before what is not there
	if err != nil {
		return nil, err
	}
	if _, err := c.volumes.Consumer(ctx, in.GetNodeId()); err != nil {
		return nil, err
	}
	a, err := c.volumes.Attach(ctx, id, in.GetNodeId(), Terms{ReadOnly: in.GetReadonly() || mode.reads, Alone: mode.single})
	if err != nil {
		return nil, err
	}
	return &csispec.ControllerPublishVolumeResponse{PublishContext: map[string]string{driver.AttachmentKey: a.ID.String()}}, nil
}

// ControllerUnpublishVolume implements the Controller service. It answers when
// nothing of the node can reach the volume any more. A volume, a node or a pair
// that is not there is unpublished. No node means all of them.
func (c *Controller) ControllerUnpublishVolume(ctx context.Context, in *csispec.ControllerUnpublishVolumeRequest) (*csispec.ControllerUnpublishVolumeResponse, error) {
	id, err := parseID(in.GetVolumeId())
	if err == nil {
		err = c.volumes.Detach(ctx, id, in.GetNodeId())
	}
	if err != nil && !errors.Is(err, block.ErrNotFound) {
		return nil, err
	}
	return &csispec.ControllerUnpublishVolumeResponse{}, nil
}

// ValidateVolumeCapabilities implements the Controller service.
func (c *Controller) ValidateVolumeCapabilities(ctx context.Context, in *csispec.ValidateVolumeCapabilitiesRequest) (*csispec.ValidateVolumeCapabilitiesResponse, error) {
	if len(in.GetVolumeCapabilities()) == 0 {
		return nil, allSupported(nil)
	}
	id, err := parseID(in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	v, err := c.volumes.VolumeByID(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := valid(v, in); err != nil {
		return &csispec.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
	}
	return &csispec.ValidateVolumeCapabilitiesResponse{Confirmed: &csispec.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: in.GetVolumeContext(), VolumeCapabilities: in.GetVolumeCapabilities(), Parameters: in.GetParameters(),
	}}, nil
}

// valid says why a volume is not what the request describes.
func valid(v Volume, in *csispec.ValidateVolumeCapabilitiesRequest) error {
	if err := allSupported(in.GetVolumeCapabilities()); err != nil {
		return err
	}
	p, err := parse(in.GetParameters())
	if err != nil {
		return err
	}
	if err := p.agree(in.GetVolumeCapabilities()); err != nil {
		return err
	}
	if len(in.GetMutableParameters()) > 0 {
		return fmt.Errorf("%w: this version has no mutable parameters", block.ErrInvalid)
	}
	if d := p.policy.differs(v.Policy); d != "" {
		return fmt.Errorf("%w: of volume %q, %s", block.ErrPrecondition, v.Name, d)
	}
	return nil
}
