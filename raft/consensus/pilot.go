package consensus

import (
	"context"
	"math"
	"strconv"
	"sync"
	"time"

	hraft "github.com/hashicorp/raft"
	autopilot "github.com/hashicorp/raft-autopilot"
)

// Application knows of the servers what raft does not. It is asked by the
// leader only, from several goroutines.
type Application interface {
	// Servers are all that are registered.
	Servers() []Server
	// Progress asks a server how far it is, until ctx ends.
	Progress(ctx context.Context, server Server) (Progress, error)
}

// Server is a registered server.
type Server struct {
	Name    string
	Rack    string
	Address string // of its raft port
	Alive   bool   // was heard of lately
}

// Progress is how far a server is, as it says itself.
type Progress struct {
	LastContact         time.Duration // since it heard the leader; negative: never
	LastTerm, LastIndex uint64        // of its log
}

// Progress is this node's own.
func (n *Node) Progress() Progress {
	p := Progress{LastContact: -1, LastIndex: n.raft.LastIndex()}
	p.LastTerm, _ = strconv.ParseUint(n.raft.Stats()["last_log_term"], 10, 64)
	if at := n.raft.LastContact(); !at.IsZero() {
		p.LastContact = time.Since(at)
	}
	if n.raft.State() == hraft.Leader {
		p.LastContact = 0
	}
	return p
}

// Pilot keeps the registered servers members, takes out those that are not,
// and gives the vote to the right ones, whenever this node leads, until ctx
// ends. It must have returned before Close.
func (n *Node) Pilot(ctx context.Context, app Application) {
	for {
		state, changed := n.Leadership()
		if state.Leads {
			n.fly(ctx, app, state)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		case <-n.quit:
			return
		}
	}
}

// fly is Pilot for one term.
func (n *Node) fly(ctx context.Context, app Application, term Leadership) {
	t := n.config.Timing
	p := &pilot{node: n, app: app}
	auto := autopilot.New(n.raft, p, autopilot.WithPromoter(promoter{stable: t.Stable}), autopilot.WithLogger(newLogger(n.config.Log, "autopilot")),
		autopilot.WithUpdateInterval(t.Survey), autopilot.WithReconcileInterval(t.Survey))
	auto.Start(ctx)
	defer func() { <-auto.Stop() }()
	tick := time.NewTicker(t.Survey)
	defer tick.Stop()
	for {
		p.admit(ctx)
		state, changed := n.Leadership()
		if state != term {
			return
		}
		select {
		case <-tick.C:
		case <-changed:
		case <-ctx.Done():
			return
		case <-n.quit:
			return
		}
	}
}

// pilot is what the library asks of the application.
type pilot struct {
	node *Node
	app  Application
}

// admit makes members of those who registered at a leader that died before it
// could, and corrects addresses.
func (p *pilot) admit(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, acceptance)
	defer cancel()
	for _, s := range p.app.Servers() {
		if s.Address == "" {
			continue
		}
		if err := p.node.Admit(ctx, s.Name, s.Address); err != nil && ctx.Err() == nil {
			p.node.log.Warn("a registered server is not a member yet; it is tried again", "node", s.Name, "address", s.Address, "err", err)
		}
	}
}

// AutopilotConfig implements autopilot.ApplicationIntegration.
func (p *pilot) AutopilotConfig() *autopilot.Config {
	t := p.node.config.Timing
	return &autopilot.Config{
		CleanupDeadServers:      true, // of those whose registration is gone: see promoter
		LastContactThreshold:    4 * t.Election,
		MaxTrailingLogs:         1000,
		ServerStabilizationTime: t.Stable,
	}
}

// NotifyState implements autopilot.ApplicationIntegration.
func (p *pilot) NotifyState(*autopilot.State) {}

// KnownServers implements autopilot.ApplicationIntegration.
func (p *pilot) KnownServers() map[hraft.ServerID]*autopilot.Server {
	known := map[hraft.ServerID]*autopilot.Server{}
	for _, s := range p.app.Servers() {
		id := hraft.ServerID(s.Name)
		status := autopilot.NodeFailed
		if s.Alive || s.Name == p.node.config.Node {
			status = autopilot.NodeAlive
		}
		known[id] = &autopilot.Server{
			ID: id, Name: s.Name, Address: hraft.ServerAddress(s.Address), NodeStatus: status, NodeType: autopilot.NodeVoter,
			RaftVersion: int(hraft.ProtocolVersionMax), IsLeader: s.Name == p.node.config.Node, Meta: map[string]string{metaRack: s.Rack},
		}
	}
	return known
}

// FetchServerStats implements autopilot.ApplicationIntegration. Who does not
// answer in time is not well: the library would go by what was said before.
func (p *pilot) FetchServerStats(ctx context.Context, servers map[hraft.ServerID]*autopilot.Server) map[hraft.ServerID]*autopilot.ServerStats {
	stats := make(map[hraft.ServerID]*autopilot.ServerStats, len(servers))
	var mu sync.Mutex
	var wait sync.WaitGroup
	for id, s := range servers {
		wait.Go(func() {
			said, err := p.ask(ctx, s)
			if err != nil {
				said.LastContact = math.MaxInt64
			}
			mu.Lock()
			defer mu.Unlock()
			stats[id] = &autopilot.ServerStats{LastContact: said.LastContact, LastTerm: said.LastTerm, LastIndex: said.LastIndex}
		})
	}
	wait.Wait()
	return stats
}

func (p *pilot) ask(ctx context.Context, s *autopilot.Server) (Progress, error) {
	if s.Name == p.node.config.Node {
		return p.node.Progress(), nil
	}
	return p.app.Progress(ctx, Server{Name: s.Name, Rack: s.Meta[metaRack], Address: string(s.Address), Alive: s.NodeStatus == autopilot.NodeAlive})
}

// RemoveFailedServer implements autopilot.ApplicationIntegration. The promoter
// lets none through: who is registered stays a member.
func (p *pilot) RemoveFailedServer(*autopilot.Server) {}
