package service

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// RegisterConsumer implements the API.
func (s *Service) RegisterConsumer(ctx context.Context, in *metapb.Consumer) (*metapb.RegisterConsumerResponse, error) {
	if _, err := s.cluster(ctx); err != nil {
		return nil, err
	}
	_, err := s.propose(ctx, &metapb.Command{Kind: &metapb.Command_PutConsumer{PutConsumer: &metapb.PutConsumer{Consumer: in}}})
	if err != nil {
		return nil, err
	}
	return &metapb.RegisterConsumerResponse{}, nil
}

// GetConsumer implements the API. max_volumes is filled in.
func (s *Service) GetConsumer(ctx context.Context, in *metapb.GetConsumerRequest) (*metapb.Consumer, error) {
	if err := metadata.ValidateNodeName(in.GetName()); err != nil {
		return nil, err
	}
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	c := v.Consumer(in.GetName())
	if c == nil {
		return nil, fmt.Errorf("%w: no node %q has registered to use volumes: is its plugin running?", block.ErrNotFound, in.GetName())
	}
	c = proto.CloneOf(c)
	c.MaxVolumes = uint32(v.MaxVolumes(c.GetName()))
	return c, nil
}

// SetFormat implements the API. The state machine decides, at one index, that
// the attachment is current and the volume blank.
func (s *Service) SetFormat(ctx context.Context, in *metapb.SetFormatRequest) (*metapb.Volume, error) {
	v, err := s.cluster(ctx)
	if err != nil {
		return nil, err
	}
	_, id, err := find(v, in.GetVolume())
	if err != nil {
		return nil, err
	}
	r, err := s.propose(ctx, &metapb.Command{Kind: &metapb.Command_SetFormat{SetFormat: &metapb.SetFormat{
		VolumeId: id.String(), AttachmentId: in.GetAttachmentId(), Format: in.GetFormat(),
	}}})
	if err != nil {
		return nil, err
	}
	return value[*metapb.Volume](r)
}
