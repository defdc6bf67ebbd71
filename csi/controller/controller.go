package controller

import (
	"context"
	"fmt"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

// Controller is the CSI Controller service. Safe for concurrent use.
type Controller struct {
	csispec.UnimplementedControllerServer
	volumes VolumeService
}

// New returns a controller over a service.
func New(volumes VolumeService) *Controller { return &Controller{volumes: volumes} }

// capabilities are what is announced, and what is there.
var capabilities = []csispec.ControllerServiceCapability_RPC_Type{
	csispec.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
	csispec.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	csispec.ControllerServiceCapability_RPC_PUBLISH_READONLY,
	csispec.ControllerServiceCapability_RPC_LIST_VOLUMES,
	csispec.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
	csispec.ControllerServiceCapability_RPC_GET_CAPACITY,
	csispec.ControllerServiceCapability_RPC_EXPAND_VOLUME,
	csispec.ControllerServiceCapability_RPC_GET_VOLUME,
	csispec.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	csispec.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
	csispec.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
	driver.ControllerVolumeCondition,
}

// ControllerGetCapabilities implements the Controller service.
func (c *Controller) ControllerGetCapabilities(context.Context, *csispec.ControllerGetCapabilitiesRequest) (*csispec.ControllerGetCapabilitiesResponse, error) {
	out := &csispec.ControllerGetCapabilitiesResponse{}
	for _, t := range capabilities {
		out.Capabilities = append(out.Capabilities, &csispec.ControllerServiceCapability{
			Type: &csispec.ControllerServiceCapability_Rpc{Rpc: &csispec.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return out, nil
}

// parseID is a volume's id out of a request. What cannot be an id is that of no volume.
func parseID(s string) (block.VolumeID, error) {
	if s == "" {
		return block.VolumeID{}, fmt.Errorf("%w: the request names no volume: volume_id is empty", block.ErrInvalid)
	}
	u, err := block.ParseUUID(s)
	if err != nil {
		return block.VolumeID{}, fmt.Errorf("%w: there is no volume %.80q", block.ErrNotFound, s)
	}
	return block.VolumeID{UUID: u}, nil
}
