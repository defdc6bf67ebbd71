package mount_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/mount/mounttest"
	"github.com/gabion-storage/gabion/server/block"
)

func TestMain(m *testing.M) { mounttest.Main(m.Run) }

func needHost(t *testing.T, tools ...string) *mount.Linux {
	t.Helper()
	mounttest.Need(t, tools...)
	return mount.NewLinux()
}

func number(t *testing.T, l *mount.Linux, d mounttest.Disk) mount.Number {
	t.Helper()
	b, err := l.Inspect(d.Path)
	must(t, err)
	return b.Number
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused checks an error's sentinel and what it names.
func refused(t *testing.T, err, sentinel error, words ...string) {
	t.Helper()
	if !errors.Is(err, sentinel) {
		t.Fatalf("got %v, want %v", err, sentinel)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Fatalf("%q does not name %q", err, w)
		}
	}
}

func dir(t *testing.T, name string) string {
	t.Helper()
	p, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	p = filepath.Join(p, name)
	must(t, os.Mkdir(p, 0o755))
	return p
}

func at(t *testing.T, l *mount.Linux, point string) (mount.Entry, bool) {
	t.Helper()
	table, err := l.Table()
	must(t, err)
	return table.At(point)
}

func options(t *testing.T, fs mount.FS, flags ...string) mount.Options {
	t.Helper()
	o, err := mount.ParseOptions(fs, flags)
	must(t, err)
	return o
}

const MiB = 1 << 20

func TestLifeOfAFileSystem(t *testing.T) {
	l := needHost(t)
	for _, fs := range []mount.FS{mount.Ext4, mount.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			d := mounttest.NewDisk(t, 512*MiB)
			n := number(t, l, d)
			must(t, l.Format(mount.Format{Device: d.Path, Type: fs, Blank: true}))
			if c, err := l.Probe(d.Path); err != nil || c.Type != string(fs) {
				t.Fatalf("probe: %+v, %v", c, err)
			}
			must(t, l.Check(d.Path, fs))
			f := mount.FileSystem{Device: d.Path, Type: fs, Options: options(t, fs, "noatime,nodev", "discard")}
			must(t, l.Try(f))
			if table, _ := l.Table(); len(table.FileSystemOf(n)) != 0 {
				t.Fatal("a trial shows in the mount table")
			}
			staging, target := dir(t, "staging"), dir(t, "a b")
			must(t, l.Mount(f, staging))
			e, ok := at(t, l, staging)
			if !ok || e.Number != n || e.Root != "/" || e.Type != string(fs) || e.ReadOnly || e.SuperReadOnly {
				t.Fatalf("staged: %+v, %v", e, ok)
			}
			if line := mountLine(t, staging); !strings.Contains(line, "noatime") || !strings.Contains(line, "nodev") || !strings.Contains(line, "discard") {
				t.Fatalf("options: %s", line)
			}
			_, err := l.Probe(d.Path)
			refused(t, err, block.ErrInUse)
			must(t, l.BindFS(staging, target, n, false))
			must(t, os.WriteFile(filepath.Join(target, "f"), []byte("x"), 0o600))
			busy(t, l, target)
			grows(t, l, d, fs, target, staging)
			must(t, l.Unmount(staging))
			if _, err := os.Stat(filepath.Join(target, "f")); err != nil {
				t.Fatal(err)
			}
			must(t, l.Unmount(target))
			must(t, l.Unmount(target)) // again
			must(t, l.Unmount(target+"/no/such"))
			must(t, l.Check(d.Path, fs))
			must(t, l.Remove(target))
			must(t, l.Remove(target))
		})
	}
}

// ext4 counts its errors, and forgets them when it is checked. Some kernels show nowhere else that it has stopped.
func TestUsageCountsErrors(t *testing.T) {
	l := needHost(t)
	d := mounttest.NewDisk(t, 64*MiB)
	mounttest.Sh(t, "mkfs.ext4", "-q", d.Path)
	point := t.TempDir()
	f := mount.FileSystem{Device: d.Path, Type: mount.Ext4}
	errorsNow := func() int64 {
		u, err := l.Usage(point)
		must(t, err)
		return u.Errors
	}
	must(t, l.Mount(f, point))
	t.Cleanup(func() { _ = l.Unmount(point) })
	if n := errorsNow(); n != 0 {
		t.Errorf("a new file system has met %d errors", n)
	}
	trigger := "/sys/fs/ext4/" + filepath.Base(d.Path) + "/trigger_fs_error"
	if err := os.WriteFile(trigger, []byte("x"), 0); err != nil {
		t.Skipf("this machine lets nobody make errors: %v", err)
	}
	if n := errorsNow(); n != 1 {
		t.Errorf("%d errors", n)
	}
	refused(t, l.Writable(point), block.ErrReadOnly, point)
	must(t, l.Unmount(point))
	must(t, l.Check(d.Path, mount.Ext4))
	must(t, l.Mount(f, point))
	if n := errorsNow(); n != 0 {
		t.Errorf("%d errors after a check", n)
	}
}

// busy shows that a mount in use stays (B045).
func busy(t *testing.T, l *mount.Linux, point string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(point, "f"), os.O_RDWR, 0)
	must(t, err)
	refused(t, l.Unmount(point), block.ErrInUse, point)
	if _, ok := at(t, l, point); !ok {
		t.Fatal("a busy mount has gone")
	}
	_, err = f.WriteString("later")
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

// grows shows that each tool is given what it takes (B092), twice.
func grows(t *testing.T, l *mount.Linux, d mounttest.Disk, fs mount.FS, points ...string) {
	t.Helper()
	if fs == mount.Ext4 && !mayResize(t) {
		t.Log("ext4 grows for CAP_SYS_RESOURCE only, which is missing here")
		return
	}
	before, err := l.Usage(points[0])
	must(t, err)
	d.Grow(t, 1024*MiB)
	for _, p := range points {
		must(t, l.Grow(d.Path, p, fs))
	}
	after, err := l.Usage(points[0])
	must(t, err)
	if after.Total < before.Total+400*MiB || after.Available > after.Total || after.Used <= 0 {
		t.Fatalf("grown from %+v to %+v", before, after)
	}
}

func mayResize(t *testing.T) bool {
	b, err := os.ReadFile("/proc/self/status")
	must(t, err)
	_, rest, _ := strings.Cut(string(b), "CapEff:")
	caps, err := strconv.ParseUint(strings.Fields(rest)[0], 16, 64)
	must(t, err)
	return caps&(1<<unix.CAP_SYS_RESOURCE) != 0
}

func mountLine(t *testing.T, point string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 4 && f[4] == point {
			return line
		}
	}
	return ""
}
