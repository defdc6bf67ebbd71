package consensus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// cluster is three voters in this process, on real directories and ports.
type cluster struct {
	t       testing.TB
	configs map[string]Config
	mu      sync.Mutex
	nodes   map[string]*Node
	lists   map[string]*list
	newer   bool // those who start from now on know what "newer" is
}

func newCluster(t testing.TB) *cluster {
	c := &cluster{t: t, configs: map[string]Config{}, nodes: map[string]*Node{}, lists: map[string]*list{}}
	for i, name := range []string{"n1", "n2", "n3"} {
		config := single(t, t.TempDir(), nil)
		config.Node, config.Bootstrap, config.Listen = name, i == 0, freePort(t)
		config.Timing = Timing{Election: 400 * time.Millisecond, Lease: 350 * time.Millisecond}
		config.Policy = Policy{Segment: 64 << 10, Commands: 100, Check: 20 * time.Millisecond}
		c.configs[name] = config
		c.start(name)
	}
	t.Cleanup(func() {
		for name := range c.configs {
			c.stop(name)
		}
	})
	for _, name := range []string{"n2", "n3"} {
		for { // on a busy machine leadership may be lost on the way
			if err := c.leader().AddVoter(t.Context(), name, c.configs[name].Listen); err == nil {
				break
			} else if !errors.Is(err, block.ErrUnknown) && !errors.Is(err, block.ErrUnavailable) {
				t.Fatal(err)
			}
		}
	}
	return c
}

func freePort(t testing.TB) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func (c *cluster) start(name string) {
	c.t.Helper()
	config := c.configs[name]
	m := newList()
	m.knowsNewer(c.newer)
	config.Machine = m
	n, err := Open(config)
	if err != nil {
		c.t.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes[name], c.lists[name] = n, m
}

func (c *cluster) stop(name string) {
	c.mu.Lock()
	n := c.nodes[name]
	delete(c.nodes, name)
	c.mu.Unlock()
	if n != nil {
		if err := n.Close(); err != nil {
			c.t.Error(err)
		}
	}
}

func (c *cluster) all() []*Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.nodes))
}

// leader waits until a node leads, other than not.
func (c *cluster) leader(not ...*Node) *Node {
	c.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		for _, n := range c.all() {
			if state, _ := n.Leadership(); state.Leads && !slices.Contains(not, n) {
				return n
			}
		}
	}
	c.t.Fatal("nobody leads")
	return nil
}

// do repeats a command until its outcome is known.
func (c *cluster) do(ctx context.Context, command string) (any, error) {
	for {
		n := c.leader()
		response, _, err := n.Apply(ctx, []byte(command))
		if err == nil || ctx.Err() != nil {
			return response, err
		}
	}
}

// settled waits until all nodes have applied the same, and returns it.
func (c *cluster) settled() map[string]string {
	c.t.Helper()
	for deadline := time.Now().Add(40 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		leader := c.leader()
		if _, err := leader.Read(c.t.Context()); err != nil {
			continue
		}
		of := c.lists[leader.config.Node]
		want, index, same := of.copy(), of.index(), true
		for _, m := range c.lists {
			same = same && m.index() == index
		}
		if !same {
			continue
		}
		for name, m := range c.lists {
			if !maps.Equal(m.copy(), want) {
				c.t.Fatalf("%s differs from %s at %d", name, leader.config.Node, index)
			}
		}
		return want
	}
	for _, n := range c.all() {
		c.t.Logf("%s: %+v", n.config.Node, n.Stats())
	}
	c.t.Fatal("the nodes do not catch up")
	return nil
}

// B122: while the leader is stopped again and again, clients repeat until an
// answer. What was acknowledged is there, once, on all.
func TestB122LeadershipLostIsNotNotApplied(t *testing.T) {
	c := newCluster(t)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	const clients, each = 10, 100
	want := map[string]string{}
	var mu sync.Mutex
	var wait sync.WaitGroup
	for client := range clients {
		wait.Go(func() {
			for i := range each {
				key, value := fmt.Sprintf("c%d-%d", client, i%17), fmt.Sprint(i)
				if _, err := c.do(ctx, key+" "+value); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				want[key] = value
				mu.Unlock()
			}
		})
	}
	stop := make(chan struct{})
	var killer sync.WaitGroup
	killer.Go(func() {
		for range 5 {
			select {
			case <-stop:
				return
			case <-time.After(500 * time.Millisecond):
			}
			name := c.leader().config.Node
			c.stop(name)
			c.start(name)
		}
	})
	wait.Wait()
	close(stop)
	killer.Wait()
	if got := c.settled(); !maps.Equal(got, want) {
		t.Errorf("state %v\nwant %v", got, want)
	}
}

// H79: the leader's log disk hangs. Another leads; the old one confirms no
// read and commits nothing; when the disk goes on it follows.
func TestH79LeaderHangs(t *testing.T) {
	c := newCluster(t)
	if _, err := c.do(t.Context(), "a 1"); err != nil {
		t.Fatal(err)
	}
	old := c.leader()
	release := hang(old)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, _, err := old.Apply(ctx, []byte("lost ?")); !errors.Is(err, block.ErrUnknown) {
		t.Errorf("got %v", err)
	}
	for next := c.leader(old); ; next = c.leader(old) {
		if _, _, err := next.Apply(t.Context(), []byte("a 2")); err == nil {
			break
		}
	}
	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := old.Read(ctx); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("a linearizable read of the old leader: %v", err)
	}
	release()
	if got := c.settled(); got["a"] != "2" {
		t.Errorf("%v", got)
	}
}

// A voter that was away, or is new, gets a snapshot when the log was cut.
func TestSnapshotInstalled(t *testing.T) {
	c := newCluster(t)
	away := "n3"
	if c.leader().config.Node == away {
		away = "n2"
	}
	c.stop(away)
	for i := range 500 {
		if _, err := c.do(t.Context(), fmt.Sprintf("k%d v", i)); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(20 * time.Second); c.leader().Stats().FirstLog < 150; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the log was not cut: %+v", c.leader().Stats())
		}
	}
	c.start(away)
	if got := c.settled(); len(got) != 500 {
		t.Errorf("%d keys", len(got))
	}
	// And its directory is one to start from.
	c.stop(away)
	c.start(away)
	if got := c.settled(); len(got) != 500 {
		t.Errorf("%d keys", len(got))
	}
}

// A follower refuses, and says nothing was done.
func TestFollowerRefuses(t *testing.T) {
	c := newCluster(t)
	leader := c.leader()
	c.settled()
	for _, n := range c.all() {
		if n == leader {
			continue
		}
		if _, _, err := n.Apply(t.Context(), []byte("a b")); !errors.Is(err, block.ErrUnavailable) || errors.Is(err, block.ErrUnknown) {
			t.Errorf("apply: %v", err)
		}
		if _, err := n.Read(t.Context()); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("read: %v", err)
		}
		if name, _ := n.Leader(); name != leader.config.Node {
			t.Errorf("%s takes %q for the leader", n.config.Node, name)
		}
	}
}

// H78, as far as one process goes: without a majority nothing commits and
// nothing is confirmed; it resumes by itself.
func TestH78MajorityGone(t *testing.T) {
	c := newCluster(t)
	if _, err := c.do(t.Context(), "a 1"); err != nil {
		t.Fatal(err)
	}
	leader := c.leader()
	var others []string
	for name := range c.configs {
		if name != leader.config.Node {
			others = append(others, name)
			c.stop(name)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, _, err := leader.Apply(ctx, []byte("b 1")); err == nil {
		t.Error("committed by one of three")
	}
	if _, err := leader.Read(ctx); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("read: %v", err)
	}
	for _, name := range others {
		c.start(name)
	}
	if _, err := c.do(t.Context(), "c 1"); err != nil {
		t.Fatal(err)
	}
	if got := c.settled(); got["a"] != "1" || got["c"] != "1" {
		t.Errorf("%v", got)
	}
}

// B147: whatever strangers send to the raft port, the cluster goes on and
// holds none of it.
func TestB147StrangersOnTheRaftPort(t *testing.T) {
	c := newCluster(t)
	leader := c.leader()
	c.settled()
	term := leader.Stats().Term
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	noise := make([]byte, 1<<16)
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	foreign := append([]byte(greeting), make([]byte, 16)...) // another cluster's server
	foreign = append(foreign, noise...)
	for i, bytes := range [][]byte{
		noise, []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), foreign, []byte(greeting), {0}, {2, 0x85}, nil, foreign[:30],
	} {
		for _, n := range c.all() {
			conn, err := net.Dial("tcp", n.Address())
			if err != nil {
				t.Fatal(err)
			}
			_, _ = conn.Write(bytes)
			if len(bytes) >= len(greeting)+16 {
				_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
				if m, err := conn.Read(make([]byte, 100)); m != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("seed %d, %d: answered with %d bytes, or not closed: %v", seed, i, m, err)
				}
			}
			t.Cleanup(func() { _ = conn.Close() })
		}
	}
	// More that say nothing than may be greeted at once: the rest is closed.
	for range 3 * greetingAtOnce {
		conn, err := net.Dial("tcp", leader.Address())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	if _, err := c.do(t.Context(), "a 1"); err != nil {
		t.Fatal(err)
	}
	// A term that a stranger invented would be a large number.
	if got := c.settled(); got["a"] != "1" || leader.Stats().Term > term+5 {
		t.Errorf("seed %d: %v, term %d after %d", seed, got, leader.Stats().Term, term)
	}
}
