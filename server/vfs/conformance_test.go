package vfs_test

import (
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// TestConformance holds every implementation to the same contract.
func TestConformance(t *testing.T) {
	for name, start := range map[string]func(t *testing.T) vfs.Dir{
		"os":  func(t *testing.T) vfs.Dir { return openDir(t, vfs.OS{}, t.TempDir()) },
		"mem": func(t *testing.T) vfs.Dir { return openDir(t, vfs.NewMem(), "/") },
		"injected": func(t *testing.T) vfs.Dir {
			return openDir(t, vfs.Inject(vfs.NewMem(), new(vfs.Rules).Hook), "/")
		},
	} {
		t.Run(name, func(t *testing.T) {
			for what, test := range conformance {
				t.Run(what, func(t *testing.T) { test(t, start(t)) })
			}
		})
	}
}

var conformance = map[string]func(*testing.T, vfs.Dir){
	"names":       testNames,
	"files":       testFiles,
	"directories": testDirectories,
	"holes":       testHoles,
	"try":         testTry,
	"replace":     testReplace,
	"lock":        testLock,
	"identity":    testIdentity,
}

func openDir(t *testing.T, fs vfs.FS, path string) vfs.Dir {
	t.Helper()
	d, err := fs.OpenDir(path)
	ok(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func openFile(t *testing.T, d vfs.Dir, name string, flag vfs.Flag) vfs.File {
	t.Helper()
	f, err := d.Open(name, flag)
	ok(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got error %v, want %v", err, target)
	}
}

func testNames(t *testing.T, d vfs.Dir) {
	for _, name := range []string{"", ".", "..", "a/b", "/etc", "a\x00b", string(make([]byte, 300))} {
		_, err := d.Open(name, vfs.Create)
		want(t, err, block.ErrInvalid)
		want(t, d.Mkdir(name), block.ErrInvalid)
		want(t, d.Unlink(name), block.ErrInvalid)
		_, err = d.Stat(name)
		want(t, err, block.ErrInvalid)
		_, err = d.OpenDir(name)
		want(t, err, block.ErrInvalid)
		want(t, d.Rename("x", d, name), block.ErrInvalid)
	}
}

func testFiles(t *testing.T, d vfs.Dir) {
	_, err := d.Open("f", 0)
	want(t, err, block.ErrNotFound)
	f := openFile(t, d, "f", vfs.Create|vfs.Exclusive)
	_, err = d.Open("f", vfs.Create|vfs.Exclusive)
	want(t, err, block.ErrExists)

	n, err := f.WriteAt([]byte("hello"), 4094)
	ok(t, err)
	if n != 5 {
		t.Fatalf("wrote %d", n)
	}
	p := make([]byte, 10)
	n, err = f.ReadAt(p, 4092)
	if n != 7 || err != io.EOF || string(p[:n]) != "\x00\x00hello" {
		t.Fatalf("read %d %q %v", n, p[:n], err)
	}
	ok(t, f.Truncate(100))
	ok(t, f.Truncate(8192))
	info, err := f.Stat()
	ok(t, err)
	if info.Size != 8192 || info.Links != 1 || info.Dir {
		t.Fatalf("stat %+v", info)
	}
	n, err = f.ReadAt(p, 4092)
	if n != 10 || err != nil || !bytes.Equal(p, make([]byte, 10)) {
		t.Fatalf("after shrinking and growing: %d %q %v", n, p, err)
	}
	ok(t, f.Datasync())
	ok(t, f.Sync())
	ok(t, d.Unlink("f"))
	if info, err = f.Stat(); err != nil || info.Links != 0 {
		t.Fatalf("an unlinked open file has %d links, %v", info.Links, err)
	}
	want(t, d.Unlink("f"), block.ErrNotFound)
}

func testDirectories(t *testing.T, d vfs.Dir) {
	ok(t, d.Mkdir("b"))
	want(t, d.Mkdir("b"), block.ErrExists)
	b, err := d.OpenDir("b")
	ok(t, err)
	defer b.Close()
	openFile(t, b, "f", vfs.Create)
	_, err = d.OpenDir("nothing")
	want(t, err, block.ErrNotFound)
	want(t, d.Rmdir("b"), block.ErrExists)
	openFile(t, d, "a", vfs.Create)
	ok(t, b.Rename("f", d, "c"))
	want(t, b.Rename("f", d, "c"), block.ErrNotFound)
	list, err := d.ReadDir()
	ok(t, err)
	if len(list) != 3 || list[0] != (vfs.Entry{Name: "a"}) || list[1] != (vfs.Entry{Name: "b", Dir: true}) || list[2].Name != "c" {
		t.Fatalf("listed %v", list)
	}
	ok(t, d.Rename("a", d, "c"))
	ok(t, d.Rmdir("b"))
	ok(t, d.Sync())
	_, err = d.Stat("a")
	want(t, err, block.ErrNotFound)
	_, err = d.Open("c", vfs.ReadOnly)
	ok(t, err)
}

func testHoles(t *testing.T, d vfs.Dir) {
	f := openFile(t, d, "f", vfs.Create)
	ok(t, f.Truncate(1<<40))
	if _, err := f.SeekData(0); err != io.EOF {
		t.Fatalf("an empty file has data: %v", err)
	}
	data := bytes.Repeat([]byte{7}, 64<<10)
	_, err := f.WriteAt(data, 1<<20)
	ok(t, err)
	seeks := func(from, data, hole int64) {
		t.Helper()
		if at, err := f.SeekData(from); err != nil || at != data {
			t.Fatalf("data after %d at %d, %v; want %d", from, at, err, data)
		}
		if at, err := f.SeekHole(data); err != nil || at != hole {
			t.Fatalf("hole after %d at %d, %v; want %d", data, at, err, hole)
		}
	}
	seeks(0, 1<<20, 1<<20+64<<10)
	seeks(1<<20+100, 1<<20+100, 1<<20+64<<10)

	// A punch off the grid zeroes the edges and frees what lies between.
	if err := f.PunchHole(1<<20+512, 32<<10); errors.Is(err, block.ErrUnsupported) {
		t.Skip("no holes here")
	} else if err != nil {
		t.Fatal(err)
	}
	clear(data[512 : 512+32<<10])
	got := make([]byte, len(data))
	_, err = f.ReadAt(got, 1<<20)
	ok(t, err)
	if !bytes.Equal(got, data) {
		t.Fatal("a punch changed something else, or not everything")
	}
	seeks(1<<20+4096, 1<<20+32<<10, 1<<20+64<<10)

	if mapped, err := f.Mapped(1<<20+4096, 32<<10); err != nil || mapped {
		t.Fatalf("a hole is mapped: %v %v", mapped, err)
	}
	ok(t, f.ZeroRange(1<<20+512, 32<<10))
	_, err = f.ReadAt(got, 1<<20)
	ok(t, err)
	if !bytes.Equal(got, data) {
		t.Fatal("zeroing changed something else")
	}
	if mapped, err := f.Mapped(1<<20, 64<<10); err != nil || !mapped {
		t.Fatalf("a zeroed range is not mapped: %v %v", mapped, err)
	}
	info, err := f.Stat()
	ok(t, err)
	if info.Allocated < 64<<10 || info.Allocated > 256<<10 || info.Size != 1<<40 {
		t.Fatalf("stat %+v", info)
	}
}

func testTry(t *testing.T, d vfs.Dir) {
	f := openFile(t, d, "f", vfs.Create)
	data := bytes.Repeat([]byte{1, 2, 3, 4}, 1024)
	_, err := f.WriteAt(data, 0)
	ok(t, err)
	got := make([]byte, 4096)
	n, err := f.TryReadAt(got, 0)
	switch {
	case errors.Is(err, vfs.ErrWouldBlock), errors.Is(err, block.ErrUnsupported):
	case err != nil || !bytes.Equal(got[:n], data[:n]):
		t.Fatalf("tried to read: %d %v", n, err)
	}
	n, err = f.TryWriteAt(data[1:4001], 0)
	if err != nil && !errors.Is(err, vfs.ErrWouldBlock) && !errors.Is(err, block.ErrUnsupported) {
		t.Fatal(err)
	}
	_, err = f.ReadAt(got, 0)
	ok(t, err)
	if !bytes.Equal(got[:n], data[1:1+n]) || !bytes.Equal(got[n:], data[n:]) {
		t.Fatalf("tried to write: %d bytes said, content differs", n)
	}
}

func testReplace(t *testing.T, d vfs.Dir) {
	for _, content := range []string{"one", "a longer second", ""} {
		ok(t, vfs.Replace(d, "f", []byte(content)))
		p, err := vfs.ReadFile(d, "f", 100)
		ok(t, err)
		if string(p) != content {
			t.Fatalf("read %q", p)
		}
	}
	ok(t, vfs.Replace(d, "f", make([]byte, 101)))
	_, err := vfs.ReadFile(d, "f", 100)
	want(t, err, block.ErrTooLarge)
	// What an interrupted Replace left is in nobody's way.
	openFile(t, d, "f"+vfs.NewSuffix, vfs.Create)
	ok(t, vfs.Replace(d, "f", nil))
	list, err := d.ReadDir()
	ok(t, err)
	if len(list) != 1 {
		t.Fatalf("left behind: %v", list)
	}
}

func testLock(t *testing.T, d vfs.Dir) {
	ok(t, d.Mkdir("locked"))
	a, err := d.OpenDir("locked")
	ok(t, err)
	b, err := d.OpenDir("locked")
	ok(t, err)
	ok(t, a.Lock())
	want(t, b.Lock(), block.ErrInUse)
	ok(t, a.Close())
	ok(t, b.Lock())
	ok(t, b.Close())
}

func testIdentity(t *testing.T, d vfs.Dir) {
	ok(t, d.Mkdir("sub"))
	sub, err := d.OpenDir("sub")
	ok(t, err)
	defer sub.Close()
	one, err := sub.Identity()
	ok(t, err)
	info, err := d.Stat("sub")
	ok(t, err)
	two, err := d.Identity()
	ok(t, err)
	if one.Inode != info.Inode || one.Inode == two.Inode || one.Mount == "" || one.Mount != two.Mount || one.Type == "" {
		t.Fatalf("identities %+v and %+v, stat %+v", one, two, info)
	}
	if s, err := d.Space(); err != nil || s.Available <= 0 || s.Capacity < s.Available {
		t.Fatalf("space %+v, %v", s, err)
	}
}

// TestNoAllocation keeps the hot path free of garbage.
func TestNoAllocation(t *testing.T) {
	d := openDir(t, vfs.OS{}, filepath.Clean(t.TempDir()))
	f := openFile(t, d, "f", vfs.Create)
	p := make([]byte, 4096)
	if n := testing.AllocsPerRun(100, func() {
		_, _ = f.WriteAt(p, 0)
		_, _ = f.ReadAt(p, 0)
		_, _ = f.TryWriteAt(p, 0)
		_, _ = f.TryReadAt(p, 0)
	}); n != 0 {
		t.Fatalf("%v allocations in four operations", n)
	}
}
