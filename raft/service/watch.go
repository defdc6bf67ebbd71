package service

import (
	"context"
	"fmt"
	"sort"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Watch implements the API. The events are read from the state itself, which
// keeps the newest of them, so a watcher costs no memory and is never waited
// for: one that falls behind what is kept is cut.
func (s *Service) Watch(in *metapb.WatchRequest, stream grpc.ServerStreamingServer[metapb.Event]) error {
	v, changed := s.machine.watch()
	after := in.GetAfterIndex()
	switch {
	case after == 0 && in.GetHistory():
		after = oldest(v)
	case after == 0:
		after = v.Index()
	}
	began := after
	for {
		events, kept := v.Events(after)
		switch {
		case !kept && after == began:
			return fmt.Errorf("%w: events after index %d are not kept any more: read anew, then watch", metapb.ErrIndexGone, after)
		case !kept:
			return fmt.Errorf("%w: events after index %d were dropped before they could be sent: read anew, then watch", metapb.ErrSlowWatcher, after)
		}
		for _, e := range events {
			if err := stream.Send(e); err != nil {
				return err
			}
			after = e.GetIndex()
		}
		if !in.GetFollow() {
			return nil
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-s.quit:
			return fmt.Errorf("%w: this metadata server stops: watch at another", block.ErrShutdown)
		}
		v, changed = s.machine.watch()
	}
}

// oldest is the lowest index after which all events are kept.
func oldest(v *metadata.View) uint64 {
	return uint64(sort.Search(int(v.Index()), func(after int) bool {
		_, kept := v.Events(uint64(after))
		return kept
	}))
}

// ReportEvent implements the API. What comes too often for one object is
// dropped without an error: its caller has nothing better to do.
func (s *Service) ReportEvent(ctx context.Context, in *metapb.ReportEventRequest) (*metapb.ReportEventResponse, error) {
	e := in.GetEvent()
	if _, err := s.cluster(ctx); err != nil {
		return nil, err
	}
	if !s.events.allow(e.GetType() + "\x00" + e.GetVolumeId() + "\x00" + e.GetDiskId() + "\x00" + e.GetNode()) {
		return &metapb.ReportEventResponse{}, nil
	}
	_, err := s.propose(ctx, &metapb.Command{Kind: &metapb.Command_RecordEvent{RecordEvent: &metapb.RecordEvent{Event: e}}})
	if err != nil {
		return nil, err
	}
	return &metapb.ReportEventResponse{}, nil
}

// limiter allows each key a burst of events, then one now and then.
type limiter struct {
	mu   sync.Mutex
	keys map[string]*rate.Limiter
}

const (
	eventBurst  = 5
	eventEvery  = 10 * time.Second
	limiterKeys = 4096
)

func newLimiter() *limiter { return &limiter{keys: map[string]*rate.Limiter{}} }

func (l *limiter) allow(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.keys[key]
	if k == nil {
		if len(l.keys) >= limiterKeys {
			clear(l.keys)
		}
		k = rate.NewLimiter(rate.Every(eventEvery), eventBurst)
		l.keys[key] = k
	}
	return k.Allow()
}
