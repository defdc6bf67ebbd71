package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path"
	"strings"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	// Name is the driver's, for ever: it stands in every PersistentVolume.
	Name = "csi.gabion.dev"
	// TopologyRack is the topology key whose value is a rack's name.
	TopologyRack = "topology.gabion.dev/rack"
	// AttachmentKey is the key of the publish context; its value is the
	// attachment's id. The context holds nothing else, and no secret.
	AttachmentKey = "attachment"
	// FSTypeKey is the parameter of a StorageClass, and the key of the volume
	// context, that names the file system where a volume capability names none.
	FSTypeKey = "csi.storage.k8s.io/fstype"
)

const (
	// maxRequest bounds what is read of a request, in bytes. The specification's own limits keep real ones far below.
	maxRequest = 1 << 20
	// maxCalls bounds the calls in progress on one connection.
	maxCalls = 1024
)

// Config is what an endpoint serves. Log is needed; a service that is nil is
// not served, and not announced.
type Config struct {
	Version    string
	Controller csispec.ControllerServer
	Node       csispec.NodeServer
	// Ready returns nil when the services can do their work, else a sentence
	// that says what is missing. It is asked by every Probe. Nil: always.
	Ready func(ctx context.Context) error
	// Observe, if set, is told of each call's end. It must not block.
	Observe func(method string, code codes.Code, took time.Duration)
	Log     *slog.Logger
}

// Server is one endpoint.
type Server struct {
	grpc *grpc.Server
}

// New returns a server that Serve starts.
func New(c Config) *Server {
	calls := &calls{config: c, repeats: newRepeats(), turns: newTurns()}
	s := &Server{grpc: grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxConcurrentStreams(maxCalls),
		grpc.WaitForHandlers(true),
		grpc.ChainUnaryInterceptor(calls.report, calls.recover, calls.deadline, calls.dropSecrets, calls.turn),
	)}
	csispec.RegisterIdentityServer(s.grpc, &identity{config: c})
	if c.Controller != nil {
		csispec.RegisterControllerServer(s.grpc, c.Controller)
	}
	if c.Node != nil {
		csispec.RegisterNodeServer(s.grpc, c.Node)
	}
	return s
}

// Serve answers on l until Stop. It returns nil after a Stop, and closes l.
func (s *Server) Serve(l net.Listener) error {
	err := s.grpc.Serve(l)
	if err == nil || errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return fmt.Errorf("%w: csi endpoint %s: %w", block.ErrIO, l.Addr(), err)
}

// Stop takes no more calls, lets those in progress finish until ctx ends, cancels the others, and waits for them.
func (s *Server) Stop(ctx context.Context) {
	done := make(chan struct{})
	go func() { defer close(done); s.grpc.GracefulStop() }()
	select {
	case <-done:
	case <-ctx.Done():
		s.grpc.Stop()
		<-done
	}
}

// ParseEndpoint returns the path of an endpoint such as unix:///csi/csi.sock. Nothing else is taken: the endpoint asks nobody who he is.
func ParseEndpoint(endpoint string) (string, error) {
	p, ok := strings.CutPrefix(endpoint, "unix://")
	if !ok {
		p, ok = strings.CutPrefix(endpoint, "unix:")
	}
	if !ok || !path.IsAbs(p) || path.Clean(p) != p || p == "/" || strings.ContainsRune(p, 0) {
		return "", fmt.Errorf("%w: endpoint %.120q: it is unix:// and the absolute path of a socket, such as unix:///csi/csi.sock", block.ErrInvalid, endpoint)
	}
	return p, nil
}
