package service

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/metapb"
)

const (
	defaultDeadline = 30 * time.Second
	maxRequest      = consensus.MaxCommand // larger could not be committed
	maxStreams      = 1000                 // calls at once on one connection
)

// newServer is the gRPC server with what holds for every call: bounds, a
// deadline, the leader answers, a panic ends one call, errors become statuses.
func (s *Service) newServer() *grpc.Server {
	return grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.WaitForHandlers(true),
		grpc.ConnectionTimeout(5*time.Second), // for strangers that say nothing
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.UnaryInterceptor(s.unary),
		grpc.StreamInterceptor(s.stream),
	)
}

func (s *Service) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (reply any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = s.panicked(info.FullMethod, p)
		}
		err = metapb.ToStatus(err)
	}()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, defaultDeadline)
		defer cancel()
	}
	if info.FullMethod == metapb.Metadata_GetProgress_FullMethodName {
		return handler(ctx, req) // about this server
	}
	if leader, address := s.elsewhere(ctx); address != "" {
		reply, err := s.pass(ctx, leader, address, info.FullMethod, req)
		if err == nil || info.FullMethod != metapb.Metadata_GetStatus_FullMethodName {
			return reply, err
		} // this server's own view of what is wrong is better than none
	}
	return handler(ctx, req)
}

func (s *Service) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = s.panicked(info.FullMethod, p)
		}
		err = metapb.ToStatus(err)
	}()
	return handler(srv, stream)
}

// panicked logs what only the log may say. The request is not logged: it may
// hold a token.
func (s *Service) panicked(method string, p any) error {
	s.log.Error("panic in a metadata call", "method", method, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	return fmt.Errorf("%w: in %s; the server's log has the rest", metapb.ErrInternal, method)
}
