package sanity

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	nbd "github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/raft/metapb"
)

// What the cases say to the driver.

const (
	kib = int64(1) << 10
	mib = kib << 10
	gib = mib << 10
	tib = gib << 10

	rwo = csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	rox = csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
)

func raw(m csispec.VolumeCapability_AccessMode_Mode) *csispec.VolumeCapability {
	return &csispec.VolumeCapability{
		AccessType: &csispec.VolumeCapability_Block{Block: &csispec.VolumeCapability_BlockVolume{}},
		AccessMode: &csispec.VolumeCapability_AccessMode{Mode: m},
	}
}

func mounted(fs string, m csispec.VolumeCapability_AccessMode_Mode) *csispec.VolumeCapability {
	return &csispec.VolumeCapability{
		AccessType: &csispec.VolumeCapability_Mount{Mount: &csispec.VolumeCapability_MountVolume{FsType: fs}},
		AccessMode: &csispec.VolumeCapability_AccessMode{Mode: m},
	}
}

// wish is a request for a raw volume of at least required bytes; changes are made to it.
func wish(name string, required int64, changes ...func(*csispec.CreateVolumeRequest)) *csispec.CreateVolumeRequest {
	in := &csispec.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csispec.VolumeCapability{raw(rwo)}, CapacityRange: &csispec.CapacityRange{RequiredBytes: required},
	}
	for _, change := range changes {
		change(in)
	}
	return in
}

func with(key, value string) func(*csispec.CreateVolumeRequest) {
	return func(in *csispec.CreateVolumeRequest) {
		if in.Parameters == nil {
			in.Parameters = map[string]string{}
		}
		in.Parameters[key] = value
	}
}

func within(limit int64) func(*csispec.CreateVolumeRequest) {
	return func(in *csispec.CreateVolumeRequest) { in.CapacityRange.LimitBytes = limit }
}

func as(c *csispec.VolumeCapability) func(*csispec.CreateVolumeRequest) {
	return func(in *csispec.CreateVolumeRequest) { in.VolumeCapabilities = []*csispec.VolumeCapability{c} }
}

func (r *rig) tryCreate(ctx context.Context, in *csispec.CreateVolumeRequest) (*csispec.Volume, error) {
	answer, err := r.controller.CreateVolume(ctx, in)
	return answer.GetVolume(), err
}

func (r *rig) create(in *csispec.CreateVolumeRequest) *csispec.Volume {
	r.t.Helper()
	v, err := r.tryCreate(r.t.Context(), in)
	if err != nil {
		r.t.Fatalf("create %s: %v", in.GetName(), err)
	}
	return v
}

func (r *rig) delete(id string) error {
	_, err := r.controller.DeleteVolume(r.t.Context(), &csispec.DeleteVolumeRequest{VolumeId: id})
	return err
}

func (r *rig) publish(ctx context.Context, id, node string, c *csispec.VolumeCapability, readOnly bool) (map[string]string, error) {
	answer, err := r.controller.ControllerPublishVolume(ctx, &csispec.ControllerPublishVolumeRequest{
		VolumeId: id, NodeId: node, VolumeCapability: c, Readonly: readOnly,
	})
	return answer.GetPublishContext(), err
}

func (r *rig) mustPublish(id, node string) {
	r.t.Helper()
	if _, err := r.publish(r.t.Context(), id, node, raw(rwo), false); err != nil {
		r.t.Fatalf("publish to %s: %v", node, err)
	}
}

func (r *rig) unpublish(id, node string) error {
	_, err := r.controller.ControllerUnpublishVolume(r.t.Context(), &csispec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})
	return err
}

// listed is every volume, with the nodes it is published to.
func (r *rig) listed() map[string]*csispec.ListVolumesResponse_Entry {
	r.t.Helper()
	all := map[string]*csispec.ListVolumesResponse_Entry{}
	for token, first := "", true; first || token != ""; first = false {
		answer, err := r.controller.ListVolumes(r.t.Context(), &csispec.ListVolumesRequest{StartingToken: token})
		if err != nil {
			r.t.Fatal(err)
		}
		for _, e := range answer.GetEntries() {
			all[e.GetVolume().GetVolumeId()] = e
		}
		token = answer.GetNextToken()
	}
	return all
}

// want fails the test unless an error has the code and says all of the words.
func want(t *testing.T, what string, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("%s: %v, not %v", what, err, code)
		return
	}
	for _, w := range words {
		if !strings.Contains(status.Convert(err).Message(), w) {
			t.Errorf("%s: %v does not say %q", what, err, w)
		}
	}
}

// What a node does with a published volume.

// target is where a node's attachment connects.
func (r *rig) target(id, node string) nbd.Target {
	r.t.Helper()
	a, err := r.api.GetAttachment(r.t.Context(), &metapb.GetAttachmentRequest{Volume: &metapb.VolumeRef{Id: id}, Node: node})
	if err != nil {
		r.t.Fatal(err)
	}
	return nbd.Target{
		Network: "tcp", Address: a.GetEndpoints()[0].GetNbdAddress(),
		Export: id + "/" + base64.RawURLEncoding.EncodeToString(a.GetAttachment().GetToken()),
	}
}

func (r *rig) connect(t nbd.Target) *nbd.Client {
	r.t.Helper()
	c, err := nbd.Dial(r.t.Context(), t, nbd.Config{})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(c.Abort)
	return c
}

// fault arms (a rule in JSON) or clears ("") the server's faults.
func (r *rig) fault(rule string) {
	r.t.Helper()
	method := http.MethodPost
	if rule == "" {
		method = http.MethodDelete
	}
	code, body, err := r.server.HTTP(r.t.Context(), method, "/faults", rule)
	if err != nil || code != http.StatusNoContent {
		r.t.Fatalf("fault %s: %d %s %v", rule, code, body, err)
	}
}

// applied is how many entries the metadata log has.
func (r *rig) applied() uint64 {
	r.t.Helper()
	s, err := r.api.GetStatus(r.t.Context(), &metapb.GetStatusRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	return s.GetAppliedIndex()
}

// extentFiles are the files of a volume on the server's disk.
func (r *rig) extentFiles(id string) []string {
	r.t.Helper()
	files, err := filepath.Glob(filepath.Join(r.server.Disks[0], "*", id+"*"))
	if err != nil {
		r.t.Fatal(err)
	}
	return files
}

// within2s fails the test if a step takes longer.
func (r *rig) within2s(what string, f func()) {
	r.t.Helper()
	begin := time.Now()
	f()
	if took := time.Since(begin); took > 2*time.Second {
		r.t.Errorf("%s took %v", what, took)
	}
}

func name(format string, args ...any) string { return fmt.Sprintf(format, args...) }
