package service

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

// Config is what New needs.
type Config struct {
	Consensus *consensus.Node
	Machine   *Machine // the one that Consensus was opened with
	Log       *slog.Logger
	Faults    *fault.Set // may be nil

	// What a new cluster is given; an existing one keeps what it has.
	ExtentSize      int64  // bytes; 0: block.DefaultExtentSize
	DefaultReplicas uint32 // 0: 3
	Overcommit      uint32 // provisioned bytes per byte of capacity; 0: the default of raft/placement

	// LocalCopies: primaries reach the disks of their own node only, so a volume
	// has one copy, all of it on its primary's node.
	LocalCopies bool

	// DownAfter is how long a node may say nothing before it counts as down; 0: 10 s.
	DownAfter time.Duration
	// Clock is for tests; nil: time.Now. It dates what people read and tells
	// who is up. Nothing that must be right depends on it.
	Clock func() time.Time
}

// Service is the metadata API of one server.
type Service struct {
	metapb.UnimplementedMetadataServer
	config    Config
	log       *slog.Logger
	consensus *consensus.Node
	machine   *Machine
	nodes     *nodes
	events    *limiter
	forward   *forwarder
	server    *grpc.Server
	attaches  *underway

	life context.Context // what goes on when its caller has gone; ends with quit
	quit chan struct{}
	stop func()
	wait sync.WaitGroup
}

// New starts what runs beside the API; Stop ends it.
func New(c Config) *Service {
	if c.ExtentSize == 0 {
		c.ExtentSize = block.DefaultExtentSize
	}
	if c.DefaultReplicas == 0 {
		c.DefaultReplicas = 3
	}
	if c.DownAfter == 0 {
		c.DownAfter = 10 * time.Second
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	s := &Service{
		config: c, log: c.Log.With("component", "metadata"), consensus: c.Consensus, machine: c.Machine,
		nodes: newNodes(c.DownAfter, c.Clock), events: newLimiter(), forward: newForwarder(), attaches: newUnderway(), quit: make(chan struct{}),
	}
	s.server = s.newServer()
	metapb.RegisterMetadataServer(s.server, s)
	life, end := context.WithCancel(context.Background())
	s.life, s.stop = life, sync.OnceFunc(func() { close(s.quit); end() })
	s.wait.Go(s.lead)
	s.wait.Go(func() { s.consensus.Pilot(s.life, fleet{s}) })
	return s
}

// Serve answers on l until Stop, which makes it return nil.
func (s *Service) Serve(l net.Listener) error {
	if err := s.server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("%w: metadata listener: %w", block.ErrIO, err)
	}
	return nil
}

// Stop refuses new calls, ends streams and waits, waits for calls in progress
// until ctx ends, then cuts them. Consensus is the caller's to close, after.
func (s *Service) Stop(ctx context.Context) {
	s.stop()                    // those who wait for a confirmation go at once
	if s.config.Faults != nil { // and those who are held at a fault point
		for _, point := range []string{"metadata.create", "metadata.commit", "metadata.log", "metadata.read"} {
			s.config.Faults.Clear(point)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.server.GracefulStop()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.server.Stop()
		<-done
	}
	s.wait.Wait()
	s.forward.close()
}

// Ready returns nil when the API can be used: there is a leader and the
// cluster is initialised. The error is a sentence for people.
func (s *Service) Ready() error {
	if err := s.consensus.Err(); err != nil {
		return err
	}
	if leader, _ := s.consensus.Leader(); leader == "" {
		return fmt.Errorf("%w: the metadata service has no leader: a majority of its voters must run and reach each other", block.ErrUnavailable)
	}
	if s.machine.View().Cluster() == nil {
		return fmt.Errorf("%w: the cluster is being initialised", block.ErrUnavailable)
	}
	return nil
}

// lead does what a new leader owes: who is up begins anew, and a cluster that
// has no parameters yet gets them.
func (s *Service) lead() {
	var term uint64
	for {
		state, changed := s.consensus.Leadership()
		if state.Leads {
			if state.Term != term {
				term = state.Term
				s.nodes.begin(s.machine.View())
			}
			if err := s.initialise(); err != nil {
				s.log.Error("the cluster could not be initialised", "err", err)
				select {
				case <-time.After(time.Second):
					continue
				case <-changed:
				case <-s.quit:
					return
				}
			}
		}
		select {
		case <-changed:
		case <-s.quit:
			return
		}
	}
}

func (s *Service) initialise() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	v, err := s.read(ctx)
	if err != nil || v.Cluster() != nil {
		return err
	}
	_, err = s.propose(ctx, &metapb.Command{Kind: &metapb.Command_InitCluster{InitCluster: &metapb.InitCluster{
		ClusterId: s.consensus.Cluster().String(), ExtentSize: s.config.ExtentSize,
		DefaultReplicas: s.config.DefaultReplicas, Overcommit: s.config.Overcommit,
	}}})
	return err
}

// read returns a state that holds everything committed before the call.
func (s *Service) read(ctx context.Context) (*metadata.View, error) {
	if err := s.config.Faults.Hit("metadata.read", ""); err != nil {
		return nil, err
	}
	if _, err := s.consensus.Read(ctx); err != nil {
		return nil, err
	}
	return s.machine.View(), nil
}

// cluster is read, of a cluster that is initialised.
func (s *Service) cluster(ctx context.Context) (*metadata.View, error) {
	v, err := s.read(ctx)
	if err == nil && v.Cluster() == nil {
		err = fmt.Errorf("%w: the cluster is being initialised: try again", block.ErrUnavailable)
	}
	return v, err
}

// propose commits a command and returns what the state machine made of it. A
// refusal is the error, as sure as one before the log: the machine decided.
// ErrUnknown: it may be applied, now or later.
func (s *Service) propose(ctx context.Context, c *metapb.Command) (metadata.Result, error) {
	r, _, err := s.commit(ctx, c)
	return r, err
}

// commit is propose that tells the command's index, too, if it made an entry.
func (s *Service) commit(ctx context.Context, c *metapb.Command) (r metadata.Result, index uint64, err error) {
	// Not the highest level that this binary knows: an older voter would halt at what it cannot apply.
	c.Level, c.Time = s.machine.View().Level(), s.config.Clock().UnixNano()
	if err := metadata.Validate(c); err != nil {
		return r, 0, fmt.Errorf("%w: %v", block.ErrUnsupported, err) // its format is the client's, not ours
	}
	b, err := proto.Marshal(c)
	if err != nil {
		return r, 0, fmt.Errorf("%w: %w", block.ErrInvalid, err)
	}
	if r, settled := s.foresee(c); settled {
		return r, 0, r.Err
	}
	if err := s.config.Faults.Hit("metadata.commit", ""); err != nil {
		return r, 0, err
	}
	if a := c.GetAttachVolume().GetAttachment(); a != nil {
		return s.applyAttach(ctx, a, b)
	}
	return s.apply(ctx, b)
}

func (s *Service) apply(ctx context.Context, command []byte) (r metadata.Result, index uint64, err error) {
	response, index, err := s.consensus.Apply(ctx, command)
	if err != nil {
		return r, 0, err
	}
	r, ok := response.(metadata.Result)
	if !ok {
		return r, 0, fmt.Errorf("%w: the machine answered %T", metapb.ErrInternal, response)
	}
	return r, index, r.Err
}

// foresee tries a command on the state. What would be refused, or would find
// all done, is answered without a log entry, so that a caller who repeats a
// failing call costs nobody a sync. The caller has read linearizably since its
// call began, so that state is a moment at which the answer is true.
func (s *Service) foresee(c *metapb.Command) (r metadata.Result, settled bool) {
	r = s.machine.View().Try(c)
	return r, r.Err != nil || !r.Changed
}

// newToken draws an attachment's secret: 32 bytes.
func newToken() []byte {
	token := make([]byte, 32)
	_, _ = rand.Read(token) // never fails
	return token
}

// pending bounds a wait for a confirmation, so that its sentence still reaches
// the caller within the deadline. It ends with the service, too.
func (s *Service) pending(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(defaultDeadline)
	}
	left := time.Until(deadline)
	ctx, cancel := context.WithTimeout(ctx, left-min(left/5, 500*time.Millisecond))
	stop := context.AfterFunc(s.life, cancel)
	return ctx, func() { stop(); cancel() }
}
