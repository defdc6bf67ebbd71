package sanity

import (
	"bytes"
	"context"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/test/cluster"
)

func TestB051SameNameDifferentVolume(t *testing.T) {
	r := newRig(t)
	v := r.create(wish("n", gib))
	for what, in := range map[string]*csispec.CreateVolumeRequest{
		"size":          wish("n", 2*gib),
		"replica count": wish("n", gib, with("replicas", "2")),
		"durability":    wish("n", gib, with("durability", "flush")),
		"block size":    wish("n", gib, with("blockSize", "512")),
		"smaller":       wish("n", 0, within(gib/2)),
		"file system":   wish("n", gib, as(mounted("xfs", rwo))),
	} {
		_, err := r.tryCreate(t.Context(), in)
		want(t, what, err, codes.AlreadyExists)
	}
	for what, in := range map[string]*csispec.CreateVolumeRequest{
		"again": wish("n", gib), "range": wish("n", gib/2, within(gib)), "any": wish("n", 0),
	} {
		if got := r.create(in); got.GetVolumeId() != v.GetVolumeId() || got.GetCapacityBytes() != gib {
			t.Errorf("%s: %v", what, got)
		}
	}
	r.create(wish("fs", gib, as(mounted("ext4", rwo))))
	_, err := r.tryCreate(t.Context(), wish("fs", gib, as(mounted("xfs", rwo))))
	want(t, "other file system", err, codes.AlreadyExists, "file system ext4 instead of xfs")
	_, err = r.tryCreate(t.Context(), wish("n", gib, func(in *csispec.CreateVolumeRequest) {
		in.VolumeContentSource = &csispec.VolumeContentSource{Type: &csispec.VolumeContentSource_Volume{
			Volume: &csispec.VolumeContentSource_VolumeSource{VolumeId: v.GetVolumeId()},
		}}
	}))
	want(t, "other source", err, codes.InvalidArgument)
}

// The size that is answered, listed, served, and served after a growth, is one.
func TestB053SizesAgree(t *testing.T) {
	r := newRig(t)
	const asked, rounded = gib + gib/2 + 1, gib + gib/2 + 4096
	v := r.create(wish("v", asked))
	r.mustPublish(v.GetVolumeId(), "n1")
	check := func(when string, answered, size int64) {
		t.Helper()
		listed := r.listed()[v.GetVolumeId()].GetVolume().GetCapacityBytes()
		c := r.connect(r.target(v.GetVolumeId(), "n1"))
		defer c.Close()
		if served := c.Export().Size; answered != size || listed != size || served != size {
			t.Errorf("%s: answered %d, listed %d, served %d, not %d", when, answered, listed, served, size)
		}
	}
	check("created", v.GetCapacityBytes(), rounded)
	grown, err := r.controller.ControllerExpandVolume(t.Context(), &csispec.ControllerExpandVolumeRequest{
		VolumeId: v.GetVolumeId(), CapacityRange: &csispec.CapacityRange{RequiredBytes: 2*gib + 1},
	})
	if err != nil || !grown.GetNodeExpansionRequired() {
		t.Fatalf("%v, %v", grown, err)
	}
	check("grown", grown.GetCapacityBytes(), 2*gib+4096)
}

func TestB054OddRanges(t *testing.T) {
	r := newRig(t)
	if v := r.create(wish("tiny", 1)); v.GetCapacityBytes() < 1 || v.GetCapacityBytes() > mib {
		t.Errorf("tiny: %v", v)
	}
	if v := r.create(wish("none", 0)); v.GetCapacityBytes() <= 0 {
		t.Errorf("no range: %v", v)
	}
	if v := r.create(wish("most", 0, within(2*gib))); v.GetCapacityBytes() > 2*gib {
		t.Errorf("at most: %v", v)
	}
	for what, in := range map[string]*csispec.CreateVolumeRequest{
		"one byte": wish("x", 1, within(1)), "empty": wish("x", 2*gib, within(gib)), "negative": wish("x", -1), "negative limit": wish("x", 0, within(-1)),
	} {
		_, err := r.tryCreate(t.Context(), in)
		want(t, what, err, codes.OutOfRange)
	}
}

// Enormous sizes are refused at once; the largest volume costs nothing.
func TestB055Enormous(t *testing.T) {
	r := newRig(t)
	for _, size := range []int64{1e16, math.MaxInt64} {
		_, err := r.tryCreate(t.Context(), wish("x", size))
		want(t, name("%d", size), err, codes.OutOfRange, "64TiB")
	}
	memory := func() int64 {
		rss, err := cluster.RSS(r.server.PID())
		if err != nil {
			t.Fatal(err)
		}
		return rss
	}
	before := memory()
	var v *csispec.Volume
	r.within2s("create", func() { v = r.create(wish("large", 64*tib)) })
	r.within2s("publish", func() { r.mustPublish(v.GetVolumeId(), "n1") })
	r.within2s("open", func() { _ = r.connect(r.target(v.GetVolumeId(), "n1")).Close() })
	r.within2s("unpublish", func() {
		if err := r.unpublish(v.GetVolumeId(), "n1"); err != nil {
			t.Error(err)
		}
	})
	if grew := memory() - before; grew > 16*mib {
		t.Errorf("the server grew by %d bytes", grew)
	}
	if files := r.extentFiles(v.GetVolumeId()); len(files) > 0 {
		t.Errorf("it has files: %v", files)
	}
	r.within2s("delete", func() {
		if err := r.delete(v.GetVolumeId()); err != nil {
			t.Error(err)
		}
	})
}

// Fifty repetitions at once, matching and not, leave a used volume alone.
func TestB056DuplicatesInParallel(t *testing.T) {
	r := newRig(t)
	v := r.create(wish("n", gib))
	r.mustPublish(v.GetVolumeId(), "n1")
	c := r.connect(r.target(v.GetVolumeId(), "n1"))
	data := bytes.Repeat([]byte{0x5a}, 4096)
	if _, err := c.WriteAt(data, mib); err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	for i := range 50 {
		wait.Go(func() {
			in := wish("n", gib)
			if i%3 == 2 {
				in = wish("n", 2*gib)
			}
			got, err := r.tryCreate(t.Context(), in)
			switch {
			case i%3 == 2:
				want(t, "mismatching", err, codes.AlreadyExists)
			case err != nil || got.GetVolumeId() != v.GetVolumeId():
				t.Errorf("matching: %v, %v", got, err)
			}
		})
	}
	wait.Wait()
	got := make([]byte, 4096)
	if _, err := c.ReadAt(got, mib); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the data is gone: %v", err)
	}
	if all := r.listed(); len(all) != 1 {
		t.Errorf("%d volumes", len(all))
	}
}

// Creates that nobody waited for make one volume, whatever dies in between.
func TestB057TimedOutCreate(t *testing.T) {
	r := newRig(t)
	const slow = `{"point": "metadata.create", "match": "slow", "delay": "10s"}`
	r.fault(slow)
	for i := range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := r.tryCreate(ctx, wish("slow", gib))
		cancel()
		if err == nil {
			t.Error("it was not slow")
		}
		if i == 2 {
			r.server.Kill()
			if err := r.server.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.fault(slow)
		}
	}
	r.fault("")
	v := r.create(wish("slow", gib))
	if all := r.listed(); len(all) != 1 || all[v.GetVolumeId()] == nil {
		t.Errorf("%v", all)
	}
	r.mustPublish(v.GetVolumeId(), "n1")
	c := r.connect(r.target(v.GetVolumeId(), "n1"))
	if _, err := c.WriteAt(make([]byte, 4096), 0); err != nil {
		t.Fatal(err)
	}
	if len(r.extentFiles(v.GetVolumeId())) == 0 {
		t.Error("a written volume has no file: the check below proves nothing")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := r.unpublish(v.GetVolumeId(), "n1"); err != nil {
		t.Fatal(err)
	}
	if err := r.delete(v.GetVolumeId()); err != nil {
		t.Fatal(err)
	}
	for begin := time.Now(); len(r.extentFiles(v.GetVolumeId())) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatalf("still there: %v", r.extentFiles(v.GetVolumeId()))
		}
	}
}

func TestB062Names(t *testing.T) {
	r := newRig(t)
	long := strings.Repeat("n", 127)
	good := []string{long + "a", long + "b", "🧱", "ע\u05d1רית", "\u00e9", "e\u0301", "a b", "a\tb", "a\nb", "a\rb", "\n", "a/b", "..", ".", "-rf", "'; --", "%00", "{}", strings.Repeat("é", 64)}
	ids := map[string]bool{}
	for _, n := range good {
		ids[r.create(wish(n, mib)).GetVolumeId()] = true
	}
	if len(ids) != len(good) {
		t.Errorf("%d volumes for %d names", len(ids), len(good))
	}
	bad := []string{"", long + "aa", strings.Repeat("é", 65), strings.Repeat("x", 4096)}
	for c := range rune(0xa0) {
		if c <= 0x08 || c == 0x0b || c == 0x0c || c >= 0x0e && c <= 0x1f || c >= 0x7f {
			bad = append(bad, "a"+string(c))
		}
	}
	for _, n := range bad {
		_, err := r.tryCreate(t.Context(), wish(n, mib))
		want(t, name("%.20q", n), err, codes.InvalidArgument)
	}
}

// What is where the pages are cut is neither skipped nor told twice.
func TestB063Paging(t *testing.T) {
	r := newRig(t)
	const n = 250
	stays := map[string]int{}
	var wait sync.WaitGroup
	var mu sync.Mutex
	for part := range 10 {
		wait.Go(func() {
			for i := part; i < n; i += 10 {
				v, err := r.tryCreate(t.Context(), wish(name("v%03d", i), mib))
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				stays[v.GetVolumeId()] = 0
				mu.Unlock()
			}
		})
	}
	wait.Wait()
	token := ""
	for page := 0; ; page++ {
		answer, err := r.controller.ListVolumes(t.Context(), &csispec.ListVolumesRequest{MaxEntries: 10, StartingToken: token})
		if err != nil || len(answer.GetEntries()) > 10 {
			t.Fatalf("%v, %v", answer, err)
		}
		for _, e := range answer.GetEntries() {
			if _, ours := stays[e.GetVolume().GetVolumeId()]; ours {
				stays[e.GetVolume().GetVolumeId()]++
			}
		}
		if token = answer.GetNextToken(); token == "" {
			break
		}
		seen := answer.GetEntries()[9].GetVolume().GetVolumeId() // the last of the page, on which the token stands
		if err := r.delete(seen); err != nil {
			t.Fatal(err)
		}
		delete(stays, seen)
		r.create(wish(name("new%d", page), mib))
	}
	for id, times := range stays {
		if times != 1 {
			t.Errorf("%s was told %d times", id, times)
		}
	}
	for what, c := range map[string]struct {
		in   *csispec.ListVolumesRequest
		code codes.Code
	}{
		"token":    {&csispec.ListVolumesRequest{StartingToken: "no-token"}, codes.Aborted},
		"negative": {&csispec.ListVolumesRequest{MaxEntries: -1}, codes.InvalidArgument},
		"huge":     {&csispec.ListVolumesRequest{MaxEntries: math.MaxInt32}, codes.OK},
	} {
		_, err := r.controller.ListVolumes(t.Context(), c.in)
		want(t, what, err, c.code)
	}
}

func racks(names ...string) (list []*csispec.Topology) {
	for _, n := range names {
		list = append(list, &csispec.Topology{Segments: map[string]string{driver.TopologyRack: n}})
	}
	return list
}

// The server is in rack r1, alone.
func TestB064Topology(t *testing.T) {
	r := newRig(t)
	at := func(requisite, preferred []*csispec.Topology) func(*csispec.CreateVolumeRequest) {
		return func(in *csispec.CreateVolumeRequest) {
			in.AccessibilityRequirements = &csispec.TopologyRequirement{Requisite: requisite, Preferred: preferred}
		}
	}
	other := []*csispec.Topology{{Segments: map[string]string{"kubernetes.io/hostname": "n9"}}}
	for what, c := range map[string]struct {
		change []func(*csispec.CreateVolumeRequest)
		racks  []string
		code   codes.Code
	}{
		"everywhere":           {[]func(*csispec.CreateVolumeRequest){at(racks("r1", "r2"), racks("r2"))}, nil, codes.OK},
		"pinned":               {[]func(*csispec.CreateVolumeRequest){at(racks("r1", "r2"), racks("r2")), with("access", "rack")}, []string{"r1"}, codes.OK},
		"pinned, no wish":      {[]func(*csispec.CreateVolumeRequest){with("access", "rack")}, []string{"r1"}, codes.OK},
		"unsatisfiable":        {[]func(*csispec.CreateVolumeRequest){at(racks("r8", "r9"), nil), with("access", "rack")}, nil, codes.ResourceExhausted},
		"nodes without racks":  {[]func(*csispec.CreateVolumeRequest){at(other, nil), with("access", "rack")}, nil, codes.ResourceExhausted},
		"differing key sets":   {[]func(*csispec.CreateVolumeRequest){at(append(other, racks("r1")...), other), with("access", "rack")}, []string{"r1"}, codes.OK},
		"everywhere, no racks": {[]func(*csispec.CreateVolumeRequest){at(other, nil)}, nil, codes.OK},
	} {
		v, err := r.tryCreate(t.Context(), wish(what, mib, c.change...))
		want(t, what, err, c.code)
		var got []string
		for _, topology := range v.GetAccessibleTopology() {
			got = append(got, slices.Collect(maps.Values(topology.GetSegments()))...)
		}
		if !slices.Equal(got, c.racks) {
			t.Errorf("%s: accessible from %v, not %v", what, got, c.racks)
		}
		if c.code == codes.OK { // and again
			again := r.create(wish(what, mib, c.change...))
			if again.GetVolumeId() != v.GetVolumeId() {
				t.Errorf("%s: another volume", what)
			}
		}
	}
}

func (r *rig) capacity(in *csispec.GetCapacityRequest) *csispec.GetCapacityResponse {
	r.t.Helper()
	c, err := r.controller.GetCapacity(r.t.Context(), in)
	if err != nil || c.GetAvailableCapacity() < 0 || c.GetMaximumVolumeSize().GetValue() < 0 {
		r.t.Fatalf("%v, %v", c, err)
	}
	return c
}

// GetCapacity follows what is promised; its largest volume is accepted, and one step more is not.
func TestB138B139Capacity(t *testing.T) {
	r := newRig(t)
	all, here := &csispec.GetCapacityRequest{}, &csispec.GetCapacityRequest{AccessibleTopology: racks("r1")[0]}
	nowhere := &csispec.GetCapacityRequest{AccessibleTopology: racks("r2")[0], Parameters: map[string]string{"access": "rack"}}
	anywhere := &csispec.GetCapacityRequest{AccessibleTopology: racks("r2")[0]} // consumers only: their volumes lie elsewhere
	before := r.capacity(all).GetAvailableCapacity()
	if before == 0 || r.capacity(here).GetAvailableCapacity() != before || r.capacity(anywhere).GetAvailableCapacity() != before || r.capacity(nowhere).GetAvailableCapacity() != 0 {
		t.Errorf("cell %v, r1 %v, r2 %v, pinned to r2 %v", r.capacity(all), r.capacity(here), r.capacity(anywhere), r.capacity(nowhere))
	}
	v := r.create(wish("one", 10*gib))
	if got := r.capacity(all).GetAvailableCapacity(); got != before-10*gib {
		t.Errorf("%d after %d less 10GiB", got, before)
	}
	r.mustPublish(v.GetVolumeId(), "n1")
	if _, err := r.connect(r.target(v.GetVolumeId(), "n1")).WriteAt(make([]byte, mib), 0); err != nil {
		t.Fatal(err)
	}
	if got := r.capacity(all).GetAvailableCapacity(); got != before-10*gib { // promised is promised, written or not
		t.Errorf("%d after a write", got)
	}
	if err := r.unpublish(v.GetVolumeId(), "n1"); err != nil {
		t.Fatal(err)
	}
	if err := r.delete(v.GetVolumeId()); err != nil {
		t.Fatal(err)
	}
	if got := r.capacity(all).GetAvailableCapacity(); got != before {
		t.Errorf("%d after the delete, not %d", got, before)
	}
	for i := 0; r.capacity(all).GetAvailableCapacity() > 64*tib; i++ { // leave less than the largest volume there is
		r.create(wish(name("fill%d", i), 64*tib-gib))
	}
	for i := range 20 {
		r.create(wish(name("fragment%d", i), mib*int64(i+1)))
	}
	for what, params := range map[string]map[string]string{"anywhere": nil, "pinned": {"access": "rack"}} {
		most := r.capacity(&csispec.GetCapacityRequest{Parameters: params}).GetMaximumVolumeSize().GetValue()
		pinned := func(in *csispec.CreateVolumeRequest) { in.Parameters = params }
		_, err := r.tryCreate(t.Context(), wish("more", most+4096, pinned))
		if code := status.Code(err); code != codes.ResourceExhausted && !(most == 64*tib && code == codes.OutOfRange) {
			t.Errorf("%s: one step more than %d: %v", what, most, err)
		}
		v := r.create(wish("most", most, pinned))
		if v.GetCapacityBytes() != most {
			t.Errorf("%s: %v", what, v)
		}
		if err := r.delete(v.GetVolumeId()); err != nil {
			t.Fatal(err)
		}
	}
}

// Room for ten, fifty at once: ten get it, and the rest learn why.
func TestB140FiftyCreatesAtOnce(t *testing.T) {
	r := newRig(t)
	for i := 0; r.capacity(&csispec.GetCapacityRequest{}).GetAvailableCapacity() > 64*tib; i++ {
		r.create(wish(name("fill%d", i), 64*tib))
	}
	filled := len(r.listed())
	size := r.capacity(&csispec.GetCapacityRequest{}).GetAvailableCapacity() / 10 / 4096 * 4096
	round := func(prefix string, fit int) []string {
		var mu sync.Mutex
		var wait sync.WaitGroup
		var made []string
		for i := range 50 {
			wait.Go(func() {
				v, err := r.tryCreate(t.Context(), wish(name("%s%d", prefix, i), size))
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					made = append(made, v.GetVolumeId())
				} else {
					want(t, "one too many", err, codes.ResourceExhausted)
				}
			})
		}
		wait.Wait()
		if len(made) != fit || len(r.listed()) != filled+10 {
			t.Errorf("%d of %d fitted; %d volumes", len(made), fit, len(r.listed()))
		}
		return made
	}
	made := round("a", 10)
	for _, id := range made[:5] {
		if err := r.delete(id); err != nil {
			t.Fatal(err)
		}
	}
	round("b", 5)
}
