package consensus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// fleet is a cluster whose servers register, and whose voters the pilot chooses.
type fleet struct {
	*cluster
	registry registry
	pilots   map[string]func() // each ends one and waits for it
}

// registry is the Application of all servers of a fleet.
type registry struct {
	mu      sync.Mutex
	servers map[string]Server
	ask     func(name string) (Progress, error)
}

func (r *registry) Servers() []Server {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []Server
	for _, s := range r.servers {
		list = append(list, s)
	}
	return list
}

func (r *registry) Progress(_ context.Context, s Server) (Progress, error) { return r.ask(s.Name) }

func (r *registry) put(s Server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.servers[s.Name] = s
}

func (r *registry) remove(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.servers, name)
}

// newFleet starts n1, n2, ... in these racks; the first founds, the others join.
func newFleet(t testing.TB, racks ...string) *fleet {
	f := &fleet{
		cluster: &cluster{t: t, configs: map[string]Config{}, nodes: map[string]*Node{}, lists: map[string]*list{}},
		pilots:  map[string]func(){},
	}
	f.registry = registry{servers: map[string]Server{}, ask: func(name string) (Progress, error) {
		f.mu.Lock()
		n := f.nodes[name]
		f.mu.Unlock()
		if n == nil {
			return Progress{}, block.ErrUnavailable
		}
		return n.Progress(), nil
	}}
	t.TempDir() // the first one: all go after the nodes have stopped
	t.Cleanup(func() {
		for name := range f.configs {
			f.stop(name)
		}
	})
	for i, rack := range racks {
		f.add(fmt.Sprint("n", i+1), rack, i == 0)
	}
	return f
}

func (f *fleet) add(name, rack string, founds bool) {
	f.t.Helper()
	config := single(f.t, f.t.TempDir(), nil)
	config.Node, config.Bootstrap, config.Listen = name, founds, freePort(f.t)
	config.Timing = Timing{Election: 400 * time.Millisecond, Lease: 350 * time.Millisecond, Survey: 200 * time.Millisecond, Stable: time.Second}
	config.Policy = Policy{Segment: 64 << 10, Commands: 100, Check: 20 * time.Millisecond}
	f.configs[name] = config
	f.start(name)
	f.registry.put(Server{Name: name, Rack: rack, Address: config.Listen, Alive: true})
}

func (f *fleet) start(name string) {
	f.t.Helper()
	f.cluster.start(name)
	ctx, end := context.WithCancel(context.Background())
	done := make(chan struct{})
	n := f.nodes[name]
	go func() {
		defer close(done)
		n.Pilot(ctx, &f.registry)
	}()
	f.pilots[name] = func() { end(); <-done }
}

func (f *fleet) stop(name string) {
	if end := f.pilots[name]; end != nil {
		end()
		delete(f.pilots, name)
	}
	f.cluster.stop(name)
}

// members are "voters / learners" as the leader has them.
func (f *fleet) members() string {
	s := f.leader().Stats()
	slices.Sort(s.Voters)
	slices.Sort(s.Learners)
	return strings.Join(s.Voters, " ") + " / " + strings.Join(s.Learners, " ")
}

// become waits until the members are those.
func (f *fleet) become(ok func(voters, learners []string) bool) (voters, learners []string) {
	f.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		before, after, _ := strings.Cut(f.members(), "/")
		voters, learners = strings.Fields(before), strings.Fields(after)
		if ok(voters, learners) {
			return voters, learners
		}
	}
	f.t.Fatalf("the voters are %v, the learners %v", voters, learners)
	return nil, nil
}

// counted waits for numbers of voters and learners.
func (f *fleet) counted(v, l int) (voters, learners []string) {
	f.t.Helper()
	return f.become(func(voters, learners []string) bool { return len(voters) == v && len(learners) == l })
}

// voter is one that does not lead, other than not.
func (f *fleet) voter(not ...string) string {
	f.t.Helper()
	leader := f.leader()
	for _, name := range leader.Stats().Voters {
		if name != leader.config.Node && !slices.Contains(not, name) {
			return name
		}
	}
	f.t.Fatal("the leader is the only voter")
	return ""
}

func (f *fleet) must(command string) {
	f.t.Helper()
	if _, err := f.do(f.t.Context(), command); err != nil {
		f.t.Fatal(err)
	}
}

// Whoever joins gets the state; votes follow the number of servers: 1, 1, 3, 3, 5.
func TestServersJoin(t *testing.T) {
	f := newFleet(t, "r1")
	f.must("a 1")
	for i, want := range []struct{ voters, learners int }{{1, 1}, {3, 0}, {3, 1}, {5, 0}} {
		f.add(fmt.Sprint("n", i+2), fmt.Sprint("r", i%3+2), false)
		f.counted(want.voters, want.learners)
	}
	f.must("b 2")
	if got := f.settled(); got["a"] != "1" || got["b"] != "2" {
		t.Errorf("%v", got)
	}
	for name, config := range f.configs {
		want := Joined
		if name == "n1" {
			want = Founded
		}
		if origin, _, err := OriginOf(config.Dir); origin != want || err != nil {
			t.Errorf("%s: origin %v, %v", name, origin, err)
		}
	}
	// A joiner's directory is one to start from, and not one to forget from.
	name := f.voter()
	f.stop(name)
	f.start(name)
	f.settled()
	f.stop(name)
	config := f.configs[name]
	for _, dir := range []string{"log", "snapshots"} {
		if err := os.RemoveAll(filepath.Join(config.Dir, dir)); err != nil {
			t.Fatal(err)
		}
	}
	config.Machine = newList()
	if _, err := Open(config); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("a voter that forgot everything: %v", err)
	}
}

// A joiner is no blank any more as soon as it has received something: it may vote next.
func TestJoinerIsNotBlank(t *testing.T) {
	f := newFleet(t, "r1", "r2")
	f.must("a 1")
	f.settled()
	path := filepath.Join(f.configs["n2"].Dir, identityFile)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		id, err := readIdentity(path)
		if err == nil && id.Stage == stageJoined {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v, %v", id, err)
		}
	}
}

// B115: votes are restored when voters die, one by one and two at once; who
// comes back learns, and votes again where that is better. Nothing is lost.
func TestB115VotersDie(t *testing.T) {
	f := newFleet(t, "r1", "r1", "r2", "r2", "r3", "r3")
	_, spare := f.counted(5, 1)
	f.must("a 1")
	first := f.voter()
	f.stop(first)
	f.become(func(voters, learners []string) bool {
		return slices.Contains(voters, spare[0]) && slices.Equal(learners, []string{first})
	})
	f.must("b 2")
	second := f.voter()
	f.stop(second)
	third := f.voter(second)
	f.stop(third)
	f.counted(3, 3) // of five votes two are dead: three tolerate one more, five none
	f.must("c 3")
	for _, name := range []string{first, second, third} {
		f.start(name)
	}
	f.counted(5, 1)
	f.must("d 4")
	if got := f.settled(); len(got) != 4 {
		t.Errorf("%v", got)
	}
}

// H82: two of three voters in one rack, until there is a server in another.
func TestH82VotersAreSpreadOverRacks(t *testing.T) {
	f := newFleet(t, "r1", "r2", "r2")
	f.counted(3, 0)
	f.add("n4", "r3", false)
	f.become(func(voters, learners []string) bool {
		return len(voters) == 3 && len(learners) == 1 && slices.Contains(voters, "n4") && slices.Contains(voters, "n1")
	})
}

// What is not registered any more leaves, a voter too.
func TestRemovedServerLeaves(t *testing.T) {
	f := newFleet(t, "r1", "r2", "r3", "r4")
	f.counted(3, 1)
	name := f.voter()
	f.stop(name)
	f.registry.remove(name)
	f.become(func(voters, learners []string) bool {
		return len(voters) == 3 && len(learners) == 0 && !slices.Contains(voters, name)
	})
	another := f.voter()
	f.stop(another)
	f.registry.remove(another)
	f.counted(1, 1) // two servers are left
	f.must("a 1")
}

// A server that comes back elsewhere is found there, whether it votes or not.
func TestAddressChanges(t *testing.T) {
	f := newFleet(t, "r1", "r2", "r3", "r4")
	_, learners := f.counted(3, 1)
	for _, name := range []string{learners[0], f.voter()} {
		f.stop(name)
		f.must(name + " away")
		config := f.configs[name]
		config.Listen = freePort(t)
		f.configs[name] = config
		f.start(name)
		f.registry.mu.Lock()
		s := f.registry.servers[name]
		s.Address = config.Listen
		f.registry.servers[name] = s
		f.registry.mu.Unlock()
		if got := f.settled(); got[name] != "away" {
			t.Errorf("%s has %v", name, got)
		}
	}
}

// H81, across a cluster: a voter that cannot apply what the others can halts,
// and they go on; with a newer binary it follows.
func TestH81MixedCluster(t *testing.T) {
	f := newFleet(t, "r1", "r2", "r3")
	f.counted(3, 0)
	f.must("a 1")
	f.settled()
	name := f.voter()
	old := f.nodes[name]
	for other, m := range f.lists {
		m.knowsNewer(other != name)
	}
	f.must("newer b")
	select {
	case <-old.Failed():
	case <-time.After(20 * time.Second):
		t.Fatal("the older voter goes on")
	}
	if err := old.Err(); !errors.Is(err, block.ErrFormat) {
		t.Errorf("it ended with %v", err)
	}
	f.must("c 3")
	f.stop(name)
	f.newer = true
	f.start(name)
	if got := f.settled(); got["newer"] != "b" || got["c"] != "3" {
		t.Errorf("%v", got)
	}
}

// Only the leader pilots; an ended pilot leaves nothing behind.
func TestPilotEnds(t *testing.T) {
	f := newFleet(t, "r1", "r2", "r3")
	f.counted(3, 0)
	for _, end := range f.pilots {
		end()
	}
	f.add("n4", "r4", false)
	f.pilots["n4"]()
	f.must("a 1")
	if got := f.members(); got != "n1 n2 n3 / " {
		t.Errorf("without a pilot the members are %s", got)
	}
	f.stop(f.leader().config.Node) // hands leadership over
	ctx, end := context.WithCancel(t.Context())
	var pilots sync.WaitGroup
	for _, n := range f.all() {
		pilots.Go(func() { n.Pilot(ctx, &f.registry) })
	}
	f.counted(3, 1)
	end()
	pilots.Wait()
}
