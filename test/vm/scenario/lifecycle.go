package scenario

import (
	"path/filepath"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func lifecycle() []lab.Scenario {
	return []lab.Scenario{
		{Name: "lifecycle/ext4", Run: func(t *lab.T) { fileSystem(t, "ext4") }},
		{Name: "lifecycle/xfs", Run: func(t *lab.T) { fileSystem(t, "xfs") }},
		{Name: "lifecycle/block", Run: rawBlock},
		{Name: "lifecycle/read-only", Run: readOnly},
		{Name: "B154-pods-of-one-node", Run: podsOfOneNode, Once: true},
	}
}

// fileSystem takes a mounted volume through its life: what was synced is there at the next stage, and calls that come
// twice change nothing.
func fileSystem(t *lab.T, fs string) {
	s, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs})
	pod := v.Up("a")
	device := v.Device()
	queue(t, v) // B020
	t.Write(filepath.Join(pod, "file"), "first")
	v.Stage()
	v.PublishTo("a")
	if v.Device() != device {
		t.Fatalf("stage twice: device %s became %s", device, v.Device())
	}
	t.Expect(filepath.Join(pod, "file"), "first")
	v.Down()
	s.CheckImage(v)
	p.Restart()
	pod = v.Up("b")
	t.Expect(filepath.Join(pod, "file"), "first")
	t.Write(filepath.Join(pod, "file"), "second")
	v.Down()
	v.Down()
	s.CheckImage(v)
}

// queue looks at what the kernel made of the export's flags.
func queue(t *lab.T, v *lab.Volume) {
	for name, want := range map[string]string{"queue/write_cache": "write back", "queue/fua": "1", "queue/logical_block_size": "4096", "queue/rotational": "0"} {
		if got := v.Queue(name); got != want {
			t.Errorf("%s is %q, not %q", name, got, want)
		}
	}
	if v.Queue("queue/discard_max_bytes") == "0" {
		t.Errorf("the device takes no trim")
	}
	if v.DeviceSize() != v.Size {
		t.Errorf("the device has %d bytes, the volume %d", v.DeviceSize(), v.Size)
	}
}

// rawBlock takes a raw volume through its life: nothing writes to it but its user (B072).
func rawBlock(t *lab.T) {
	s, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: "raw", Block: true})
	pod := v.Up("a")
	if used := s.Used(); used > mib {
		t.Errorf("staging a raw volume wrote %d bytes", used)
	}
	t.Write(pod, "raw content")
	v.Down()
	if lab.Exists(pod) {
		t.Errorf("%s is still there", pod)
	}
	pod = v.Up("b")
	t.Expect(pod, "raw content")
	v.Down()
}

// readOnly shows a file system that may not be written to, by the pod's wish and by the attachment's.
func readOnly(t *lab.T) {
	_, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: "ro"})
	pod := v.Up("writer")
	t.Write(filepath.Join(pod, "file"), "content")
	t.Check(v.TryPublishTo(t.Context(), "reader", true), "a read-only publish")
	t.Expect(filepath.Join(v.Target("reader"), "file"), "content")
	t.Refused(lab.TryWrite(filepath.Join(v.Target("reader"), "file"), "other"), "writing read-only", "read-only file system")
	t.Write(filepath.Join(pod, "file"), "content two")
	v.Down()

	v.Access, v.ReadOnly = csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, true
	v.Publish()
	v.Stage()
	t.Check(v.TryPublishTo(t.Context(), "reader", true), "publishing a read-only attachment")
	if v.Queue("ro") != "1" {
		t.Errorf("the device of a read-only attachment can be written to")
	}
	t.Expect(filepath.Join(v.Target("reader"), "file"), "content two")
	v.Down()
}

// podsOfOneNode: several pods of a node share a volume unless it is for one pod alone (B154, B079).
func podsOfOneNode(t *lab.T) {
	_, p := cell(t)
	shared := t.Volume(p, p, lab.VolumeSpec{Name: "shared", Access: csispec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
	shared.Up("a")
	shared.PublishTo("b")
	t.Check(shared.TryPublishTo(t.Context(), "c", true), "a third, read-only pod")
	t.Write(filepath.Join(shared.Target("a"), "file"), "from a")
	t.Expect(filepath.Join(shared.Target("c"), "file"), "from a")
	shared.UnpublishFrom("a")
	t.Expect(filepath.Join(shared.Target("b"), "file"), "from a")

	alone := t.Volume(p, p, lab.VolumeSpec{Name: "alone", Access: csispec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER})
	alone.Up("a")
	alone.PublishTo("a")
	t.RefusedAs(alone.TryPublishTo(t.Context(), "b", false), "a second pod", lab.FailedPrecondition)
	alone.UnpublishFrom("a")
	alone.PublishTo("b")
}
