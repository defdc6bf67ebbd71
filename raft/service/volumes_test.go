package service

import (
	"context"
	"errors"
	"fmt"
	"math"
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

func code(err error) codes.Code {
	var e *metapb.Error
	if errors.As(err, &e) {
		return e.Code()
	}
	return codes.OK
}

// B051, B056: the same name is the same volume, or refused, saying what differs.
func TestB051SameName(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	v := w.create("n", gib)
	if p := v.Policy; p.Replicas != 1 || p.Durability != metapb.Policy_WRITE_THROUGH || p.Spread != metapb.Policy_RACK ||
		p.Access != metapb.Policy_CLUSTER || p.OnFull != metapb.Policy_WAIT || p.BlockSize != 4096 {
		t.Errorf("defaults: %v", p)
	}
	entries := w.index()
	if again := w.create("n", gib); again.Id != v.Id {
		t.Errorf("another volume")
	}
	for what, in := range map[string]*metapb.CreateVolumeRequest{
		"size":                           {Name: "n", Size: 2 * gib},
		"durability":                     {Name: "n", Size: gib, Policy: &metapb.Policy{Durability: metapb.Policy_FLUSH}},
		"block size":                     {Name: "n", Size: gib, Policy: &metapb.Policy{BlockSize: 512}},
		"file system any instead of xfs": {Name: "n", Size: gib, Policy: &metapb.Policy{FsType: "xfs"}},
		"replicas":                       {Name: "n", Size: gib, Policy: &metapb.Policy{Replicas: 2}},
	} {
		_, err := w.CreateVolume(t.Context(), in)
		if !errors.Is(err, block.ErrExists) || !strings.Contains(err.Error(), what) || code(err) != codes.AlreadyExists {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := w.index(); got != entries {
		t.Errorf("%d entries for calls that changed nothing", got-entries)
	}
}

func TestB056DuplicatesInParallel(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	ids := make(chan string, 50)
	var wait sync.WaitGroup
	for i := range 50 {
		wait.Go(func() {
			size := int64(gib)
			if i%5 == 4 {
				size = 2 * gib
			}
			v, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "n", Size: size})
			switch {
			case err == nil:
				ids <- v.Id
			case !errors.Is(err, block.ErrExists):
				t.Error(err)
			}
		})
	}
	wait.Wait()
	close(ids)
	first := <-ids
	for id := range ids {
		if id != first {
			t.Error("two volumes of one name")
		}
	}
	if l, err := w.ListVolumes(t.Context(), &metapb.ListVolumesRequest{}); err != nil || len(l.Volumes) != 1 {
		t.Errorf("%v, %v", l, err)
	}
}

// B053, B054, B055: sizes are taken as they are or refused with what is allowed.
func TestB053B054B055Sizes(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	for _, c := range []struct {
		size int64
		code codes.Code
		says string
	}{
		{0, codes.InvalidArgument, "positive"},
		{-1, codes.InvalidArgument, "positive"},
		{math.MinInt64, codes.InvalidArgument, "positive"},
		{1, codes.InvalidArgument, "the next is 4096"},
		{gib + gib/2 + 1, codes.InvalidArgument, "the next is 1610616832"},
		{64<<40 + 4096, codes.OutOfRange, "64TiB"},
		{1e16, codes.OutOfRange, "64TiB"},
		{math.MaxInt64, codes.OutOfRange, "64TiB"},
		{63 << 40, codes.OK, ""},
		{4096, codes.OK, ""},
	} {
		v, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: fmt.Sprint("v", c.size), Size: c.size})
		if code(err) != c.code || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%d: %v", c.size, err)
		}
		if err == nil && (v.Size != c.size || v.WantedSize != c.size) {
			t.Errorf("%d: %v", c.size, v)
		}
	}
}

// B057: creates that the caller gave up on make exactly one volume.
func TestB057TimedOutCreate(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	if err := w.faults.Arm(fault.Rule{Point: "metadata.create", Match: "slow", Hold: true}); err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	for range 5 {
		wait.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			_, err := w.CreateVolume(ctx, &metapb.CreateVolumeRequest{Name: "slow", Size: gib})
			if !errors.Is(err, block.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		})
	}
	wait.Wait()
	w.faults.Clear("")
	v := w.create("slow", gib)
	l, err := w.ListVolumes(t.Context(), &metapb.ListVolumesRequest{})
	if err != nil || len(l.Volumes) != 1 || l.Volumes[0].Id != v.Id {
		t.Errorf("%v, %v", l, err)
	}
	w.restart()
	if again := w.create("slow", gib); again.Id != v.Id {
		t.Error("another volume after a restart")
	}
}

func TestB062Names(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	long := strings.Repeat("n", 127)
	good := []string{
		long + "a", long + "b", "🧱", "ע\u05d1רית", "\u00e9", "e\u0301", "a b", "a\tb", "a\nb", "a\r", "\n", "a/b", "..", ".", "-rf", "'; --", "%00", strings.Repeat("é", 64),
	}
	ids := map[string]bool{}
	for _, name := range good {
		ids[w.create(name, gib).Id] = true
		g, err := w.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: byName(name)})
		if err != nil || g.Volume.Name != name {
			t.Errorf("%q: %v, %v", name, g, err)
		}
	}
	if len(ids) != len(good) {
		t.Errorf("%d volumes for %d names", len(ids), len(good))
	}
	bad := []string{"", long + "abc", strings.Repeat("é", 65)}
	for r := range rune(0xa0) {
		if r < 0x20 && !strings.ContainsRune("\t\n\r", r) || r >= 0x7f {
			bad = append(bad, "a"+string(r))
		}
	}
	for _, name := range bad {
		_, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: name, Size: gib})
		if code(err) != codes.InvalidArgument {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestB063Paging(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	const n = 250
	var wait sync.WaitGroup
	for part := range 10 {
		wait.Go(func() {
			for i := part; i < n; i += 10 {
				w.create(fmt.Sprintf("v%03d", i), 4096)
			}
		})
	}
	wait.Wait()
	seen := map[string]int{}
	deleted := map[string]bool{}
	var token, first string
	for page := 0; ; page++ {
		l, err := w.ListVolumes(t.Context(), &metapb.ListVolumesRequest{MaxEntries: 10, StartingToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range l.Volumes {
			seen[v.Name]++
			first = v.Name
		}
		if token = l.NextToken; token == "" {
			break
		}
		if len(l.Volumes) != 10 {
			t.Errorf("page of %d", len(l.Volumes))
		}
		deleted[first] = true
		if _, err := w.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: byName(first)}); err != nil {
			t.Fatal(err)
		}
		w.create(fmt.Sprintf("u%03d", page), 4096) // before every other
	}
	for i := range n {
		name := fmt.Sprintf("v%03d", i)
		if seen[name] != 1 {
			t.Errorf("%s seen %d times", name, seen[name])
		}
	}
	for _, c := range []struct {
		in   *metapb.ListVolumesRequest
		code codes.Code
	}{
		{&metapb.ListVolumesRequest{StartingToken: "x"}, codes.Aborted},
		{&metapb.ListVolumesRequest{StartingToken: "AAAA"}, codes.Aborted},
		{&metapb.ListVolumesRequest{StartingToken: strings.Repeat("A", 5000)}, codes.Aborted},
		{&metapb.ListVolumesRequest{MaxEntries: -1}, codes.InvalidArgument},
		{&metapb.ListVolumesRequest{MaxEntries: math.MaxInt32}, codes.OK},
	} {
		l, err := w.ListVolumes(t.Context(), c.in)
		if code(err) != c.code {
			t.Errorf("%v: %v", c.in, err)
		}
		if err == nil && len(l.Volumes) != n {
			t.Errorf("%d volumes at once", len(l.Volumes))
		}
	}
	if _, err := w.ListVolumes(t.Context(), &metapb.ListVolumesRequest{StartingToken: "x"}); !errors.Is(err, metapb.ErrPageToken) {
		t.Errorf("token: %v", err)
	}
}

// B138, B139: what GetCapacity names is accepted right away, a block more is not.
func TestB138B139Capacity(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Overcommit = 2 })
	w.register("n1", disk(1, 100*gib), disk(2, 50*gib))
	for i := range 3 {
		c, err := w.GetCapacity(t.Context(), &metapb.GetCapacityRequest{})
		if err != nil || c.MaximumVolumeSize <= 0 || c.Available < 0 {
			t.Fatalf("%v, %v", c, err)
		}
		name := fmt.Sprint("v", i)
		_, err = w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: name, Size: c.MaximumVolumeSize + 4096})
		if code(err) != codes.ResourceExhausted && code(err) != codes.OutOfRange {
			t.Errorf("one more: %v", err)
		}
		w.create(name, c.MaximumVolumeSize/2/4096*4096)
	}
	c, err := w.GetCapacity(t.Context(), &metapb.GetCapacityRequest{})
	if err != nil {
		t.Fatal(err)
	}
	w.create("rest", c.MaximumVolumeSize)
	if c, err = w.GetCapacity(t.Context(), &metapb.GetCapacityRequest{Replicas: 1}); err != nil || c.MaximumVolumeSize != 0 {
		t.Errorf("full: %v, %v", c, err)
	}
	if _, err := w.GetCapacity(t.Context(), &metapb.GetCapacityRequest{Replicas: 4}); code(err) != codes.InvalidArgument {
		t.Errorf("replicas 4: %v", err)
	}
	if c, err := w.GetCapacity(t.Context(), &metapb.GetCapacityRequest{Rack: "nowhere"}); err != nil || c.Available != 0 {
		t.Errorf("rack: %v, %v", c, err)
	}
}

// B140: fifty at once, room for ten.
func TestB140FiftyCreatesAtOnce(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Overcommit = 1 })
	w.register("n1", disk(1, 10*gib))
	round := func(prefix string, want int) {
		t.Helper()
		var mu sync.Mutex
		var made []string
		var wait sync.WaitGroup
		for i := range 50 {
			wait.Go(func() {
				name := fmt.Sprint(prefix, i)
				_, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: name, Size: gib})
				if err != nil && code(err) != codes.ResourceExhausted {
					t.Error(err)
				}
				if err == nil {
					mu.Lock()
					defer mu.Unlock()
					made = append(made, name)
				}
			})
		}
		wait.Wait()
		if len(made) != want {
			t.Fatalf("%d of 50 made, want %d", len(made), want)
		}
		for _, name := range made[:min(5, len(made))] {
			if _, err := w.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: byName(name)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	round("a", 10)
	round("b", 5)
}

// B161: calls that fail make no log entry.
func TestB161FailingCallsAreCheap(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Overcommit = 1 })
	d := disk(1, 10*gib)
	w.register("n1", d)
	w.create("all", 10*gib)
	id := w.create0(t)
	w.attach("all", "c1")
	entries := w.index()
	for range 20 {
		for what, call := range map[string]func() error{
			"full": func() error {
				return second(w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "x", Size: gib}))
			},
			"missing": func() error {
				return second(w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("x"), Node: "c1"}))
			},
			"other": func() error {
				return second(w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("all"), Node: "c2"}))
			},
			"in use": func() error {
				return second(w.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: byName("all")}))
			},
			"shrink": func() error {
				return second(w.ResizeVolume(t.Context(), &metapb.ResizeVolumeRequest{Volume: byName("all"), Size: gib}))
			},
			"stale": func() error {
				return second(w.Propose(t.Context(), &metapb.ProposeRequest{
					Fence:   &metapb.Fence{VolumeId: id, Generation: 7},
					Command: &metapb.ProposeRequest_ConfirmSize{ConfirmSize: &metapb.ConfirmSize{Size: gib}},
				}))
			},
			"rack": func() error {
				return second(w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "y", Size: 4096, Policy: sameRack(1), Racks: []string{"r7"}}))
			},
			"not attached": func() error {
				return second(w.GetAttachment(t.Context(), &metapb.GetAttachmentRequest{Volume: byName("all"), Node: "c2"}))
			},
			"format": func() error {
				return second(w.SetFormat(t.Context(), &metapb.SetFormatRequest{Volume: byName("all"), AttachmentId: id, Format: metapb.Volume_STARTED}))
			},
			"consumer": func() error {
				return second(w.RegisterConsumer(t.Context(), &metapb.Consumer{Name: "c1"}))
			},
			"reader": func() error {
				return second(w.Attach(t.Context(), &metapb.AttachRequest{Volume: byName("all"), Node: "c2", ReadOnly: true}))
			},
			"node": func() error {
				return second(w.Grant(t.Context(), &metapb.GrantRequest{VolumeId: id, Node: "n9", Process: proc}))
			},
		} {
			if err := call(); err == nil {
				t.Errorf("%s: no error", what)
			}
		}
		// And those that find all done.
		w.register("n1", d)
		w.attach("all", "c1")
		if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n1", Disks: []*metapb.Disk{d}}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: byName("gone")}); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.index(); got != entries {
		t.Errorf("%d log entries", got-entries)
	}
}

func second[T any](_ T, err error) error { return err }

// create0 makes the smallest volume there is and returns its id.
func (w *world) create0(t *testing.T) string {
	t.Helper()
	v, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "small", Size: 4096})
	if err == nil {
		return v.Id
	}
	return block.NewUUID().String()
}

func TestReplicasBeyondNodes(t *testing.T) {
	w := newWorld(t)
	_, err := w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib})
	if code(err) != codes.FailedPrecondition {
		t.Errorf("no disks: %v", err)
	}
	w.register("n1", disk(1, 100*gib))
	_, err = w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib, Policy: &metapb.Policy{Replicas: 3}})
	if code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "--replicas 1") {
		t.Errorf("got %v", err)
	}
	_, err = w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib, Policy: &metapb.Policy{Replicas: 4}})
	if code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "replicas") {
		t.Errorf("got %v", err)
	}
	_, err = w.CreateVolume(t.Context(), &metapb.CreateVolumeRequest{Name: "v", Size: gib, Policy: &metapb.Policy{Spread: 77}})
	if code(err) != codes.Unimplemented {
		t.Errorf("unknown value: %v", err)
	}
}

func TestDeleteAndTombstone(t *testing.T) {
	w := newWorld(t)
	w.register("n1", disk(1, 100*gib))
	v := w.create("v", gib)
	w.attach("v", "c1")
	_, err := w.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: byID(v.Id)})
	if !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), "c1") {
		t.Errorf("attached: %v", err)
	}
	if _, err := w.Detach(t.Context(), &metapb.DetachRequest{Volume: byName("v"), Node: "c1"}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := w.DeleteVolume(t.Context(), &metapb.DeleteVolumeRequest{Volume: byID(v.Id)}); err != nil {
			t.Fatal(err)
		}
	}
	for name, call := range map[string]func() error{
		"get": func() error { return second(w.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: byID(v.Id)})) },
		"map": func() error { return second(w.ReadMap(t.Context(), &metapb.ReadMapRequest{VolumeId: v.Id})) },
	} {
		err := call()
		var e *metapb.Error
		if !errors.Is(err, block.ErrNotFound) || !errors.As(err, &e) || e.Detail("tombstone") != v.Id {
			t.Errorf("%s: %v", name, err)
		}
	}
	live := w.create("v", gib)
	for id, want := range map[string]metapb.LookupVolumeResponse_State{
		v.Id: metapb.LookupVolumeResponse_TOMBSTONE, live.Id: metapb.LookupVolumeResponse_LIVE,
		block.NewUUID().String(): metapb.LookupVolumeResponse_UNKNOWN,
	} {
		l, err := w.LookupVolume(t.Context(), &metapb.LookupVolumeRequest{VolumeId: id})
		if err != nil || l.State != want || l.ClusterId != clusterID.String() || l.Index == 0 {
			t.Errorf("%v, %v", l, err)
		}
	}
	if _, err := w.LookupVolume(t.Context(), &metapb.LookupVolumeRequest{VolumeId: "../x"}); code(err) != codes.InvalidArgument {
		t.Errorf("got %v", err)
	}
	if _, err := w.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: &metapb.VolumeRef{Id: v.Id, Name: "v"}}); code(err) != codes.InvalidArgument {
		t.Errorf("both: %v", err)
	}
}

// A growth is answered when the primary confirmed it; before the deadline the
// error says who has not.
func TestResizeWaitsForThePrimary(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	v := w.create("v", gib)
	if r, err := w.ResizeVolume(t.Context(), &metapb.ResizeVolumeRequest{Volume: byName("v"), Size: 2 * gib}); err != nil || r.Size != 2*gib {
		t.Fatalf("never granted: %v, %v", r, err)
	}
	p := w.serve(v.Id, "n1", d)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := w.ResizeVolume(ctx, &metapb.ResizeVolumeRequest{Volume: byName("v"), Size: 3 * gib})
	if !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), `node "n1" has not confirmed`) || !strings.Contains(err.Error(), "is up") {
		t.Errorf("got %v", err)
	}
	w.clock.pass(time.Minute)
	ctx, cancel = context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err = w.ResizeVolume(ctx, &metapb.ResizeVolumeRequest{Volume: byID(v.Id), Size: 3 * gib}); err == nil || !strings.Contains(err.Error(), "is down") {
		t.Errorf("got %v", err)
	}
	done := make(chan error, 1)
	go func() {
		r, err := w.ResizeVolume(t.Context(), &metapb.ResizeVolumeRequest{Volume: byName("v"), Size: 3 * gib})
		if err == nil && r.Size != 3*gib {
			err = fmt.Errorf("size %d", r.Size)
		}
		done <- err
	}()
	if m := p.refresh(); m.Volume.WantedSize != 3*gib || m.Volume.Size != 2*gib {
		t.Errorf("the intent: %v", m.Volume)
	}
	p.must(&metapb.ProposeRequest_ConfirmSize{ConfirmSize: &metapb.ConfirmSize{Size: 3 * gib}})
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := w.ResizeVolume(t.Context(), &metapb.ResizeVolumeRequest{Volume: byName("v"), Size: gib}); code(err) != codes.InvalidArgument {
		t.Errorf("shrink: %v", err)
	}
}

// H70: a node whose disks are another cluster's is told so.
func TestH70AnotherClustersNode(t *testing.T) {
	w := newWorld(t)
	other := block.NewUUID().String()
	_, err := w.RegisterNode(t.Context(), &metapb.RegisterNodeRequest{Node: node("n1"), ClusterId: other, Disks: []*metapb.Disk{disk(1, gib)}})
	if code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), other) || !strings.Contains(err.Error(), clusterID.String()) {
		t.Errorf("got %v", err)
	}
	r, err := w.RegisterNode(t.Context(), &metapb.RegisterNodeRequest{Node: node("n1"), ClusterId: clusterID.String(), Disks: []*metapb.Disk{disk(1, gib)}})
	if err != nil || r.ClusterId != clusterID.String() || r.ExtentSize != block.DefaultExtentSize {
		t.Errorf("%v, %v", r, err)
	}
	// What it has never heard of is no proof of anything.
	l, err := w.LookupVolume(t.Context(), &metapb.LookupVolumeRequest{VolumeId: block.NewUUID().String()})
	if err != nil || l.State != metapb.LookupVolumeResponse_UNKNOWN {
		t.Errorf("%v, %v", l, err)
	}
}

func TestDisksOfTwoNodes(t *testing.T) {
	w := newWorld(t)
	d := disk(1, gib)
	w.register("n1", d)
	_, err := w.RegisterNode(t.Context(), &metapb.RegisterNodeRequest{Node: node("n2"), Disks: []*metapb.Disk{d}})
	if code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), `"n1"`) {
		t.Errorf("copy of a disk: %v", err)
	}
	w.clock.pass(time.Minute) // n1 is down: its disk may have been moved
	w.register("n2", d)
	l, err := w.ListDisks(t.Context(), &metapb.ListDisksRequest{})
	if err != nil || len(l.Disks) != 1 || l.Disks[0].Node != "n2" {
		t.Errorf("%v, %v", l, err)
	}
	nodes, err := w.ListNodes(t.Context(), &metapb.ListNodesRequest{})
	if err != nil || !slices.EqualFunc(nodes.Nodes, []bool{false, true}, func(n *metapb.Node, up bool) bool { return n.Up == up && n.SeenAt > 0 }) {
		t.Errorf("%v, %v", nodes, err)
	}
	if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n3"}); code(err) != codes.NotFound {
		t.Errorf("unknown node: %v", err)
	}
}

// TestLateRegistrationOfAPredecessor: a dead server process's call overtakes
// its successor's registration. The next report is refused, so that it registers again.
func TestLateRegistrationOfAPredecessor(t *testing.T) {
	w := newWorld(t)
	d := disk(1, gib)
	w.register("n1", d)
	late := node("n1")
	late.Process = "0a0a0a0a-0000-4000-8000-000000000001"
	if _, err := w.RegisterNode(t.Context(), &metapb.RegisterNodeRequest{Node: late, Disks: []*metapb.Disk{d}}); err != nil {
		t.Fatal(err)
	}
	report := &metapb.ReportDisksRequest{Node: "n1", Process: proc, Disks: []*metapb.Disk{d}}
	if _, err := w.ReportDisks(t.Context(), report); code(err) != codes.NotFound {
		t.Errorf("a report of a process that is not the registered one: %v", err)
	}
	w.register("n1", d)
	if _, err := w.ReportDisks(t.Context(), report); err != nil {
		t.Error(err)
	}
	report.Process = late.Process // its reports are late, too
	if _, err := w.ReportDisks(t.Context(), report); code(err) != codes.NotFound {
		t.Errorf("a predecessor's report: %v", err)
	}
}

// Free space moves all the time: the exact figure is the leader's, the log
// gets what matters.
func TestReportsThatMatter(t *testing.T) {
	w := newWorld(t)
	d := disk(1, 100*gib)
	w.register("n1", d)
	entries := w.index()
	for i := range 10 {
		d.Available = 100*gib - int64(i)*1000
		if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n1", Disks: []*metapb.Disk{d}}); err != nil {
			t.Fatal(err)
		}
	}
	if w.index() != entries {
		t.Errorf("%d entries", w.index()-entries)
	}
	if l, err := w.ListDisks(t.Context(), &metapb.ListDisksRequest{}); err != nil || l.Disks[0].Available != 100*gib-9000 {
		t.Errorf("%v, %v", l, err)
	}
	d.Available = 90 * gib
	if _, err := w.ReportDisks(t.Context(), &metapb.ReportDisksRequest{Node: "n1", Disks: []*metapb.Disk{d}}); err != nil {
		t.Fatal(err)
	}
	if w.index() != entries+1 {
		t.Errorf("%d entries", w.index()-entries)
	}
}
