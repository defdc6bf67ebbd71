package consensus

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// B125, B159: after a burst, and after a long trickle, the log is bounded, and
// a small commit costs what it cost before. A thirtieth of it but in `make soak`.
func TestB125B159LogIsBounded(t *testing.T) {
	c := single(t, t.TempDir(), newList())
	c.Policy = Policy{Segment: 64 << 10, Commands: 500, Check: 10 * time.Millisecond}
	n := open(t, c)
	lead(t, n)
	fresh := timed(t, n, "fresh")
	each, trickle := 200, 2000
	if os.Getenv("GABION_SOAK") != "" {
		each, trickle = 6000, 60_000
	}
	var wait sync.WaitGroup
	for part := range 50 {
		wait.Go(func() {
			for i := range each {
				put(t, n, fmt.Sprintf("k%d", (part*each+i)%1000), strings.Repeat("v", 100))
			}
		})
	}
	wait.Wait()
	settle := func() Stats {
		t.Helper()
		var s Stats
		for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
			if s = n.Stats(); s.AppliedIndex-s.SnapshotIndex < 500 && s.LastLog-s.FirstLog < 20_000 {
				break
			}
		}
		return s
	}
	after := settle()
	if after.LastLog < uint64(50*each) || after.LogBytes > 4<<20 || after.StableBytes > 1<<20 || len(snapshotFiles(t, c.Dir)) > keptSnapshots+1 { // one may just be replaced
		t.Errorf("after the burst: %+v", after)
	}
	for i := range trickle {
		put(t, n, fmt.Sprintf("k%d", i%1000), strings.Repeat("w", 100))
	}
	if s := settle(); s.LastLog-s.FirstLog > 2500 || s.LogBytes > 1<<20 || s.SnapshotIndex == 0 {
		t.Errorf("after the trickle: %+v", s)
	}
	if again := timed(t, n, "again"); again > 10*fresh+50*time.Millisecond { // wide: the machine is shared
		t.Errorf("median commit %v, was %v", again, fresh)
	}
}

// timed is the median time of a small commit.
func timed(t *testing.T, n *Node, key string) time.Duration {
	var took []time.Duration
	for range 51 {
		start := time.Now()
		put(t, n, key, "v")
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	return took[len(took)/2]
}

// A quiet log is cut by age, though neither commands nor bytes suffice.
func TestB125QuietLogIsCutByAge(t *testing.T) {
	c := single(t, t.TempDir(), newList())
	c.Policy.Age = 30 * time.Millisecond
	n := open(t, c)
	lead(t, n)
	for i := range 3 {
		before := n.Stats().SnapshotIndex
		put(t, n, fmt.Sprint("k", i), "v")
		for deadline := time.Now().Add(10 * time.Second); n.Stats().SnapshotIndex <= before; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%+v", n.Stats())
			}
		}
	}
}

// And by bytes.
func TestLogIsCutByBytes(t *testing.T) {
	c := single(t, t.TempDir(), newList())
	c.Policy.Bytes = 100 << 10
	n := open(t, c)
	lead(t, n)
	for i := range 5 {
		put(t, n, fmt.Sprint("k", i), strings.Repeat("v", 50<<10))
	}
	for deadline := time.Now().Add(10 * time.Second); n.Stats().SnapshotIndex == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%+v", n.Stats())
		}
	}
}
