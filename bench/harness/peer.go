package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// Peer is a server that can be measured.
type Peer interface {
	Name() string
	Version() string
	// Start serves a blank volume of size bytes, with everything in dir, which it makes.
	Start(ctx context.Context, dir string, size int64) (Target, error)
	// Stop ends the server. Harmless if it was never started.
	Stop() error
}

// Target is a running server.
type Target struct {
	URI string
	PID int // of the process whose CPU time counts
}

func newPeers(c config) ([]Peer, error) {
	var peers []Peer
	for _, name := range splitNames(c.peers) {
		switch name {
		case "gabion":
			peers = append(peers, &gabion{binary: c.binary})
		case "nbdkit":
			peers = append(peers, &nbdkit{})
		default:
			return nil, fmt.Errorf("no peer %q; the peers are gabion and nbdkit", name)
		}
	}
	if len(peers) == 0 {
		return nil, errors.New("-peers names no peer")
	}
	return peers, nil
}

// gabion is one server with one volume of one replica.
type gabion struct {
	binary string
	server *cluster.Server
}

func (g *gabion) Name() string    { return "gabion" }
func (g *gabion) Version() string { return firstLine(g.binary, "version") }

func (g *gabion) Start(ctx context.Context, dir string, size int64) (Target, error) {
	s, err := cluster.Start(ctx, cluster.Options{Binary: g.binary, Dir: dir})
	if err != nil {
		return Target{}, err
	}
	g.server = s
	uris, err := s.Volume(ctx, "bench", fmt.Sprint(size), "--durability", "flush")
	return Target{URI: uris.Socket, PID: s.PID()}, err
}

func (g *gabion) Stop() error {
	if g.server == nil {
		return nil
	}
	return g.server.Stop()
}

// nbdkit is its file plugin with the defaults, the nearest thing to the least that an NBD server can do.
type nbdkit struct{ cmd *exec.Cmd }

func (n *nbdkit) Name() string    { return "nbdkit" }
func (n *nbdkit) Version() string { return firstLine("nbdkit", "--version") }

func (n *nbdkit) Start(ctx context.Context, dir string, size int64) (Target, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return Target{}, err
	}
	image, socket := filepath.Join(dir, "image"), filepath.Join(dir, "nbd.sock")
	f, err := os.Create(image)
	if err != nil {
		return Target{}, err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return Target{}, err
	}
	ready := filepath.Join(dir, "pid") // written once it listens
	n.cmd = exec.Command("nbdkit", "--foreground", "--unix", socket, "--pidfile", ready, "file", image)
	n.cmd.Stderr = os.Stderr
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := n.cmd.Start(); err != nil {
		n.cmd = nil
		return Target{}, err
	}
	return Target{URI: "nbd+unix:///?socket=" + socket, PID: n.cmd.Process.Pid}, waitForFile(ctx, ready)
}

func (n *nbdkit) Stop() error {
	if n.cmd == nil {
		return nil
	}
	return errors.Join(n.cmd.Process.Signal(syscall.SIGTERM), n.cmd.Wait())
}

func waitForFile(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("%s did not appear: %w", path, ctx.Err())
		}
	}
}

func firstLine(command string, args ...string) string {
	out, err := exec.Command(command, args...).Output()
	if err != nil {
		return "unknown"
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line)
}
