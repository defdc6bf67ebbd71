// Package mounttest lets tests mount: in a mount namespace of their own, so that
// they see and leave nothing of the machine's, and on loop devices.
package mounttest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// private is set in a test process that has a mount namespace of its own.
const private = "GABION_TEST_PRIVATE_MOUNTS"

// Main runs a package's tests in a mount namespace of their own, if the machine
// lets it. It is TestMain's only statement and does not return.
func Main(run func() int) {
	if os.Getenv(private) != "" || os.Geteuid() != 0 {
		os.Exit(run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// Under the race detector a process sleeps for a second at its end, and mount.Linux starts many.
	cmd.Env = append(os.Environ(), private+"=1", "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		os.Exit(0)
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	}
	os.Exit(run()) // no such right: the tests that need it skip
}

// Need skips a test where the machine does not let it mount; in CI it must.
func Need(t testing.TB, tools ...string) {
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
}

// Disk is a loop device on a sparse file.
type Disk struct{ Path, File string }

// NewDisk makes one of size bytes that goes with the test.
func NewDisk(t testing.TB, size int64) Disk { t.Helper(); return NewDiskIn(t, t.TempDir(), size) }

// NewDiskIn is NewDisk with its file in a directory of the caller's.
func NewDiskIn(t testing.TB, dir string, size int64) Disk {
	t.Helper()
	file := filepath.Join(dir, "disk")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		t.Fatal(err)
	}
	return attach(t, file)
}

func attach(t testing.TB, file string, flags ...string) Disk {
	t.Helper()
	d := Disk{File: file, Path: strings.TrimSpace(Sh(t, "losetup", append([]string{"--find", "--show", file}, flags...)...))}
	t.Cleanup(func() { Sh(t, "losetup", "--detach", d.Path) })
	return d
}

// ReadOnly attaches the disk's file once more, read-only.
func (d Disk) ReadOnly(t testing.TB) Disk { t.Helper(); return attach(t, d.File, "--read-only") }

// Grow gives the disk another size.
func (d Disk) Grow(t testing.TB, size int64) {
	t.Helper()
	if err := os.Truncate(d.File, size); err != nil {
		t.Fatal(err)
	}
	Sh(t, "losetup", "--set-capacity", d.Path)
}

// Write writes through the device.
func (d Disk) Write(t testing.TB, off int64, p []byte) {
	t.Helper()
	f, err := os.OpenFile(d.Path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(p, off)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// Sh runs a tool and returns what it said.
func Sh(t testing.TB, tool string, args ...string) string {
	t.Helper()
	out, err := exec.Command(tool, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", tool, strings.Join(args, " "), err, out)
	}
	return string(out)
}
