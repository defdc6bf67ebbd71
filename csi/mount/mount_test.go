package mount_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/mount/mounttest"
	"github.com/gabion-storage/gabion/server/block"
)

// crashed returns a disk with a file system as a power cut left it: the file
// "kept" was synced, the journal was not replayed.
func crashed(t *testing.T, l *mount.Linux, fs mount.FS) mounttest.Disk {
	t.Helper()
	d := mounttest.NewDisk(t, 512*MiB)
	must(t, l.Format(mount.Format{Device: d.Path, Type: fs, Blank: true}))
	point := dir(t, "crash")
	must(t, l.Mount(mount.FileSystem{Device: d.Path, Type: fs}, point))
	for i := range 20 {
		f, err := os.Create(filepath.Join(point, fmt.Sprintf("kept%d", i)))
		must(t, err)
		_, err = f.WriteString("kept")
		must(t, errors.Join(err, f.Sync(), f.Close()))
	}
	mounttest.Sh(t, "xfs_io", "-x", "-c", "shutdown -f", point)
	must(t, l.Unmount(point))
	mounttest.Sh(t, "sync", d.File)
	return d
}

// writes is how many writes and discards the kernel has sent to a disk.
func writes(t *testing.T, d mounttest.Disk) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(d.Path), "stat"))
	must(t, err)
	total := 0
	for _, i := range []int{4, 11} {
		n, err := strconv.Atoi(strings.Fields(string(b))[i])
		must(t, err)
		total += n
	}
	return total
}

// B080: the journal is replayed, by mounting; nothing clears a log.
func TestB080JournalIsReplayed(t *testing.T) {
	l := needHost(t, "xfs_io")
	for _, fs := range []mount.FS{mount.Ext4, mount.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			d := crashed(t, l, fs)
			must(t, l.Check(d.Path, fs))
			must(t, l.Check(d.Path, fs))
			point := dir(t, "point")
			must(t, l.Mount(mount.FileSystem{Device: d.Path, Type: fs}, point))
			defer func() { must(t, l.Unmount(point)) }()
			for i := range 20 {
				if b, err := os.ReadFile(filepath.Join(point, fmt.Sprintf("kept%d", i))); err != nil || string(b) != "kept" {
					t.Fatalf("%q, %v", b, err)
				}
			}
		})
	}
}

// B081: a read-only volume is mounted as it is, on two nodes at once: no
// recovery, not one byte is written.
func TestB081ReadOnlyMountsAsItIs(t *testing.T) {
	l := needHost(t, "xfs_io")
	for _, fs := range []mount.FS{mount.Ext4, mount.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			d := crashed(t, l, fs)
			before := writes(t, d)
			for i, one := range []mounttest.Disk{d.ReadOnly(t), d.ReadOnly(t)} {
				point := dir(t, fmt.Sprint("point", i))
				f := mount.FileSystem{Device: one.Path, Type: fs, ReadOnly: true, Options: options(t, fs, "noatime")}
				was := writes(t, one) // the loop device had another disk before
				must(t, l.Mount(f, point))
				defer func() {
					must(t, l.Unmount(point))
					if n := writes(t, one) - was; n > 0 {
						t.Fatalf("%d writes", n)
					}
				}()
				if _, err := os.ReadDir(point); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(point, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
					t.Fatalf("writing: %v", err)
				}
				if e, _ := at(t, l, point); !e.ReadOnly || !e.SuperReadOnly {
					t.Fatalf("%+v", e)
				}
			}
			if writes(t, d) != before {
				t.Fatal("a read-only mount wrote")
			}
			err := l.Mount(mount.FileSystem{Device: d.ReadOnly(t).Path, Type: fs}, dir(t, "rw"))
			if err == nil {
				t.Fatal("a read-only device was mounted for writing")
			}
		})
	}
}

// B068: a damaged superblock is never taken for a blank device, and what is wrong is told.
func TestB068DamageIsTold(t *testing.T) {
	l := needHost(t, "debugfs")
	t.Run("signature gone", func(t *testing.T) {
		d := mounttest.NewDisk(t, 64*MiB)
		must(t, l.Format(mount.Format{Device: d.Path, Type: mount.Ext4, Blank: true}))
		d.Write(t, 0x438, []byte{0, 0})
		before := writes(t, d)
		refused(t, l.Try(mount.FileSystem{Device: d.Path, Type: mount.Ext4}), block.ErrPrecondition, d.Path)
		if writes(t, d) != before {
			t.Fatal("something was written")
		}
	})
	t.Run("faults for a person", func(t *testing.T) {
		d := mounttest.NewDisk(t, 64*MiB)
		must(t, l.Format(mount.Format{Device: d.Path, Type: mount.Ext4, Blank: true}))
		mounttest.Sh(t, "debugfs", "-w", "-R", "clri <2>", d.Path)
		mounttest.Sh(t, "debugfs", "-w", "-R", "ssv state 2", d.Path)
		refused(t, l.Check(d.Path, mount.Ext4), block.ErrCorrupt, d.Path, "e2fsck")
	})
	t.Run("xfs", func(t *testing.T) {
		d := mounttest.NewDisk(t, 512*MiB)
		must(t, l.Format(mount.Format{Device: d.Path, Type: mount.XFS, Blank: true}))
		d.Write(t, 200, bytes.Repeat([]byte{0xff}, 8)) // the superblock's checksum
		err := l.Try(mount.FileSystem{Device: d.Path, Type: mount.XFS})
		refused(t, err, block.ErrCorrupt, d.Path, "xfs_repair")
	})
}

// What has been formatted once is formatted again the same way, whatever a first try left.
func TestFormatAfterAnInterruptedOne(t *testing.T) {
	l := needHost(t)
	for _, fs := range []mount.FS{mount.Ext4, mount.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			d := mounttest.NewDisk(t, 512*MiB)
			must(t, l.Format(mount.Format{Device: d.Path, Type: fs, Blank: true}))
			d.Write(t, 4096, bytes.Repeat([]byte{0xff}, MiB))
			must(t, l.Format(mount.Format{Device: d.Path, Type: fs}))
			must(t, l.Check(d.Path, fs))
			must(t, l.Try(mount.FileSystem{Device: d.Path, Type: fs}))
		})
	}
}

// An ext4 that is as good as empty writes little, wherever it lies: an extent
// costs space from its first write on.
func TestFormatIsThin(t *testing.T) {
	l := needHost(t)
	for _, fs := range []mount.FS{mount.Ext4, mount.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			const extent, size = 64 * MiB, 1 << 40
			d := mounttest.NewDisk(t, size)
			must(t, l.Format(mount.Format{Device: d.Path, Type: fs, Blank: true}))
			mounttest.Sh(t, "sync", d.File)
			born, bytes := extents(t, d.File, extent)
			t.Logf("1 TiB: %d extents, %d MiB", born, bytes/MiB)
			if born > 64 {
				t.Fatalf("%d extents are born", born)
			}
		})
	}
}

// extents counts the extents that hold data, and the data's bytes.
func extents(t *testing.T, file string, extent int64) (int, int64) {
	t.Helper()
	f, err := os.Open(file)
	must(t, err)
	defer f.Close()
	born, total := map[int64]bool{}, int64(0)
	for off := int64(0); ; {
		begin, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if err != nil {
			break
		}
		end, err := unix.Seek(int(f.Fd()), begin, unix.SEEK_HOLE)
		must(t, err)
		for i := begin / extent; i*extent < end; i++ {
			born[i] = true
		}
		total += end - begin
		off = end
	}
	return len(born), total
}

func TestSmallXFSIsRefused(t *testing.T) {
	l := needHost(t)
	d := mounttest.NewDisk(t, 299*MiB)
	refused(t, l.Format(mount.Format{Device: d.Path, Type: mount.XFS, Blank: true}), block.ErrPrecondition, "300 MiB", "ext4")
	refused(t, l.Format(mount.Format{Device: d.Path, Type: "btrfs"}), block.ErrInvalid, "btrfs")
	refused(t, l.Format(mount.Format{Device: d.File, Type: mount.Ext4}), block.ErrPrecondition, d.File)
}

// B074, B071: what is bound is what was meant, or nothing.
func TestB074BindComparesTheDevice(t *testing.T) {
	l := needHost(t)
	a, b := mounttest.NewDisk(t, 64*MiB), mounttest.NewDisk(t, 64*MiB)
	must(t, l.Format(mount.Format{Device: a.Path, Type: mount.Ext4, Blank: true}))
	staging, target := dir(t, "staging"), dir(t, "target")

	t.Run("nothing is staged", func(t *testing.T) {
		refused(t, l.BindFS(staging, target, number(t, l, a), false), block.ErrPrecondition, staging)
	})
	must(t, l.Mount(mount.FileSystem{Device: a.Path, Type: mount.Ext4}, staging))
	defer func() { must(t, l.Unmount(staging)) }()
	t.Run("another device", func(t *testing.T) {
		refused(t, l.BindFS(staging, target, number(t, l, b), false), block.ErrPrecondition, staging)
	})
	t.Run("read-only", func(t *testing.T) {
		must(t, l.BindFS(staging, target, number(t, l, a), true))
		if err := os.WriteFile(filepath.Join(target, "f"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Fatal(err)
		}
		must(t, os.WriteFile(filepath.Join(staging, "f"), nil, 0o600))
		refused(t, l.Writable(target), block.ErrReadOnly, target)
		if e, _ := at(t, l, target); !e.ReadOnly || e.SuperReadOnly {
			t.Fatalf("%+v", e)
		}
		must(t, l.Unmount(target))
	})
	t.Run("stacked", func(t *testing.T) {
		must(t, l.BindFS(staging, target, number(t, l, a), false))
		must(t, l.BindFS(staging, target, number(t, l, a), true))
		if e, _ := at(t, l, target); !e.ReadOnly {
			t.Fatalf("not the topmost: %+v", e)
		}
		must(t, l.Unmount(target))
		if e, ok := at(t, l, target); !ok || e.ReadOnly {
			t.Fatalf("%+v, %v", e, ok)
		}
		must(t, l.Unmount(target))
	})
	t.Run("target is a link", func(t *testing.T) {
		link := target + ".link"
		must(t, os.Symlink(target, link))
		if err := l.BindFS(staging, link, number(t, l, a), false); err == nil {
			t.Fatal("a link was followed")
		}
		if _, ok := at(t, l, target); ok {
			t.Fatal("a link was followed")
		}
	})
}

// B071: what is published of a raw volume is its block device.
func TestB071NodesAreBound(t *testing.T) {
	l := needHost(t)
	d, other := mounttest.NewDisk(t, 64*MiB), mounttest.NewDisk(t, 64*MiB)
	n := number(t, l, d)
	target := filepath.Join(dir(t, "block"), "dev")
	for range 2 {
		_, err := l.MakeFile(target)
		must(t, err)
	}
	refused(t, l.BindNode(other.Path, target, n, false), block.ErrPrecondition, other.Path)
	regular := filepath.Join(t.TempDir(), "regular")
	must(t, os.WriteFile(regular, nil, 0o600))
	refused(t, l.BindNode(regular, target, n, false), block.ErrPrecondition, regular)
	must(t, l.BindNode(d.Path, target, n, false))
	if b, err := l.Inspect(target); err != nil || b.Number != n || b.Size != 64*MiB {
		t.Fatalf("%+v, %v", b, err)
	}
	table, err := l.Table()
	must(t, err)
	if got := table.NodesOf(n).Points(); !slices.Equal(got, []string{target}) {
		t.Fatal(got)
	}
	if len(table.FileSystemOf(n)) != 0 {
		t.Fatal("a node was taken for a file system")
	}
	refused(t, l.Remove(target), block.ErrInUse)
	must(t, l.Unmount(target))
	must(t, l.Remove(target))
}

// B073: spellings of one path are one path, and nobody looks behind its last part.
func TestB073PathsAreResolved(t *testing.T) {
	l := needHost(t)
	base := dir(t, "real")
	must(t, os.Mkdir(filepath.Join(base, "globalmount"), 0o755))
	link := base + ".link"
	must(t, os.Symlink(base, link))
	want := filepath.Join(base, "globalmount")
	for _, p := range []string{want, link + "/globalmount", link + "/../" + filepath.Base(link) + "//globalmount/", want + "/."} {
		if got, err := l.Resolve(p); err != nil || got != want {
			t.Errorf("%s: %s, %v", p, got, err)
		}
	}
	must(t, os.Symlink("/nowhere", filepath.Join(base, "dangling")))
	if got, err := l.Resolve(base + "/dangling"); err != nil || got != base+"/dangling" {
		t.Errorf("%s, %v", got, err)
	}
	for p, want := range map[string]error{"relative": block.ErrInvalid, "": block.ErrInvalid, "/": block.ErrInvalid, "/a\x00b": block.ErrInvalid, base + "/none/x": block.ErrNotFound} {
		if _, err := l.Resolve(p); !errors.Is(err, want) {
			t.Errorf("%q: %v", p, err)
		}
	}
}

// B078: what is broken is unmounted by the mount table alone.
func TestB078BrokenMountsAreUnmounted(t *testing.T) {
	l := needHost(t, "xfs_io")
	for _, fs := range []mount.FS{mount.Ext4, mount.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			d := mounttest.NewDisk(t, 512*MiB)
			must(t, l.Format(mount.Format{Device: d.Path, Type: fs, Blank: true}))
			point, target := dir(t, "point"), dir(t, "target")
			must(t, l.Mount(mount.FileSystem{Device: d.Path, Type: fs}, point))
			must(t, os.WriteFile(filepath.Join(point, "dirty"), make([]byte, MiB), 0o600))
			must(t, l.BindFS(point, target, number(t, l, d), false))
			must(t, l.Writable(point))
			mounttest.Sh(t, "xfs_io", "-x", "-c", "shutdown", point)
			if err := l.Writable(point); !errors.Is(err, block.ErrReadOnly) && !errors.Is(err, block.ErrIO) {
				t.Fatalf("a file system that was shut down is writable: %v", err)
			}
			if fs == mount.XFS {
				if _, err := os.Stat(target); err == nil {
					t.Fatal("the file system still answers")
				}
				_, err := l.Usage(target)
				refused(t, err, mount.ErrShutDown, target)
				refused(t, err, block.ErrIO)
				_, err = l.Usage(filepath.Join(target, "below")) // another's way leads through it
				refused(t, err, block.ErrIO)
				if errors.Is(err, mount.ErrShutDown) {
					t.Fatal(err)
				}
			}
			if e, ok := at(t, l, target); !ok || e.Number != number(t, l, d) {
				t.Fatalf("%+v, %v", e, ok)
			}
			if got, err := l.Resolve(target); err != nil || got != target {
				t.Fatal(got, err)
			}
			must(t, l.Unmount(target))
			must(t, l.Unmount(point))
			must(t, l.Remove(target))
			must(t, l.Remove(point))
		})
	}
}

// What is in the way is named and stays.
func TestPathsInTheWay(t *testing.T) {
	l := needHost(t)
	base := dir(t, "base")
	path := func(name string) string { return filepath.Join(base, name) }
	must(t, os.WriteFile(path("content"), []byte("x"), 0o600))
	must(t, os.Symlink("/nowhere", path("link")))
	must(t, unix.Mknod(path("node"), unix.S_IFBLK|0o600, int(unix.Mkdev(43, 200))))
	must(t, os.MkdirAll(path("full/sub"), 0o755))
	for _, name := range []string{"content", "link", "node"} {
		_, err := l.MakeDir(path(name))
		refused(t, err, block.ErrPrecondition, path(name))
		_, err = l.MakeFile(path(name))
		refused(t, err, block.ErrPrecondition, path(name))
	}
	_, err := l.MakeFile(path("full"))
	refused(t, err, block.ErrPrecondition, "directory")
	_, err = l.MakeDir(path("none/sub"))
	refused(t, err, block.ErrPrecondition, "parent")
	for range 2 {
		made, err := l.MakeDir(path("new"))
		must(t, err)
		_ = made
	}
	refused(t, l.Remove(path("content")), block.ErrPrecondition, "content")
	refused(t, l.Remove(path("full")), block.ErrPrecondition, "not empty")
	for _, name := range []string{"link", "node", "new", "none", "none/sub", "content/sub"} {
		must(t, l.Remove(path(name)))
	}
}

// _netdev reaches the table by which systemd orders the shutdown, and leaves it again.
func TestMountsAreAnnounced(t *testing.T) {
	l := needHost(t)
	must(t, unix.Mount("tmpfs", "/run", "tmpfs", 0, ""))
	defer func() { must(t, unix.Unmount("/run", 0)) }()
	d := mounttest.NewDisk(t, 64*MiB)
	must(t, l.Format(mount.Format{Device: d.Path, Type: mount.Ext4, Blank: true}))
	point := dir(t, "point")
	for range 3 {
		must(t, l.Mount(mount.FileSystem{Device: d.Path, Type: mount.Ext4}, point))
		b, err := os.ReadFile("/run/mount/utab")
		must(t, err)
		if !strings.Contains(string(b), "TARGET="+point+" ") || !strings.Contains(string(b), "_netdev") {
			t.Fatalf("utab: %s", b)
		}
		must(t, l.Unmount(point))
		if b, err := os.ReadFile("/run/mount/utab"); err != nil || strings.Contains(string(b), point) {
			t.Fatalf("utab: %s, %v", b, err)
		}
	}
}
