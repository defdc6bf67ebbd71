package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/service"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/fault"
	"github.com/gabion-storage/gabion/server/primary"
	"github.com/gabion-storage/gabion/server/replica"
	"github.com/gabion-storage/gabion/server/vfs"
)

const serverHelp = `Run a server: its part of the metadata service, its disks, and the volumes it
serves over NBD.

The first server founds the cluster with --bootstrap, others enter it with
--join; a server that was started before simply starts again with the same
flags. Of three servers or more three have a vote in the metadata service, of
five or more five, in as many racks as there are: put them into at least three.
A server with --join and without --disk has a part in the metadata service only.

A disk is the root directory of a local file system of its own (XFS in
production); the server makes an empty one its own, and refuses what it does not
know.

SIGTERM and SIGINT end it in order, a second one at once.`

func (a *app) serverCommand() *cobra.Command {
	var c serverConfig
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Run the server of a storage node",
		Long:  serverHelp,
		Example: `  gabion server --node n1 --rack r1 --data /var/lib/gabion --disk /disks/1,/disks/2 --bootstrap
  gabion server --node n2 --rack r2 --data /var/lib/gabion --disk /disks/1,/disks/2 --join n1:7400`,
		Args: cobra.NoArgs,
		RunE: a.act(func(ctx context.Context, _ []string) error {
			if err := c.complete(); err != nil {
				return err
			}
			var missing []error
			if c.harden && a.harden != nil {
				missing = a.harden() // may start the process anew
			}
			s, err := newServer(c, a.err)
			if err != nil {
				return err
			}
			if len(missing) > 0 {
				s.log.Warn("not prepared for memory to be short: do not attach volumes as devices of this host", "err", listed(missing))
			}
			return s.run(ctx)
		}),
	}
	c.register(cmd.Flags())
	return cmd
}

// listed is errors on one line.
func listed(errs []error) string {
	var texts []string
	for _, err := range errs {
		texts = append(texts, err.Error())
	}
	return strings.Join(texts, "; ")
}

// server is one server process. Its parts are set by the steps that start them,
// in the order of steps, and used by later ones only.
type server struct {
	serverConfig
	log     *slog.Logger
	version daemon.Version
	process block.UUID // of this run
	boot    block.UUID // of the kernel
	fs      vfs.FS
	faults  *fault.Set // nil: no injection
	group   *daemon.Group

	unlock    func() error
	listeners listeners
	serving   sync.WaitGroup // goroutines that serve a listener
	registry  *prometheus.Registry
	traffic   daemon.TrafficTable
	missing   atomic.Pointer[string] // what keeps the server from being ready; nil: nothing
	http      *daemon.HTTP

	origin    consensus.Origin // of the data directory, at the start
	machine   *service.Machine
	consensus *consensus.Node
	cluster   block.ClusterID
	service   *service.Service
	client    *client.Client // of this server's own service
	geometry  block.Geometry

	store     *replica.Store
	registrar *registrar
	manager   *primary.Manager
	follower  *follower
	nbd       *nbd.Server
}

// steps is the whole of a server in the order in which it starts; it stops in
// the reverse order. What refuses comes before what writes.
func (s *server) steps() []daemon.Step {
	return []daemon.Step{
		// From here on nobody else is this node: a second server beside a stopped first gets no further (H39).
		{Name: "data directory", Start: s.lockData, Stop: s.unlockData},
		// A port in use is found before anything is written. Who connects already waits.
		{Name: "listeners", Start: s.listen, Stop: s.closeListeners},
		// Health answers while the rest starts, and while it drains.
		{Name: "http", Start: s.startHTTP, Stop: s.stopHTTP},
		{Name: "data check", Start: s.checkData},
		// Who joins is registered before it listens for Raft: see join.go.
		{Name: "entry", Start: s.enter},
		{Name: "consensus", Start: s.startConsensus, Stop: s.stopConsensus},
		daemon.Loop("consensus watch", func(ctx context.Context) { s.watchConsensus(ctx) }),
		{Name: "metadata service", Start: s.startService, Stop: s.stopService},
		{Name: "disks", Start: s.openDisks, Stop: s.closeDisks},
		// Grants go to registered nodes only, and births to registered disks.
		{Name: "registration", Start: func(ctx context.Context) error { return s.registrar.register(ctx) }},
		// Closing a volume needs the metadata (a detach under way) and the disks (the last sync).
		{Name: "volumes", Start: s.startVolumes, Stop: s.stopVolumes},
		daemon.Loop("disk watch", func(ctx context.Context) { _ = s.store.Run(ctx) }),
		daemon.Loop("reports", func(ctx context.Context) { s.registrar.run(ctx) }),
		daemon.Loop("metadata watch", func(ctx context.Context) { s.follower.run(ctx) }),
		{Name: "nbd", Start: s.startNBD, Stop: s.stopNBD},
		// Whoever asks is sent elsewhere before connections are closed.
		{Name: "readiness", Start: s.ready, Stop: s.notReady},
	}
}

func newServer(c serverConfig, logTo io.Writer) (*server, error) {
	level, err := daemon.ParseLevel(c.logLevel)
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	text := c.logFormat == "text" || c.logFormat == "auto" && isTerminal(logTo)
	s := &server{
		serverConfig: c, log: daemon.NewLogger(logTo, text, level), version: daemon.ReadVersion(version),
		process: block.NewUUID(), boot: boot, fs: vfs.OS{}, machine: service.NewMachine(),
	}
	if c.faults {
		s.faults = &fault.Set{}
	}
	s.group = daemon.NewGroup(s.log, c.grace, s.steps()...)
	return s, nil
}

// bootID tells one run of the kernel from another.
func bootID() (block.UUID, error) {
	const path = "/proc/sys/kernel/random/boot_id"
	b, err := os.ReadFile(path)
	if err != nil {
		return block.UUID{}, fmt.Errorf("%w: the kernel's boot id: %w: is /proc mounted?", block.ErrUnavailable, err)
	}
	id, err := block.ParseUUID(strings.TrimSpace(string(b)))
	if err != nil {
		return block.UUID{}, fmt.Errorf("%s: %w", path, err)
	}
	return id, nil
}

// run serves until ctx ends or something fails.
func (s *server) run(ctx context.Context) error {
	s.log.Info("starting", "node", s.node, "version", s.version.Version, "process", s.process.String(), "data", s.data, "disks", len(s.disks))
	if s.insecure {
		s.log.Warn("insecure: whoever reaches these ports can read and change everything", "listen", s.serverConfig.listen)
	}
	if s.faults != nil {
		s.log.Warn("faults can be injected over the HTTP port")
	}
	err := s.group.Run(ctx)
	if err != nil {
		s.log.Error("ended", "node", s.node, "err", err)
		return err
	}
	s.log.Info("ended in order", "node", s.node)
	return nil
}
