package cluster_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/test/cluster"
)

// createMany makes n volumes through the API, eight at a time.
func createMany(t *testing.T, s *cluster.Server, n int) {
	t.Helper()
	client := api(t, s)
	names := make(chan string)
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for name := range names {
				if _, err := client.CreateVolume(context.Background(), &metapb.CreateVolumeRequest{
					Name: name, Size: 1 << 30, Policy: &metapb.Policy{Replicas: 1, Durability: metapb.Policy_FLUSH}}); err != nil {
					t.Errorf("creating %s: %v", name, err)
				}
			}
		})
	}
	for i := range n {
		names <- fmt.Sprintf("v%04d", i)
	}
	close(names)
	workers.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// A server with 1,000 volumes, some of them written, serves again within a second of its start.
func TestRestartWithThousandVolumes(t *testing.T) {
	s := start(t)
	createMany(t, s, 1000)
	block := bytes.Repeat([]byte{7}, 4096)
	written := scaled(20, 1000)
	uris := make([]cluster.URIs, written)
	for i := range uris {
		var err error
		if uris[i], err = s.Attach(t.Context(), fmt.Sprintf("v%04d", i*(1000/written))); err != nil {
			t.Fatal(err)
		}
		r := connect(t, s, uris[i])
		if err := r.write(0, block); err != nil {
			t.Fatal(err)
		}
		_ = r.Close()
	}
	for _, end := range []string{"kill", "stop"} {
		if end == "kill" {
			s.Kill()
		} else if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		started := ready(t, s)
		r := connect(t, s, uris[written-1])
		p := make([]byte, 4096)
		if err := r.read(0, p); err != nil || !bytes.Equal(p, block) {
			t.Fatalf("first read after the %s: %v", end, err)
		}
		took := time.Since(began)
		t.Logf("after a %s: ready in %v, first read answered in %v (goal 1s)", end, started.Round(time.Millisecond), took.Round(time.Millisecond))
		if took > 5*time.Second {
			t.Errorf("after a %s it took %v", end, took)
		}
	}
}

// An idle server is small and quiet, and idle volumes add little.
func TestIdleMemoryAndCPU(t *testing.T) {
	s := start(t)
	volume(t, s, "first", "1GiB")
	rss := func() int64 {
		t.Helper()
		n, err := cluster.RSS(s.PID())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	idle := rss()
	t.Logf("idle: %.1f MiB resident (goal 64)", float64(idle)/(1<<20))
	if idle > 64<<20 {
		t.Errorf("an idle server has %d bytes resident", idle)
	}

	const volumes = 1000
	createMany(t, s, volumes)
	// Let go of what the burst of calls used, then count what volumes alone cost.
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	ready(t, s)
	closed := rss()
	perClosed := (closed - idle) / volumes
	t.Logf("with %d volumes: %.1f MiB resident, %d KiB each (goal 64)", volumes, float64(closed)/(1<<20), perClosed>>10)

	open := scaled(100, volumes)
	for i := range open {
		u, err := s.Attach(t.Context(), fmt.Sprintf("v%04d", i))
		if err != nil {
			t.Fatal(err)
		}
		r := connect(t, s, u)
		if err := r.write(0, make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
		if err := r.disconnect(); err != nil {
			t.Fatal(err)
		}
	}
	opened := rss()
	perOpen := (opened - closed) / int64(open)
	t.Logf("%d of them served and idle: %.1f MiB resident, %d KiB each (goal 64)", open, float64(opened)/(1<<20), perOpen>>10)
	if perClosed > 64<<10 || perOpen > 2*64<<10 {
		t.Errorf("an idle volume costs %d bytes, a served one %d more", perClosed, perOpen)
	}

	const window = 5 * time.Second
	before, err := cluster.CPUTime(s.PID())
	if err != nil {
		t.Fatal(err)
	}
	<-time.After(window) // what is measured is what happens when nothing does
	after, err := cluster.CPUTime(s.PID())
	if err != nil {
		t.Fatal(err)
	}
	share := float64(after-before) / float64(window)
	t.Logf("idle with %d served volumes: %.1f %% of a core (goal 1)", open, 100*share)
	if share > 0.05 {
		t.Errorf("an idle server uses %.1f %% of a core", 100*share)
	}
}
