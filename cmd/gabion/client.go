package main

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

const defaultServer = "127.0.0.1:7400"

// ask runs f with a client of the metadata service, within --timeout.
func (a *app) ask(ctx context.Context, f func(ctx context.Context, c metapb.MetadataClient) error) error {
	if a.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.timeout)
		defer cancel()
	}
	conn, err := grpc.NewClient(a.servers, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return metapb.FromStatus(invoke(ctx, method, req, reply, cc, opts...))
		}))
	if err != nil {
		return err
	}
	defer conn.Close()
	return f(ctx, metapb.NewMetadataClient(conn))
}

// sentence is what a person is told about err.
func (a *app) sentence(err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Sprintf("no answer within %v: what was asked may or may not be done; look with `gabion status`, or wait longer with --timeout", a.timeout)
	case errors.Is(err, context.Canceled):
		return "interrupted"
	case errors.Is(err, block.ErrUnavailable) && unheard(err):
		return fmt.Sprintf("no metadata server answers at %s: start `gabion server`, or name one with --server or GABION_SERVER", a.servers)
	}
	return err.Error()
}

// unheard reports whether err is that of a call which no metadata server answered.
func unheard(err error) bool {
	var e *metapb.Error
	return errors.As(err, &e) && !e.Answered()
}

// find resolves what was typed, a name or an id, to one volume: what follows acts on its id.
func find(ctx context.Context, c metapb.MetadataClient, name string) (*metapb.GetVolumeResponse, error) {
	v, err := c.GetVolume(ctx, &metapb.GetVolumeRequest{Volume: &metapb.VolumeRef{Name: name}})
	if _, notID := block.ParseUUID(name); notID != nil || !errors.Is(err, block.ErrNotFound) {
		return v, err
	}
	return c.GetVolume(ctx, &metapb.GetVolumeRequest{Volume: &metapb.VolumeRef{Id: name}})
}

func byID(v *metapb.GetVolumeResponse) *metapb.VolumeRef {
	return &metapb.VolumeRef{Id: v.GetVolume().GetId()}
}
