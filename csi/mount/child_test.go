package mount_test

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/mount/mounttest"
)

// stopped is a disk with an ext4 on it that answers no write until thaw: its
// file is in a file system that is frozen.
func stopped(t *testing.T, l *mount.Linux) (d mounttest.Disk, freeze, thaw func()) {
	t.Helper()
	lower := mounttest.NewDisk(t, 256*MiB)
	mounttest.Sh(t, "mkfs.ext4", "-q", lower.Path)
	under := dir(t, "under")
	must(t, l.Mount(mount.FileSystem{Device: lower.Path, Type: mount.Ext4}, under))
	t.Cleanup(func() { must(t, l.Unmount(under)) })
	d = mounttest.NewDiskIn(t, under, 64*MiB)
	must(t, l.Format(mount.Format{Device: d.Path, Type: mount.Ext4}))
	frozen := false
	turn := func(flag string, to bool) func() {
		return func() {
			if frozen != to {
				mounttest.Sh(t, "fsfreeze", flag, under)
				frozen = to
			}
		}
	}
	freeze, thaw = turn("-f", true), turn("-u", false)
	t.Cleanup(thaw)
	return d, freeze, thaw
}

// H76: what waits for a device that does not answer waits in a process that has
// nothing of the plugin's, so that a plugin can be killed and replaced at any time.
func TestH76NothingWaitsInThePlugin(t *testing.T) {
	l := needHost(t, "fsfreeze")
	socket, err := net.Listen("unix", filepath.Join(t.TempDir(), "socket"))
	must(t, err)
	defer socket.Close()
	for _, c := range []struct {
		name    string
		mounted bool // before, with something to be written
		call    func(d mounttest.Disk, point string) error
	}{
		{"unmount", true, func(_ mounttest.Disk, point string) error { return l.Unmount(point) }},
		{"mount", false, func(d mounttest.Disk, point string) error {
			return l.Mount(mount.FileSystem{Device: d.Path, Type: mount.Ext4}, point)
		}},
		{"try", false, func(d mounttest.Disk, _ string) error {
			return l.Try(mount.FileSystem{Device: d.Path, Type: mount.Ext4})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, freeze, thaw := stopped(t, l)
			point := dir(t, "point")
			t.Cleanup(func() { must(t, l.Unmount(point)) })
			if c.mounted {
				must(t, l.Mount(mount.FileSystem{Device: d.Path, Type: mount.Ext4}, point))
				must(t, os.WriteFile(filepath.Join(point, "dirty"), make([]byte, MiB), 0o600))
			}
			freeze()
			waitsApart(t, thaw, func() error { return c.call(d, point) })
		})
	}
	t.Run("writable", func(t *testing.T) {
		d := mounttest.NewDisk(t, 64*MiB)
		mounttest.Sh(t, "mkfs.ext4", "-q", d.Path)
		point := dir(t, "point")
		must(t, l.Mount(mount.FileSystem{Device: d.Path, Type: mount.Ext4}, point))
		t.Cleanup(func() { must(t, l.Unmount(point)) })
		mounttest.Sh(t, "fsfreeze", "-f", point)
		waitsApart(t, func() { mounttest.Sh(t, "fsfreeze", "-u", point) }, func() error { return l.Writable(point) })
	})
}

// waitsApart shows that a call waits, in another process, until release.
func waitsApart(t *testing.T, release func(), call func() error) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- call() }()
	child := ""
	for end := time.Now().Add(10 * time.Second); child == "" && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		child = waitingChild()
	}
	time.Sleep(100 * time.Millisecond)
	if own := stuck("self"); len(own) > 0 {
		t.Errorf("threads of this process wait: %s", own)
	}
	if child == "" {
		t.Error("no child waits")
	} else {
		inheritsNothing(t, child)
	}
	select {
	case err := <-ended:
		t.Fatalf("the call ended without the device: %v", err)
	default:
	}
	release()
	must(t, <-ended)
}

// waitingChild is a child of this process that no signal reaches.
func waitingChild() string {
	files, _ := filepath.Glob("/proc/self/task/*/children")
	for _, file := range files {
		b, _ := os.ReadFile(file)
		for _, pid := range strings.Fields(string(b)) {
			if len(stuck(pid)) > 0 {
				return pid
			}
		}
	}
	return ""
}

// stuck are a process's threads that no signal reaches.
func stuck(pid string) (list []string) {
	files, _ := filepath.Glob("/proc/" + pid + "/task/*/stat")
	for _, file := range files {
		b, _ := os.ReadFile(file)
		if _, rest, ok := strings.Cut(string(b), ") "); ok && strings.HasPrefix(rest, "D") {
			list = append(list, string(b))
		}
	}
	return list
}

// inheritsNothing shows that a child has a process group of its own, and none of this process's sockets.
func inheritsNothing(t *testing.T, pid string) {
	t.Helper()
	id, err := strconv.Atoi(pid)
	must(t, err)
	if group, err := unix.Getpgid(id); err != nil || group == unix.Getpgrp() {
		t.Errorf("the child's group: %d, %v", group, err)
	}
	files, _ := filepath.Glob("/proc/" + pid + "/fd/*")
	for _, file := range files {
		if target, _ := os.Readlink(file); strings.HasPrefix(target, "socket:") {
			t.Errorf("the child has %s", target)
		}
	}
}
