package scenario

import (
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func filesystem2() []lab.Scenario {
	return []lab.Scenario{
		{Name: "H68-full-disk/wait", Run: fullDiskWaits, Once: true, Timeout: 4 * time.Minute},
		{Name: "H68-full-disk/error-ext4", Run: func(t *lab.T) { fullDiskFails(t, "ext4") }, Timeout: 4 * time.Minute},
		{Name: "H68-full-disk/error-xfs", Run: func(t *lab.T) { fullDiskFails(t, "xfs") }, Once: true, Timeout: 4 * time.Minute},
		{Name: "B048-H85-shutdown", Run: shutdown, Waits: true, Timeout: 4 * time.Minute},
		{Name: "H87-B049-little-memory", Run: littleMemory, Memory: 512, Timeout: 8 * time.Minute, Alone: true},
		{Name: "csi-sanity/mount", Run: func(t *lab.T) { sanity(t, "mount") }, Once: true, Timeout: 10 * time.Minute},
		{Name: "csi-sanity/block", Run: func(t *lab.T) { sanity(t, "block") }, Timeout: 10 * time.Minute, Long: true},
	}
}

// full is a server whose disk has little room, and a ballast on it that can be thrown off.
func full(t *lab.T) (*lab.Server, *lab.Plugin, func()) {
	t.LoadDriver()
	t.Sh("modprobe", "loop")
	s := t.NewServer(lab.Everywhere()...)
	disk := t.DiskOf(s, 320)
	s.Start()
	disk.Fill(80)
	return s, t.Plugin(), disk.Free
}

// fullDiskWaits: on a full disk writes wait, without an error at any file system; what is there can be read and written
// again; when space is free they go on by themselves (H68, on-full wait).
func fullDiskWaits(t *lab.T) {
	s, p, throwOff := full(t)
	var copies []<-chan error
	var volumes []*lab.Volume
	for _, fs := range []string{"ext4", "xfs"} {
		v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs, Size: 512 * mib, Parameters: map[string]string{"on-full": "wait"}})
		pod := v.Up("a")
		t.Write(filepath.Join(pod, "before"), "before")
		volumes = append(volumes, v)
	}
	for _, v := range volumes {
		copies = append(copies, t.Go("dd", "if=/dev/zero", "of="+filepath.Join(v.Target("a"), "big"), "bs=1M", "count=75", "conv=fsync", "status=none"))
	}
	t.Eventually(2*time.Minute, "the disk is full", func() bool {
		before := s.Used()
		t.Pause(4 * time.Second)
		return s.Used() == before
	})
	for i, c := range copies {
		select {
		case err := <-c:
			t.Fatalf("the write to %s ended on a full disk of %d MiB: %v", volumes[i].Name, s.Used()>>20, err)
		default:
		}
	}
	used := s.Used()
	began := time.Now()
	throwOff()
	for i, c := range copies {
		t.Await(c, time.Minute, "the write to %s after space is free", volumes[i].Name)
	}
	t.Figure("full with %d MiB; all writes ended %.1f s after space was free", used>>20, time.Since(began).Seconds())
	t.NoIOErrors()
	for _, v := range volumes {
		t.Expect(filepath.Join(v.Target("a"), "before"), "before")
		v.Down()
		s.CheckImage(v)
	}
}

// fullDiskFails: a volume that asked for it gets errors on a full disk, and loses nothing that was synced; once there is
// room again it is unstaged, staged and written to (H68, on-full error).
func fullDiskFails(t *lab.T, fs string) {
	s, p, throwOff := full(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs, Size: 512 * mib, Parameters: map[string]string{"on-full": "error"}})
	pod := v.Up("a")
	t.Write(filepath.Join(pod, "before"), "before")
	big := filepath.Join(pod, "big")
	// With its journal aborted Linux 6.1's ext4 may try for ever to write what it cannot, until the writer is killed.
	_, err := t.Try("timeout", "--signal=KILL", "30", "dd", "if=/dev/zero", "of="+big, "bs=1M", "count=300", "conv=fsync", "status=none")
	t.Refused(err, "a write that does not fit")
	if len(t.KernelLines(`returned error \(28\)`)) == 0 {
		t.Errorf("nothing was refused for want of space: the writes waited")
	}
	t.Expect(filepath.Join(pod, "before"), "before")
	used := s.Used()
	_, err = t.Try("sh", "-e", "-c", "rm $1; sync -f $2; fstrim $2", "sh", big, pod)
	t.Figure("full with %d MiB; condition: %q; rm, sync and fstrim: %v; then %d MiB", used>>20, v.Abnormal(), err, s.Used()>>20)
	throwOff()
	v.Down()
	v.Publish()
	if err := t.Repeat(t.Context(), "stage", v.TryStage); lab.Code(err) == lab.DataLoss {
		replayed(t, s, v, err)
	}
	pod = v.Up("b")
	t.Expect(filepath.Join(pod, "before"), "before")
	t.Write(filepath.Join(pod, "after"), "after")
	v.Down()
	s.CheckImage(v)
}

// replayed does what a person is asked for: an unmount that could not write all of ext4's journal calls the journal empty
// all the same (ext4_put_super), and e2fsck does not replay such a one unasked.
func replayed(t *lab.T, s *lab.Server, v *lab.Volume, why error) {
	t.Refused(why, "staging", "run e2fsck", "journal has data")
	v.Unpublish()
	gabion := func(args ...string) string {
		return strings.TrimSpace(t.Sh(lab.Gabion, append([]string{"--server", s.Metadata()}, args...)...))
	}
	device := gabion("attach", v.ID, "--device", "--node", "n1")
	out, _ := t.Try("e2fsck", "-y", device) // its exit code says that it has repaired something
	gabion("detach", v.ID, "--node", "n1")
	t.Figure("a person replayed the journal: %q", out)
	v.Publish()
}

// shutdown: with the plugin ended first, unmounting flushes and ends; without servers it waits, and ends with their
// return, or when the device is given up: what was synced is there (B048, H85).
func shutdown(t *lab.T) {
	s, p := cell(t)
	volumes := []*lab.Volume{t.Volume(p, p, lab.VolumeSpec{Name: "ext4"}), t.Volume(p, p, lab.VolumeSpec{Name: "xfs", FS: "xfs"})}
	dirty := func(v *lab.Volume) {
		t.Write(filepath.Join(v.Target("a"), "synced"), "synced")
		t.Sh("dd", "if=/dev/zero", "of="+filepath.Join(v.Target("a"), "dirty"), "bs=1M", "count=8", "status=none")
	}
	for _, v := range volumes {
		v.Up("a")
		dirty(v)
		if !strings.Contains(lab.ReadText("/run/mount/utab"), v.Staging()+" ") {
			t.Errorf("%s: the mount is not known to need the network", v.Name)
		}
	}
	p.Process().Terminate(15 * time.Second)
	began := time.Now()
	for _, v := range volumes {
		t.Sh("umount", v.Target("a"))
		t.Sh("umount", v.Staging())
	}
	t.Figure("without the plugin, with the server: unmounted in %.2f s", time.Since(began).Seconds())
	p.Start()
	for _, v := range volumes {
		v.Stage()
		v.PublishTo("a")
		t.Expect(filepath.Join(v.Target("a"), "synced"), "synced")
		if got := strings.TrimSpace(t.Sh("stat", "-c", "%s", filepath.Join(v.Target("a"), "dirty"))); got != "8388608" {
			t.Errorf("%s: what was not synced before the unmount has %s bytes", v.Name, got)
		}
		dirty(v)
	}

	// Neither plugin nor server.
	p.Process().Terminate(15 * time.Second)
	s.Kill()
	var ended []<-chan error
	for _, v := range volumes {
		ended = append(ended, t.Go("sh", "-c", fmt.Sprintf("umount %s; umount %s", v.Target("a"), v.Staging())))
	}
	t.Pause(5 * time.Second)
	for i, v := range volumes {
		select {
		case err := <-ended[i]:
			t.Errorf("%s: unmounted without a server: %v", v.Name, err)
		default:
		}
	}
	t.NoIOErrors()
	began = time.Now()
	t.Sh(lab.Gabion, "detach", "--give-up", "/dev/"+volumes[0].Device())
	t.Await(ended[0], 20*time.Second, "the unmount of a device that was given up")
	t.Figure("without plugin and server: unmounted %.2f s after the device was given up", time.Since(began).Seconds())
	s.Start()
	p.Start()
	began = time.Now()
	t.Await(ended[1], time.Minute, "the unmount after the server's return")
	t.Figure("unmounted %.2f s after the plugin's return", time.Since(began).Seconds())
	for _, v := range volumes {
		v.Unstage()
		t.Expect(filepath.Join(v.Up("b"), "synced"), "synced")
		v.Down()
		s.CheckImage(v)
	}
}

// littleMemory: server and consumer share a machine of 512 MiB; more than that is written through the page cache and
// synced (H87, B049). What happens is reported; it does not have to pass yet.
func littleMemory(t *lab.T) {
	t.LoadDriver()
	s := t.Server("--io-mode", "direct")
	p := t.Plugin()
	v := t.Volume(p, p, lab.VolumeSpec{Name: "v", Size: 4 * gib, FS: "xfs"})
	pod := v.Up("a")
	count := 768
	if t.Long {
		count = 3072
	}
	before := lab.ReadText("/proc/pressure/memory")
	began := time.Now()
	written := t.Go("dd", "if=/dev/zero", "of="+filepath.Join(pod, "big"), "bs=1M", fmt.Sprintf("count=%d", count), "conv=fsync", "status=none")
	least := int64(1 << 40)
	for done := false; !done; {
		select {
		case err := <-written:
			t.Figure("%d MiB written and synced in %.1f s: %v; least memory available: %d MiB", count, time.Since(began).Seconds(), err, least>>20)
			done = true
		case <-time.After(200 * time.Millisecond):
			least = min(least, lab.MemoryAvailable())
			if time.Since(began) > 5*time.Minute {
				t.Fatalf("%d MiB are not written after 5 min; %d MiB are on the disk", count, s.Used()>>20)
			}
		}
	}
	t.Figure("server: %d MiB resident, plugin: %d MiB; pressure before %q, after %q", lab.RSS(s.Process().PID())>>20, lab.RSS(p.Process().PID())>>20, before, lab.ReadText("/proc/pressure/memory"))
	// The sender of a request may find the last reserve used up. It says so, waits and goes on.
	t.Figure("%d allocations failed in the kernel, and were repeated", t.Tolerate("page allocation failure", "pages reserved"))
	for _, l := range t.KernelLines(`[Oo]ut of memory|oom-kill|blocked for more`) {
		t.Errorf("kernel: %s", l)
	}
	t.NoIOErrors()
	v.Down()
	s.CheckImage(v)
}

// sanity is csi-sanity with nothing faked.
func sanity(t *lab.T, access string) {
	t.LoadDriver()
	t.Server("--default-replicas", "1") // of volumes that do not say how many
	out := t.Sanity(t.Plugin(), access)
	t.Figure("%s", out)
}
