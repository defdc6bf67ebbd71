package kernel

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// watchdog is how long a netlink call may take before its device's sockets are ended.
const watchdog = 2 * time.Second

// calls makes the kernel's netlink calls, one at a time.
type calls struct {
	turn    chan struct{} // cap 1
	running sync.WaitGroup
}

func newCalls() *calls { return &calls{turn: make(chan struct{}, 1)} }

// call is one netlink call.
type call struct {
	name    string
	do      func() error
	rescue  func() // what may free it when it hangs; nil: it can only wait for somebody else
	abandon func() // run after a do for which nobody waited any more; may be nil
}

// do waits for its turn and for the call's end. When ctx ends first, a call that
// has not begun is not made, and the outcome of one that has is ErrUnknown.
func (c *calls) do(ctx context.Context, call call) error {
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%w: %s: the driver is busy with another device: %w", block.ErrUnavailable, call.name, ctx.Err())
	}
	if ctx.Err() != nil {
		<-c.turn
		return fmt.Errorf("%w: %s: %w", block.ErrUnavailable, call.name, ctx.Err())
	}
	left := make(chan struct{})
	done := make(chan error)
	c.running.Go(func() {
		err := call.run()
		select {
		case done <- err:
		case <-left:
			if call.abandon != nil {
				call.abandon()
			}
		}
		<-c.turn // only now, so that whoever has the next turn finds nothing of this one
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		close(left)
		return fmt.Errorf("%w: %s: the driver has not answered yet: %w", block.ErrUnknown, call.name, ctx.Err())
	}
}

// run makes the call, and rescues it for as long as it hangs: whether its caller
// still waits or not, all others do.
func (c call) run() error {
	done := make(chan error, 1)
	go func() { done <- c.do() }()
	t := time.NewTicker(watchdog)
	defer t.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-t.C:
			if c.rescue != nil {
				c.rescue()
			}
		}
	}
}
