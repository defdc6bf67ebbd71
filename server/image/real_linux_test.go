package image

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// mounted is a small file system of its own in a loop device.
type mounted struct {
	t                  *testing.T
	file, point, state string
}

// mount makes and mounts a file system. Where that is not possible the test is
// skipped, except in CI.
func mount(t *testing.T, kind string) *mounted {
	t.Helper()
	dir := t.TempDir()
	m := &mounted{t: t, file: filepath.Join(dir, "fs.img"), point: filepath.Join(dir, "mnt"), state: filepath.Join(dir, "state.json")}
	ok(t, os.WriteFile(m.file, nil, 0o600))
	ok(t, os.Truncate(m.file, 310<<20))
	ok(t, os.Mkdir(m.point, 0o700))
	mkfs := map[string][]string{"xfs": {"mkfs.xfs", "-q"}, "ext4": {"mkfs.ext4", "-q", "-F", "-m", "0"}}[kind]
	if err := command(append(mkfs, m.file)...); err != nil {
		unavailable(t, err)
	}
	if err := m.mount(); err != nil {
		unavailable(t, err)
	}
	t.Cleanup(func() { _ = command("umount", "-l", m.point) })
	return m
}

func (m *mounted) mount() error { return command("mount", "-o", "loop", m.file, m.point) }

func (m *mounted) unmount() { m.t.Helper(); ok(m.t, command("umount", m.point)) }

func (m *mounted) config(mode Mode) Config {
	c := labConfig()
	c.Path, c.Mode, c.InstanceFile = m.point, mode, m.state
	return c
}

func (m *mounted) open(c Config) *Disk {
	m.t.Helper()
	d, err := Open(vfs.OS{}, c)
	ok(m.t, err)
	return d
}

func unavailable(t *testing.T, err error) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(err)
	}
	t.Skip(err)
}

func command(args ...string) error {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return errors.New(strings.Join(args, " ") + ": " + err.Error() + ": " + string(bytes.TrimSpace(out)))
	}
	return nil
}

// TestRealFileSystems runs what only a kernel can answer for on XFS and ext4.
func TestRealFileSystems(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			m := mount(t, kind)
			_, err := Init(vfs.OS{}, m.point, labCluster, labConfig().Geometry)
			ok(t, err)
			for _, mode := range []Mode{Buffered, Direct} {
				t.Run(mode.String(), func(t *testing.T) {
					d := m.open(m.config(mode))
					defer d.Close()
					if d.Reflink() != (kind == "xfs") {
						t.Fatalf("reflink %v", d.Reflink())
					}
					realData(t, d)
					realFull(t, d)
				})
			}
			t.Run("H24", func(t *testing.T) { realRemount(t, m) })
			t.Run("huge", func(t *testing.T) { realHuge(t, m, kind) })
			t.Run("H69", func(t *testing.T) { realMountLost(t, m) })
		})
	}
}

func realData(t *testing.T, d *Disk) {
	const size = 64 * extent
	i := newImage(t, d, volA, size)
	ok(t, i.Birth(1, []block.RunIndex{1, 2, 3}))
	model := make([]byte, size)
	write := func(w *block.IO) {
		t.Helper()
		ok(t, do(i, w))
		if w.Op == block.OpWrite {
			copy(model[w.Offset:], w.Data)
		} else {
			clear(model[w.Offset : w.Offset+w.Length])
		}
	}
	write(put(1, 0, fill(1, 32*extent)))
	write(put(2, 40*extent+512, fill(2, 3*extent)))
	write(erase(block.OpTrim, false, 512, 9728))
	write(erase(block.OpTrim, false, extent-512, 8*extent+1024))
	write(erase(block.OpZero, true, 50*extent+512, 4*extent))
	write(erase(block.OpZero, false, 41*extent, 512))
	ok(t, i.Sync())
	ok(t, i.ClearMarks(9, Behind|Unflushed))
	if !bytes.Equal(get(t, i, 0, size), model) {
		t.Fatal("differs from the model")
	}
	used, err := i.Allocated()
	ok(t, err)
	if data := int64((32 - 8 + 3 + 4) * extent); used < data-extent || used > data+extent {
		t.Fatalf("%d bytes allocated for %d", used, data)
	}
	s := statusOf(t, i, 0, size, 100)
	if len(s) < 5 || !s[1].Hole || s[1].Length < 7*extent {
		t.Fatalf("%+v", s)
	}
	if d.Mode() == Buffered {
		if done, err := i.TryReadAt(make([]byte, 4096), 41*extent); !done || err != nil {
			t.Fatalf("what was just written is not read in line: %v %v", done, err)
		}
	} else if done, _ := i.TryReadAt(make([]byte, 4096), 0); done {
		t.Fatal("direct I/O claims not to wait for the device")
	}
	ok(t, d.Check())
}

// realFull fills the file system through a second volume: H67, H68, B136.
func realFull(t *testing.T, d *Disk) {
	const chunk = 8 << 20
	i := newImage(t, d, volB, 4096*extent)
	var runs []block.RunIndex
	for r := range block.RunIndex(256) {
		runs = append(runs, r)
	}
	ok(t, i.Birth(1, runs))
	var off int64
	for ; ; off += chunk {
		err := do(i, put(1, off, fill(byte(off/chunk)|1, chunk)))
		if errors.Is(err, block.ErrNoSpace) {
			break
		}
		ok(t, err)
	}
	// Without credits the kernel says it: each block is old or new, and the instance goes on.
	err := i.Write(put(2, off-chunk, fill(0x80, 3*chunk)))
	want(t, err, block.ErrNoSpace)
	i.disk.space.held.Store(0)
	ok(t, d.Err())
	for at := off - chunk; at < off+2*chunk; at += 4096 {
		p := get(t, i, at, 4096)
		isAll(t, p, p[0])
		if old := byte(0); p[0] != 0x80 {
			if at < off {
				old = byte(at/chunk) | 1
			}
			if p[0] != old {
				t.Fatalf("block at %d holds %d", at, p[0])
			}
		}
	}
	// A full disk can be overwritten, trimmed, and then written again.
	ok(t, do(i, put(3, 0, fill(9, chunk))))
	ok(t, do(i, erase(block.OpTrim, false, 0, 4096*extent)))
	ok(t, i.Sync())
	ok(t, do(i, put(4, 0, fill(9, chunk))))
	ok(t, i.Sync())
	ok(t, d.Quarantine(volB, "test"))
	ok(t, d.Purge(volB))
	ok(t, d.Quarantine(volA, "test"))
	ok(t, d.Purge(volA))
}

func realRemount(t *testing.T, m *mounted) {
	c := m.config(Buffered)
	d := m.open(c)
	first := d.Incarnation()
	ok(t, d.Close())
	c.Process = block.NewUUID()
	d = m.open(c)
	if got := d.Incarnation().Since(first); got != block.Restarted {
		t.Fatalf("continuity %v after a restart", got)
	}
	ok(t, d.Close())
	m.unmount()
	ok(t, m.mount())
	d = m.open(c)
	if got := d.Incarnation().Since(first); got != block.Rebooted {
		t.Fatalf("continuity %v after a remount", got)
	}
	ok(t, d.Close())
}

// realHuge: the largest volume is made at once and takes nothing, also where files end at 16 TiB.
func realHuge(t *testing.T, m *mounted, kind string) {
	d := m.open(m.config(Buffered))
	defer d.Close()
	i, err := d.CreateImage(Description{ID: volA, Size: block.MaxVolumeSize})
	ok(t, err)
	ok(t, i.Seal(1))
	ok(t, i.Birth(1, []block.RunIndex{0, 1000}))
	ok(t, do(i, put(1, 1000*16*extent, fill(1, 4096))))
	last := block.RunIndex(block.MaxVolumeSize/(16*extent) - 1)
	err = i.Birth(1, []block.RunIndex{last})
	if kind == "ext4" {
		want(t, err, block.ErrTooLarge)
	} else {
		ok(t, err)
		ok(t, do(i, put(2, block.MaxVolumeSize-4096, fill(2, 4096))))
		isAll(t, get(t, i, block.MaxVolumeSize-4096, 4096), 2)
	}
	ok(t, i.Sync())
	ok(t, d.Err())
	if used, err := i.Allocated(); err != nil || used > 1<<20 {
		t.Fatalf("%d bytes allocated, %v", used, err)
	}
	ok(t, d.Close())
	d = m.open(m.config(Buffered))
	defer d.Close()
	i = getImage(t, d, volA)
	if lost := i.Lost([]block.RunIndex{0, 1000}); len(lost) > 0 || i.Size() != block.MaxVolumeSize {
		t.Fatalf("lost %v, size %d", lost, i.Size())
	}
	isAll(t, get(t, i, 1000*16*extent, 4096), 1)
}

// realMountLost: the mount goes away under a running disk; nothing lands below it.
func realMountLost(t *testing.T, m *mounted) {
	c := m.config(Buffered)
	d := m.open(c)
	defer d.Close()
	i := newImage(t, d, volB, extent)
	ok(t, d.Check())
	ok(t, command("umount", "-l", m.point))
	want(t, d.Check(), block.ErrIO)
	want(t, do(i, put(1, 0, fill(1, 4096))), block.ErrIO)
	_, err := Probe(vfs.OS{}, m.point)
	want(t, err, block.ErrNotFound)
	_, err = Open(vfs.OS{}, c)
	want(t, err, block.ErrNotFound)
	below, err := os.ReadDir(m.point)
	ok(t, err)
	if len(below) != 0 {
		t.Fatalf("under the mount point: %v", below)
	}
}
