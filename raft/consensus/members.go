package consensus

import (
	"context"
	"fmt"

	hraft "github.com/hashicorp/raft"

	"github.com/gabion-storage/gabion/server/block"
)

// AddVoter makes a server a voter, or corrects its address. Only the leader
// can. ErrUnknown as for Apply; repeating it is safe.
func (n *Node) AddVoter(ctx context.Context, node, address string) error {
	return n.change(ctx, func() hraft.IndexFuture {
		return n.raft.AddVoter(hraft.ServerID(node), hraft.ServerAddress(address), 0, patience(ctx))
	})
}

// Admit makes a server a member without a vote, which receives the state and
// the log; of one that is a member it corrects the address. Only the leader can.
func (n *Node) Admit(ctx context.Context, node, address string) error {
	for _, s := range n.raft.GetConfiguration().Configuration().Servers {
		if s.ID == hraft.ServerID(node) && s.Address == hraft.ServerAddress(address) {
			return nil
		}
	}
	return n.change(ctx, func() hraft.IndexFuture { // of a voter it changes nothing but the address
		return n.raft.AddNonvoter(hraft.ServerID(node), hraft.ServerAddress(address), 0, patience(ctx))
	})
}

func (n *Node) change(ctx context.Context, request func() hraft.IndexFuture) error {
	if err := n.enter(ctx); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	select {
	case err := <-n.await(request()):
		if err != nil {
			return outcome(err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: change of membership: %w", block.ErrUnknown, ctx.Err())
	}
}
