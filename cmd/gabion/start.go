package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"runtime/debug"
	"strconv"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/service"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/primary"
	"github.com/gabion-storage/gabion/server/replica"
)

// The steps of a server, in the order of server.steps.

func (s *server) lockData(context.Context) (err error) {
	if err := os.MkdirAll(s.data, 0o700); err != nil {
		return fmt.Errorf("%w: --data %s: %w", block.ErrUnavailable, s.data, err)
	}
	s.unlock, err = daemon.LockDir(s.data)
	return err
}

func (s *server) unlockData(context.Context) error { return s.unlock() }

// listeners are bound early and served late.
type listeners struct{ metadata, nbd, http, socket net.Listener }

func (s *server) listen(context.Context) (err error) {
	defer func() {
		if err != nil {
			_ = s.listeners.close()
		}
	}()
	for _, l := range []struct {
		to   *net.Listener
		port int
		flag string
	}{
		{&s.listeners.metadata, s.ports.metadata, "--metadata-port"},
		{&s.listeners.nbd, s.ports.nbd, "--nbd-port"},
		{&s.listeners.http, s.ports.http, "--http-port"},
	} {
		if *l.to, err = daemon.ListenTCP(s.serverConfig.listen, l.port, l.flag); err != nil {
			return err
		}
	}
	// Consensus binds its own port; this is only to say what is wrong with it in time.
	raft, err := daemon.ListenTCP(s.serverConfig.listen, s.ports.raft, "--raft-port")
	if err != nil {
		return err
	}
	if err := raft.Close(); err != nil || s.nbdSocket == "" {
		return err
	}
	s.listeners.socket, err = daemon.ListenUnix(s.nbdSocket, "--nbd-socket")
	return err
}

func (s *server) closeListeners(context.Context) error { return s.listeners.close() }

// close closes what those who served it have not closed already.
func (l *listeners) close() error {
	var errs []error
	for _, x := range []net.Listener{l.metadata, l.nbd, l.http, l.socket} {
		if x != nil {
			if err := x.Close(); !errors.Is(err, net.ErrClosed) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

func (s *server) startHTTP(context.Context) error {
	s.waitFor("it is starting")
	s.registry = daemon.NewRegistry(s.version)
	s.http = daemon.NewHTTP(daemon.HTTPConfig{Metrics: s.registry, Ready: s.readiness, Faults: s.faults, Log: s.log})
	s.http.Start(s.listeners.http, s.group.Fail)
	return nil
}

func (s *server) stopHTTP(ctx context.Context) error { return s.http.Stop(ctx) }

func (s *server) waitFor(what string) { s.missing.Store(&what) }

func (s *server) readiness() error {
	if what := s.missing.Load(); what != nil {
		return fmt.Errorf("%w: %s", block.ErrUnavailable, *what)
	}
	return nil
}

func (s *server) startConsensus(context.Context) (err error) {
	config := consensus.Config{
		Dir: s.raftDir(), Node: s.node, Bootstrap: s.bootstrap,
		Listen:    net.JoinHostPort(s.serverConfig.listen, strconv.Itoa(s.ports.raft)),
		Advertise: net.JoinHostPort(s.advertise, strconv.Itoa(s.ports.raft)),
		Machine:   s.machine, Log: s.log,
	}
	if s.ports.raft == 0 {
		config.Advertise = ""
	}
	if s.origin == consensus.Blank && !s.enters() {
		config.Cluster = block.ClusterID{UUID: block.NewUUID()}
	}
	if s.consensus, err = consensus.Open(config); err != nil {
		return err
	}
	s.cluster = s.consensus.Cluster()
	s.registry.MustRegister(s.raftMetrics())
	return nil
}

func (s *server) stopConsensus(context.Context) error { return s.consensus.Close() }

// watchConsensus ends the server when it cannot apply what was committed: it
// would answer from a state that is not the cluster's.
func (s *server) watchConsensus(ctx context.Context) {
	select {
	case <-s.consensus.Failed():
		s.group.Fail(s.consensus.Err())
	case <-ctx.Done():
	}
}

func (s *server) startService(ctx context.Context) (err error) {
	s.service = service.New(service.Config{
		Consensus: s.consensus, Machine: s.machine, Log: s.log, Faults: s.faults,
		ExtentSize: s.extentSize, DefaultReplicas: s.replicas, LocalCopies: true,
	})
	s.serving.Go(func() {
		if err := s.service.Serve(s.listeners.metadata); err != nil {
			s.group.Fail(err)
		}
	})
	own := s.listeners.metadata.Addr().(*net.TCPAddr)
	if own.IP.IsUnspecified() {
		own = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: own.Port}
	}
	if s.client, err = client.Dial([]string{own.String()}); err != nil {
		return errors.Join(err, s.stopService(ctx))
	}
	if err := s.awaitCluster(ctx); err != nil {
		return errors.Join(err, s.stopService(ctx))
	}
	s.geometry = s.machine.View().Geometry()
	return nil
}

// awaitCluster returns when the metadata service has a leader and the cluster its parameters.
func (s *server) awaitCluster(ctx context.Context) error {
	s.waitFor("the metadata service has no leader yet")
	return retry(ctx, func() error {
		call, cancel := context.WithTimeout(ctx, meetLimit)
		defer cancel()
		_, err := s.client.ListNodes(call, &metapb.ListNodesRequest{}) // linearizable, and refused before the cluster has its parameters
		if passing(err) && ctx.Err() == nil {
			if refusal := s.comeBack(ctx); refusal != nil && !passing(refusal) {
				return refusal
			}
		}
		return err
	})
}

func (s *server) stopService(ctx context.Context) error {
	var err error
	if s.client != nil {
		err = s.client.Close()
	}
	s.service.Stop(ctx)
	s.serving.Wait()
	return err
}

func (s *server) openDisks(context.Context) (err error) {
	s.waitFor("its disks are being opened")
	s.store, err = replica.Open(replica.Config{
		FS: s.fs, Paths: s.disks, StateDir: s.data, Cluster: s.cluster, Geometry: s.geometry,
		Mode: s.mode(), Boot: s.boot, Process: s.process, Registry: s.metadata(), Log: s.log, Fault: s.faults,
		Changed: func(id block.DiskID) { s.registrar.soon(); s.manager.DiskChanged(id) },
		Space:   func() { s.registrar.soon(); s.manager.SpaceChanged() },
	})
	if err != nil {
		return err
	}
	if err := s.someDisk(); err != nil {
		return errors.Join(err, s.store.Close())
	}
	s.registry.MustRegister(s.diskMetrics())
	s.registrar = &registrar{
		client: s.client, node: s.describe(s.consensus.Address(), s.consensus.Directory()), cluster: s.cluster, disks: s.store.Reports, log: s.log, changed: make(chan struct{}, 1),
	}
	s.waitFor("the metadata service has not registered it yet")
	return nil
}

func (s *server) closeDisks(context.Context) error { return s.store.Close() }

// describe is this node as others see it, with the address of its Raft port and the identity of its directory.
func (s *server) describe(raft string, directory block.UUID) *metapb.Node {
	return &metapb.Node{
		Name: s.node, Rack: s.rack, Process: s.process.String(), Version: s.version.Version, FeatureLevel: metadata.Level,
		MetadataAddress: s.advertised(s.listeners.metadata), RaftAddress: raft, Directory: directory.String(),
		ReplicaAddress: net.JoinHostPort(s.advertise, strconv.Itoa(s.ports.replica)),
		NbdAddress:     s.advertised(s.listeners.nbd), NbdSocket: s.nbdSocket,
	}
}

// metadata is the metadata service in the words of this server's disks and volumes.
func (s *server) metadata() metadataOf {
	return metadataOf{api: s.client, node: s.node, process: s.process}
}

func (s *server) startVolumes(context.Context) (err error) {
	s.waitFor("its volumes are being opened")
	s.manager, err = primary.New(primary.Config{
		Metadata: s.metadata(), Replicas: copiesOf{s.store}, Geometry: s.geometry, Node: s.node, Log: s.log, Fault: s.faults,
	})
	if err != nil {
		return err
	}
	s.registry.MustRegister(s.volumeMetrics(), &s.traffic)
	s.registrar.wrong = (&complaints{disks: s.store.Reports, volumes: s.manager.Status}).now
	s.follower = &follower{
		client: s.client, changed: s.manager.Changed, held: s.held, log: s.log,
		deleted: func(id block.VolumeID) { s.traffic.Forget(id); s.store.Collect() },
	}
	return nil
}

// held are the volumes that are open here, or were and have counters.
func (s *server) held() []block.VolumeID {
	ids := s.traffic.Volumes()
	for _, v := range s.manager.Status() {
		ids = append(ids, v.ID)
	}
	return ids
}

func (s *server) stopVolumes(ctx context.Context) error { return s.manager.Close(ctx) }

func (s *server) startNBD(context.Context) (err error) {
	var exports nbd.Exports = s.manager
	if !s.devices {
		exports = remoteDevices{exports, s.store.Reports}
	}
	config := nbd.Config{Exports: countedExports{exports, &s.traffic}, Log: s.log, Fault: s.faults}
	if limit := debug.SetMemoryLimit(-1); limit < math.MaxInt64 { // GOMEMLIMIT: requests get half of it
		config.ServerBytes = min(max(limit/2, 2*block.MaxPayload), 512<<20)
	}
	if s.nbd, err = nbd.New(config); err != nil {
		return err
	}
	s.registry.MustRegister(s.nbdMetrics())
	for _, l := range []net.Listener{s.listeners.nbd, s.listeners.socket} {
		if l == nil {
			continue
		}
		s.serving.Go(func() {
			if err := s.nbd.Serve(context.Background(), l); err != nil {
				s.group.Fail(err)
			}
		})
	}
	return nil
}

// stopNBD answers what is in flight and closes every connection.
func (s *server) stopNBD(ctx context.Context) error {
	s.faults.Clear("") // whoever a fault holds would never drain
	return s.nbd.Shutdown(ctx)
}

func (s *server) ready(context.Context) error {
	s.missing.Store(nil)
	s.log.Info("ready", "node", s.node, "cluster_id", s.cluster.String(), "metadata", s.listeners.metadata.Addr().String(),
		"nbd", s.listeners.nbd.Addr().String(), "socket", s.nbdSocket, "http", s.listeners.http.Addr().String())
	return nil
}

func (s *server) notReady(context.Context) error {
	s.waitFor("it is stopping")
	return nil
}
