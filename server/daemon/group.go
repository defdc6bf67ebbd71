package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// Step is one thing that a server starts and stops. Either function may be nil.
type Step struct {
	Name string // "raft", "nbd listener": a noun, for errors and logs
	// Start returns when the thing is up. ctx ends when the server is told to stop meanwhile.
	Start func(ctx context.Context) error
	// Stop is called once, and only after a Start that succeeded. It returns when every goroutine of the thing has ended,
	// and when ctx ends it gives up whatever it was being polite about.
	Stop func(ctx context.Context) error
}

// Group runs steps in order and ends them in the reverse order.
type Group struct {
	log   *slog.Logger
	grace time.Duration
	steps []Step
	// end is the cause for which the group stops; the first one stays.
	end    context.Context
	cancel context.CancelCauseFunc
}

// NewGroup returns a group over steps. All stops together have grace to end.
func NewGroup(log *slog.Logger, grace time.Duration, steps ...Step) *Group {
	end, cancel := context.WithCancelCause(context.Background())
	return &Group{log: log, grace: grace, steps: steps, end: end, cancel: cancel}
}

// Fail makes Run stop and return err: for what breaks while the group serves.
// It may be called at any time, from any goroutine; the first call counts.
func (g *Group) Fail(err error) { g.cancel(err) }

// Run starts the steps, waits until ctx ends or something fails, and stops what
// was started. It returns nil only after an orderly end that ctx asked for.
// Run is called once.
func (g *Group) Run(ctx context.Context) error {
	starting, release := context.WithCancel(ctx)
	defer release()
	defer context.AfterFunc(g.end, release)()

	up, err := g.start(starting)
	if err == nil {
		<-starting.Done()
	}
	if failure := context.Cause(g.end); failure != nil {
		err = failure // says more than the start it interrupted
	} else if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil // told to stop while starting
	}
	return errors.Join(err, g.stop(ctx, up))
}

// start returns how many steps are up.
func (g *Group) start(ctx context.Context) (int, error) {
	for i, s := range g.steps {
		if s.Start == nil {
			continue
		}
		begin := time.Now()
		if err := s.Start(ctx); err != nil {
			return i, fmt.Errorf("starting the %s: %w", s.Name, err)
		}
		g.log.Debug("started", "step", s.Name, "took", time.Since(begin))
		if ctx.Err() != nil {
			return i + 1, ctx.Err()
		}
	}
	return len(g.steps), nil
}

// stop ends the first up steps, last first. A step that outlasts the grace time
// ends the effort: what lies below it may still be in use, and a process that
// exits here is no worse off than one that is killed.
func (g *Group) stop(ctx context.Context, up int) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.grace)
	defer cancel()
	var errs []error
	for i := up - 1; i >= 0; i-- {
		s := g.steps[i]
		if s.Stop == nil {
			continue
		}
		begin, done := time.Now(), make(chan error, 1)
		go func() { done <- s.Stop(ctx) }()
		select {
		case err := <-done:
			if err != nil {
				errs = append(errs, fmt.Errorf("stopping the %s: %w", s.Name, err))
			}
			g.log.Debug("stopped", "step", s.Name, "took", time.Since(begin))
		case <-afterGrace(ctx):
			errs = append(errs, fmt.Errorf("%w: the %s did not stop within %v; exiting without it", block.ErrShutdown, s.Name, g.grace))
			return errors.Join(errs...)
		}
	}
	return errors.Join(errs...)
}

// patience is how long a step may take to give up after its ctx ended.
const patience = 2 * time.Second

// afterGrace is closed when a step must have returned.
func afterGrace(ctx context.Context) <-chan struct{} {
	c := make(chan struct{})
	context.AfterFunc(ctx, func() { time.AfterFunc(patience, func() { close(c) }) })
	return c
}

// Loop is a step that runs a function in a goroutine of its own. run returns
// soon after its context has ended.
func Loop(name string, run func(ctx context.Context)) Step {
	var cancel context.CancelFunc
	done := make(chan struct{})
	return Step{
		Name: name,
		Start: func(ctx context.Context) error {
			ctx, cancel = context.WithCancel(context.WithoutCancel(ctx))
			go func() { defer close(done); run(ctx) }()
			return nil
		},
		Stop: func(context.Context) error {
			cancel()
			<-done
			return nil
		},
	}
}
