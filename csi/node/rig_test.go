package node_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/mount/mounttest"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/csi/node/nodetest"
	"github.com/gabion-storage/gabion/server/block"
)

func TestMain(m *testing.M) {
	mounttest.Main(func() int {
		code := m.Run()
		if err := goleak.Find(); code == 0 && err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	})
}

const GiB = 1 << 30

type ctx = context.Context

// rig is a host with one process of the node plugin.
type rig struct {
	t      *testing.T
	host   *nodetest.Host
	vols   *nodetest.Volumes
	plugin *nodetest.Plugin
	svc    *node.Service
	dir    string // of staging paths and targets
	state  string
	log    *lockedBuffer
}

func newRig(t *testing.T) *rig {
	t.Helper()
	h := nodetest.NewHost()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, host: h, vols: nodetest.NewVolumes(h), dir: dir, state: filepath.Join(dir, "state"), log: &lockedBuffer{}}
	r.start(nil)
	t.Cleanup(func() {
		r.stop()
		for _, b := range h.Broken() {
			t.Errorf("broken: %s", b)
		}
	})
	return r
}

// start begins a new process of the plugin; what the old one does no more is its end.
func (r *rig) start(fault nodetest.Fault) {
	r.plugin = nodetest.NewPlugin(r.host, r.vols, fault)
	r.svc = r.service()
}

func (r *rig) service() *node.Service { return r.serviceWith(r.plugin) }

func (r *rig) serviceWith(a node.Attacher) *node.Service {
	return node.New(node.Config{
		Name: "n1", Rack: "r1", Attacher: a, Volumes: r.plugin, Mounter: r.plugin, StateDir: r.state,
		Log: slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
}

func (r *rig) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := r.svc.Close(ctx); err != nil {
		r.t.Errorf("close: %v", err)
	}
}

func (r *rig) restart(fault nodetest.Fault) { r.stop(); r.start(fault) }

// spec is how a volume is used.
type spec struct {
	id       block.VolumeID
	mode     csispec.VolumeCapability_AccessMode_Mode
	raw      bool
	fs       string
	flags    []string
	staging  string
	readOnly bool              // of publish
	context  map[string]string // of publish; nil: of the present attachment
	volume   map[string]string // context of the volume
}

const (
	rwo    = csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	rwop   = csispec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	rwMany = csispec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	rox    = csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
)

// use is a volume's ordinary use; its staging directory is made, as kubelet does.
func (r *rig) use(id block.VolumeID) spec {
	r.t.Helper()
	s := spec{id: id, mode: rwo, staging: filepath.Join(r.dir, id.String(), "globalmount")}
	if err := os.MkdirAll(s.staging, 0o750); err != nil {
		r.t.Fatal(err)
	}
	return s
}

func (r *rig) target(name string) string { return filepath.Join(r.dir, name) }

func (s spec) capability() *csispec.VolumeCapability {
	c := &csispec.VolumeCapability{AccessMode: &csispec.VolumeCapability_AccessMode{Mode: s.mode}}
	if s.raw {
		c.AccessType = &csispec.VolumeCapability_Block{Block: &csispec.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csispec.VolumeCapability_Mount{Mount: &csispec.VolumeCapability_MountVolume{FsType: s.fs, MountFlags: s.flags}}
	}
	return c
}

func (r *rig) published(s spec) map[string]string {
	if s.context != nil {
		return s.context
	}
	return map[string]string{driver.AttachmentKey: r.vols.Get(s.id).Attachment.String()}
}

func (r *rig) stage(s spec) error { return r.stageWithin(context.Background(), s) }

func (r *rig) stageWithin(ctx context.Context, s spec) error {
	_, err := r.svc.NodeStageVolume(ctx, &csispec.NodeStageVolumeRequest{
		VolumeId: s.id.String(), PublishContext: r.published(s), StagingTargetPath: s.staging, VolumeCapability: s.capability(), VolumeContext: s.volume,
	})
	return err
}

func (r *rig) unstage(s spec) error {
	_, err := r.svc.NodeUnstageVolume(context.Background(), &csispec.NodeUnstageVolumeRequest{VolumeId: s.id.String(), StagingTargetPath: s.staging})
	return err
}

func (r *rig) publish(s spec, target string) error {
	_, err := r.svc.NodePublishVolume(context.Background(), &csispec.NodePublishVolumeRequest{
		VolumeId: s.id.String(), PublishContext: r.published(s), StagingTargetPath: s.staging, TargetPath: target,
		VolumeCapability: s.capability(), Readonly: s.readOnly, VolumeContext: s.volume,
	})
	return err
}

func (r *rig) unpublish(s spec, target string) error {
	_, err := r.svc.NodeUnpublishVolume(context.Background(), &csispec.NodeUnpublishVolumeRequest{VolumeId: s.id.String(), TargetPath: target})
	return err
}

func (r *rig) expand(s spec, required int64, path, staging string) (int64, error) {
	out, err := r.svc.NodeExpandVolume(context.Background(), &csispec.NodeExpandVolumeRequest{
		VolumeId: s.id.String(), VolumePath: path, StagingTargetPath: staging, CapacityRange: &csispec.CapacityRange{RequiredBytes: required},
	})
	return out.GetCapacityBytes(), err
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// refused checks an error's sentinel and what it names.
func (r *rig) refused(err, sentinel error, words ...string) {
	r.t.Helper()
	if !errors.Is(err, sentinel) {
		r.t.Fatalf("got %v, want %v", err, sentinel)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			r.t.Fatalf("%q does not name %q", err, w)
		}
	}
}

// clean checks that nothing is left behind.
func (r *rig) clean(s spec, targets ...string) {
	r.t.Helper()
	if residue := r.host.Residue(); residue != "" {
		r.t.Fatalf("residue: %s", residue)
	}
	if list, err := os.ReadDir(s.staging); err != nil || len(list) > 0 {
		r.t.Fatalf("residue in the staging path: %v, %v", list, err)
	}
	for _, p := range targets {
		if _, err := os.Lstat(p); err == nil {
			r.t.Fatalf("residue: %s", p)
		}
	}
	if list, err := os.ReadDir(r.state); err == nil && len(list) > 0 {
		r.t.Fatalf("residue: %v", list)
	}
}

// mounts is how many mounts there are at a path.
func (r *rig) mounts(point string) (n int) {
	for _, e := range r.host.Table() {
		if e.Point == point {
			n++
		}
	}
	return n
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}
func (l *lockedBuffer) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }

func contains(text string, words ...string) bool {
	for _, w := range words {
		if !strings.Contains(text, w) {
			return false
		}
	}
	return true
}
