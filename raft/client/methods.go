package client

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// kind says what a call may do twice.
type kind uint8

const (
	// once: a second time would be refused by the effect of the first, so the
	// caller must learn that the outcome is unknown.
	once kind = iota
	// keyed: idempotent by its key.
	keyed
	// reads: changes nothing.
	reads
)

// kinds has a row for every method; a method without one is made once.
var kinds = map[string]kind{
	metapb.Metadata_CreateVolume_FullMethodName:     keyed,
	metapb.Metadata_GetVolume_FullMethodName:        reads,
	metapb.Metadata_ListVolumes_FullMethodName:      reads,
	metapb.Metadata_ResizeVolume_FullMethodName:     keyed,
	metapb.Metadata_DeleteVolume_FullMethodName:     keyed,
	metapb.Metadata_Attach_FullMethodName:           keyed,
	metapb.Metadata_Detach_FullMethodName:           keyed,
	metapb.Metadata_GetAttachment_FullMethodName:    reads,
	metapb.Metadata_SetFormat_FullMethodName:        keyed,
	metapb.Metadata_RegisterConsumer_FullMethodName: keyed,
	metapb.Metadata_GetConsumer_FullMethodName:      reads,
	metapb.Metadata_ListNodes_FullMethodName:        reads,
	metapb.Metadata_ListDisks_FullMethodName:        reads,
	metapb.Metadata_RemoveNode_FullMethodName:       keyed,
	metapb.Metadata_GetStatus_FullMethodName:        reads,
	metapb.Metadata_GetCapacity_FullMethodName:      reads,
	metapb.Metadata_Watch_FullMethodName:            reads,
	metapb.Metadata_RegisterNode_FullMethodName:     keyed,
	metapb.Metadata_ReportDisks_FullMethodName:      keyed,
	metapb.Metadata_ReportEvent_FullMethodName:      keyed,
	metapb.Metadata_Grant_FullMethodName:            keyed, // twice is two generations, and the caller has the newer
	metapb.Metadata_ReadMap_FullMethodName:          reads,
	metapb.Metadata_LookupVolume_FullMethodName:     reads,
	metapb.Metadata_PlaceRuns_FullMethodName:        reads,
	metapb.Metadata_Propose_FullMethodName:          once,
	metapb.Metadata_GetProgress_FullMethodName:      reads,
}

func kindOf(method string) kind { return kinds[method] }

// What follows is keyed by a name that may come to mean another thing between
// two attempts. The key is resolved once, and the attempts act on the id.

// resolve returns a reference by id.
func (c *Client) resolve(ctx context.Context, ref *metapb.VolumeRef) (*metapb.GetVolumeResponse, error) {
	return c.GetVolume(ctx, &metapb.GetVolumeRequest{Volume: ref})
}

// DeleteVolume deletes a volume; one that is absent is deleted.
func (c *Client) DeleteVolume(ctx context.Context, in *metapb.DeleteVolumeRequest, opts ...grpc.CallOption) (*metapb.DeleteVolumeResponse, error) {
	if in.GetVolume().GetId() == "" {
		v, err := c.resolve(ctx, in.GetVolume())
		if errors.Is(err, block.ErrNotFound) {
			return &metapb.DeleteVolumeResponse{}, nil
		}
		if err != nil {
			return nil, err
		}
		in = &metapb.DeleteVolumeRequest{Volume: &metapb.VolumeRef{Id: v.GetVolume().GetId()}}
	}
	return c.MetadataClient.DeleteVolume(ctx, in, opts...)
}

// ResizeVolume grows a volume; see metadata.proto.
func (c *Client) ResizeVolume(ctx context.Context, in *metapb.ResizeVolumeRequest, opts ...grpc.CallOption) (*metapb.Volume, error) {
	if in.GetVolume().GetId() == "" {
		v, err := c.resolve(ctx, in.GetVolume())
		if err != nil {
			return nil, err
		}
		in = &metapb.ResizeVolumeRequest{Volume: &metapb.VolumeRef{Id: v.GetVolume().GetId()}, Size: in.GetSize()}
	}
	return c.MetadataClient.ResizeVolume(ctx, in, opts...)
}

// SetFormat records how far formatting has come; see metadata.proto.
func (c *Client) SetFormat(ctx context.Context, in *metapb.SetFormatRequest, opts ...grpc.CallOption) (*metapb.Volume, error) {
	if in.GetVolume().GetId() == "" {
		v, err := c.resolve(ctx, in.GetVolume())
		if err != nil {
			return nil, err
		}
		in = proto.CloneOf(in)
		in.Volume = &metapb.VolumeRef{Id: v.GetVolume().GetId()}
	}
	return c.MetadataClient.SetFormat(ctx, in, opts...)
}

// Detach takes a consumer's right away, or, without a node, that of all; see
// metadata.proto. A volume or an attachment that is absent is detached.
func (c *Client) Detach(ctx context.Context, in *metapb.DetachRequest, opts ...grpc.CallOption) (*metapb.DetachResponse, error) {
	if in.GetAttachmentId() != "" {
		return c.MetadataClient.Detach(ctx, in, opts...)
	}
	v, err := c.resolve(ctx, in.GetVolume())
	if errors.Is(err, block.ErrNotFound) {
		return &metapb.DetachResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	volume := &metapb.VolumeRef{Id: v.GetVolume().GetId()}
	var list []*metapb.DetachRequest
	for _, a := range v.GetAttachments() {
		if in.GetNode() == "" || a.GetNode() == in.GetNode() {
			list = append(list, &metapb.DetachRequest{Volume: volume, Node: a.GetNode(), AttachmentId: a.GetId()})
		}
	}
	errs := make([]error, len(list))
	var wait sync.WaitGroup
	for i, one := range list { // at once: each waits for a confirmation
		wait.Go(func() { _, errs[i] = c.MetadataClient.Detach(ctx, one, opts...) })
	}
	wait.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err // one says enough
		}
	}
	return &metapb.DetachResponse{}, nil
}
