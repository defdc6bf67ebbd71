package main

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"google.golang.org/grpc"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/replica"
)

// oneNode is a metadata service that knows which process is registered.
type oneNode struct {
	metapb.MetadataClient
	process string
}

func (m *oneNode) RegisterNode(_ context.Context, in *metapb.RegisterNodeRequest, _ ...grpc.CallOption) (*metapb.RegisterNodeResponse, error) {
	m.process = in.GetNode().GetProcess()
	return &metapb.RegisterNodeResponse{}, nil
}

func (m *oneNode) ReportDisks(_ context.Context, in *metapb.ReportDisksRequest, _ ...grpc.CallOption) (*metapb.ReportDisksResponse, error) {
	if in.GetProcess() != m.process {
		return nil, fmt.Errorf("%w: process %q", block.ErrNotFound, in.GetProcess())
	}
	return &metapb.ReportDisksResponse{}, nil
}

// TestRegistrarRegistersAgain: whoever took the registration, the next report takes it back.
func TestRegistrarRegistersAgain(t *testing.T) {
	meta := &oneNode{}
	r := &registrar{
		client: meta, node: &metapb.Node{Name: "n1", Process: "mine"}, log: slog.New(slog.DiscardHandler),
		disks: func() []replica.Report { return nil }, wrong: func() []*metapb.Condition { return nil },
	}
	for _, registered := range []string{"", "mine", "a dead predecessor's"} {
		meta.process = registered
		if err := r.send(t.Context()); err != nil || meta.process != "mine" {
			t.Errorf("registered was %q: %q is now, %v", registered, meta.process, err)
		}
	}
}
