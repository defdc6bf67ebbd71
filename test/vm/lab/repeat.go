package lab

import (
	"context"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

// repeatAfter is the time between two tries of a call; a kubelet's first is not much longer.
const repeatAfter = 200 * time.Millisecond

// Repeat makes a call as an orchestrator does: again and again until ctx ends, while what refuses it passes by itself.
// Each refusal is told.
func (t *T) Repeat(ctx context.Context, what string, call func(context.Context) error) error {
	for {
		err := call(ctx)
		if err == nil || !passes(err) {
			return err
		}
		t.Logf("%s is called again after: %v", what, err)
		select {
		case <-time.After(repeatAfter):
		case <-ctx.Done():
			return err
		}
	}
}

// passes tells whether a refusal says nothing of the volume: another call of it is under way, a server is not there
// now, a plugin that has just started is not known yet, or a program has the device open, as the device manager has for a
// moment when something changes.
func passes(err error) bool {
	switch Code(err) {
	case codes.Aborted, codes.Unavailable, codes.DeadlineExceeded:
		return true
	case codes.NotFound:
		return strings.Contains(err.Error(), "is its plugin running?")
	case InUse:
		return strings.Contains(err.Error(), "held open by")
	}
	return false
}
