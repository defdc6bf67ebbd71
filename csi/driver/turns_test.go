package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gabion-storage/gabion/server/block"
)

// Calls about one volume go one after the other; one that waits too long is
// told to come again, and that never sticks.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns()
		done, err := turns.take(t.Context(), "v")
		if err != nil {
			t.Fatal(err)
		}
		other, err := turns.take(t.Context(), "w")
		if err != nil {
			t.Fatalf("another key: %v", err)
		}
		other()
		begin := time.Now()
		if _, err := turns.take(t.Context(), "v"); !errors.Is(err, ErrPending) || time.Since(begin) != turnPatience {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := turns.take(ctx, "v"); !errors.Is(err, ErrPending) {
			t.Errorf("the caller's time is up: %v", err)
		}
		begin = time.Now()
		time.AfterFunc(time.Second, done)
		again, err := turns.take(t.Context(), "v")
		if err != nil || time.Since(begin) != time.Second {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		again()
		if len(turns.lines) != 0 {
			t.Errorf("%d lines are left", len(turns.lines))
		}
	})
}

func TestTurnsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns()
		done, err := turns.take(t.Context(), "v")
		if err != nil {
			t.Fatal(err)
		}
		var wait sync.WaitGroup
		for range maxInLine - 1 {
			wait.Go(func() {
				if done, err := turns.take(t.Context(), "v"); err == nil {
					done()
				}
			})
		}
		synctest.Wait()
		begin := time.Now()
		if _, err := turns.take(t.Context(), "v"); !errors.Is(err, ErrPending) || time.Since(begin) != 0 {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		done()
		wait.Wait()
		if len(turns.lines) != 0 {
			t.Errorf("%d lines are left", len(turns.lines))
		}
	})
}

// Which calls keep which others waiting.
func TestTurnOf(t *testing.T) {
	publish := func(v string) string {
		return turnOf("ControllerPublishVolume", &csispec.ControllerPublishVolumeRequest{VolumeId: v})
	}
	unpublish := turnOf("ControllerUnpublishVolume", &csispec.ControllerUnpublishVolumeRequest{VolumeId: "v"})
	stage := turnOf("NodeStageVolume", &csispec.NodeStageVolumeRequest{VolumeId: "v"})
	unstage := turnOf("NodeUnstageVolume", &csispec.NodeUnstageVolumeRequest{VolumeId: "v"})
	switch {
	case publish("v") == "" || publish("v") == publish("w"):
		t.Error("publish")
	case publish("v") == unpublish:
		t.Error("an unpublish waits for a publish")
	case stage != unstage || stage == publish("v"):
		t.Error("stage and unstage")
	case turnOf("NodeGetVolumeStats", &csispec.NodeGetVolumeStatsRequest{VolumeId: "v"}) != "":
		t.Error("statistics wait")
	case turnOf("CreateVolume", &csispec.CreateVolumeRequest{Name: "v"}) == turnOf("CreateVolume", &csispec.CreateVolumeRequest{Name: "w"}):
		t.Error("create")
	}
}

// B075, the driver's part: one at a time on a node, whatever comes at once.
func TestB075OneCallPerVolume(t *testing.T) {
	var mu sync.Mutex
	running := map[string]int{}
	e := both(t, slog.LevelInfo, func(_ context.Context, req any) error {
		id := req.(*csispec.NodeStageVolumeRequest).GetVolumeId()
		mu.Lock()
		running[id]++
		n := running[id]
		mu.Unlock()
		defer func() { mu.Lock(); running[id]--; mu.Unlock() }()
		for range 1000 {
			runtime.Gosched() // whoever may come in does
		}
		if n > 1 {
			return errors.New("two at once")
		}
		return nil
	})
	var wait sync.WaitGroup
	for i := range 40 {
		wait.Go(func() {
			_, err := csispec.NewNodeClient(e).NodeStageVolume(t.Context(), &csispec.NodeStageVolumeRequest{VolumeId: fmt.Sprint(i % 2)})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
}

// B161, the driver's part: a caller that fails without pause fills no log.
func TestB161RepeatedFailuresAreToldOnce(t *testing.T) {
	e := both(t, slog.LevelInfo, func(context.Context, any) error {
		return fmt.Errorf("%w: there is no volume", block.ErrNotFound)
	})
	for range 200 {
		if err := e.create(t.Context(), &csispec.CreateVolumeRequest{Name: "v"}); status.Code(err) != codes.NotFound {
			t.Fatal(err)
		}
	}
	if err := e.create(t.Context(), &csispec.CreateVolumeRequest{Name: "w"}); status.Code(err) != codes.NotFound {
		t.Fatal(err)
	}
	if n := strings.Count(e.log.String(), "there is no volume"); n != 2 {
		t.Errorf("%d lines:\n%.2000s", n, e.log)
	}
}

func TestRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRepeats()
		for i := range 3 {
			if _, fresh := r.seen("a"); fresh != (i == 0) {
				t.Errorf("%d: %v", i, fresh)
			}
		}
		time.Sleep(repeatWindow)
		if n, fresh := r.seen("a"); !fresh || n != 2 {
			t.Errorf("later: %d, %v", n, fresh)
		}
		told := 0
		for i := range 10 * maxRepeats {
			if _, fresh := r.seen(fmt.Sprint(i)); fresh {
				told++
			}
		}
		if len(r.told) > maxRepeats || told > maxRepeats {
			t.Errorf("%d remembered, %d told", len(r.told), told)
		}
		time.Sleep(repeatWindow)
		if _, fresh := r.seen("new"); !fresh {
			t.Error("never again")
		}
	})
}
