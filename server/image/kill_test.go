package image

import (
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// TestKillAtEveryOperation kills the process before each file operation, lets
// a successor do the same work again, and then cuts the power. What the first
// life had written without a sync is in the page cache: the successor sees it,
// and must not take it for durable.
func TestKillAtEveryOperation(t *testing.T) {
	for at := 1; ; at++ {
		m := labFS(t)
		n := 0
		dying := vfs.Inject(m, func(vfs.Op) error {
			if n++; n == at {
				panic(errCut)
			}
			return nil
		})
		finished := survives(func() { lifetime(t, dying, true, func() {}) })
		m.Kill()
		// What a step has confirmed must hold before the next sync, too.
		d := lifetime(t, m, false, func() {
			d := openDisk(t, m.Crash(0))
			i := getImage(t, d, volA)
			if lost := i.Lost([]block.RunIndex{0, 1}); len(lost) > 0 {
				t.Fatalf("killed before operation %d, repeated: lost %v", at, lost)
			}
			isAll(t, get(t, i, 16*extent, extent), 0)
			ok(t, d.Close())
		})
		for seed := range uint64(3) {
			judge(t, at, m.Crash(seed))
		}
		ok(t, d.Close())
		if finished {
			t.Logf("%d file operations", at-1)
			return
		}
	}
}

// survives reports whether f came to its end.
func survives(f func()) (finished bool) {
	defer func() {
		if r := recover(); r != nil && r != errCut { //nolint:errorlint // the very value
			panic(r)
		}
	}()
	f()
	return true
}

// lifetime is work that can be repeated. In its first life it finds old bytes
// where run 1 is to be born. look is called after steps that no sync of the
// data follows.
func lifetime(t *testing.T, fs vfs.FS, first bool, look func()) *Disk {
	d, err := Open(fs, labConfig())
	ok(t, err)
	i, err := d.CreateImage(Description{ID: volA, Name: "a", Size: 17 * extent})
	ok(t, err)
	if first {
		_, err = i.img.WriteAt(fill(0xee, extent), 16*extent)
		ok(t, err)
		ok(t, i.img.Sync())
	}
	ok(t, i.Seal(2))
	ok(t, i.Birth(2, []block.RunIndex{0, 1}))
	look()
	ok(t, do(i, put(1, 0, fill(1, 4096))))
	ok(t, do(i, put(2, 5*region, fill(2, 512))))
	ok(t, i.Grow(20*extent))
	look()
	ok(t, do(i, put(3, 20*extent-4096, fill(3, 4096))))
	ok(t, i.Sync())
	return d
}

func judge(t *testing.T, at int, fs vfs.FS) {
	t.Helper()
	d := openDisk(t, fs)
	i, err := d.Image(volA)
	if err != nil {
		t.Fatalf("killed before operation %d: %v", at, err)
	}
	if lost := i.Lost([]block.RunIndex{0, 1}); len(lost) > 0 || i.Generation() != 2 || i.Size() != 20*extent {
		t.Fatalf("killed before operation %d: lost %v, generation %d, size %d", at, lost, i.Generation(), i.Size())
	}
	isAll(t, get(t, i, 0, 4096), 1)
	isAll(t, get(t, i, 5*region, 512), 2)
	isAll(t, get(t, i, 16*extent, extent), 0)
	isAll(t, get(t, i, 20*extent-4096, 4096), 3)
	for e, need := range map[block.ExtentIndex]uint64{0: 1 | 1<<5, 19: 1 << 63} {
		if behind, unflushed := marksOf(i, e); behind&unflushed&need != need {
			t.Fatalf("killed before operation %d: extent %d is marked %x and %x, not %x", at, e, behind, unflushed, need)
		}
	}
	ok(t, d.Close())
}
