package driver

import (
	"context"
	"sync/atomic"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// identity is the Identity service.
type identity struct {
	csispec.UnimplementedIdentityServer
	config Config
	unwell atomic.Bool // what the last Probe said
}

// GetPluginInfo implements the Identity service.
func (i *identity) GetPluginInfo(context.Context, *csispec.GetPluginInfoRequest) (*csispec.GetPluginInfoResponse, error) {
	return &csispec.GetPluginInfoResponse{Name: Name, VendorVersion: i.config.Version}, nil
}

// GetPluginCapabilities implements the Identity service. CONTROLLER_SERVICE is
// said by an endpoint that has it only, because whoever hears it calls it there.
func (i *identity) GetPluginCapabilities(context.Context, *csispec.GetPluginCapabilitiesRequest) (*csispec.GetPluginCapabilitiesResponse, error) {
	list := []*csispec.PluginCapability{
		service(csispec.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		{Type: &csispec.PluginCapability_VolumeExpansion_{VolumeExpansion: &csispec.PluginCapability_VolumeExpansion{
			Type: csispec.PluginCapability_VolumeExpansion_ONLINE,
		}}},
	}
	if i.config.Controller != nil {
		list = append(list, service(csispec.PluginCapability_Service_CONTROLLER_SERVICE))
	}
	return &csispec.GetPluginCapabilitiesResponse{Capabilities: list}, nil
}

func service(t csispec.PluginCapability_Service_Type) *csispec.PluginCapability {
	return &csispec.PluginCapability{Type: &csispec.PluginCapability_Service_{Service: &csispec.PluginCapability_Service{Type: t}}}
}

// Probe implements the Identity service. The answer has no room for the
// reason: the log has it, once when it begins and once when it ends.
func (i *identity) Probe(ctx context.Context, _ *csispec.ProbeRequest) (*csispec.ProbeResponse, error) {
	var err error
	if i.config.Ready != nil {
		err = i.config.Ready(ctx)
	}
	switch was := i.unwell.Swap(err != nil); {
	case err != nil && !was:
		i.config.Log.Warn("not ready", "err", sentence(err))
	case err == nil && was:
		i.config.Log.Info("ready again")
	}
	return &csispec.ProbeResponse{Ready: wrapperspb.Bool(err == nil)}, nil
}
