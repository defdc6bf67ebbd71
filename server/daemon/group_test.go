package daemon

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

var quiet = slog.New(slog.DiscardHandler)

// diary is a list of steps that write down what happens to them.
type diary struct{ lines []string }

func (d *diary) step(name string) Step {
	return Step{
		Name:  name,
		Start: func(context.Context) error { d.lines = append(d.lines, "+"+name); return nil },
		Stop:  func(context.Context) error { d.lines = append(d.lines, "-"+name); return nil },
	}
}

func (d *diary) expect(t *testing.T, want string) {
	t.Helper()
	if got := strings.Join(d.lines, " "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestGroupStopsInReverse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d diary
		ctx, cancel := context.WithCancel(t.Context())
		g := NewGroup(quiet, time.Second, d.step("store"), Step{Name: "nothing"}, d.step("raft"), d.step("listener"))
		time.AfterFunc(time.Hour, cancel)
		if err := g.Run(ctx); err != nil {
			t.Errorf("an orderly end returned %v", err)
		}
		d.expect(t, "+store +raft +listener -listener -raft -store")
	})
}

func TestGroupFailedStart(t *testing.T) {
	var d diary
	broken := d.step("raft")
	broken.Start = func(context.Context) error { return block.ErrInUse }
	err := NewGroup(quiet, time.Second, d.step("store"), broken, d.step("listener")).Run(t.Context())
	if !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), "starting the raft") {
		t.Errorf("got %v, want the step's name and its error", err)
	}
	d.expect(t, "+store -store")
}

func TestGroupFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d diary
		g := NewGroup(quiet, time.Second, d.step("store"), d.step("raft"))
		time.AfterFunc(time.Minute, func() { g.Fail(block.ErrCorrupt); g.Fail(block.ErrIO) })
		if err := g.Run(t.Context()); !errors.Is(err, block.ErrCorrupt) || errors.Is(err, block.ErrIO) {
			t.Errorf("got %v, want the first failure", err)
		}
		d.expect(t, "+store +raft -raft -store")
	})
}

// A failure while a later step starts is what Run reports, not the cancelled start.
func TestGroupFailureDuringStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d diary
		slow := d.step("services")
		slow.Start = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		g := NewGroup(quiet, time.Second, d.step("raft"), slow)
		time.AfterFunc(time.Minute, func() { g.Fail(block.ErrFormat) })
		if err := g.Run(t.Context()); !errors.Is(err, block.ErrFormat) {
			t.Errorf("got %v, want %v", err, block.ErrFormat)
		}
		d.expect(t, "+raft -raft")
	})
}

func TestGroupToldToStopWhileStarting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d diary
		slow := d.step("raft")
		slow.Start = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if err := NewGroup(quiet, time.Second, d.step("store"), slow).Run(ctx); err != nil {
			t.Errorf("got %v, want an orderly end", err)
		}
		d.expect(t, "+store -store")
	})
}

// A step that never stops ends the effort after the grace time, and nothing below it is pulled away.
func TestGroupHungStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d diary
		release := make(chan struct{})
		defer close(release)
		hung := d.step("nbd")
		hung.Stop = func(context.Context) error { <-release; return nil }
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		begin := time.Now()
		err := NewGroup(quiet, 10*time.Second, d.step("store"), hung, d.step("listener")).Run(ctx)
		if !errors.Is(err, block.ErrShutdown) || !strings.Contains(err.Error(), "nbd") {
			t.Errorf("got %v, want the hung step named", err)
		}
		if took := time.Since(begin) - time.Second; took != 10*time.Second+patience {
			t.Errorf("gave up after %v", took)
		}
		d.expect(t, "+store +nbd +listener -listener")
	})
}

// A polite step sees its context end and still stops everything below it.
func TestGroupStopDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d diary
		polite := d.step("nbd")
		polite.Stop = func(ctx context.Context) error { <-ctx.Done(); return nil }
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if err := NewGroup(quiet, 10*time.Second, d.step("store"), polite).Run(ctx); err != nil {
			t.Errorf("got %v", err)
		}
		d.expect(t, "+store +nbd -store")
	})
}

// A loop outlives the context that the group was told to end by: its turn comes in the reverse order.
func TestGroupLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d diary
		loop := Loop("watch", func(ctx context.Context) {
			d.lines = append(d.lines, "+watch")
			<-ctx.Done()
			d.lines = append(d.lines, "-watch")
		})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if err := NewGroup(quiet, time.Second, d.step("store"), loop).Run(ctx); err != nil {
			t.Error(err)
		}
		d.expect(t, "+store +watch -watch -store")
	})
}
