package image

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

func TestH39SecondServerOnANode(t *testing.T) {
	for name, lab := range map[string]func(t *testing.T) (vfs.FS, Config){
		"mem": func(t *testing.T) (vfs.FS, Config) { return labFS(t), labConfig() },
		"os":  realDisk,
	} {
		t.Run(name, func(t *testing.T) {
			fs, c := lab(t)
			d, err := Open(fs, c)
			ok(t, err)
			defer d.Close()
			_, err = Open(fs, c)
			want(t, err, block.ErrInUse)
			if !strings.Contains(err.Error(), d.ID().String()) {
				t.Fatalf("the refusal names no disk: %v", err)
			}
			ok(t, d.Close())
			d, err = Open(fs, c)
			ok(t, err)
			ok(t, d.Close())
		})
	}
}

func TestH49HolesOverOldBytes(t *testing.T) {
	m := labFS(t)
	d := openDisk(t, m)
	i, err := d.CreateImage(Description{ID: volA, Name: "v", Size: 20 * extent})
	ok(t, err)
	ok(t, i.Seal(3))
	// Somebody's bytes lie where no extent was ever born.
	_, err = i.img.WriteAt(fill(0xee, 3*extent), extent/2)
	ok(t, err)
	ok(t, i.img.Sync())
	ok(t, i.Birth(3, []block.RunIndex{0}))
	for seed := range uint64(20) {
		isAll(t, get(t, getImage(t, openDisk(t, m.Crash(seed)), volA), 0, 4*extent), 0)
	}

	// A repeat, and a late one of an older generation, never touch what was written since.
	ok(t, do(i, put(1, extent, fill(7, 4096))))
	ok(t, i.Birth(3, []block.RunIndex{0}))
	ok(t, i.Seal(5))
	want(t, i.Birth(3, []block.RunIndex{0}), block.ErrStale)
	want(t, i.Birth(5, []block.RunIndex{0}), block.ErrPrecondition)
	want(t, i.Birth(6, []block.RunIndex{1}), block.ErrPrecondition) // not sealed
	want(t, i.Birth(5, []block.RunIndex{2}), block.ErrInvalid)      // beyond the volume
	isAll(t, get(t, i, extent, 4096), 7)
}

func TestH65BornAndNeverWritten(t *testing.T) {
	m := labFS(t)
	i := newImage(t, openDisk(t, m), volA, 40*extent)
	ok(t, i.Birth(1, []block.RunIndex{2, 0}))
	for name, fs := range map[string]*vfs.Mem{"nothing more synced": m.Crash(0), "everything": m.Crash(1), "some": m.Crash(7)} {
		i := getImage(t, openDisk(t, fs), volA)
		if lost := i.Lost([]block.RunIndex{0, 2}); len(lost) > 0 {
			t.Fatalf("%s: lost %v", name, lost)
		}
		// The last run ends with the volume; run 1 was never born.
		if lost := i.Lost([]block.RunIndex{1}); len(lost) != block.ExtentsPerRun || lost[0] != 16 {
			t.Fatalf("%s: run 1 lost %v", name, lost)
		}
		isAll(t, get(t, i, 32*extent, 8*extent), 0)
		ok(t, do(i, put(1, 39*extent, fill(1, 4096))))
		if i.Unflushed() != true {
			t.Fatalf("%s: unmarked", name)
		}
		want(t, i.ReadAt(make([]byte, 512), 16*extent), block.ErrCorrupt)
	}
}

func TestH66BirthNotCommitted(t *testing.T) {
	m := labFS(t)
	i := newImage(t, openDisk(t, m), volA, 48*extent) // run 0 is committed
	ok(t, do(i, put(1, 0, fill(1, 4096))))
	ok(t, i.Birth(1, []block.RunIndex{1})) // never committed
	ok(t, i.Seal(2))
	ok(t, i.DropBirths(2, []block.RunIndex{0, 1}))
	ok(t, i.DropBirths(2, []block.RunIndex{0, 1}))
	if lost := i.Lost([]block.RunIndex{1}); len(lost) != block.ExtentsPerRun {
		t.Fatalf("still there: %v", lost)
	}
	isAll(t, get(t, i, 0, 4096), 1) // written: not an orphan
	for seed := range uint64(10) {
		i := getImage(t, openDisk(t, m.Crash(seed)), volA)
		if lost := i.Lost([]block.RunIndex{1}); len(lost) != block.ExtentsPerRun {
			t.Fatalf("seed %d: a dropped birth came back: %v", seed, lost)
		}
	}
	ok(t, i.Birth(2, []block.RunIndex{1}))
	isAll(t, get(t, i, 16*extent, extent), 0)
	ok(t, i.DropBirths(2, []block.RunIndex{1})) // born at 2, not below
	if lost := i.Lost([]block.RunIndex{1}); len(lost) != 0 {
		t.Fatalf("dropped a birth of the present generation: %v", lost)
	}
	// An older birth that was never written is simply born again.
	ok(t, i.Seal(3))
	ok(t, i.Birth(3, []block.RunIndex{1}))
	if lost := i.Lost([]block.RunIndex{1}); len(lost) != 0 {
		t.Fatalf("lost %v", lost)
	}
}

// Also B136: neighbouring blocks with and without space.
func TestH67NoSpaceOnOneMember(t *testing.T) {
	m := labFS(t)
	d := openDisk(t, m)
	i := newImage(t, d, volA, extent)
	ok(t, do(i, put(1, 64<<10, fill(1, 64<<10)))) // the middle is allocated
	full(t, m, d, 3*4096)
	w := put(2, 0, fill(2, extent))
	want(t, i.Write(w), block.ErrNoSpace)
	ok(t, d.Err())
	for off := int64(0); off < extent; off += 4096 {
		p := get(t, i, off, 4096)
		isAll(t, p, p[0])
		if old := off >= 64<<10 && off < 128<<10; p[0] != 2 && (old && p[0] != 1 || !old && p[0] != 0) {
			t.Fatalf("block at %d holds %d", off, p[0])
		}
	}
	ok(t, i.Sync())
	m.SetCapacity(vfs.MemCapacity)
	ok(t, do(i, w))
	isAll(t, get(t, i, 0, extent), 2)
}

// full leaves room for left bytes and no more.
func full(t *testing.T, m *vfs.Mem, d *Disk, left int64) {
	t.Helper()
	u, err := d.Usage()
	ok(t, err)
	m.SetCapacity(u.Capacity - u.Available + left)
	_, err = d.Usage()
	ok(t, err)
}

func TestH68FullAndFreeAgain(t *testing.T) {
	m := labFS(t)
	d := openDisk(t, m, func(c *Config) { c.Reserve = 1 << 20 })
	i := newImage(t, d, volA, 20*extent)
	ok(t, do(i, put(1, 0, fill(1, 128<<10))))
	ok(t, do(i, erase(block.OpZero, true, extent, 64<<10)))
	u, err := d.Usage()
	ok(t, err)
	m.SetCapacity(u.Capacity - u.Available + 1<<20 + 8192) // room for two blocks before the reserve
	if u, err = d.Usage(); err != nil || u.Available != 8192 {
		t.Fatalf("usage %+v, %v", u, err)
	}

	one := put(2, 2*extent+100*512, fill(1, 4096)) // touches two blocks
	ok(t, i.Reserve(one))
	want(t, i.Reserve(put(2, 3*extent, fill(1, 512))), block.ErrNoSpace)
	i.Release(one)
	ok(t, i.Reserve(one))
	i.Release(one)
	want(t, i.Reserve(put(2, 3*extent, fill(1, 8193))), block.ErrNoSpace)
	m.SetCapacity(4096) // whoever else filled it
	want(t, i.Reserve(put(2, 3*extent, fill(1, 512))), block.ErrNoSpace)
	want(t, i.Birth(1, []block.RunIndex{1}), block.ErrNoSpace)

	// Overwriting works, data or allocated zeros, and a region's first mark as well.
	ok(t, do(i, put(3, 0, fill(2, 128<<10))))
	ok(t, do(i, put(3, extent, fill(2, 64<<10))))
	ok(t, do(i, erase(block.OpZero, true, 0, 4096)))
	want(t, do(i, put(3, 64<<10, fill(2, 128<<10))), block.ErrNoSpace)
	// So does whatever frees space, with no credit left.
	ok(t, do(i, erase(block.OpTrim, false, 0, 16*extent)))
	ok(t, do(i, erase(block.OpZero, false, 512, 1024)))
	ok(t, i.Sync())
	m.SetCapacity(1 << 40)
	ok(t, do(i, put(4, 3*extent, fill(3, 4096))))
	if held := d.space.held.Load(); held != 0 {
		t.Fatalf("%d bytes of credit were never given back", held)
	}
	ok(t, d.Err())
}

func TestH69StrangerOnTheDisk(t *testing.T) {
	replaceFile := func(t *testing.T, m *vfs.Mem, dir, name string) {
		d, err := m.OpenDir(dir)
		ok(t, err)
		p, err := vfs.ReadFile(d, name, 1<<30)
		ok(t, err)
		ok(t, vfs.Replace(d, name, p))
	}
	volume := "/disk/volumes/" + volA.String()
	for name, strange := range map[string]func(t *testing.T, m *vfs.Mem){
		"another mount":         func(_ *testing.T, m *vfs.Mem) { m.Remount() },
		"gabion.json replaced":  func(t *testing.T, m *vfs.Mem) { replaceFile(t, m, "/disk", diskFile) },
		"head.idx replaced":     func(t *testing.T, m *vfs.Mem) { replaceFile(t, m, volume, indexFile) },
		"mount missing":         func(t *testing.T, m *vfs.Mem) { move(t, m, "/", "disk", "elsewhere"); ok(t, m.MkdirAll("/disk")) },
		"path gone":             func(t *testing.T, m *vfs.Mem) { move(t, m, "/", "disk", "elsewhere") },
		"volume directory gone": func(t *testing.T, m *vfs.Mem) { move(t, m, "/disk/volumes", volA.String(), "x") },
		"head.img unlinked": func(t *testing.T, m *vfs.Mem) {
			d, err := m.OpenDir(volume)
			ok(t, err)
			ok(t, d.Unlink(imageFile))
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := labFS(t)
			d := openDisk(t, m)
			i := newImage(t, d, volA, extent)
			ok(t, d.Check())
			strange(t, m)
			want(t, d.Check(), block.ErrIO)
			want(t, do(i, put(1, 0, fill(1, 512))), block.ErrIO)
		})
	}
	t.Run("nothing there when starting", func(t *testing.T) {
		m := labFS(t)
		move(t, m, "/", "disk", "elsewhere")
		_, err := Probe(m, "/disk")
		want(t, err, block.ErrNotFound)
		ok(t, m.MkdirAll("/disk"))
		_, err = Probe(m, "/disk")
		want(t, err, block.ErrNotFound)
		_, err = Open(m, labConfig())
		want(t, err, block.ErrNotFound)
	})
	t.Run("a foreign directory is never made a disk", func(t *testing.T) {
		m := labFS(t)
		_, err := Init(m, "/disk", labCluster, block.Geometry{ExtentSize: extent})
		want(t, err, block.ErrExists)
		ok(t, m.MkdirAll("/home/photos"))
		_, err = Init(m, "/home", labCluster, block.Geometry{ExtentSize: extent})
		want(t, err, block.ErrPrecondition)
		if !strings.Contains(err.Error(), "photos") {
			t.Fatalf("names nothing: %v", err)
		}
		ok(t, m.MkdirAll("/blank/lost+found"))
		_, err = Init(m, "/blank", labCluster, block.Geometry{ExtentSize: extent})
		ok(t, err)
	})
	t.Run("one identity twice", func(t *testing.T) {
		m := labFS(t)
		d := openDisk(t, m)
		ok(t, m.MkdirAll("/copy/volumes"))
		dir, err := m.OpenDir("/copy")
		ok(t, err)
		ok(t, vfs.Replace(dir, diskFile, d.raw))
		twin := openDisk(t, m, func(c *Config) { c.Path = "/copy" })
		if twin.Incarnation().Since(d.Incarnation()) != block.Rebooted {
			t.Fatal("a copy of a disk claims to be its continuation")
		}
	})
}

func move(t *testing.T, m *vfs.Mem, dir, from, to string) {
	t.Helper()
	d, err := m.OpenDir(dir)
	ok(t, err)
	ok(t, d.Rename(from, d, to))
}

func TestDiskOfAnotherClusterOrFormat(t *testing.T) {
	m := labFS(t)
	open := func(change func(*Config)) error {
		c := labConfig()
		change(&c)
		_, err := Open(m, c)
		return err
	}
	want(t, open(func(c *Config) { c.Cluster = block.ClusterID{UUID: block.UUID{9}} }), block.ErrPrecondition)
	want(t, open(func(c *Config) { c.Geometry.ExtentSize *= 2 }), block.ErrPrecondition)
	dir, err := m.OpenDir("/disk")
	ok(t, err)
	for content, target := range map[string]error{
		`{"type":"gabion-disk","format":2,"new":true}`: block.ErrFormat,
		`{"some":"json"}`:                   block.ErrFormat,
		``:                                  block.ErrCorrupt,
		`{"type":"gabion-disk","form`:       block.ErrCorrupt,
		`{"type":"gabion-disk","format":1}`: block.ErrCorrupt,
		fmt.Sprintf("%070000d", 0):          block.ErrFormat,
	} {
		ok(t, vfs.Replace(dir, diskFile, []byte(content)))
		_, err := Probe(m, "/disk")
		want(t, err, target)
		want(t, open(func(*Config) {}), target)
		after, err := vfs.ReadFile(dir, diskFile, 1<<20)
		ok(t, err)
		if string(after) != content {
			t.Fatal("a refused disk was touched")
		}
	}
}
