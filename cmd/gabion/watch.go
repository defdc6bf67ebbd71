package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// watchPause keeps a watcher whose streams break at once from spinning.
const watchPause = 250 * time.Millisecond

// watch calls handle with every event after an index, in order and each once.
// It goes on where a stream broke, until ctx ends or handle returns an error.
// metapb.ErrIndexGone: the index is kept no more; read anew.
func watch(ctx context.Context, c *client.Client, after uint64, handle func(*metapb.Event) error) error {
	w := watcher{client: c, after: after, handle: handle}
	for {
		err := w.stream(ctx, true)
		if w.refused != nil {
			return w.refused
		}
		if ctx.Err() != nil || !passing(err) && !errors.Is(err, metapb.ErrSlowWatcher) {
			return err
		}
		sleep(ctx, watchPause)
	}
}

// watcher is where a watch stands.
type watcher struct {
	client  *client.Client
	after   uint64
	handle  func(*metapb.Event) error
	last    *metapb.Event // handled last
	refused error         // by handle
}

// stream handles what one stream brings. With follow it ends with an error always.
func (w *watcher) stream(ctx context.Context, follow bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	after := w.after
	if w.last != nil { // several events may have one index: those of the last one's come again
		after = w.last.GetIndex() - 1
	}
	stream, err := w.client.Watch(ctx, &metapb.WatchRequest{AfterIndex: after, History: after == 0, Follow: follow})
	if err != nil {
		return err
	}
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if follow {
				return fmt.Errorf("%w: the server ended the stream", block.ErrUnavailable)
			}
			return nil
		}
		if err != nil {
			return err
		}
		if l := w.last; l != nil && (e.GetIndex() < l.GetIndex() || e.GetIndex() == l.GetIndex() && e.GetOrdinal() <= l.GetOrdinal()) {
			continue
		}
		if w.refused = w.handle(e); w.refused != nil {
			return w.refused
		}
		w.last = e
	}
}
