package controller

import (
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

const gib = int64(1) << 30

// B053, B054, B055: what size a range becomes.
func TestB053B054B055Sizes(t *testing.T) {
	for _, c := range []struct {
		name            string
		required, limit int64
		cap             *csispec.VolumeCapability
		want            int64 // 0: out of range
	}{
		{"nothing asked for", 0, 0, raw(writer), defaultSize},
		{"tiny", 1, 0, raw(writer), minRaw},
		{"tiny, ext4", 1, 0, mounted("", writer), minExt4},
		{"tiny, xfs", 1, 0, mounted("xfs", writer), minXFS},
		{"exactly tiny", 1, 1, raw(writer), 0},
		{"too tiny for xfs", minExt4, minXFS - 1, mounted("xfs", writer), 0},
		{"empty", 2 * gib, gib, raw(writer), 0},
		{"negative", -1, 0, raw(writer), 0},
		{"negative limit", 0, -1, raw(writer), 0},
		{"most negative", math.MinInt64, math.MinInt64, raw(writer), 0},
		{"at most", 0, 2 * gib, raw(writer), 2 * gib},
		{"at most, odd", 0, 2*gib + 4095, raw(writer), 2 * gib},
		{"at most, a lot", 0, math.MaxInt64, raw(writer), defaultSize},
		{"at most, tiny", 0, minRaw - 1, raw(writer), 0},
		{"odd", gib + gib/2 + 1, 0, raw(writer), gib + gib/2 + 4096},
		{"odd, limit between", gib + 1, gib + 4095, raw(writer), 0},
		{"odd, limit just there", gib + 1, gib + 4096, raw(writer), gib + 4096},
		{"the largest", block.MaxVolumeSize, 0, raw(writer), block.MaxVolumeSize},
		{"nearly the largest", block.MaxVolumeSize - 1, 0, raw(writer), block.MaxVolumeSize},
		{"larger", block.MaxVolumeSize + 1, 0, raw(writer), 0},
		{"10^16", 1e16, 0, raw(writer), 0},
		{"2^63-1", math.MaxInt64, math.MaxInt64, raw(writer), 0},
	} {
		service := newCell()
		r, err := New(service).CreateVolume(t.Context(), &csispec.CreateVolumeRequest{
			Name: "v", VolumeCapabilities: caps(c.cap), CapacityRange: &csispec.CapacityRange{RequiredBytes: c.required, LimitBytes: c.limit},
		})
		if got := r.GetVolume().GetCapacityBytes(); got != c.want || (c.want == 0) != errors.Is(err, block.ErrTooLarge) {
			t.Errorf("%s: %d, %v", c.name, got, err)
		}
		if c.want == 0 && service.made() != "" {
			t.Errorf("%s: the service was asked", c.name)
		}
	}
}

// B051: the same name with another size or policy is refused; within the range it is the volume.
func TestB051SameName(t *testing.T) {
	c := New(newCell())
	first := create(t, c, "n", gib)
	for _, x := range []struct {
		what            string
		required, limit int64
		p               map[string]string
		refused         bool
	}{
		{"again", gib, 0, nil, false},
		{"larger", 2 * gib, 0, nil, true},
		{"smaller, at most", 0, gib / 2, nil, true},
		{"a range", gib / 2, gib, nil, false},
		{"no range", 0, 0, nil, false},
		{"replicas", gib, 0, map[string]string{"replicas": "2"}, true},
		{"a range and replicas", gib / 2, gib, map[string]string{"replicas": "2"}, true},
	} {
		r, err := c.CreateVolume(t.Context(), &csispec.CreateVolumeRequest{
			Name: "n", CapacityRange: &csispec.CapacityRange{RequiredBytes: x.required, LimitBytes: x.limit}, Parameters: x.p, VolumeCapabilities: caps(raw(writer)),
		})
		v := r.GetVolume()
		if errors.Is(err, block.ErrExists) != x.refused || !x.refused && (err != nil || v.GetVolumeId() != first.GetVolumeId() || v.GetCapacityBytes() != gib) {
			t.Errorf("%s: %v, %v", x.what, r, err)
		}
	}
}

// B051: the file system is told apart, whoever names it.
func TestB051FileSystem(t *testing.T) {
	for _, c := range []struct {
		first, second     *csispec.VolumeCapability
		param, paramAgain string
		refused           bool
	}{
		{mounted("ext4", writer), mounted("ext4", writer), "", "", false},
		{mounted("ext4", writer), mounted("xfs", writer), "", "", true},
		{mounted("", writer), mounted("xfs", writer), "xfs", "", false},
		{mounted("", writer), mounted("", writer), "xfs", "ext4", true},
		{raw(writer), raw(writer), "xfs", "ext4", false}, // a raw volume has none, and one StorageClass may serve both
	} {
		controller := New(newCell())
		ask := func(vc *csispec.VolumeCapability, fs string) error {
			in := &csispec.CreateVolumeRequest{Name: "n", VolumeCapabilities: caps(vc), CapacityRange: &csispec.CapacityRange{RequiredBytes: gib}}
			if fs != "" {
				in.Parameters = map[string]string{driver.FSTypeKey: fs}
			}
			_, err := controller.CreateVolume(t.Context(), in)
			return err
		}
		if err := ask(c.first, c.param); err != nil {
			t.Errorf("%v: %v", c, err)
		}
		if err := ask(c.second, c.paramAgain); errors.Is(err, block.ErrExists) != c.refused || !c.refused && err != nil {
			t.Errorf("%v: %v", c, err)
		}
	}
}

// A volume that has grown since is still what its claim asked for.
func TestCreateAgainAfterGrowth(t *testing.T) {
	c := New(newCell())
	v := create(t, c, "n", gib)
	if _, err := c.ControllerExpandVolume(t.Context(), &csispec.ControllerExpandVolumeRequest{
		VolumeId: v.GetVolumeId(), CapacityRange: &csispec.CapacityRange{RequiredBytes: 2 * gib},
	}); err != nil {
		t.Fatal(err)
	}
	if again := create(t, c, "n", gib); again.GetVolumeId() != v.GetVolumeId() || again.GetCapacityBytes() != 2*gib {
		t.Errorf("got %v", again)
	}
}

func TestCreateRefusals(t *testing.T) {
	good := func() *csispec.CreateVolumeRequest {
		return &csispec.CreateVolumeRequest{Name: "v", VolumeCapabilities: caps(mounted("", writer))}
	}
	for what, change := range map[string]func(*csispec.CreateVolumeRequest){
		"name":            func(r *csispec.CreateVolumeRequest) { r.Name = "" },
		"no volume capab": func(r *csispec.CreateVolumeRequest) { r.VolumeCapabilities = nil },
		"no access type":  func(r *csispec.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessType = nil },
		"file system":     func(r *csispec.CreateVolumeRequest) { r.VolumeCapabilities[0] = mounted("btrfs", writer) },
		"snapshots":       func(r *csispec.CreateVolumeRequest) { r.VolumeContentSource = &csispec.VolumeContentSource{} },
		"mutable":         func(r *csispec.CreateVolumeRequest) { r.MutableParameters = map[string]string{"iops": "1"} },
		"mount group":     func(r *csispec.CreateVolumeRequest) { r.VolumeCapabilities[0].GetMount().VolumeMountGroup = "1" },
		"names xfs": func(r *csispec.CreateVolumeRequest) {
			r.VolumeCapabilities[0] = mounted("xfs", writer)
			r.Parameters = map[string]string{driver.FSTypeKey: "ext4"}
		},
		"is empty": func(r *csispec.CreateVolumeRequest) { r.AccessibilityRequirements = topology([]string{""}, nil) },
		"one node at a time": func(r *csispec.CreateVolumeRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities, raw(csispec.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))
		},
	} {
		in := good()
		change(in)
		service := newCell()
		_, err := New(service).CreateVolume(t.Context(), in)
		if !errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), what) || service.made() != "" {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestParameters(t *testing.T) {
	for _, c := range []struct {
		given map[string]string
		want  parameters
		says  string // of the refusal
	}{
		{nil, parameters{}, ""},
		{map[string]string{"replicas": "2", "spread": "node", "access": "rack", "durability": "write-through", "on-full": "error", "blockSize": "512", driver.FSTypeKey: "xfs"},
			parameters{Policy{2, SpreadNode, AccessRack, WriteThrough, OnFullError, 512, ""}, "xfs"}, ""},
		{map[string]string{"replicas": "3", "spread": "rack", "access": "cluster", "durability": "flush", "on-full": "wait", "blockSize": "4096", driver.FSTypeKey: "ext4"},
			parameters{Policy{3, SpreadRack, AccessCell, Flush, OnFullWait, 4096, ""}, "ext4"}, ""},
		{map[string]string{"csi.storage.k8s.io/pvc/name": "x", "csi.storage.k8s.io/pvc/namespace": "y", "csi.storage.k8s.io/pv/name": "z"}, parameters{}, ""},
		{map[string]string{"csi.storage.k8s.io/pvc/names": "x"}, parameters{}, "is unknown; there are access, blockSize,"},
		{map[string]string{"Replicas": "1"}, parameters{}, `"Replicas" is unknown`},
		{map[string]string{"": ""}, parameters{}, `"" is unknown`},
		{map[string]string{"replicas": "4"}, parameters{}, `"replicas" is "4"; it takes 1, 2 or 3`},
		{map[string]string{"replicas": "0"}, parameters{}, "it takes 1, 2 or 3"},
		{map[string]string{"replicas": "+1"}, parameters{}, "it takes 1, 2 or 3"},
		{map[string]string{"replicas": ""}, parameters{}, "it takes 1, 2 or 3"},
		{map[string]string{"replicas": strings.Repeat("9", 1000)}, parameters{}, "it takes 1, 2 or 3"},
		{map[string]string{"blockSize": "1024"}, parameters{}, "it takes 4096 or 512"},
		{map[string]string{"access": "RACK"}, parameters{}, "it takes cluster or rack"},
		{map[string]string{"on-full": "block"}, parameters{}, "it takes wait or error"},
		{map[string]string{driver.FSTypeKey: "btrfs"}, parameters{}, "it takes ext4 or xfs"},
		{map[string]string{"iops": "100"}, parameters{}, `"iops" is not supported by this version`},
		{map[string]string{"throughput": "100"}, parameters{}, "not supported by this version"},
		{map[string]string{"b": "1", "a": "1"}, parameters{}, `"a" is unknown`}, // always the same one
	} {
		got, err := parse(c.given)
		if c.says == "" && (err != nil || got != c.want) {
			t.Errorf("%v: %v, %v", c.given, got, err)
		}
		if c.says != "" && (!errors.Is(err, block.ErrInvalid) || !strings.Contains(err.Error(), c.says) || len(err.Error()) > 400) {
			t.Errorf("%v: %v", c.given, err)
		}
	}
}

// A volume whose file system only the parameters name tells its nodes.
func TestVolumeContext(t *testing.T) {
	r, err := New(newCell()).CreateVolume(t.Context(), &csispec.CreateVolumeRequest{
		Name: "v", VolumeCapabilities: caps(mounted("", writer)), Parameters: map[string]string{driver.FSTypeKey: "xfs"},
		CapacityRange: &csispec.CapacityRange{RequiredBytes: 1},
	})
	if err != nil || !reflect.DeepEqual(r.GetVolume().GetVolumeContext(), map[string]string{driver.FSTypeKey: "xfs"}) || r.GetVolume().GetCapacityBytes() != minXFS {
		t.Errorf("%v, %v", r, err)
	}
}

func topology(requisite, preferred []string) *csispec.TopologyRequirement {
	terms := func(racks []string) (list []*csispec.Topology) {
		for _, r := range racks {
			if r == "-" { // a node that has no such key
				list = append(list, &csispec.Topology{Segments: map[string]string{"kubernetes.io/hostname": "x"}})
				continue
			}
			list = append(list, &csispec.Topology{Segments: map[string]string{driver.TopologyRack: r, "zone": "z"}})
		}
		return list
	}
	return &csispec.TopologyRequirement{Requisite: terms(requisite), Preferred: terms(preferred)}
}

// B064: which racks are asked for, and what the answer says of them.
func TestB064Topology(t *testing.T) {
	for _, c := range []struct {
		name                 string
		requisite, preferred []string
		want                 []string
	}{
		{"no wish", nil, nil, nil},
		{"requisite", []string{"r1", "r2"}, nil, []string{"r1", "r2"}},
		{"preferred first", []string{"r1", "r2"}, []string{"r2"}, []string{"r2", "r1"}},
		{"preferred alone", nil, []string{"r2", "r1"}, []string{"r2", "r1"}},
		{"preferred outside", []string{"r1"}, []string{"r9", "r1"}, []string{"r1"}},
		{"twice", []string{"r1", "r1", "r2"}, []string{"r1", "r1"}, []string{"r1", "r2"}},
		{"nodes with other keys", []string{"-", "r2"}, []string{"-", "r2"}, []string{"r2"}},
		{"only other keys", []string{"-", "-"}, nil, nil},
	} {
		got, err := racksOf(topology(c.requisite, c.preferred), AccessCell)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v", c.name, got, err)
		}
	}
	for _, c := range []struct {
		name      string
		access    string
		requisite []string
		preferred []string
		want      string // the accessible topology; "": everywhere
		refused   error
	}{
		{"cluster", "cluster", []string{"r1", "r2"}, []string{"r2"}, "", nil},
		{"rack", "rack", []string{"r1", "r2"}, []string{"r2"}, "r2", nil},
		{"rack without disks preferred", "rack", []string{"r9", "r2"}, []string{"r9"}, "r2", nil},
		{"no rack has disks", "rack", []string{"r8", "r9"}, nil, "", block.ErrNoSpace},
		{"no rack is named", "rack", []string{"-"}, nil, "", block.ErrNoSpace},
		{"no wish", "rack", nil, nil, "r1", nil},
	} {
		r, err := New(newCell()).CreateVolume(t.Context(), &csispec.CreateVolumeRequest{
			Name: "v", VolumeCapabilities: caps(mounted("", writer)), Parameters: map[string]string{"access": c.access},
			AccessibilityRequirements: topology(c.requisite, c.preferred),
		})
		if !errors.Is(err, c.refused) || (c.refused == nil) != (err == nil) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		got := segments(r.GetVolume().GetAccessibleTopology())
		if want := strings.Fields(c.want); !slices.Equal(got, want) {
			t.Errorf("%s: accessible from %v, not %v", c.name, got, want)
		}
	}
}

// B060, B061, the controller's part: what is not there is deleted, what is in use is not.
func TestB061Delete(t *testing.T) {
	service := newCell()
	c := New(service)
	del := func(id string) error {
		_, err := c.DeleteVolume(t.Context(), &csispec.DeleteVolumeRequest{VolumeId: id})
		return err
	}
	v := create(t, c, "v", gib)
	if _, err := publish(t, c, v.GetVolumeId(), "n1", raw(writer), false); err != nil {
		t.Fatal(err)
	}
	if err := del(v.GetVolumeId()); !errors.Is(err, block.ErrInUse) {
		t.Errorf("published: %v", err)
	}
	if err := unpublish(t, c, v.GetVolumeId(), "n1"); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{v.GetVolumeId(), v.GetVolumeId(), block.NewUUID().String(), "../../etc", strings.Repeat("x", 5000)} {
		if err := del(id); err != nil {
			t.Errorf("%.40s: %v", id, err)
		}
	}
	if err := del(""); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("no id: %v", err)
	}
	service.failWith = block.ErrUnavailable
	if err := del(v.GetVolumeId()); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("no service: %v", err)
	}
}

func TestExpand(t *testing.T) {
	service := newCell()
	c := New(service)
	v := create(t, c, "v", gib)
	for _, x := range []struct {
		required, limit int64
		want            int64
		refused         error
	}{
		{gib, 0, gib, nil},
		{1, 0, gib, nil},
		{gib + 1, 0, gib + 4096, nil},
		{gib + 1, 0, gib + 4096, nil},
		{0, 4 * gib, gib + 4096, nil},
		{0, gib, 0, block.ErrTooLarge}, // it does not shrink
		{2*gib + 1, 2*gib + 100, 0, block.ErrTooLarge},
		{-1, 0, 0, block.ErrTooLarge},
		{math.MaxInt64, 0, 0, block.ErrTooLarge},
		{2 * gib, 2 * gib, 2 * gib, nil},
	} {
		r, err := c.ControllerExpandVolume(t.Context(), &csispec.ControllerExpandVolumeRequest{
			VolumeId: v.GetVolumeId(), VolumeCapability: raw(writer), CapacityRange: &csispec.CapacityRange{RequiredBytes: x.required, LimitBytes: x.limit},
		})
		if !errors.Is(err, x.refused) || r.GetCapacityBytes() != x.want || err == nil && !r.GetNodeExpansionRequired() {
			t.Errorf("%d to %d: %v, %v", x.required, x.limit, r, err)
		}
	}
	for want, in := range map[error]*csispec.ControllerExpandVolumeRequest{
		block.ErrInvalid:  {VolumeId: v.GetVolumeId()},
		block.ErrNotFound: {VolumeId: block.NewUUID().String(), CapacityRange: &csispec.CapacityRange{RequiredBytes: gib}},
	} {
		if _, err := c.ControllerExpandVolume(t.Context(), in); !errors.Is(err, want) {
			t.Errorf("%v: %v", want, err)
		}
	}
}
