package node

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

const (
	// MaxVolumes is how many volumes a node takes: a constant, whatever is in use.
	// It is far below the number of devices that the kernel's nbd can make.
	MaxVolumes = 250
	// metadataPatience bounds a question to the metadata service once nobody can give up the call any more.
	metadataPatience = 30 * time.Second
	// detachPatience bounds the detaching of a device, also while a failed stage is undone.
	detachPatience = time.Minute
)

// Config is a Node service's surroundings. All but StateDir are needed.
type Config struct {
	Name     string // of the node, as volumes are published to it
	Rack     string
	Attacher Attacher
	Volumes  Volumes
	Mounter  Mounter
	// StateDir remembers with which options volumes were staged, so that a call
	// with others can be told apart; on a file system that a reboot empties. What
	// is lost there is not missed. "": nothing is remembered.
	StateDir string
	Log      *slog.Logger
}

// Service is the Node service. Its errors wrap a sentinel of block, or
// driver.ErrPending. Safe for concurrent use.
type Service struct {
	csispec.UnimplementedNodeServer

	cfg     Config
	flights *flights
	asking  *asking
}

var _ csispec.NodeServer = (*Service)(nil)

// New returns a service that has touched nothing yet. Close it.
func New(cfg Config) *Service {
	return &Service{cfg: cfg, flights: newFlights(cfg.Log), asking: newAsking(cfg.Mounter.Usage)}
}

// Close lets no call begin, gives up those that have not begun to work on a
// device, and waits for the rest, until ctx ends. Devices and mounts stay.
func (s *Service) Close(ctx context.Context) error {
	if err := s.flights.close(ctx); err != nil {
		return err
	}
	return s.asking.close(ctx)
}

// NodeGetInfo implements the Node service.
func (s *Service) NodeGetInfo(context.Context, *csispec.NodeGetInfoRequest) (*csispec.NodeGetInfoResponse, error) {
	return &csispec.NodeGetInfoResponse{
		NodeId: s.cfg.Name, MaxVolumesPerNode: MaxVolumes,
		AccessibleTopology: &csispec.Topology{Segments: map[string]string{driver.TopologyRack: s.cfg.Rack}},
	}, nil
}

// NodeGetCapabilities implements the Node service.
func (s *Service) NodeGetCapabilities(context.Context, *csispec.NodeGetCapabilitiesRequest) (*csispec.NodeGetCapabilitiesResponse, error) {
	out := &csispec.NodeGetCapabilitiesResponse{}
	for _, t := range []csispec.NodeServiceCapability_RPC_Type{
		csispec.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csispec.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csispec.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		driver.NodeVolumeCondition,
		csispec.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csispec.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		out.Capabilities = append(out.Capabilities, &csispec.NodeServiceCapability{
			Type: &csispec.NodeServiceCapability_Rpc{Rpc: &csispec.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return out, nil
}

// NodeStageVolume implements the Node service.
func (s *Service) NodeStageVolume(ctx context.Context, in *csispec.NodeStageVolumeRequest) (*csispec.NodeStageVolumeResponse, error) {
	r, err := s.parseStage(in)
	if err == nil {
		err = s.turn(ctx, "stage", in, func(f *flight) error { return s.stage(f, r) })
	}
	return &csispec.NodeStageVolumeResponse{}, err
}

// NodeUnstageVolume implements the Node service.
func (s *Service) NodeUnstageVolume(ctx context.Context, in *csispec.NodeUnstageVolumeRequest) (*csispec.NodeUnstageVolumeResponse, error) {
	r, err := s.parsePath(in.GetVolumeId(), in.GetStagingTargetPath(), "staging target path")
	if err == nil {
		err = s.turn(ctx, "unstage", in, func(f *flight) error { return s.unstage(f, r) })
	}
	return &csispec.NodeUnstageVolumeResponse{}, err
}

// NodePublishVolume implements the Node service.
func (s *Service) NodePublishVolume(ctx context.Context, in *csispec.NodePublishVolumeRequest) (*csispec.NodePublishVolumeResponse, error) {
	r, err := s.parsePublish(in)
	if err == nil {
		err = s.turn(ctx, "publish", in, func(f *flight) error { return s.publish(f, r) })
	}
	return &csispec.NodePublishVolumeResponse{}, err
}

// NodeUnpublishVolume implements the Node service.
func (s *Service) NodeUnpublishVolume(ctx context.Context, in *csispec.NodeUnpublishVolumeRequest) (*csispec.NodeUnpublishVolumeResponse, error) {
	r, err := s.parsePath(in.GetVolumeId(), in.GetTargetPath(), "target path")
	if err == nil {
		err = s.turn(ctx, "unpublish", in, func(f *flight) error { return s.unpublish(f, r) })
	}
	return &csispec.NodeUnpublishVolumeResponse{}, err
}

// NodeExpandVolume implements the Node service.
func (s *Service) NodeExpandVolume(ctx context.Context, in *csispec.NodeExpandVolumeRequest) (*csispec.NodeExpandVolumeResponse, error) {
	r, err := s.parseExpand(in)
	if err != nil {
		return nil, err
	}
	// The size is an answer to whoever asks, not only to those who wait for the flight's outcome: it is read afterwards.
	if err := s.turn(ctx, "expand", in, func(f *flight) error { return s.expand(f, r) }); err != nil {
		return nil, err
	}
	dev, err := s.cfg.Attacher.Find(ctx, r.id)
	if err != nil {
		return nil, err
	}
	return &csispec.NodeExpandVolumeResponse{CapacityBytes: dev.Size}, nil
}

// volumeRequest is any request about one volume.
type volumeRequest interface {
	proto.Message
	GetVolumeId() string
}

func (s *Service) turn(ctx context.Context, call string, in volumeRequest, do func(*flight) error) error {
	same, err := proto.MarshalOptions{Deterministic: true}.Marshal(in)
	if err != nil {
		return fmt.Errorf("%w: %w", block.ErrInvalid, err)
	}
	return s.flights.do(ctx, in.GetVolumeId(), call, call+"\x00"+string(same), do)
}

// facts are what the kernel says now.
type facts struct {
	device   Device
	attached bool // device is one
	table    mount.Table
}

// look reads the facts about a volume. A device that says it is another's is
// nobody's to use. The zero id has no device.
func (s *Service) look(ctx context.Context, id block.VolumeID) (facts, error) {
	var f facts
	var err error
	if !id.IsZero() {
		f.device, err = s.cfg.Attacher.Find(ctx, id)
		f.attached = err == nil
		if err != nil && !isNotFound(err) {
			return facts{}, fmt.Errorf("device of volume %s: %w", id, err)
		}
	}
	if f.attached && f.device.Volume != id {
		return facts{}, fmt.Errorf("%w: %s is of volume %s, not %s", block.ErrCorrupt, f.device.Path, f.device.Volume, id)
	}
	if f.table, err = s.cfg.Mounter.Table(); err != nil {
		return facts{}, err
	}
	s.report(f)
	return f, nil
}

// report tells of mounts that bear the device's name and are of one that had it
// before. They count as nothing: only numbers do.
func (s *Service) report(f facts) {
	for _, e := range f.table {
		if f.attached && e.Source == f.device.Path && e.Number != f.device.Number || f.attached && e.Node == f.device.Number && e.Orphaned() {
			s.cfg.Log.Warn("a mount is left of a device that has gone", "volume_id", f.device.Volume, "device", f.device.Path, "mount", e.Point, "number", e.Number.String())
		}
	}
}

// users are the mounts of a device other than those at the given places.
func (f facts) users(except ...string) mount.Table {
	if !f.attached {
		return nil
	}
	var list mount.Table
	for _, e := range append(f.table.FileSystemOf(f.device.Number), f.table.NodesOf(f.device.Number)...) {
		if !slices.Contains(except, e.Point) {
			list = append(list, e)
		}
	}
	return list
}
