package consensus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

// Node is one server's part in the replication of a machine. All methods may
// be called from any goroutine.
type Node struct {
	config   Config
	identity identity
	log      *slog.Logger

	lock      *os.File
	logs      *logStore
	snapshots *snapshotStore
	stream    *stream
	fsm       *fsm
	raft      *hraft.Raft
	trans     *transport

	established atomic.Uint64 // the term this node leads and has committed in; 0: none
	leadership  leadership

	gate   gate          // calls in progress
	quit   chan struct{} // ends our goroutines
	wait   sync.WaitGroup
	nudged chan struct{} // compact should look now

	failed   chan struct{}
	failOnce sync.Once
	close    func() error
}

// Open takes the directory, checks what is in it and starts. It returns when
// the node runs, not when there is a leader.
//
// ErrInUse: another process has the directory, or the port. ErrPrecondition:
// the directory is new and neither founds nor joins a cluster, or it belongs
// to another node or cluster. ErrCorrupt, ErrFormat: the state cannot be
// rebuilt, or was written by a newer binary.
func Open(config Config) (*Node, error) {
	if err := config.validate(); err != nil {
		return nil, err
	}
	n := &Node{
		config: config, log: config.Log.With("component", "consensus"),
		quit: make(chan struct{}), nudged: make(chan struct{}, 1), failed: make(chan struct{}),
	}
	n.leadership.init()
	n.close = sync.OnceValue(n.shut)
	n.fsm = &fsm{machine: config.Machine, nudge: n.nudge, fail: n.fail}
	if err := n.open(); err != nil {
		return nil, errors.Join(err, n.release())
	}
	n.wait.Go(n.lead)
	n.wait.Go(n.compact)
	return n, nil
}

// open takes everything in order; release gives back what was taken.
func (n *Node) open() (err error) {
	if n.lock, err = lockDir(n.config.Dir); err != nil {
		return err
	}
	if n.identity, err = identify(&n.config); err != nil {
		return err
	}
	if n.snapshots, err = openSnapshots(filepath.Join(n.config.Dir, "snapshots"), n.log); err != nil {
		return fmt.Errorf("metadata snapshots: %w", err)
	}
	if n.logs, err = openLog(filepath.Join(n.config.Dir, "log"), n.config.Policy.Segment, n.config.Log); err != nil {
		return fmt.Errorf("metadata log: %w", err)
	}
	n.logs.keep = func() uint64 { return n.snapshots.olderIndex() + 1 }
	f, err := inspect(n.snapshots, n.logs, n.log)
	if err != nil {
		return err
	}
	n.logs.bytes.Store(f.bytes)
	if err := n.listen(); err != nil {
		return err
	}
	return n.start(f)
}

func (n *Node) listen() error {
	listener, err := net.Listen("tcp", n.config.Listen)
	if err != nil {
		return fmt.Errorf("%w: raft port: %w", block.ErrInUse, err)
	}
	address, err := advertised(listener, n.config.Advertise)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	n.stream = newStream(listener, address, n.identity.Cluster, n.log)
	return nil
}

// start founds the cluster if that is due, and starts raft.
func (n *Node) start(f found) error {
	trans := &transport{
		NetworkTransport: hraft.NewNetworkTransportWithConfig(&hraft.NetworkTransportConfig{
			Stream: n.stream, MaxPool: 3, Timeout: 10 * time.Second, Logger: newLogger(n.config.Log, "raft-net"),
			// No pipelining: in it, a sender that meets the end of its decoder
			// waits for ever, the follower gets heartbeats and no entries, and
			// raft cannot be shut down. Batches do what is needed here.
			MaxRPCsInFlight: 1,
		}),
		hangs: func() bool { return n.logs.stalled(n.config.Timing.Election / 2) },
	}
	config := n.config.raft()
	if err := n.found(f, config, trans); err != nil {
		return errors.Join(err, trans.Close())
	}
	alone := f.empty() && n.identity.Stage == stageReady || f.onlyVoter(n.config.Node)
	if alone {
		config.HeartbeatTimeout += time.Millisecond
		config.ElectionTimeout += time.Millisecond
	}
	raft, err := hraft.NewRaft(config, n.fsm, n.logs, n.logs, n.snapshots, trans)
	if failure := n.fsm.failure(); failure != nil {
		err = fmt.Errorf("the metadata snapshot cannot be restored: %w", failure)
	}
	if err != nil {
		if raft != nil {
			err = errors.Join(err, raft.Shutdown().Error())
		}
		return errors.Join(err, trans.Close())
	}
	n.raft, n.trans = raft, trans
	n.followLeader()
	n.fsm.applied.advance(f.snapshot)
	if alone {
		// There is no leader to wait for. A shorter timeout makes raft look
		// at its timer now instead of after one of the older length.
		reload := raft.ReloadableConfig()
		reload.HeartbeatTimeout = n.config.Timing.Election
		reload.ElectionTimeout = n.config.Timing.Election
		if err := raft.ReloadConfig(reload); err != nil {
			return errors.Join(err, raft.Shutdown().Error())
		}
	}
	return nil
}

// found writes the first entry of a new cluster's log, and keeps the stage.
func (n *Node) found(f found, config *hraft.Config, trans *transport) error {
	member := n.identity.Stage == stageReady || n.identity.Stage == stageJoined
	switch {
	case member && f.empty():
		return fmt.Errorf("%w: the data directory %s was in use but holds neither log nor snapshots: restore it from a backup, "+
			"or empty it and let the node join again", block.ErrCorrupt, n.config.Dir)
	case member, n.identity.Stage == stageJoining && f.empty():
		return nil
	case n.identity.Stage == stageJoining:
		return n.identity.advance(n.config.Dir, stageJoined)
	case f.empty():
		first := hraft.Configuration{Servers: []hraft.Server{{
			Suffrage: hraft.Voter, ID: config.LocalID, Address: trans.LocalAddr(),
		}}}
		err := hraft.BootstrapCluster(config, n.logs, n.logs, n.snapshots, trans, first)
		if errors.Is(err, hraft.ErrCantBootstrap) { // cut short after the term, before the entry
			err = n.logs.StoreLog(&hraft.Log{Index: 1, Term: 1, Type: hraft.LogConfiguration, Data: hraft.EncodeConfiguration(first)})
		}
		if err != nil {
			return fmt.Errorf("found the cluster: %w", err)
		}
	}
	return n.identity.advance(n.config.Dir, stageReady)
}

// settle records that a joiner has received something: from now on an empty
// directory is one that forgot. Called by compact only.
func (n *Node) settle() {
	if n.identity.Stage != stageJoining || n.raft.LastIndex() == 0 {
		return
	}
	if err := n.identity.advance(n.config.Dir, stageJoined); err != nil {
		n.log.Warn("that this node has joined was not recorded; it is tried again", "err", err)
	}
}

// Directory is the identity of the data directory.
func (n *Node) Directory() block.UUID { return n.identity.Directory }

// Cluster is the identity of the cluster this directory belongs to.
func (n *Node) Cluster() block.ClusterID { return n.identity.Cluster }

// Name is this node's name.
func (n *Node) Name() string { return n.config.Node }

// Address is where other servers reach this node's raft port.
func (n *Node) Address() string { return n.stream.Addr().String() }

// Failed is closed when the machine could not apply a committed command, or
// could not restore a snapshot. Nothing was applied since; the process must
// end with Err.
func (n *Node) Failed() <-chan struct{} { return n.failed }

// Err is why Failed is closed, else nil.
func (n *Node) Err() error {
	if err := n.fsm.failure(); err != nil {
		return fmt.Errorf("metadata service halted: %w", err)
	}
	return nil
}

// fail is called once, by the FSM goroutine, which must go on to answer.
func (n *Node) fail(err error) {
	n.failOnce.Do(func() {
		n.log.Error("metadata service halts: a committed command cannot be applied", "err", err)
		close(n.failed)
	})
}

// Close ends the node in order and gives the directory back. It may be called
// again and returns the same.
func (n *Node) Close() error { return n.close() }

func (n *Node) shut() error {
	n.gate.close()
	if n.raft.State() == hraft.Leader && n.voters() > 1 {
		if err := n.raft.LeadershipTransfer().Error(); err != nil {
			n.log.Info("leadership not handed over", "err", err)
		}
	}
	n.gate.drain()
	close(n.quit)
	n.stream.leave()
	err := n.raft.Shutdown().Error() // closes the transport, and the stream with it
	n.trans.CloseStreams()           // what it dialled
	n.wait.Wait()
	return errors.Join(err, n.release())
}

// release gives back what open took, raft excepted.
func (n *Node) release() error {
	var errs []error
	if n.stream != nil {
		errs = append(errs, n.stream.Close())
	}
	if n.logs != nil && n.logs.wal != nil {
		errs = append(errs, n.logs.close())
	}
	if n.lock != nil {
		errs = append(errs, n.lock.Close())
	}
	return errors.Join(errs...)
}

func (n *Node) voters() int {
	count := 0
	for _, s := range n.raft.GetConfiguration().Configuration().Servers {
		if s.Suffrage == hraft.Voter {
			count++
		}
	}
	return count
}

// gate counts calls in progress and refuses new ones once closed.
type gate struct {
	mu     sync.Mutex
	closed bool
	wait   sync.WaitGroup
}

func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.wait.Add(1)
	return true
}

func (g *gate) leave() { g.wait.Done() }

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

func (g *gate) drain() { g.wait.Wait() }

// enter admits a call, or says why not.
func (n *Node) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := n.fsm.failure(); err != nil {
		return fmt.Errorf("%w: metadata service halted: %w", block.ErrUnavailable, err)
	}
	if !n.gate.enter() {
		return fmt.Errorf("%w: the metadata service is stopping", block.ErrShutdown)
	}
	return nil
}
