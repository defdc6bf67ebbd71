package image

import (
	"bytes"
	"errors"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// The lab is a disk of small extents in a memory file system, and the same
// for tests that need a real one.
const (
	extent = block.MinExtentSize
	region = extent / block.MarksPerExtent
)

var (
	labCluster = block.ClusterID{UUID: block.UUID{0xc1}}
	labBoot    = block.UUID{0xb0}
	volA       = block.VolumeID{UUID: block.UUID{0xa}}
	volB       = block.VolumeID{UUID: block.UUID{0xb}}
)

func labConfig() Config {
	return Config{
		Path: "/disk", Cluster: labCluster, Geometry: block.Geometry{ExtentSize: extent},
		InstanceFile: "/state/disk.json", Boot: labBoot, Process: block.NewUUID(),
	}
}

// labFS returns a memory file system with a disk that has been initialised.
func labFS(t testing.TB) *vfs.Mem {
	t.Helper()
	m := vfs.NewMem()
	ok(t, m.MkdirAll("/disk"))
	ok(t, m.MkdirAll("/state"))
	_, err := Init(m, "/disk", labCluster, block.Geometry{ExtentSize: extent})
	ok(t, err)
	return m
}

func openDisk(t testing.TB, fs vfs.FS, change ...func(*Config)) *Disk {
	t.Helper()
	c := labConfig()
	for _, f := range change {
		f(&c)
	}
	d, err := Open(fs, c)
	ok(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// newImage makes an image of size bytes, sealed at 1, with its first run born.
func newImage(t testing.TB, d *Disk, id block.VolumeID, size int64) *Image {
	t.Helper()
	i, err := d.CreateImage(Description{ID: id, Name: "vol", Size: size, Version: 1, Policy: map[string]string{"replicas": "1"}})
	ok(t, err)
	ok(t, i.Seal(1))
	ok(t, i.Birth(1, []block.RunIndex{0}))
	return i
}

func getImage(t testing.TB, d *Disk, id block.VolumeID) *Image {
	t.Helper()
	i, err := d.Image(id)
	ok(t, err)
	return i
}

func fill(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n) }

func put(seq int, off int64, p []byte) *block.IO {
	return &block.IO{Generation: 1, Sequence: block.Sequence(seq), Op: block.OpWrite, Offset: off, Length: int64(len(p)), Data: p}
}

func erase(op block.Op, noHole bool, off, length int64) *block.IO {
	return &block.IO{Generation: 1, Op: op, NoHole: noHole, Offset: off, Length: length}
}

// do reserves and writes, as a member does.
func do(i *Image, w *block.IO) error {
	if err := i.Reserve(w); err != nil {
		return err
	}
	return i.Write(w)
}

func get(t testing.TB, i *Image, off int64, n int) []byte {
	t.Helper()
	p := make([]byte, n)
	ok(t, i.ReadAt(p, off))
	return p
}

func isAll(t testing.TB, p []byte, b byte) {
	t.Helper()
	if n := bytes.IndexFunc(p, func(r rune) bool { return r != rune(b) }); len(p) > 0 && bytes.Count(p, []byte{b}) != len(p) {
		t.Fatalf("byte %d is not %d: %x", n, b, p[max(0, n):min(len(p), max(0, n)+8)])
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got error %v, want %v", err, target)
	}
}

// marksOf are an extent's masks as they are in memory now.
func marksOf(i *Image, e block.ExtentIndex) (behind, unflushed uint64) {
	i.index.mu.Lock()
	defer i.index.mu.Unlock()
	if r := i.index.record(e); r != nil {
		return r.behind, r.unflushed
	}
	return 0, 0
}

// inject puts rules between the disk and its file system.
func inject(t testing.TB, fs vfs.FS) (vfs.FS, *vfs.Rules) {
	t.Helper()
	rules := new(vfs.Rules)
	return vfs.Inject(fs, rules.Hook), rules
}

// realDisk is a disk in a directory of the real file system.
func realDisk(t *testing.T) (vfs.FS, Config) {
	t.Helper()
	return realDiskAt(t, t.TempDir())
}

func realDiskAt(t *testing.T, path string) (vfs.FS, Config) {
	t.Helper()
	c := labConfig()
	c.Path = path
	c.InstanceFile = t.TempDir() + "/disk.json"
	_, err := Init(vfs.OS{}, c.Path, c.Cluster, c.Geometry)
	ok(t, err)
	return vfs.OS{}, c
}
