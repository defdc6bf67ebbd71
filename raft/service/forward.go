package service

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// forwarded marks a call that came from another server, which goes no further:
// two servers that take each other for the leader must not pass it to and fro.
const forwarded = "gabion-forwarded"

// elsewhere is the leader and its metadata address if that is another server,
// and the call came from a client.
func (s *Service) elsewhere(ctx context.Context) (leader, address string) {
	state, _ := s.consensus.Leadership()
	leader, _ = s.consensus.Leader()
	if state.Leads || leader == "" {
		return "", ""
	}
	if md, ok := metadata.FromIncomingContext(ctx); ok && len(md.Get(forwarded)) > 0 {
		return "", ""
	}
	if leader == s.consensus.Name() { // elected, and not established yet: wait here
		return "", ""
	}
	return leader, s.machine.View().Node(leader).GetMetadataAddress()
}

// pass has the leader answer a call, for as long as it leads: a leader that
// hangs or was stopped would keep the caller for its whole patience.
func (s *Service) pass(ctx context.Context, leader, address, method string, req any) (any, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go s.whileLeads(ctx, leader, cancel)
	reply, err := s.forward.call(ctx, address, method, req)
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, block.ErrUnknown) {
		return nil, cause
	}
	return reply, err
}

// whileLeads cancels when this server takes another one for the leader, or none.
func (s *Service) whileLeads(ctx context.Context, leader string, cancel context.CancelCauseFunc) {
	for {
		_, changed := s.consensus.Leadership()
		if now, _ := s.consensus.Leader(); now != leader {
			cancel(fmt.Errorf("%w: node %s lost the lead of the metadata service before it answered", block.ErrUnknown, leader))
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// forwarder holds a connection to each server that was asked.
type forwarder struct {
	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
}

func newForwarder() *forwarder { return &forwarder{conns: map[string]*grpc.ClientConn{}} }

func (f *forwarder) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		_ = c.Close()
	}
	clear(f.conns)
}

func (f *forwarder) conn(address string) (*grpc.ClientConn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.conns[address]; c != nil {
		return c, nil
	}
	c, err := grpc.NewClient("passthrough:///"+address, client.DialOptions()...)
	if err != nil {
		return nil, fmt.Errorf("%w: server %q: %w", block.ErrUnavailable, address, err)
	}
	f.conns[address] = c
	return c, nil
}

// call passes a call on to the leader and its answer back, as they are.
func (f *forwarder) call(ctx context.Context, address, method string, req any) (any, error) {
	reply, err := replyOf(method)
	if err != nil {
		return nil, err
	}
	conn, err := f.conn(address)
	if err != nil {
		return nil, err
	}
	ctx = metadata.AppendToOutgoingContext(ctx, forwarded, "1")
	if err := conn.Invoke(ctx, method, req, reply); err != nil {
		return nil, err
	}
	return reply, nil
}

// replyOf is an empty reply of a method, "/package.Service/Method".
func replyOf(method string) (protoreflect.ProtoMessage, error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil, fmt.Errorf("%w: method %s: %w", metapb.ErrInternal, method, err)
	}
	m, ok := d.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, fmt.Errorf("%w: %s is no method", metapb.ErrInternal, method)
	}
	t, err := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	if err != nil {
		return nil, fmt.Errorf("%w: method %s: %w", metapb.ErrInternal, method, err)
	}
	return t.New().Interface(), nil
}
