package consensus

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

var errNewer = fmt.Errorf("%w: command of level 9, this binary knows 1", block.ErrFormat)

// list is a machine that remembers its commands: "key value" sets, "refuse"
// is refused, "newer" cannot be applied.
type list struct {
	mu     sync.Mutex
	Index  uint64
	Values map[string]string
	Count  int
	new    bool // knows "newer", which then sets as any other
}

func newList() *list { return &list{Values: map[string]string{}} }

func (m *list) Apply(index uint64, command []byte) (any, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if index <= m.Index {
		panic(fmt.Sprintf("index %d after %d", index, m.Index))
	}
	key, value, _ := strings.Cut(string(command), " ")
	switch key {
	case "newer":
		if !m.new {
			return nil, errNewer
		}
	case "refuse":
		m.Index = index
		return errors.New("refused"), nil
	}
	m.Index = index
	m.Values[key] = value
	m.Count++
	return value, nil
}

func (m *list) Snapshot() func(io.Writer) error {
	m.mu.Lock()
	c := &list{Index: m.Index, Values: maps.Clone(m.Values), Count: m.Count}
	m.mu.Unlock()
	return func(w io.Writer) error { return json.NewEncoder(w).Encode(c) }
}

func (m *list) Restore(r io.Reader) error {
	c := newList()
	if err := json.NewDecoder(r).Decode(c); err != nil {
		return err
	}
	if c.Values["level"] == "9" {
		return errNewer
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Index, m.Values, m.Count = c.Index, c.Values, c.Count
	return nil
}

func (m *list) knowsNewer(does bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.new = does
}

func (m *list) get(key string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Values[key]
}

func (m *list) index() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Index
}

func (m *list) copy() map[string]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.Values)
}

// testLog discards unless the test runs with GABION_TEST_LOG set.
func testLog(t testing.TB) *slog.Logger {
	if os.Getenv("GABION_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})).With("test", t.Name())
}

// single is the configuration of the only voter in dir.
func single(t testing.TB, dir string, m Machine) Config {
	return Config{
		Dir: dir, Node: "n1", Cluster: testCluster, Bootstrap: true,
		Listen: "127.0.0.1:0", Machine: m, Log: testLog(t),
		Policy: Policy{Segment: 64 << 10, Check: 50 * time.Millisecond},
	}
}

var testCluster = block.ClusterID{UUID: block.UUID{1, 2, 3}}

// open opens and closes at the end, unless the test has closed it before.
func open(t testing.TB, c Config) *Node {
	t.Helper()
	n, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	return n
}

// lead waits until n leads.
func lead(t testing.TB, n *Node) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		state, changed := n.Leadership()
		if state.Leads {
			return
		}
		select {
		case <-changed:
		case <-n.Failed():
			t.Fatalf("failed: %v", n.Err())
		case <-timeout:
			t.Fatalf("%s does not lead: %+v", n.config.Node, n.Stats())
		}
	}
}

func put(t testing.TB, n *Node, key, value string) uint64 {
	t.Helper()
	response, index, err := n.Apply(t.Context(), []byte(key+" "+value))
	if err != nil || response != value {
		t.Fatalf("set %s: %v, %v", key, response, err)
	}
	return index
}

func closeNode(t testing.TB, n *Node) {
	t.Helper()
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
}

// copyDir is what another machine would find if this one lost power now:
// everything synced, and whatever else the kernel had written.
func copyDir(t testing.TB, from string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return to
}

func snapshotFiles(t testing.TB, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "snapshots", "*.snap"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}
