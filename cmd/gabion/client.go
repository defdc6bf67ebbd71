package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

const defaultServer = "127.0.0.1:7400"

// firstContact is how long a server that starts may take to listen.
const firstContact = 2 * time.Second

// ask runs f with a client of the metadata service, within --timeout.
func (a *app) ask(ctx context.Context, f func(ctx context.Context, c *client.Client) error) error {
	if a.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.timeout)
		defer cancel()
	}
	addresses := strings.Split(a.servers, ",")
	c, err := client.Dial(addresses)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := someListens(ctx, addresses); err != nil {
		return err
	}
	return f(ctx, c)
}

// someListens spares a person the whole --timeout when the address is wrong or
// nothing runs there: the client itself would wait for a server to come.
func someListens(ctx context.Context, addresses []string) error {
	ctx, cancel := context.WithTimeout(ctx, firstContact)
	defer cancel()
	for {
		for _, address := range addresses {
			var d net.Dialer
			if c, err := d.DialContext(ctx, "tcp", strings.TrimSpace(address)); err == nil {
				return c.Close()
			}
		}
		if sleep(ctx, 50*time.Millisecond); ctx.Err() != nil {
			return fmt.Errorf("%w: no metadata server listens at %s: start `gabion server`, or name one with --server or GABION_SERVER",
				block.ErrUnavailable, strings.Join(addresses, ", "))
		}
	}
}

// sentence is what a person is told about err.
func (a *app) sentence(err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded) && errors.Is(err, block.ErrUnknown):
		return fmt.Sprintf("no answer within %v: what was asked may or may not be done; look, and wait longer with --timeout", a.timeout)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Sprintf("no answer within %v from %s: wait longer with --timeout", a.timeout, a.servers)
	case errors.Is(err, context.Canceled):
		return "interrupted"
	}
	return err.Error()
}

// find resolves what was typed, a name or an id, to one volume: what follows acts on its id.
func find(ctx context.Context, c *client.Client, name string) (*metapb.GetVolumeResponse, error) {
	v, err := c.GetVolume(ctx, &metapb.GetVolumeRequest{Volume: &metapb.VolumeRef{Name: name}})
	if _, notID := block.ParseUUID(name); notID != nil || !errors.Is(err, block.ErrNotFound) {
		return v, err
	}
	return c.GetVolume(ctx, &metapb.GetVolumeRequest{Volume: &metapb.VolumeRef{Id: name}})
}

func byID(v *metapb.GetVolumeResponse) *metapb.VolumeRef {
	return &metapb.VolumeRef{Id: v.GetVolume().GetId()}
}
