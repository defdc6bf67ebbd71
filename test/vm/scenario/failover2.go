package scenario

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func refusals() []lab.Scenario {
	return []lab.Scenario{
		{Name: "H21-H23-cache-lost", Run: cacheLost, Once: true, Waits: true},
		{Name: "H22-cache-kept", Run: cacheKept, Once: true},
		{Name: "H86-B044-refused", Run: refused, Once: true, Timeout: 3 * time.Minute},
		{Name: "H86-B044-servers-gone", Run: serversGone, Waits: true},
		{Name: "H84-H68-full-disk", Run: fullDisk, Once: true, Timeout: 3 * time.Minute},
		{Name: "H85-plugin-away", Run: pluginAway, Once: true, Waits: true},
	}
}

// refused: a mounted device with dirty pages whose attachment ends, or whose volume is deleted, fails; it can be unstaged
// by the deadline of a call, and its number is used again (H86, B044).
func refused(t *lab.T) {
	s, p := cell(t)
	for _, c := range []struct {
		what string
		end  func(v *lab.Volume)
	}{
		{"the attachment was revoked", func(v *lab.Volume) { v.Unpublish() }},
		{"the volume was deleted while the plugin was away", func(v *lab.Volume) {
			p.Kill()
			s.Detach(v.Name, p.Node)
			s.CLI("volume", "delete", v.Name)
			p.Start()
		}},
	} {
		v := t.Volume(p, p, lab.VolumeSpec{Name: strings.ReplaceAll(c.what, " ", "-")[:20]})
		pod := v.Up("pod")
		device := v.Device()
		dirty(t, filepath.Join(pod, "file"))
		began := time.Now()
		c.end(v)
		t.Eventually(10*time.Second, "the device fails", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			wrong, err := v.TryHealth(ctx)
			return err == nil && strings.Contains(strings.Join(wrong, ""), "Refused")
		})
		failed := time.Since(began)
		f, err := os.Open(filepath.Join(pod, "file"))
		if err == nil {
			t.Refused(f.Sync(), "syncing a file of a device that has failed")
			_ = f.Close()
		}
		began = time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		t.Check(v.TryUnpublishFrom(ctx, "pod"), "unpublishing")
		t.Check(t.Repeat(ctx, "unstaging", v.TryUnstage), "unstaging")
		cancel()
		t.Figure("%s: failed after %.2f s, unpublished and unstaged in %.2f s, %d lines of the kernel", c.what, failed.Seconds(), time.Since(began).Seconds(), len(t.KernelLines(device)))
		if lab.Exists("/sys/block/" + device + "/pid") {
			t.Errorf("%s is still there", device)
		}
		if n := len(t.KernelLines(device)); n > 100 {
			t.Errorf("the kernel has said %d lines about %s", n, device)
		}
		v.Gone()
		next := t.Volume(p, p, lab.VolumeSpec{Name: "next", Block: true})
		next.Up("pod")
		if next.Device() != device {
			t.Errorf("the next device is %s; %s is free", next.Device(), device)
		}
		next.Down()
		next.Delete()
	}
}

// dirty writes to a file and does not sync it.
func dirty(t *lab.T, path string) {
	t.Check(os.WriteFile(path, make([]byte, 4*mib), 0o600), "writing %s", path)
}

// serversGone: no server is there any more. Calls end by their deadline, and an operator who gives the data up frees
// the device without any server (H86, B044).
func serversGone(t *lab.T) {
	s, controller, p := splitCell(t)
	v := t.Volume(controller, p, lab.VolumeSpec{Name: "ext4"})
	pod := v.Up("pod")
	device := v.Device()
	dirty(t, filepath.Join(pod, "file"))
	s.Kill()
	v.UnpublishFrom("pod")
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	err := v.TryUnstage(ctx)
	cancel()
	if took := time.Since(began); took > 9*time.Second {
		t.Errorf("the call took %v", took)
	}
	t.Refused(err, "unstaging without a server")
	retryable(t, err)
	p.WaitReady()
	told := strings.Join(v.Health(), "; ")
	t.Logf("health: %s", told)
	began = time.Now()
	t.Logf("%s", t.Sh(lab.Gabion, "detach", "--give-up", "/dev/"+device))
	v.Unstage()
	t.Figure("given up and unstaged in %.2f s, %d lines of the kernel", time.Since(began).Seconds(), len(t.KernelLines(device)))
	if lab.Exists("/sys/block/" + device + "/pid") {
		t.Errorf("%s is still there", device)
	}
	s.Start()
	v.Up("pod")
	if v.Device() != device {
		t.Errorf("the next device is %s; %s is free", v.Device(), device)
	}
	v.Down()
}

// fullDisk: the server's disk is full. With on-full=wait writes are parked until nothing more is read from the device's
// connections, and go on by themselves (H84); with on-full=error they fail; what needs no space, and what frees it, works
// (H68).
func fullDisk(t *lab.T) {
	t.LoadDriver()
	s := t.NewServer()
	disk := t.DiskOf(s, 448)
	s.Start()
	p := t.Plugin()
	wait := t.Volume(p, p, lab.VolumeSpec{Name: "wait"})
	fail := t.Volume(p, p, lab.VolumeSpec{Name: "fail", Block: true, Parameters: map[string]string{"on-full": "error"}})
	other := t.Volume(p, p, lab.VolumeSpec{Name: "other", Block: true})
	file := filepath.Join(wait.Up("pod"), "file")
	failing, well := fail.Up("pod"), other.Up("pod")
	fill := func(path string, megabytes string) error {
		_, err := t.Try("dd", "if=/dev/zero", "of="+path, "bs=1M", "count="+megabytes, "oflag=direct", "conv=notrunc,fsync", "status=none")
		return err
	}
	t.Check(fill(well, "1"), "the load's blocks")
	t.Check(fill(failing, "1"), "some blocks")
	t.Check(fill(file, "1"), "a file")
	l := t.LoadOf(lab.Shape{Workers: 2, Span: 512 << 10}, well)

	disk.Fill(8)
	before := p.Reconnects(wait)
	done := make(chan error, 6)
	for i := range cap(done) {
		go func() { done <- fill(file+string(rune('a'+i)), "12") }()
	}
	full := 6 * time.Second
	if t.Long {
		full = 10 * time.Minute
	}
	l.Quiet("another volume while writes wait for space", 2*time.Second, func() {
		t.Eventually(20*time.Second, "writes wait for space", func() bool {
			return s.Metric("gabion_volume_requests", wait.ID, `"space"`) > 0
		})
		t.Pause(full)
	})
	t.Figure("waiting for space for %v: %v requests, %d reconnects", full, s.Metric("gabion_volume_requests", wait.ID, `"space"`), p.Reconnects(wait)-before)
	if n := p.Reconnects(wait) - before; n > int(full/(3*time.Second))+2 {
		t.Errorf("%d reconnects", n)
	}
	t.Logf("status: %s", s.CLI("status"))
	began := time.Now()
	disk.Free()
	for range cap(done) {
		t.Check(<-done, "a write that waited for space")
	}
	t.Figure("all went on within %.2f s of there being space", time.Since(began).Seconds())
	t.NoIOErrors()

	disk.Fill(8)
	err := fill(failing, "64")
	t.Refused(err, "writing to a full disk with on-full=error")
	t.Check(fill(failing, "1"), "overwriting on a full disk")
	t.Sh("fstrim", wait.Target("pod"))
	t.Sh("blkdiscard", "-f", failing)
	l.Stop()
	fail.Down()
	fail.Delete()
	other.Down()
	disk.Free()
	wait.Down()
	s.CheckImage(wait)
}

// pluginAway: while the plugin is away the server moves and the volume grows; requests wait, and on its return the plugin
// knows its devices. Then it is away for good, as when a machine is shut down, and the unmount flushes and ends (H85).
func pluginAway(t *lab.T) {
	s, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: "ext4"})
	pod := v.Up("pod")
	device := v.Device()
	l := t.Load(pod)
	l.Outage("the plugin away while the server moves and the volume grows", func() {
		p.Kill()
		s.Restart(lab.AddrB)
		s.CLI("volume", "resize", v.Name, "--size", "2GiB")
		t.Pause(5 * time.Second)
		p.Start()
	})
	if v.Device() != device {
		t.Errorf("the device was %s and is %q", device, v.Device())
	}
	v.Size = 2 * gib
	v.NodeExpand()
	if v.DeviceSize() != v.Size {
		t.Errorf("the device has %d bytes", v.DeviceSize())
	}
	l.Stop()
	t.NoIOErrors()
	dirty(t, filepath.Join(pod, "file"))
	p.Kill()
	began := time.Now()
	t.Check(errors.Join(syscall.Unmount(pod, 0), syscall.Unmount(v.Staging(), 0)), "unmounting without the plugin")
	t.Figure("unmounted without the plugin in %.2f s", time.Since(began).Seconds())
	p.Start()
	v.Down()
	s.CheckImage(v)
}
