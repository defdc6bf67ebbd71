package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/test/cluster"
)

type volumeList []struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Size int64  `json:"size"`
}

func volumes(t *testing.T, s *cluster.Server) (v volumeList) {
	t.Helper()
	if err := json.Unmarshal([]byte(cli(t, s, "volume", "list", "-o", "json")), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// One name is one volume, whoever asks, how often, and all at once.
func TestB056CreateFiftyTimesAtOnce(t *testing.T) {
	s := start(t)
	client := api(t, s)
	ask := func(size int64) (*metapb.Volume, error) {
		v, err := client.CreateVolume(context.Background(), &metapb.CreateVolumeRequest{Name: "v", Size: size, Policy: &metapb.Policy{Replicas: 1}})
		return v, metapb.FromStatus(err)
	}
	first, err := ask(1 << 30)
	if err != nil {
		t.Fatal(err)
	}
	u, err := s.Attach(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	page := make([]byte, 4096)
	page[0] = 1
	if err := connect(t, s, u).write(0, page); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			v, err := ask(1<<30 + int64(i%2)<<20)
			switch {
			case i%2 == 0 && (err != nil || v.GetId() != first.GetId()):
				t.Errorf("the same again: %v %v", v, err)
			case i%2 == 1 && !errors.Is(err, block.ErrExists):
				t.Errorf("another size: %v %v", v, err)
			}
		})
	}
	all.Wait()
	if v := volumes(t, s); len(v) != 1 {
		t.Errorf("there are %d volumes", len(v))
	}
	p := make([]byte, 4096)
	if err := connect(t, s, u).read(0, p); err != nil || p[0] != 1 {
		t.Errorf("the volume's data after all that: %v", err)
	}
}

// The caller gives up, the server does not: one volume comes of it, under its name.
func TestB057TimedOutCreate(t *testing.T) {
	s := start(t, "--fault-injection")
	arm(t, s, `{"point":"metadata.create","delay":"3s"}`)
	create := []string{"volume", "create", "v", "--size", "1GiB", "--replicas", "1", "--timeout", "500ms"}
	for range 3 {
		cliRefuses(t, s, 1, create...)
	}
	if status, body, err := s.HTTP(t.Context(), "DELETE", "/faults", ""); err != nil || status/100 != 2 {
		t.Fatalf("clearing the fault: %d %s %v", status, body, err)
	}
	cli(t, s, "volume", "create", "v", "--size", "1GiB", "--replicas", "1")
	if v := volumes(t, s); len(v) != 1 || v[0].Name != "v" {
		t.Errorf("volumes: %v", v)
	}
	cli(t, s, "volume", "delete", "v")
	mentions(t, cliRefuses(t, s, 1, "volume", "delete", "v"), "no volume")
	if v := volumes(t, s); len(v) != 0 {
		t.Errorf("volumes after the delete: %v", v)
	}
}

// Faults are for servers that were started for them.
func TestFaultsAreRefusedOtherwise(t *testing.T) {
	s := start(t)
	status, body, err := s.HTTP(t.Context(), "POST", "/faults", `{"point":"disk.sync","error":"io"}`)
	if err != nil || status/100 != 4 {
		t.Errorf("arming a fault: %d %v", status, err)
	}
	mentions(t, body, "--fault-injection")
}

// Calls while the server is killed again and again: what was acknowledged is so, what was not is either so or not.
func TestB122AcknowledgedCallsSurviveKills(t *testing.T) {
	random := seeded(t)
	s := start(t)
	const workers, names = 4, 6
	known := make([]map[string]fate, workers) // each worker has names of its own
	for i := range known {
		known[i] = map[string]fate{}
	}
	for round := range scaled(6, 300) {
		client := api(t, s)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		for i := range workers {
			seed := random.Uint64()
			running.Go(func() { known[i] = churn(ctx, client, known[i], i, names, rand.New(rand.NewPCG(seed, 0))) })
		}
		<-time.After(time.Duration(random.Int64N(int64(200 * time.Millisecond))))
		s.Kill()
		cancel()
		running.Wait()
		ready(t, s)
		there := map[string]bool{}
		for _, v := range volumes(t, s) {
			if there[v.Name] {
				t.Errorf("round %d: two volumes are called %s", round, v.Name)
			}
			there[v.Name] = true
		}
		for i := range known {
			for name, f := range known[i] {
				if f != unsure && there[name] != (f == present) {
					t.Errorf("round %d: %s was acknowledged as %v, it is there: %v", round, name, f, there[name])
				}
				if known[i][name] = absent; there[name] {
					known[i][name] = present
				}
				delete(there, name)
			}
		}
		if len(there) > 0 {
			t.Errorf("round %d: nobody asked for %v", round, there)
		}
		if t.Failed() {
			return
		}
	}
}

type fate int

const (
	absent fate = iota
	present
	unsure
)

func (f fate) String() string { return []string{"absent", "present", "unsure"}[f] }

// churn creates and deletes volumes until the server is gone, and says what it knows of them.
func churn(ctx context.Context, client metapb.MetadataClient, known map[string]fate, worker, names int, random *rand.Rand) map[string]fate {
	for {
		name := fmt.Sprintf("w%d-%d", worker, random.IntN(names))
		var err error
		var done fate
		if known[name] == present {
			done = absent
			_, err = client.DeleteVolume(ctx, &metapb.DeleteVolumeRequest{Volume: &metapb.VolumeRef{Name: name}})
		} else {
			done = present
			_, err = client.CreateVolume(ctx, &metapb.CreateVolumeRequest{Name: name, Size: 1 << 30, Policy: &metapb.Policy{Replicas: 1}})
		}
		if err != nil {
			known[name] = unsure
			return known
		}
		known[name] = done
	}
}

// A failed fsync is never forgotten: the disk's open instance ends, all its
// volumes go through a takeover, and a FLUSH is not answered over the loss.
func TestH19FsyncFailsOnce(t *testing.T) {
	s := start(t, "--fault-injection")
	page := make([]byte, 4096)
	var uris []cluster.URIs
	var before []shown
	var open []*raw
	for i := range 3 {
		name := fmt.Sprintf("v%d", i)
		uris = append(uris, volume(t, s, name, "64MiB", "--durability", "flush"))
		r := connect(t, s, uris[i])
		if err := r.write(0, page); err != nil {
			t.Fatal(err)
		}
		open = append(open, r)
		before = append(before, show(t, s, name))
	}
	arm(t, s, `{"point":"disk.sync","error":"io","count":1}`)
	_ = open[0].SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := open[0].send(cmdFlush, 0, 0, 0, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := open[0].receive(nil); err == nil {
		t.Error("FLUSH was answered with success over a failed fsync")
	}
	for i := range uris {
		name := fmt.Sprintf("v%d", i)
		eventually(t, 30*time.Second, name+" is served again", func() bool {
			r, err := openAt("unix", s.Socket, uris[i])
			if err != nil {
				return false
			}
			defer r.Close()
			return r.write(4096, page) == nil && r.flush() == nil
		})
		if after := show(t, s, name); after.CacheEpoch <= before[i].CacheEpoch {
			t.Errorf("%s: the cache epoch is %d, it was %d", name, after.CacheEpoch, before[i].CacheEpoch)
		}
	}
	if told := cli(t, s, "events"); !strings.Contains(told, "isk") {
		t.Errorf("no event tells of the disk: %s", told)
	}
}

// A caller that fails again and again is answered cheaply: nothing of it reaches the log of the metadata service or a disk.
func TestB161CallerRetriesWithoutPause(t *testing.T) {
	s := start(t)
	cli(t, s, "volume", "create", "v", "--size", "1GiB", "--replicas", "1")
	client := api(t, s)
	name := func(n string) *metapb.VolumeRef { return &metapb.VolumeRef{Name: n} }
	calls := map[string]func() error{
		"attach of nothing": func() error {
			_, err := client.Attach(t.Context(), &metapb.AttachRequest{Volume: name("nothing"), Node: "n"})
			return err
		},
		"name taken": func() error {
			_, err := client.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: 2 << 30, Policy: &metapb.Policy{Replicas: 1}})
			return err
		},
		"too many copies": func() error {
			_, err := client.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "w", Size: 2 << 30, Policy: &metapb.Policy{Replicas: 3}})
			return err
		},
		"shrink": func() error {
			_, err := client.ResizeVolume(t.Context(), &metapb.ResizeVolumeRequest{Volume: name("v"), Size: 1 << 20})
			return err
		},
	}
	disk, log, index := tree(t, s.Disks[0]), len(s.Log()), metric(t, s, "gabion_raft_last_index")
	for range scaled(50, 1500) {
		for what, call := range calls {
			if call() == nil {
				t.Fatalf("%s succeeded", what)
			}
		}
	}
	if now := metric(t, s, "gabion_raft_last_index"); now > index+2 { // a report of the disk may fall into the time
		t.Errorf("failing calls made %v log entries", now-index)
	}
	if now := tree(t, s.Disks[0]); now != disk {
		t.Errorf("failing calls changed the disk:\n%s\n%s", disk, now)
	}
	if grown := len(s.Log()) - log; grown > 16<<10 {
		t.Errorf("failing calls made %d bytes of log", grown)
	}
	if _, err := s.Attach(t.Context(), "v"); err != nil {
		t.Errorf("a good call afterwards: %v", err)
	}
}

// A command that the service refuses is a refusal, with its own code, for every caller.
func TestH80RefusalIsNotSuccess(t *testing.T) {
	s := start(t)
	client := api(t, s)
	create := func(name string, size int64, replicas uint32) error {
		_, err := client.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: name, Size: size, Policy: &metapb.Policy{Replicas: replicas}})
		return metapb.FromStatus(err)
	}
	if err := create("v", 1<<30, 1); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		err  error
		code codes.Code
	}{
		"another size": {create("v", 2<<30, 1), codes.AlreadyExists},
		"three copies": {create("w", 1<<30, 3), codes.FailedPrecondition},
		"no size":      {create("w", 0, 1), codes.InvalidArgument},
		"65 TiB":       {create("w", 65<<40, 1), codes.OutOfRange},
	} {
		var e *metapb.Error
		if !errors.As(c.err, &e) || e.Code() != c.code {
			t.Errorf("%s: %v, want code %v", name, c.err, c.code)
		}
	}
	if v := volumes(t, s); len(v) != 1 {
		t.Errorf("volumes: %v", v)
	}
}
