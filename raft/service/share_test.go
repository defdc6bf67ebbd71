package service

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

type contextT = context.Context

func contextFor(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), d)
}

// nodesOf are the nodes that a volume is shown as attached to.
func (w *world) nodesOf(name string) (nodes []string) {
	for _, a := range w.volume(name).Attachments {
		nodes = append(nodes, a.Node)
	}
	return nodes
}

// B066, B150: a second node is refused by name, unless both only read.
func TestB066SeveralReaders(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	v := w.create("v", gib)
	attach := func(node string, readOnly bool) (*metapb.AttachResponse, error) {
		return w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v"), Node: node, ReadOnly: readOnly})
	}
	tokens := map[string]bool{}
	for _, node := range []string{"k2", "k1", "k3", "k2"} {
		a, err := attach(node, true)
		if err != nil {
			t.Fatal(err)
		}
		tokens[string(a.Attachment.Token)] = true
	}
	if len(tokens) != 3 || !slices.Equal(w.nodesOf("v"), []string{"k1", "k2", "k3"}) {
		t.Errorf("%d tokens, attached to %v", len(tokens), w.nodesOf("v"))
	}
	if _, err := attach("k4", false); code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), `"k1"`) {
		t.Errorf("a writer beside readers: %v", err)
	}
	if _, err := attach("k1", false); code(err) != codes.AlreadyExists {
		t.Errorf("another mode: %v", err)
	}
	p := w.serve(v.Id, "n1", d)
	done := make(chan error, 1)
	go func() { // B060: without a node it is for all
		_, err := w.Detach(t.Context(), &metapb.DetachRequest{Volume: byName("v")})
		done <- err
	}()
	for confirmed := 0; confirmed < 3; {
		for _, a := range p.refresh().Attachments {
			if a.Revoking {
				err := p.propose(&metapb.ProposeRequest{Command: &metapb.ProposeRequest_ConfirmDetach{ConfirmDetach: &metapb.ConfirmDetach{AttachmentId: a.Id}}})
				if err != nil && !errors.Is(err, block.ErrStale) { // the other intents raise the version, too
					t.Fatal(err)
				}
				if err == nil {
					confirmed++
				}
				break
			}
		}
	}
	if err := <-done; err != nil || w.nodesOf("v") != nil {
		t.Errorf("%v, still attached to %v", err, w.nodesOf("v"))
	}
	if _, err := attach("k4", false); err != nil {
		t.Error(err)
	}
	if _, err := attach("k1", true); code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), `"k4"`) {
		t.Errorf("a reader beside a writer: %v", err)
	}
}

// B060: what is not attached is detached, twice, whatever of it is unknown.
func TestB060DetachOfWhatIsGone(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	v := w.create("v", gib)
	entries := w.index()
	for range 2 {
		for _, in := range []*metapb.DetachRequest{
			{Volume: byName("v"), Node: "never"},
			{Volume: byName("v")},
			{Volume: byID(v.Id), Node: "never", AttachmentId: block.NewUUID().String()},
			{Volume: byName("gone"), Node: "k1"},
			{Volume: byID(block.NewUUID().String())},
			{Volume: byID(block.NewUUID().String()), Node: "k1", AttachmentId: block.NewUUID().String()},
		} {
			if _, err := w.Detach(t.Context(), in); err != nil {
				t.Errorf("%v: %v", in, err)
			}
			if _, err := w.MetadataClient.Detach(t.Context(), in); err != nil { // as it stands
				t.Errorf("%v: %v", in, err)
			}
		}
	}
	if w.index() != entries {
		t.Error("log entries were made")
	}
	if _, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("gone"), Node: "k1"}); code(err) != codes.NotFound {
		t.Errorf("attach of no volume: %v", err)
	}
}

// B150, B066: five hundred nodes want a volume at once, to write or to be the only one that reads; one has it, and the
// others are told which.
func TestB150OneOfManyWins(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	w.create("v", gib)
	for round, readOnly := range []bool{false, true, false, true} {
		var mu sync.Mutex
		var winner string
		var refusals []error
		var wait sync.WaitGroup
		for i := range 500 {
			wait.Go(func() {
				node := fmt.Sprintf("k%03d", i)
				_, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v"), Node: node, ReadOnly: readOnly, Alone: true})
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err != nil:
					refusals = append(refusals, err)
				case winner != "":
					t.Errorf("both %s and %s have it", winner, node)
				default:
					winner = node
				}
			})
		}
		wait.Wait()
		if winner == "" || !slices.Equal(w.nodesOf("v"), []string{winner}) {
			t.Fatalf("round %d: %q won, attached to %v", round, winner, w.nodesOf("v"))
		}
		for _, err := range refusals {
			if code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), winner) {
				t.Fatalf("%v does not name %s", err, winner)
			}
		}
		w.detach("v", winner)
	}
}

// B151: an attach that its caller gave up on is stopped before it gets into
// the log; or it is in the log already, and the detach ends it.
func TestB151AttachAfterItsCallerLeft(t *testing.T) {
	for _, point := range []string{"metadata.commit", "metadata.log"} {
		for _, all := range []bool{false, true} {
			t.Run(fmt.Sprint(point, " all ", all), func(t *testing.T) {
				w := newWorld(t)
				w.register("n1", disk(1, 100*gib))
				v := w.create("v", gib)
				if err := w.faults.Arm(fault.Rule{Point: point, Hold: true}); err != nil { // also what the client tries again
					t.Fatal(err)
				}
				ctx, cancel := contextFor(t, 200*time.Millisecond)
				defer cancel()
				if _, err := w.Attach(ctx, &metapb.AttachRequest{Volume: byName("v"), Node: "k1"}); !errors.Is(err, block.ErrUnknown) {
					t.Fatalf("attach: %v", err)
				}
				done := make(chan error, 1)
				go func() {
					in := &metapb.DetachRequest{Volume: byID(v.Id), Node: "k1"}
					if all {
						in.Node = ""
					}
					_, err := w.Detach(t.Context(), in)
					done <- err
				}()
				if point == "metadata.commit" {
					if err := <-done; err != nil {
						t.Error(err)
					}
					w.faults.Clear("")
				} else { // nobody can say yet
					select {
					case err := <-done:
						t.Fatalf("answered before the attach was settled: %v", err)
					case <-time.After(50 * time.Millisecond):
					}
					w.faults.Clear("")
					if err := <-done; err != nil {
						t.Error(err)
					}
				}
				for range 10 { // what was held has long gone on
					if nodes := w.nodesOf("v"); nodes != nil {
						t.Fatalf("attached to %v after the detach was answered", nodes)
					}
					w.create(fmt.Sprint("v", block.NewUUID()), gib)
				}
			})
		}
	}
}

// Pages of volumes show where each is attached, and no token.
func TestListShowsAttachments(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	for i := range 5 {
		w.create(fmt.Sprint("v", i), gib)
	}
	w.attach("v1", "k1")
	w.attach("v3", "k2")
	for _, node := range []string{"k3", "k1"} {
		if _, err := w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("v4"), Node: node, ReadOnly: true}); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for token := ""; ; {
		l, err := w.ListVolumes(t.Context(), &metapb.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range l.Attachments {
			i := slices.IndexFunc(l.Volumes, func(v *metapb.Volume) bool { return v.Id == a.VolumeId })
			if i < 0 || a.Token != nil {
				t.Fatalf("%v on the page of %v", a, l.Volumes)
			}
			got = append(got, l.Volumes[i].Name+" "+a.Node)
		}
		if token = l.NextToken; token == "" {
			break
		}
	}
	if want := []string{"v1 k1", "v3 k2", "v4 k1", "v4 k3"}; !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}
