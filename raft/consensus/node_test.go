package consensus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("GABION_TEST_VICTIM"); dir != "" {
		victim(dir)
	}
	goleak.VerifyTestMain(m)
}

func TestApplyAndRestart(t *testing.T) {
	dir, m := t.TempDir(), newList()
	n := open(t, single(t, dir, m))
	lead(t, n)
	for i := range 50 {
		put(t, n, fmt.Sprintf("k%d", i), "v")
	}
	want := m.copy()
	closeNode(t, n)
	closeNode(t, n)

	m2 := newList()
	c := single(t, dir, m2)
	c.Bootstrap, c.Cluster = false, block.ClusterID{}
	n2 := open(t, c)
	if n2.Cluster() != testCluster {
		t.Errorf("cluster %v", n2.Cluster())
	}
	lead(t, n2)
	if _, err := n2.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := m2.copy(); len(got) != len(want) {
		t.Errorf("%d keys, want %d", len(got), len(want))
	}
}

// H80: a refusal is in the response, and nothing else is taken for success.
func TestH80RefusalIsNotSuccess(t *testing.T) {
	n := open(t, single(t, t.TempDir(), newList()))
	lead(t, n)
	response, index, err := n.Apply(t.Context(), []byte("refuse"))
	if refusal, ok := response.(error); err != nil || !ok || refusal.Error() != "refused" || index == 0 {
		t.Errorf("got %v, %d, %v", response, index, err)
	}
	for _, c := range []struct{ library, want error }{
		{errNotLeaderForTest, block.ErrUnavailable},
		{errLeadershipLostForTest, block.ErrUnknown},
		{errShutdownForTest, block.ErrUnknown},
		{errors.New("write log: no space left on device"), block.ErrUnknown},
	} {
		if got := outcome(c.library); !errors.Is(got, c.want) {
			t.Errorf("%v: %v", c.library, got)
		}
	}
}

func TestApplyLimits(t *testing.T) {
	n := open(t, single(t, t.TempDir(), newList()))
	lead(t, n)
	if _, _, err := n.Apply(t.Context(), make([]byte, MaxCommand+1)); !errors.Is(err, block.ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := n.Apply(ctx, []byte("a b")); !errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrUnknown) {
		t.Errorf("before it was sent: %v", err)
	}
	if _, err := n.Read(ctx); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("read: %v", err)
	}
	closeNode(t, n)
	if _, _, err := n.Apply(t.Context(), []byte("a b")); !errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrUnknown) {
		t.Errorf("closed: %v", err)
	}
}

// A write that hangs past the deadline is unknown, and applied all the same
// when the disk goes on.
func TestDeadlineInFlightIsUnknown(t *testing.T) {
	m := newList()
	n := open(t, single(t, t.TempDir(), m))
	lead(t, n)
	release := hang(n)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := n.Apply(ctx, []byte("late yes")); !errors.Is(err, block.ErrUnknown) {
		t.Errorf("got %v", err)
	}
	release()
	put(t, n, "after", "1")
	if m.get("late") != "yes" {
		t.Error("not applied")
	}
}

// hang stops log writes of n until the returned function is called.
func hang(n *Node) (release func()) {
	c := make(chan struct{})
	n.logs.before.Store(func() error { <-c; return nil })
	return func() {
		n.logs.before.Store(func() error { return nil })
		close(c)
	}
}

// A failed log write is unknown, and the node resumes by itself when the disk
// has room again (B125).
func TestB125FullDiskResumes(t *testing.T) {
	dir, m := t.TempDir(), newList()
	n := open(t, single(t, dir, m))
	lead(t, n)
	put(t, n, "before", "1")
	n.logs.before.Store(func() error { return errors.New("no space left on device") })
	if _, _, err := n.Apply(t.Context(), []byte("x y")); !errors.Is(err, block.ErrUnknown) {
		t.Fatalf("got %v", err)
	}
	n.logs.before.Store(func() error { return nil })
	for { // it steps down and stands for election again
		_, _, err := n.Apply(t.Context(), []byte("again 1"))
		if err == nil {
			break
		}
		if !errors.Is(err, block.ErrUnavailable) {
			t.Fatal(err)
		}
		_, changed := n.Leadership()
		select {
		case <-changed:
		case <-time.After(10 * time.Millisecond):
		}
	}
	closeNode(t, n)
	m2 := newList()
	n2 := open(t, single(t, dir, m2))
	lead(t, n2)
	if m2.get("again") != "1" || m2.get("before") != "1" {
		t.Errorf("%v", m2.copy())
	}
}

// Writes that the WAL itself fails half-way leave it refusing the index for
// ever; the log is reopened, and what did arrive of them is taken out.
func TestFailedAppendIsUndone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	s, err := openLog(dir, 64<<10, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.close() }()
	if err := s.StoreLogs(entries(1, 3)); err != nil {
		t.Fatal(err)
	}
	fillDisk(t, segments(t, dir)[0])
	if err := s.StoreLogs(entries(4, 6)); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("on a full disk: %v", err)
	}
	if err := s.StoreLogs(entries(4, 6)); err != nil { // it has room again
		t.Fatal(err)
	}
	s.broken = true // as far as raft knows those failed, though they reached the disk
	if err := s.StoreLogs(entries(4, 4)); err != nil {
		t.Fatal(err)
	}
	if _, last, _ := bounds(s); last != 4 {
		t.Errorf("last %d", last)
	}
}

// fillDisk makes writes to an open file fail for want of space until it is
// opened again.
func fillDisk(t *testing.T, path string) {
	t.Helper()
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = full.Close() }()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && to == path {
			n, err := strconv.Atoi(fd.Name())
			if err == nil {
				err = unix.Dup3(int(full.Fd()), n, unix.O_CLOEXEC)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Concurrent commands share a sync: far fewer writes than commands.
func TestGroupCommit(t *testing.T) {
	n := open(t, single(t, t.TempDir(), newList()))
	lead(t, n)
	var mu sync.Mutex
	writes := 0
	n.logs.before.Store(func() error {
		mu.Lock()
		writes++
		mu.Unlock()
		time.Sleep(5 * time.Millisecond) // a disk
		return nil
	})
	var wait sync.WaitGroup
	for i := range 64 {
		wait.Go(func() { put(t, n, fmt.Sprint("k", i), "v") })
	}
	wait.Wait()
	mu.Lock()
	defer mu.Unlock()
	if writes > 16 {
		t.Errorf("%d writes for 64 concurrent commands", writes)
	}
}

func TestOnlyVoterStartsFast(t *testing.T) {
	dir := t.TempDir()
	n := open(t, single(t, dir, newList()))
	lead(t, n)
	closeNode(t, n)
	start := time.Now()
	n = open(t, single(t, dir, newList()))
	lead(t, n)
	// 500 ms is the election timeout that is skipped.
	if took := time.Since(start); took > 450*time.Millisecond {
		t.Errorf("from open to leading: %v", took)
	}
}

// H39: a second server on the same directory gets nowhere.
func TestH39SecondServerOnADirectory(t *testing.T) {
	dir := t.TempDir()
	n := open(t, single(t, dir, newList()))
	_, err := Open(single(t, dir, newList()))
	if !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), fmt.Sprint("pid ", os.Getpid())) {
		t.Errorf("got %v", err)
	}
	closeNode(t, n)
	lead(t, open(t, single(t, dir, newList())))
}

func TestIdentity(t *testing.T) {
	dir := t.TempDir()
	fresh := func(change func(*Config)) error {
		c := single(t, dir, newList())
		change(&c)
		n, err := Open(c)
		if err == nil {
			closeNode(t, n)
		}
		return err
	}
	if err := fresh(func(c *Config) { c.Cluster, c.Bootstrap = block.ClusterID{}, false }); !errors.Is(err, block.ErrPrecondition) {
		t.Errorf("neither: %v", err)
	}
	if err := fresh(func(*Config) {}); err != nil {
		t.Fatal(err)
	}
	if err := fresh(func(c *Config) { c.Node = "n2" }); !errors.Is(err, block.ErrPrecondition) {
		t.Errorf("other node: %v", err)
	}
	if err := fresh(func(c *Config) { c.Cluster, c.Bootstrap = block.ClusterID{UUID: block.NewUUID()}, false }); !errors.Is(err, block.ErrPrecondition) {
		t.Errorf("other cluster: %v", err)
	}
	if err := fresh(func(c *Config) { c.Cluster = block.ClusterID{UUID: block.NewUUID()} }); err != nil {
		t.Errorf("bootstrap on a bootstrapped directory: %v", err)
	}
	path := filepath.Join(dir, "identity.json")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]error{
		strings.Replace(string(good), `"format": 1`, `"format": 2`, 1): block.ErrFormat,
		"{": block.ErrCorrupt,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := fresh(func(*Config) {}); !errors.Is(err, want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.RemoveAll(filepath.Join(dir, "log")), os.RemoveAll(filepath.Join(dir, "snapshots"))); err != nil {
		t.Fatal(err)
	}
	if err := fresh(func(*Config) {}); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("state removed: %v", err)
	}
}

// Bootstrap that was cut short anywhere is finished by the next start.
func TestBootstrapCutShort(t *testing.T) {
	dir := t.TempDir()
	c := single(t, dir, newList())
	if _, err := create(&c, filepath.Join(dir, "identity.json")); err != nil {
		t.Fatal(err)
	}
	s, err := openLog(filepath.Join(dir, "log"), 64<<10, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SetUint64([]byte("CurrentTerm"), 1); err != nil { // the term, not the entry
		t.Fatal(err)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	c.Bootstrap, c.Cluster = false, block.ClusterID{}
	n := open(t, c)
	lead(t, n)
	put(t, n, "a", "b")
}

// H81, B127: a command of a newer level stops the node before it is applied,
// and on every start again.
func TestH81NewerCommandOlderVoter(t *testing.T) {
	dir, m := t.TempDir(), newList()
	n := open(t, single(t, dir, m))
	lead(t, n)
	put(t, n, "a", "1")
	_, _, err := n.Apply(t.Context(), []byte("newer"))
	if !errors.Is(err, block.ErrUnknown) {
		t.Errorf("proposer: %v", err)
	}
	<-n.Failed()
	if !errors.Is(n.Err(), block.ErrFormat) || !strings.Contains(n.Err().Error(), "level 9") {
		t.Errorf("Err: %v", n.Err())
	}
	if _, _, err := n.Apply(t.Context(), []byte("b 2")); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("after: %v", err)
	}
	if err := n.Snapshot(t.Context()); err == nil {
		t.Error("snapshot of a halted machine")
	}
	closeNode(t, n)

	m = newList()
	n = open(t, single(t, dir, m))
	<-n.Failed()
	if m.get("a") != "1" || m.get("b") != "" {
		t.Errorf("%v", m.copy())
	}
	closeNode(t, n)
}

// B127: so does a snapshot; there is no falling back to an older one.
func TestB127NewerSnapshot(t *testing.T) {
	dir := t.TempDir()
	n := open(t, single(t, dir, newList()))
	lead(t, n)
	put(t, n, "a", "1")
	if err := n.Snapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	put(t, n, "level", "9")
	if err := n.Snapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	closeNode(t, n)
	if _, err := Open(single(t, dir, newList())); !errors.Is(err, block.ErrFormat) {
		t.Errorf("got %v", err)
	}
}

func TestPortInUse(t *testing.T) {
	n := open(t, single(t, t.TempDir(), newList()))
	c := single(t, t.TempDir(), newList())
	c.Listen = n.Address()
	if _, err := Open(c); !errors.Is(err, block.ErrInUse) {
		t.Errorf("got %v", err)
	}
}
