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

// RemoveServer takes a server out of the cluster.
func (n *Node) RemoveServer(ctx context.Context, node string) error {
	return n.change(ctx, func() hraft.IndexFuture {
		return n.raft.RemoveServer(hraft.ServerID(node), 0, patience(ctx))
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
