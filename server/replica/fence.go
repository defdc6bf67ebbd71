package replica

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/gabion-storage/gabion/server/block"
)

// fence admits operations of one generation and can be closed and drained.
// enter and exit are the hot path; shut and open are called by one seal at a time.
type fence struct {
	generation atomic.Uint64 // of the operations that may enter; 0: closed
	inFlight   atomic.Int64  // entered, or about to be turned away
	idle       chan struct{} // capacity 1: a hint that inFlight reached 0
}

// enter counts the operation first and compares afterwards, so that shut, which
// stores first and counts afterwards, cannot miss one that got through.
func (f *fence) enter(g block.Generation) error {
	f.inFlight.Add(1)
	if now := block.Generation(f.generation.Load()); now != g || now == 0 {
		f.exit()
		return fmt.Errorf("%w: an operation of generation %d reached a copy at generation %d", block.ErrStale, g, now)
	}
	return nil
}

func (f *fence) exit() {
	if f.inFlight.Add(-1) == 0 {
		select {
		case f.idle <- struct{}{}:
		default:
		}
	}
}

// shut closes the fence and returns when nothing is in flight. On an error the
// fence stays closed and operations may still be running.
func (f *fence) shut(ctx context.Context) error {
	f.generation.Store(0)
	for f.inFlight.Load() != 0 {
		select {
		case <-f.idle:
		case <-ctx.Done():
			return fmt.Errorf("%w: %d operations did not finish: %w", block.ErrUnavailable, f.inFlight.Load(), ctx.Err())
		}
	}
	return nil
}

func (f *fence) open(g block.Generation) { f.generation.Store(uint64(g)) }
