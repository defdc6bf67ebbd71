package consensus

import (
	"context"
	"errors"
	"fmt"
	"time"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

// nudge makes compact look before its next tick.
func (n *Node) nudge() {
	select {
	case n.nudged <- struct{}{}:
	default:
	}
}

// compact takes snapshots by the policy. What was applied before this process
// started counts as new: a snapshot too many does no harm.
func (n *Node) compact() {
	p := n.config.Policy
	tick := time.NewTicker(p.Check)
	defer tick.Stop()
	var commands, bytes int64
	at := time.Now()
	for {
		select {
		case <-tick.C:
		case <-n.nudged:
		case <-n.quit:
			return
		}
		n.settle()
		nowCommands, nowBytes := n.fsm.count.Load(), n.logs.bytes.Load()
		applied := nowCommands - commands
		due := applied >= int64(p.Commands) || nowBytes-bytes >= p.Bytes || time.Since(at) >= p.Age
		if applied == 0 || !due {
			continue
		}
		if err := n.Snapshot(context.Background()); err != nil {
			n.log.Warn("metadata snapshot failed; the log stays longer until one succeeds", "err", err)
			if !n.pause(p.Check) {
				return
			}
			continue
		}
		commands, bytes, at = nowCommands, nowBytes, time.Now()
	}
}

// Snapshot writes the state as it is now, durably, and cuts the log. Apply is
// not held up.
func (n *Node) Snapshot(ctx context.Context) error {
	if err := n.enter(ctx); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	select {
	case err := <-n.await(n.raft.Snapshot()):
		if err != nil && !errors.Is(err, hraft.ErrNothingNewToSnapshot) {
			return fmt.Errorf("metadata snapshot: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("metadata snapshot: %w", ctx.Err())
	}
}
