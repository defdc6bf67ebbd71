package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The programs, on the payload disk.
const (
	program = "/gabion/bin/init"
	agent   = "/gabion/bin/agent"
)

// The guest's disks, in the order of the command line that starts it.
const (
	rootDisk    = "/dev/vda" // Debian, thrown away afterwards
	payloadDisk = "/dev/vdb" // binaries and kernel modules
	dataDisk    = "/dev/vdc" // what outlives a power cut
	dataDir     = "/data"
)

// enterRoot runs from the initial archive.
func enterRoot() error {
	if err := unix.Mount("dev", "/dev", "devtmpfs", 0, ""); err != nil {
		return fmt.Errorf("devtmpfs: %w", err)
	}
	modules, err := filepath.Glob("/modules/*.ko")
	if err != nil {
		return err
	}
	for _, m := range modules {
		if err := loadModule(m); err != nil {
			return fmt.Errorf("module %s: %w", m, err)
		}
	}
	if err := mountSoon(rootDisk, "/root", 0); err != nil {
		return fmt.Errorf("mounting %s: %w", rootDisk, err)
	}
	if err := mountSoon(payloadDisk, "/root/gabion", unix.MS_RDONLY); err != nil {
		return fmt.Errorf("mounting %s: %w", payloadDisk, err)
	}
	if err := unix.Mount("/dev", "/root/dev", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	_ = os.RemoveAll("/modules") // memory is dear in some scenarios
	_ = os.Remove("/init")
	if err := os.Chdir("/root"); err != nil {
		return err
	}
	if err := unix.Mount("/root", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	return unix.Exec(program, []string{program}, []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root"})
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENODEV) { // built in, or hardware that the guest lacks
		return nil
	}
	return err
}

// mountSoon waits for a disk that is still being found.
func mountSoon(from, to string, flags uintptr) error {
	var err error
	for range 500 {
		if err = unix.Mount(from, to, "ext4", unix.MS_NOATIME|flags, ""); !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENXIO) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

// supervise is process 1 of the root file system.
func supervise() error {
	if err := prepare(); err != nil {
		return err
	}
	child := exec.Command(agent)
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	if err := child.Start(); err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid == child.Process.Pid {
			fmt.Println("init: the agent ended:", status.ExitStatus(), err)
			powerOff()
		}
	}
}

// prepare mounts what a node has mounted, and starts the device manager.
func prepare() error {
	for _, m := range []struct{ kind, to, data string }{
		{"proc", "/proc", ""}, {"sysfs", "/sys", ""}, {"tmpfs", "/run", "mode=755"}, {"tmpfs", "/tmp", ""}, {"devpts", "/dev/pts", ""},
		{"cgroup2", "/sys/fs/cgroup", ""}, {"debugfs", "/sys/kernel/debug", ""},
	} {
		if err := os.MkdirAll(m.to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.to, m.kind, 0, m.data); err != nil {
			return fmt.Errorf("mounting %s: %w", m.to, err)
		}
	}
	// As systemd leaves it: kubelet and container runtimes rely on it.
	if err := unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return err
	}
	if err := unix.Mount("/gabion/lib/modules", "/lib/modules", "", unix.MS_BIND, ""); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"/lib/systemd/systemd-udevd", "--daemon"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return mountData()
}

// mountData mounts the persistent disk.
func mountData() error {
	if out, err := exec.Command("modprobe", "xfs").CombinedOutput(); err != nil {
		return fmt.Errorf("modprobe xfs: %w: %s", err, out)
	}
	if err := unix.Mount(dataDisk, dataDir, "xfs", 0, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", dataDisk, err)
	}
	return nil
}

// powerOff ends the VM at once; the emulator does not restart it.
func powerOff() {
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	for {
		_ = syscall.Pause()
	}
}
