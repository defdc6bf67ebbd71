package main

import (
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/gabion-storage/gabion/nbd/kernel"
)

const (
	// checkPatience is how long a start waits for the kernel to say what this machine lacks.
	checkPatience = 2 * time.Second
	// probePatience is how long a Probe does. Who probes waits no more than a second.
	probePatience = 500 * time.Millisecond
)

// hostCheck asks the kernel what this machine lacks, once at a time and beside
// other work: the question waits, and cannot be interrupted, for as long as any
// program's nbd call hangs.
type hostCheck struct {
	kernel kernel.Kernel
	log    *slog.Logger

	checks singleflight.Group

	mu      sync.Mutex
	advised bool
	last    error // what the last one that ended said
}

// ask begins a check, unless one is under way, and waits for its end, at most for
// patience. What it returns is of the last check that ended; nil, if none has yet.
func (c *hostCheck) ask(patience time.Duration) (ended bool, err error) {
	pending := c.checks.DoChan("", c.run)
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-pending:
		ended = true
	case <-t.C:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return ended, c.last
}

func (c *hostCheck) run() (any, error) {
	advice, err := c.kernel.Check()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && !c.advised {
		c.advised = true
		for _, a := range advice {
			c.log.Warn("this machine could be set up better", "advice", a)
		}
	}
	c.last = err
	return nil, err
}
