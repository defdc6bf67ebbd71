package mount_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// private is set in a test process that has a mount namespace of its own.
const private = "GABION_TEST_PRIVATE_MOUNTS"

// TestMain runs the tests in a mount namespace of their own, so that they see
// and leave nothing of the machine's.
func TestMain(m *testing.M) {
	if os.Getenv(private) != "" || os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), private+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		panic(err)
	}
	os.Exit(0)
}

// needHost skips where the machine does not let the test mount; in CI it must.
func needHost(t *testing.T, tools ...string) *mount.Linux {
	t.Helper()
	skip := t.Skipf
	if os.Getenv("CI") == "true" {
		skip = t.Fatalf
	}
	if os.Getenv(private) == "" {
		skip("mounting needs root")
	}
	for _, tool := range append([]string{"losetup", "blkid", "mkfs.ext4", "mkfs.xfs"}, tools...) {
		if _, err := exec.LookPath(tool); err != nil {
			skip("%s is not installed: run make setup", tool)
		}
	}
	return mount.NewLinux()
}

// disk is a loop device on a sparse file.
type disk struct {
	path, file string
}

func newDisk(t *testing.T, size int64) disk {
	t.Helper()
	d := disk{file: filepath.Join(t.TempDir(), "disk")}
	f, err := os.Create(d.file)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		t.Fatal(err)
	}
	d.path = strings.TrimSpace(sh(t, "losetup", "--find", "--show", d.file))
	t.Cleanup(func() { sh(t, "losetup", "--detach", d.path) })
	return d
}

// grow is what the server and the kernel do before a file system can grow.
func (d disk) grow(t *testing.T, size int64) {
	t.Helper()
	if err := os.Truncate(d.file, size); err != nil {
		t.Fatal(err)
	}
	sh(t, "losetup", "--set-capacity", d.path)
}

// readOnly attaches the disk anew, read-only.
func (d disk) readOnly(t *testing.T) disk {
	t.Helper()
	ro := disk{file: d.file}
	ro.path = strings.TrimSpace(sh(t, "losetup", "--find", "--show", "--read-only", d.file))
	t.Cleanup(func() { sh(t, "losetup", "--detach", ro.path) })
	return ro
}

func (d disk) write(t *testing.T, off int64, p []byte) {
	t.Helper()
	f, err := os.OpenFile(d.path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(p, off); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

func (d disk) number(t *testing.T, l *mount.Linux) mount.Number {
	t.Helper()
	b, err := l.Inspect(d.path)
	if err != nil {
		t.Fatal(err)
	}
	return b.Number
}

func sh(t *testing.T, tool string, args ...string) string {
	t.Helper()
	out, err := exec.Command(tool, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", tool, strings.Join(args, " "), err, out)
	}
	return string(out)
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
			d := newDisk(t, 512*MiB)
			n := d.number(t, l)
			must(t, l.Format(mount.Format{Device: d.path, Type: fs, Blank: true}))
			if c, err := l.Probe(d.path); err != nil || c.Type != string(fs) {
				t.Fatalf("probe: %+v, %v", c, err)
			}
			must(t, l.Check(d.path, fs))
			f := mount.FileSystem{Device: d.path, Type: fs, Options: options(t, fs, "noatime,nodev", "discard")}
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
			_, err := l.Probe(d.path)
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
			must(t, l.Check(d.path, fs))
			must(t, l.Remove(target))
			must(t, l.Remove(target))
		})
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
func grows(t *testing.T, l *mount.Linux, d disk, fs mount.FS, points ...string) {
	t.Helper()
	if fs == mount.Ext4 && !mayResize(t) {
		t.Log("ext4 grows for CAP_SYS_RESOURCE only, which is missing here")
		return
	}
	before, err := l.Usage(points[0])
	must(t, err)
	d.grow(t, 1024*MiB)
	for _, p := range points {
		must(t, l.Grow(d.path, p, fs))
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
