package cluster_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// cell is several servers of one cluster: n1 and n2 have a disk each and serve a
// volume each, v1 and v2; n3 and n4 have none. Each is in a rack of its own.
type cell struct {
	servers map[string]*cluster.Server
	open    map[*cluster.Server]*raw // each to the volume that the server serves
}

// survivesAny is what the status says of a cell that is as well as it can be.
const survivesAny = "3 voters in 3 racks; survives the loss of any one server or rack"

// The life of a cell of several servers: what one step leaves the next begins with.
func TestCellOfSeveralServers(t *testing.T) {
	t.Parallel() // it mostly waits for what takes ten seconds: to be trusted with a vote, and to count as dead
	c := &cell{servers: map[string]*cluster.Server{}, open: map[*cluster.Server]*raw{}}
	for i, disks := range [][]string{nil, nil, {}, {}} {
		o := cluster.Options{Node: fmt.Sprint("n", i+1), Rack: fmt.Sprint("r", i+1), Disks: disks, Flags: []string{"--default-replicas", "1"}}
		if i > 0 {
			o.Join = c.servers["n1"].MetadataAddress()
		}
		c.servers[o.Node] = layout(t, o)
	}
	for _, step := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"three servers become one cell, one of them without disks", c.form},
		{"a volume is served where its grant says", func(step *testing.T) { c.serve(step, t) }},
		{"a leader that ends hands over", c.handOver},
		{"H79: a leader hangs", c.hang},
		{"B115: the leader dies", c.lead},
		{"H78: the majority is gone", c.loseMajority},
		{"a voter's name with an empty directory is refused", c.forget},
		{"a dead voter is removed and another votes", c.replace},
	} {
		if !t.Run(step.name, step.do) {
			return
		}
	}
}

func (c *cell) form(t *testing.T) {
	// In no order: who joins waits for a server that knows the cluster.
	for _, name := range []string{"n3", "n2", "n1"} {
		if err := c.servers[name].Launch(); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"n1", "n2", "n3"} {
		if err := c.servers[name].WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	c.becomes(t, "n3", survivesAny)
	ready(t, c.servers["n4"]) // a spare
	mentions(t, cli(t, c.servers["n2"], "status"), "All is well", "4 of 4 up, 2 without disks", "2 of 2 online")
}

// serve leaves connections that last for the whole test.
func (c *cell) serve(t, whole *testing.T) {
	n1, n2, n3 := c.servers["n1"], c.servers["n2"], c.servers["n3"]
	mentions(t, cliRefuses(t, n3, 1, "volume", "create", "two", "--size", "1GiB", "--replicas", "2"), "--replicas 1")
	for s, other := range map[*cluster.Server]*cluster.Server{n1: n2, n2: n1} {
		name := "v" + s.Node[1:]
		cli(t, n3, "volume", "create", name, "--size", "2GiB")
		u, err := c.servers["n4"].Attach(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		refusedAt(t, n3, u, `node "n3" has no disk`)
		c.open[s] = connect(whole, s, u)
		use(t, c.open[s])
		for _, wrong := range []*cluster.Server{n3, other} {
			refusedAt(t, wrong, u, fmt.Sprintf("connect to node %q", s.Node))
		}
		if u, err = n3.Attach(t.Context(), name); err != nil || !strings.Contains(u.TCP, fmt.Sprintf(":%d/", s.Ports.NBD)) {
			t.Errorf("attach names %s, %v; %s serves %s", u.TCP, err, s.Node, name)
		}
	}
}

func refusedAt(t *testing.T, s *cluster.Server, u cluster.URIs, why string) {
	t.Helper()
	r, err := openTCP(s, u)
	if err == nil {
		_ = r.Close()
		t.Fatalf("%s serves a volume that it cannot serve", s.Node)
	}
	mentions(t, err.Error(), why)
}

// handOver: no server notices by the silence of the leader that it is gone.
func (c *cell) handOver(t *testing.T) {
	leader, bystander := c.leader(t)
	before := map[string]int{}
	for name, s := range c.servers {
		before[name] = len(s.Log())
	}
	c.undisturbed(t, bystander, func() {
		if err := leader.Stop(); err != nil {
			t.Fatal(err)
		}
		cli(t, bystander, "volume", "list")
	})
	for name, s := range c.servers {
		if strings.Contains(s.Log()[before[name]:], "heartbeat timeout reached") {
			t.Errorf("%s stood for election because it heard nothing of the leader", name)
		}
	}
	ready(t, leader)
}

func (c *cell) hang(t *testing.T) {
	leader, bystander := c.leader(t)
	c.undisturbed(t, bystander, func() {
		if err := leader.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	})
	cli(t, bystander, "volume", "create", "meanwhile", "--size", "1GiB")
	if err := leader.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	cli(t, leader, "volume", "delete", "meanwhile") // it follows, and forwards
}

func (c *cell) lead(t *testing.T) {
	leader, bystander := c.leader(t)
	c.undisturbed(t, bystander, leader.Kill)
	cli(t, bystander, "volume", "create", "meanwhile", "--size", "1GiB")
	cli(t, c.servers["n4"], "volume", "delete", "meanwhile")
	ready(t, leader)
}

func (c *cell) loseMajority(t *testing.T) {
	_, bystander := c.leader(t)
	voters := c.status(t, bystander).Voters
	c.undisturbed(t, bystander, func() {
		for _, name := range voters {
			if name != bystander.Node {
				c.servers[name].Kill()
			}
		}
	})
	r := c.open[bystander]
	mentions(t, cli(t, bystander, "status"), "No leader confirms")
	// A first write to a new part of the volume has to be placed, which waits.
	page := make([]byte, 4096)
	if _, err := r.send(cmdWrite, 0, 1<<30, len(page), page); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "the write waits for its placement", func() bool { return metric(t, bystander, "gabion_volume_requests") > 0 })
	for _, name := range voters { // together: one alone has no majority either
		if name != bystander.Node {
			if err := c.servers[name].Launch(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, name := range voters {
		if err := c.servers[name].WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	_ = r.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := r.receive(nil); err != nil {
		t.Errorf("the write that waited: %v", err)
	}
	for s := range c.open {
		use(t, c.open[s])
	}
}

func (c *cell) forget(t *testing.T) {
	n3 := c.servers["n3"]
	if err := n3.Stop(); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(n3.Dir, "data")
	if err := os.Rename(data, data+".lost"); err != nil {
		t.Fatal(err)
	}
	mentions(t, refused(t, n3), "another data directory", "gabion node remove n3")
	mentions(t, cliRefuses(t, c.servers["n1"], 1, "node", "remove", "n3"), "is up")
	mentions(t, cliRefuses(t, c.servers["n1"], 1, "node", "remove", "n5"), "gabion node list")
}

func (c *cell) replace(t *testing.T) {
	n1 := c.servers["n1"]
	eventually(t, 2*time.Minute, "n3 counts as down", func() bool {
		_, err := n1.CLI(t.Context(), "node", "remove", "n3")
		return err == nil
	})
	eventually(t, 2*time.Minute, "n4 votes instead of n3", func() bool {
		voters := c.status(t, n1).Voters
		return slices.Contains(voters, "n4") && !slices.Contains(voters, "n3")
	})
	c.becomes(t, "n2", survivesAny)
	// It was not dead after all, and comes back with what it had, when nobody speaks to it any more: a leader goes on for a
	// while to try whom it removed, so that has to be another one.
	eventually(t, time.Minute, "n3 is no member", func() bool {
		log := c.servers[c.status(t, n1).Leader].Log()
		at := strings.LastIndex(log, "updating configuration")
		members, _, _ := strings.Cut(log[max(at, 0):], "\n")
		return at >= 0 && !strings.Contains(members, "ID:n3 ")
	})
	leader, _ := c.leader(t)
	if err := leader.Stop(); err != nil {
		t.Fatal(err)
	}
	ready(t, leader)
	data := filepath.Join(c.servers["n3"].Dir, "data")
	if err := errors.Join(os.RemoveAll(data), os.Rename(data+".lost", data)); err != nil {
		t.Fatal(err)
	}
	ready(t, c.servers["n3"])
	if list := cli(t, n1, "node", "list"); strings.Count(list, "voter")+strings.Count(list, "leader") != 3 || strings.Count(list, "learner") != 1 {
		t.Errorf("the nodes:\n%s", list)
	}
	mentions(t, cli(t, n1, "status"), "All is well", "4 of 4 up")
}

// cellStatus is `status -o json`, as far as tests ask.
type cellStatus struct {
	Leader    string   `json:"leader"`
	Voters    []string `json:"voters"`
	Endurance string   `json:"endurance"`
}

func (c *cell) status(t *testing.T, at *cluster.Server) (s cellStatus) {
	t.Helper()
	if err := json.Unmarshal([]byte(cli(t, at, "status", "-o", "json")), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// becomes waits until the status says so.
func (c *cell) becomes(t *testing.T, at, endurance string) {
	t.Helper()
	var s cellStatus
	defer func() { t.Logf("status: %+v", s) }()
	eventually(t, 2*time.Minute, endurance, func() bool {
		s = c.status(t, c.servers[at])
		return strings.Contains(s.Endurance, endurance)
	})
}

// leader waits for one, and returns beside it the server of a volume that does not lead.
func (c *cell) leader(t *testing.T) (leader, bystander *cluster.Server) {
	t.Helper()
	eventually(t, 30*time.Second, "somebody leads", func() bool {
		leader = c.servers[c.status(t, c.servers["n4"]).Leader]
		return leader != nil
	})
	if bystander = c.servers["n1"]; leader == bystander {
		bystander = c.servers["n2"]
	}
	return leader, bystander
}

// undisturbed checks that what is done elsewhere does not reach the volume of a server.
func (c *cell) undisturbed(t *testing.T, s *cluster.Server, elsewhere func()) {
	t.Helper()
	use(t, c.open[s]) // if the server was started a moment ago nothing is open yet
	generation := metric(t, s, "gabion_volume_generation")
	elsewhere()
	use(t, c.open[s])
	if now := metric(t, s, "gabion_volume_generation"); now != generation {
		t.Errorf("the volume of %s was taken over: generation %v, it was %v", s.Node, now, generation)
	}
}

// use writes, flushes and reads back.
func use(t *testing.T, r *raw) {
	t.Helper()
	page, back := []byte(strings.Repeat("cell of servers ", 256)), make([]byte, 4096)
	_ = r.SetDeadline(time.Now().Add(30 * time.Second))
	if err := errors.Join(r.write(0, page), r.flush(), r.read(0, back)); err != nil || !bytes.Equal(back, page) {
		t.Fatalf("read %.16q, %v", back, err)
	}
}
