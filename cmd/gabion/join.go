package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// How a server enters a cluster: it asks which one that is, then registers there,
// and only then has a log and listens for Raft. Under the name of a voter an empty
// directory must not even listen: it would answer for what that voter acknowledged.

// meetLimit bounds one try to learn something of a cluster that may not be there.
const meetLimit = 3 * time.Second

// enters reports whether this server is yet to enter a cluster.
func (s *server) enters() bool {
	return s.origin == consensus.Entering || s.origin == consensus.Blank && s.join != ""
}

// meet learns which cluster the servers of --join are of, and keeps it.
func (s *server) meet(ctx context.Context) error {
	if s.join == "" {
		return fmt.Errorf("%w: --data %s has not entered its cluster yet: start with --join as before", block.ErrPrecondition, s.data)
	}
	s.waitFor("no server of --join has answered yet")
	return s.atCell(ctx, meetLimit, func(ctx context.Context, c *client.Client) error {
		r, err := c.GetStatus(ctx, &metapb.GetStatusRequest{})
		if err != nil {
			return err
		}
		// Its leader must know what a member is. Without nodes it is being founded.
		if level := r.GetFeatureLevel(); level < metadata.LevelServers && r.GetNodes() > 0 {
			return fmt.Errorf("%w: the cluster is at feature level %d, and others can enter it from %d on: upgrade its servers first",
				block.ErrUnavailable, level, metadata.LevelServers)
		}
		s.cluster, err = clusterIn(r)
		return err
	})
}

func clusterIn(r *metapb.GetStatusResponse) (block.ClusterID, error) {
	id, err := block.ParseUUID(r.GetClusterId())
	return block.ClusterID{UUID: id}, err
}

// checkJoin refuses the founder of one cluster that is told to join another: it
// would simply start, alone. Servers that do not answer prove nothing.
func (s *server) checkJoin(ctx context.Context, own block.ClusterID) error {
	return s.withCell(func(c *client.Client) error {
		ctx, cancel := context.WithTimeout(ctx, meetLimit)
		defer cancel()
		r, err := c.GetStatus(ctx, &metapb.GetStatusRequest{})
		if theirs, notID := clusterIn(r); err == nil && notID == nil && theirs != own {
			return fmt.Errorf("%w: --data %s founded cluster %s, and --join %s is cluster %s: to enter that one start with an empty --data and empty disks, else without --join",
				block.ErrPrecondition, s.data, own, s.join, theirs)
		}
		return nil
	})
}

// enter registers this server where it joins, without its disks, which it can open
// only when it knows the cluster. A directory that was refused is as it was before.
func (s *server) enter(ctx context.Context) error {
	if !s.enters() {
		return nil
	}
	s.waitFor("the cluster has not taken it in yet")
	directory, err := consensus.Enter(s.raftDir(), s.node, s.cluster)
	if err != nil {
		return err
	}
	node := s.describe(net.JoinHostPort(s.advertise, strconv.Itoa(s.ports.raft)), directory)
	err = s.atCell(ctx, callLimit, func(ctx context.Context, c *client.Client) error { return s.introduce(ctx, c, node) })
	if err != nil && !passing(err) && s.origin == consensus.Blank {
		err = errors.Join(err, consensus.Withdraw(s.raftDir()))
	}
	return err
}

// introduce registers a server without disks, unless it is registered: that would
// give up the disks that it has there by now.
func (s *server) introduce(ctx context.Context, c *client.Client, node *metapb.Node) error {
	r, err := c.ListNodes(ctx, &metapb.ListNodesRequest{})
	if err != nil || slices.ContainsFunc(r.GetNodes(), func(n *metapb.Node) bool {
		return n.GetName() == node.GetName() && n.GetDirectory() == node.GetDirectory()
	}) {
		return err
	}
	_, err = c.RegisterNode(ctx, &metapb.RegisterNodeRequest{Node: node, ClusterId: s.cluster.String()})
	return err
}

// comeBack introduces a server that was removed while it was away. No leader will
// ever speak to it, so its own part of the metadata service cannot forward that.
func (s *server) comeBack(ctx context.Context) error {
	if s.origin != consensus.Joined || s.join == "" {
		return nil
	}
	return s.withCell(func(c *client.Client) error {
		ctx, cancel := context.WithTimeout(ctx, meetLimit)
		defer cancel()
		return s.introduce(ctx, c, s.describe(s.consensus.Address(), s.consensus.Directory()))
	})
}

// atCell asks the servers of --join until they do what f asks, or refuse it.
func (s *server) atCell(ctx context.Context, limit time.Duration, f func(context.Context, *client.Client) error) error {
	return s.withCell(func(c *client.Client) error {
		return retry(ctx, func() error {
			call, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			err := f(call, c)
			if passing(err) && ctx.Err() == nil {
				s.log.Warn("the cluster does not take this server in yet; it is tried again", "join", s.join, "err", err)
			}
			return err
		})
	})
}

// withCell gives f a client of the servers of --join.
func (s *server) withCell(f func(*client.Client) error) error {
	c, err := client.Dial(strings.Split(s.join, ","))
	if err != nil {
		return err
	}
	return errors.Join(f(c), c.Close())
}
