package consensus

import (
	"errors"
	"sync"
	"time"

	hraft "github.com/hashicorp/raft"
)

// Leadership is this node's view of who leads.
type Leadership struct {
	// Leads: this node leads and has committed in its term, so Read and Apply work.
	Leads bool
	// Term in which it leads.
	Term uint64
}

type leadership struct {
	mu      sync.Mutex
	now     Leadership
	changed chan struct{}
}

func (l *leadership) init() { l.changed = make(chan struct{}) }

func (l *leadership) get() (Leadership, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.now, l.changed
}

// set always wakes those who wait: they look at raft again.
func (l *leadership) set(to Leadership) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = to
	close(l.changed)
	l.changed = make(chan struct{})
}

// wake makes those who wait look again.
func (l *leadership) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
}

// followLeader wakes those who wait when this node hears of another leader, too.
// raft calls the filter, which is all that there is of this observer.
func (n *Node) followLeader() {
	n.raft.RegisterObserver(hraft.NewObserver(nil, false, func(o *hraft.Observation) bool {
		if _, leader := o.Data.(hraft.LeaderObservation); leader {
			n.leadership.wake()
		}
		return false
	}))
}

// Leadership returns the present state and a channel that is closed when it,
// or what Leader says, may have changed.
func (n *Node) Leadership() (Leadership, <-chan struct{}) { return n.leadership.get() }

// Leader is the name and raft address of the leader as this node knows it,
// empty if it knows none.
func (n *Node) Leader() (node, address string) {
	a, id := n.raft.LeaderWithID()
	return string(id), string(a)
}

// lead follows raft's leadership. It publishes a term only after a barrier was
// committed in it: before that the commit index of a new leader may be older
// than what its predecessor acknowledged.
func (n *Node) lead() {
	for {
		select {
		case leads := <-n.raft.LeaderCh():
			n.established.Store(0)
			n.leadership.set(Leadership{})
			if leads {
				n.establish()
			}
		case <-n.failed: // halt: see DESIGN.md
			n.established.Store(0)
			n.leadership.set(Leadership{})
			n.gate.close()
			n.gate.drain()
			n.stream.leave()
			if err := n.raft.Shutdown().Error(); err != nil {
				n.log.Error("raft did not stop", "err", err)
			}
			return
		case <-n.quit:
			return
		}
	}
}

func (n *Node) establish() {
	for n.raft.State() == hraft.Leader {
		term := n.raft.CurrentTerm()
		index, err := n.barrier()
		if err == nil && n.raft.CurrentTerm() == term {
			n.fsm.applied.advance(index)
			n.established.Store(term)
			n.leadership.set(Leadership{Leads: true, Term: term})
			n.log.Info("leads the metadata service", "term", term, "index", index)
			n.correctAddress()
			return
		}
		if !n.pause(50 * time.Millisecond) {
			return
		}
	}
}

// barrier commits an entry of this term and waits until everything before it
// is applied.
func (n *Node) barrier() (uint64, error) {
	if !n.gate.enter() {
		return 0, hraft.ErrRaftShutdown
	}
	defer n.gate.leave()
	future := n.raft.Barrier(acceptance)
	if err := future.Error(); err != nil {
		return 0, err
	}
	indexed, ok := future.(hraft.IndexFuture)
	if !ok {
		return 0, errors.New("raft's barrier has no index")
	}
	return indexed.Index(), nil
}

// correctAddress records this node's address if it has changed since it was
// last a member: nobody else could reach it to do that.
func (n *Node) correctAddress() {
	if !n.gate.enter() {
		return
	}
	defer n.gate.leave()
	own := hraft.ServerAddress(n.Address())
	for _, s := range n.raft.GetConfiguration().Configuration().Servers {
		if s.ID == hraft.ServerID(n.config.Node) && s.Address != own {
			if err := n.raft.AddVoter(s.ID, own, 0, acceptance).Error(); err != nil {
				n.log.Warn("own raft address not recorded", "err", err)
			}
		}
	}
}

func (n *Node) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-n.quit:
		return false
	}
}
