package consensus

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"time"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

// MaxCommand bounds one command, in bytes: a larger one would hold up the
// heartbeats behind it.
const MaxCommand = 1 << 20

// Config is what Open needs.
type Config struct {
	// Dir is the state directory, private to one process at a time. It is
	// created if its parent exists.
	Dir string
	// Node is the unique, lasting name of this server.
	Node string
	// Cluster is the identity of a directory that is new; in one that is not,
	// zero or the same.
	Cluster block.ClusterID
	// Bootstrap makes a new directory the first voter of a new cluster. A
	// directory that is not new simply starts. Without it a new directory
	// waits to be added by a leader of Cluster.
	Bootstrap bool
	// Listen is the address (host:port) of the raft port; Advertise is how
	// others reach it, by default the same.
	Listen, Advertise string

	Machine Machine
	Log     *slog.Logger

	// Timing and Policy take defaults where zero.
	Timing Timing
	Policy Policy
}

// Timing is raft's, for several voters. The only voter elects itself at once.
type Timing struct {
	Election  time.Duration // without a leader for this long: stand for election; 500 ms
	Lease     time.Duration // a leader without contact to a majority for this long steps down; half of Election
	Heartbeat time.Duration // at most this long between a commit and its announcement; 20 ms

	Survey time.Duration // how often the leader asks the servers how they are, and changes one vote at most; 2 s
	Stable time.Duration // well for so long: may vote; gone for so long: is dead; 10 s
}

// Policy says when a snapshot is taken. The log is bounded by two intervals.
type Policy struct {
	Commands int           // applied since the last snapshot; 8192
	Bytes    int64         // of log since the last snapshot; 16 MiB
	Age      time.Duration // since the last snapshot, if anything was applied; 24 h
	Check    time.Duration // how often to look; 10 s
	Segment  int           // size of a log segment, in bytes; 8 MiB
}

func (c *Config) validate() error {
	if c.Node == "" || len(c.Node) > 253 {
		return fmt.Errorf("%w: a node needs a name of 1 to 253 bytes", block.ErrInvalid)
	}
	if c.Machine == nil || c.Log == nil {
		return errors.New("consensus: Machine and Log are required")
	}
	t, p := &c.Timing, &c.Policy
	set(&t.Election, 500*time.Millisecond)
	set(&t.Lease, t.Election/2)
	set(&t.Heartbeat, 20*time.Millisecond)
	set(&t.Survey, 2*time.Second)
	set(&t.Stable, 10*time.Second)
	set(&p.Commands, 8192)
	set(&p.Bytes, 16<<20)
	set(&p.Age, 24*time.Hour)
	set(&p.Check, 10*time.Second)
	set(&p.Segment, 8<<20)
	return nil
}

func set[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// raft is the library's configuration. Its own snapshot policy is switched
// off: it looks at entries only, so a quiet log would never be cut.
func (c *Config) raft() *hraft.Config {
	r := hraft.DefaultConfig()
	r.LocalID = hraft.ServerID(c.Node)
	r.HeartbeatTimeout = c.Timing.Election
	r.ElectionTimeout = c.Timing.Election
	r.LeaderLeaseTimeout = c.Timing.Lease
	r.CommitTimeout = c.Timing.Heartbeat
	r.SnapshotThreshold = math.MaxUint64
	r.SnapshotInterval = 24 * time.Hour
	r.TrailingLogs = 1 // the log store keeps more: up to the older snapshot
	r.ShutdownOnRemove = false
	r.NoLegacyTelemetry = true
	r.Logger = newLogger(c.Log, "raft")
	return r
}

func advertised(listener net.Listener, advertise string) (net.Addr, error) {
	if advertise == "" {
		return listener.Addr(), nil
	}
	a, err := net.ResolveTCPAddr("tcp", advertise)
	if err != nil {
		return nil, fmt.Errorf("%w: raft address to advertise %q: %w", block.ErrInvalid, advertise, err)
	}
	return a, nil
}
