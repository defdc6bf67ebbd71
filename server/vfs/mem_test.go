package vfs_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// crashed runs check on what a power cut may leave, for many seeds.
func crashed(t *testing.T, m *vfs.Mem, check func(d vfs.Dir) error) {
	t.Helper()
	for seed := range uint64(200) {
		if err := check(openDir(t, m.Crash(seed), "/")); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func content(d vfs.Dir, name string) string {
	p, err := vfs.ReadFile(d, name, 1<<20)
	if err != nil {
		return "none"
	}
	return string(p)
}

func TestCrashKeepsWhatWasSynced(t *testing.T) {
	m := vfs.NewMem()
	d := openDir(t, m, "/")
	f := openFile(t, d, "f", vfs.Create)
	ok(t, d.Sync())
	synced, _ := f.WriteAt(bytes.Repeat([]byte("s"), 8192), 0)
	ok(t, f.Sync())
	_, _ = f.WriteAt(bytes.Repeat([]byte("u"), 4096), 2048)
	openFile(t, d, "unsynced", vfs.Create)

	seen := map[string]bool{}
	crashed(t, m, func(d vfs.Dir) error {
		got := content(d, "f")
		if len(got) != synced {
			return fmt.Errorf("%d bytes", len(got))
		}
		for s := 0; s < len(got); s += 512 {
			sector := got[s : s+512]
			inside := s >= 2048 && s < 6144
			if sector != string(bytes.Repeat([]byte("s"), 512)) && (!inside || sector != string(bytes.Repeat([]byte("u"), 512))) {
				return fmt.Errorf("sector %d is torn or foreign", s/512)
			}
		}
		seen[got[2048:6144]] = true
		seen["there: "+content(d, "unsynced")] = true
		return nil
	})
	if len(seen) < 20 || !seen["there: none"] || !seen["there: "] {
		t.Fatalf("power cuts show too little variety: %d", len(seen))
	}
}

func TestCrashDropsUnsyncedSizes(t *testing.T) {
	m := vfs.NewMem()
	d := openDir(t, m, "/")
	f := openFile(t, d, "f", vfs.Create)
	ok(t, d.Sync())
	ok(t, f.Truncate(1<<20))
	_, _ = f.WriteAt([]byte("x"), 100)
	ok(t, f.Datasync()) // the data's size, not the truncation's
	if got := content(openDir(t, m.Crash(0), "/"), "f"); len(got) != 101 {
		t.Fatalf("%d bytes", len(got))
	}
	ok(t, f.Sync())
	if got := content(openDir(t, m.Crash(0), "/"), "f"); len(got) != 1<<20 {
		t.Fatalf("%d bytes after Sync", len(got))
	}
}

func TestCrashRenamesAreWhole(t *testing.T) {
	m := vfs.NewMem()
	d := openDir(t, m, "/")
	ok(t, d.Mkdir("to"))
	to, err := d.OpenDir("to")
	ok(t, err)
	ok(t, vfs.Replace(d, "f", []byte("old")))
	ok(t, vfs.Replace(d, "g", []byte("moved")))
	ok(t, d.Sync())
	tmp := openFile(t, d, "tmp", vfs.Create)
	_, _ = tmp.WriteAt([]byte("new"), 0)
	ok(t, tmp.Sync())
	ok(t, d.Rename("tmp", d, "f"))
	ok(t, d.Rename("g", to, "g"))
	places := map[string]int{}
	crashed(t, m, func(d vfs.Dir) error {
		if c := content(d, "f"); c != "old" && c != "new" {
			return fmt.Errorf("f is %q", c)
		}
		to, err := d.OpenDir("to")
		if err != nil {
			return err
		}
		here, there := content(d, "g"), content(to, "g")
		if (here == "moved") == (there == "moved") {
			return fmt.Errorf("a moved file is in %q and %q", here, there)
		}
		places[here]++
		return nil
	})
	if len(places) != 2 {
		t.Fatalf("always the same: %v", places)
	}
	// Syncing the target alone makes the whole move durable.
	ok(t, to.Sync())
	if content(openDir(t, m.Crash(0), "/"), "g") != "none" {
		t.Fatal("half of a rename is durable")
	}
}

func TestCrashIsReproducible(t *testing.T) {
	m := vfs.NewMem()
	d := openDir(t, m, "/")
	f := openFile(t, d, "f", vfs.Create)
	ok(t, d.Sync())
	for i := range 100 {
		_, _ = f.WriteAt(bytes.Repeat([]byte{byte(i)}, 700), int64(i)*500)
	}
	for seed := range uint64(20) {
		a, b := openDir(t, m.Crash(seed), "/"), openDir(t, m.Crash(seed), "/")
		if content(a, "f") != content(b, "f") {
			t.Fatalf("seed %d gives two disks", seed)
		}
	}
}

func TestKillEndsHandlesOnly(t *testing.T) {
	m := vfs.NewMem()
	d := openDir(t, m, "/")
	ok(t, d.Lock())
	f := openFile(t, d, "f", vfs.Create)
	_, _ = f.WriteAt([]byte("unsynced"), 0)
	m.Kill()
	_, err := f.WriteAt([]byte("ghost"), 0)
	want(t, err, block.ErrIO)
	again := openDir(t, m, "/")
	ok(t, again.Lock())
	if content(again, "f") != "unsynced" {
		t.Fatal("a kill lost the page cache")
	}
	if content(openDir(t, m.Crash(0), "/"), "f") != "none" {
		t.Fatal("a kill made something durable")
	}
}

func TestCapacity(t *testing.T) {
	m := vfs.NewMem()
	m.SetCapacity(16 << 10)
	d := openDir(t, m, "/")
	f := openFile(t, d, "f", vfs.Create)
	n, err := f.WriteAt(make([]byte, 20<<10), 0)
	want(t, err, block.ErrNoSpace)
	if n != 16<<10 {
		t.Fatalf("%d bytes fit", n)
	}
	_, err = f.WriteAt(make([]byte, 16<<10), 0) // overwriting needs none
	ok(t, err)
	ok(t, f.PunchHole(4096, 4096))
	_, err = f.WriteAt(make([]byte, 4096), 1<<20)
	ok(t, err)
	ok(t, d.Unlink("f"))
	if s, _ := d.Space(); s.Available != 0 {
		t.Fatal("an unlinked open file takes no space")
	}
	ok(t, f.Close())
	if s, _ := d.Space(); s.Available != 16<<10 {
		t.Fatalf("%d bytes free", s.Available)
	}
}

func TestRules(t *testing.T) {
	rules := new(vfs.Rules)
	d := openDir(t, vfs.Inject(vfs.NewMem(), rules.Hook), "/")
	f := openFile(t, d, "head.img", vfs.Create)
	for _, r := range []string{"datasync head.* #2 eio", "write head.img #2+ enospc short=3", "tryread * * again"} {
		ok(t, rules.Add(r))
	}
	ok(t, f.Datasync())
	want(t, f.Datasync(), block.ErrIO)
	ok(t, f.Datasync())
	_, err := f.WriteAt([]byte("hello"), 0)
	ok(t, err)
	for range 2 {
		n, err := f.WriteAt([]byte("HELLO"), 0)
		want(t, err, block.ErrNoSpace)
		if n != 3 {
			t.Fatalf("%d bytes", n)
		}
	}
	_, err = f.TryReadAt(make([]byte, 5), 0)
	if err != vfs.ErrWouldBlock { //nolint:errorlint // the contract says bare
		t.Fatal(err)
	}
	rules.Clear()
	p := make([]byte, 5)
	_, err = f.ReadAt(p, 0)
	ok(t, err)
	if string(p) != "HELlo" {
		t.Fatalf("%q", p)
	}
}

func FuzzParseRule(f *testing.F) {
	f.Add("datasync head.img #1 eio")
	f.Add("* * #3+ enospc short=4096")
	f.Add("write [a * again")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := vfs.ParseRule(text)
		if err != nil {
			if !errors.Is(err, block.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		again, err := vfs.ParseRule(r.String())
		if err != nil || again != r {
			t.Fatalf("%q became %q: %+v, %v", text, r.String(), again, err)
		}
	})
}
