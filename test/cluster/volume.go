package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

// CLI runs `gabion args…` against this server and returns what it printed. A
// non-zero exit is an error that carries standard error; see ExitCode.
func (s *Server) CLI(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, s.Binary, args...)
	cmd.WaitDelay = time.Second
	cmd.Env = append(os.Environ(), "GABION_SERVER="+s.MetadataAddress())
	var out, diagnostics bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &diagnostics
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("gabion %s: %w: %s", strings.Join(args, " "), err, diagnostics.String())
	}
	return out.String(), nil
}

// ExitCode is the exit code behind an error of CLI: 0 for nil, -1 if it never ran or was killed.
func ExitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	default:
		return -1
	}
}

// MetadataAddress is where the CLI connects.
func (s *Server) MetadataAddress() string { return fmt.Sprintf("127.0.0.1:%d", s.Ports.Metadata) }

// URIs are the two ways to one attachment's export.
type URIs struct {
	TCP    string // nbd://HOST:PORT/<id>/<token>
	Socket string // nbd+unix:///<id>/<token>?socket=PATH
}

// Export is the export's name, which carries the token.
func (u URIs) Export() string {
	_, export, _ := strings.Cut(strings.TrimPrefix(u.TCP, "nbd://"), "/")
	return export
}

// VolumeID is the volume's id.
func (u URIs) VolumeID() string {
	id, _, _ := strings.Cut(u.Export(), "/")
	return id
}

var (
	tcpURI    = regexp.MustCompile(`nbd://\S+`)
	socketURI = regexp.MustCompile(`nbd\+unix://\S+`)
)

// CreateVolume makes a volume of one replica; flags are added to the command.
func (s *Server) CreateVolume(ctx context.Context, name, size string, flags ...string) error {
	_, err := s.CLI(ctx, append([]string{"volume", "create", name, "--size", size, "--replicas", "1"}, flags...)...)
	return err
}

// Attach gives this host the right to connect and returns the ways.
func (s *Server) Attach(ctx context.Context, name string, flags ...string) (URIs, error) {
	out, err := s.CLI(ctx, append([]string{"attach", name}, flags...)...)
	if err != nil {
		return URIs{}, err
	}
	u := URIs{TCP: tcpURI.FindString(out), Socket: socketURI.FindString(out)}
	if u.TCP == "" || u.Socket == "" {
		return URIs{}, errors.New("gabion attach did not print both URIs")
	}
	return u, nil
}

// Volume creates a volume and attaches it.
func (s *Server) Volume(ctx context.Context, name, size string, flags ...string) (URIs, error) {
	if err := s.CreateVolume(ctx, name, size, flags...); err != nil {
		return URIs{}, err
	}
	return s.Attach(ctx, name)
}
