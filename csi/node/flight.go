package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

// flights lets one call at a time work on a volume. The work runs in a
// goroutine of its own, since it may have to outlive its callers.
type flights struct {
	log *slog.Logger

	mu     sync.Mutex
	closed bool
	now    map[string]*flight // by volume id
}

// flight is one call's work.
type flight struct {
	ctx    context.Context // ends when every caller has left and the work is not committed
	cancel context.CancelFunc
	all    *flights
	volume string
	call   string        // stage, publish, …
	key    string        // equal for calls that ask for the same
	done   chan struct{} // closed at the end; err is set before
	err    error

	// Under flights.mu.
	callers   int
	committed bool // it goes to its end, whoever waits
	given     bool // up
}

func newFlights(log *slog.Logger) *flights { return &flights{log: log, now: map[string]*flight{}} }

// do runs work as the volume's flight, or joins one that does the same. It
// returns its outcome, or leaves when ctx ends: driver.ErrPending if its turn
// never came, else ctx's error.
func (fs *flights) do(ctx context.Context, volume, call, key string, work func(*flight) error) error {
	for {
		f, joined, err := fs.enter(volume, call, key, work)
		if err != nil {
			return err
		}
		if joined {
			return f.wait(ctx)
		}
		select {
		case <-f.done:
		case <-ctx.Done():
			return fmt.Errorf("%w: %s of volume %s has not ended yet: it is repeated later", driver.ErrPending, f.call, volume)
		}
	}
}

// enter returns the volume's flight, begun if there was none, and whether the caller is on it.
func (fs *flights) enter(volume, call, key string, work func(*flight) error) (*flight, bool, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.closed {
		return nil, false, fmt.Errorf("%w: the node plugin ends: it is repeated later", block.ErrShutdown)
	}
	f := fs.now[volume]
	if f == nil {
		f = &flight{all: fs, volume: volume, call: call, key: key, done: make(chan struct{})}
		f.ctx, f.cancel = context.WithCancel(context.Background())
		fs.now[volume] = f
		go f.run(work)
	}
	joined := f.key == key && !f.given
	if joined {
		f.callers++
	}
	return f, joined, nil
}

func (f *flight) run(work func(*flight) error) {
	defer func() {
		if p := recover(); p != nil { // of one call, not of the plugin
			f.err = fmt.Errorf("%s of volume %s panicked: the plugin's log has the rest", f.call, f.volume)
			f.all.log.Error("a call panicked", "call", f.call, "volume_id", f.volume, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		}
		f.cancel()
		f.all.mu.Lock()
		delete(f.all.now, f.volume)
		alone := f.callers == 0
		f.all.mu.Unlock()
		if alone { // nobody else tells
			f.all.log.Info("a call ended after its callers had left", "call", f.call, "volume_id", f.volume, "err", f.err)
		}
		close(f.done)
	}()
	f.err = work(f)
}

func (f *flight) wait(ctx context.Context) error {
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
	}
	f.all.mu.Lock()
	defer f.all.mu.Unlock()
	select {
	case <-f.done:
		return f.err
	default:
	}
	f.callers--
	if f.callers == 0 && !f.committed {
		f.give()
		return fmt.Errorf("%w: %s of volume %s was given up", ctx.Err(), f.call, f.volume)
	}
	return fmt.Errorf("%w: %s of volume %s goes on: repeat the call", ctx.Err(), f.call, f.volume)
}

// give gives the flight up; with all.mu held.
func (f *flight) give() {
	f.given = true
	f.cancel()
}

// commit says that the work goes to its end from here on. An error: it was
// given up before, and is to be undone.
func (f *flight) commit() error {
	f.all.mu.Lock()
	defer f.all.mu.Unlock()
	if f.given {
		return fmt.Errorf("%w: %s of volume %s was given up", context.Canceled, f.call, f.volume)
	}
	f.committed = true
	return nil
}

// close lets no flight begin, gives up what is not committed, and waits.
func (fs *flights) close(ctx context.Context) error {
	fs.mu.Lock()
	fs.closed = true
	var left []*flight
	for _, f := range fs.now {
		if !f.committed {
			f.give()
		}
		left = append(left, f)
	}
	fs.mu.Unlock()
	var late []string
	for _, f := range left {
		select {
		case <-f.done:
		case <-ctx.Done():
			late = append(late, f.call+" of "+f.volume)
		}
	}
	if len(late) > 0 {
		slices.Sort(late)
		return fmt.Errorf("%w: still under way, and found by the next plugin: %s", block.ErrUnavailable, strings.Join(late, ", "))
	}
	return nil
}

func isNotFound(err error) bool { return errors.Is(err, block.ErrNotFound) }
