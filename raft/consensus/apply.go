package consensus

import (
	"context"
	"errors"
	"fmt"
	"time"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

// acceptance bounds the wait for raft's main loop, so that a caller without a
// deadline is not held by a leader whose disk hangs.
const acceptance = 10 * time.Second

// Apply has command committed and applied on this node, and returns the
// machine's response with the index. Concurrent calls share a sync.
//
// ErrUnavailable, ErrTooLarge: surely not applied, now or later. ErrUnknown:
// it may be. If ctx ends while the outcome is open, that is ErrUnknown too.
func (n *Node) Apply(ctx context.Context, command []byte) (response any, index uint64, err error) {
	if len(command) > MaxCommand {
		return nil, 0, fmt.Errorf("%w: a command of %d bytes; the limit is %d", block.ErrTooLarge, len(command), MaxCommand)
	}
	if err := n.enter(ctx); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	future := n.raft.Apply(seal(command), patience(ctx))
	select {
	case err = <-n.await(future):
	case <-ctx.Done():
		return nil, 0, fmt.Errorf("%w: the command was accepted, then: %w", block.ErrUnknown, ctx.Err())
	}
	if err != nil {
		return nil, 0, outcome(err)
	}
	if h, ok := future.Response().(halted); ok {
		return nil, 0, fmt.Errorf("%w: the metadata service halted: %w", block.ErrUnknown, h.err)
	}
	return future.Response(), future.Index(), nil
}

// await ends an entered call with a future of raft's, which has no deadline of
// its own. The goroutine belongs to the gate: raft answers every future while
// it runs, and it is shut down only after the gate has drained.
func (n *Node) await(future hraft.Future) <-chan error {
	done := make(chan error, 1)
	n.gate.wait.Go(func() { done <- future.Error() })
	n.gate.leave()
	return done
}

// outcome tells apart what raft answers before and after an entry is in its log.
func outcome(err error) error {
	switch {
	case errors.Is(err, hraft.ErrNotLeader), errors.Is(err, hraft.ErrLeadershipTransferInProgress), errors.Is(err, hraft.ErrEnqueueTimeout):
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	default:
		return fmt.Errorf("%w: %w", block.ErrUnknown, err)
	}
}

func patience(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return max(min(time.Until(deadline), acceptance), time.Millisecond)
	}
	return acceptance
}

// Read returns when everything committed before the call has been applied on
// this node, so that a look at the machine after it is linearizable. index is
// an index the machine has reached. ErrUnavailable: this node does not lead,
// or cannot prove it.
func (n *Node) Read(ctx context.Context) (index uint64, err error) {
	if err := n.enter(ctx); err != nil {
		return 0, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	term, err := n.term(ctx)
	if err != nil {
		n.gate.leave()
		return 0, err
	}
	index = n.raft.CommitIndex()
	select {
	case err = <-n.await(n.raft.VerifyLeader()):
	case <-ctx.Done():
		err = ctx.Err()
	}
	switch {
	case err != nil:
		return 0, fmt.Errorf("%w: leadership not confirmed: %w", block.ErrUnavailable, err)
	case n.raft.CurrentTerm() != term: // lost and won back: others may have committed in between
		return 0, fmt.Errorf("%w: leadership changed", block.ErrUnavailable)
	case !n.fsm.applied.wait(ctx, index, n.failed):
		return 0, fmt.Errorf("%w: not applied up to %d yet", block.ErrUnavailable, index)
	}
	return index, nil
}

// term is the term this node leads. A leader that is about to commit its first
// entry is waited for; a follower is refused at once.
func (n *Node) term(ctx context.Context) (uint64, error) {
	for {
		state, changed := n.leadership.get()
		term := n.raft.CurrentTerm()
		if state.Leads && n.established.Load() == term && n.raft.State() == hraft.Leader {
			return term, nil
		}
		if n.raft.State() != hraft.Leader {
			return 0, fmt.Errorf("%w: this node does not lead the metadata service", block.ErrUnavailable)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, fmt.Errorf("%w: waiting for the new leader's first commit: %w", block.ErrUnavailable, ctx.Err())
		case <-n.quit:
			return 0, fmt.Errorf("%w: the metadata service is stopping", block.ErrShutdown)
		}
	}
}
