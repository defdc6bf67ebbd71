package scenario

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func device3() []lab.Scenario {
	return []lab.Scenario{
		{Name: "B078-servers-gone", Run: brokenIsLetGo, Waits: true, Timeout: 3 * time.Minute},
		{Name: "H76-killed-in-unmount", Run: killedInUnmount, Once: true, Waits: true, Timeout: 3 * time.Minute},
		{Name: "residue-random-kills", Run: randomKills, Once: true, Timeout: 15 * time.Minute},
		{Name: "attach-device", Run: attachDevice, Once: true, Timeout: 3 * time.Minute},
		{Name: "B042-openers", Run: openers, Once: true, Timeout: 10 * time.Minute},
		{Name: "B046-B082-looked-up", Run: lookedUp, Once: true, Timeout: 3 * time.Minute},
		{Name: "B050-block-size", Run: blockSize, Once: true, Timeout: 3 * time.Minute},
		{Name: "B027-sizes", Run: sizes, Once: true, Timeout: 4 * time.Minute},
		{Name: "B065-attach-and-detach", Run: attachAndDetach, Once: true, Timeout: 5 * time.Minute},
		{Name: "volumes-at-once", Run: volumesAtOnce, Once: true, Timeout: 6 * time.Minute},
		{Name: "B047-many-volumes", Run: manyVolumes, Once: true, Timeout: 6 * time.Minute},
		{Name: "B020-flush-survives", Run: flushSurvives, Alone: true},
	}
}

// stopFS makes a mounted file system stop as it does itself after an error. It writes that down, and so needs the server.
func stopFS(t *lab.T, v *lab.Volume) {
	if v.FS == "ext4" {
		t.Check(os.WriteFile("/sys/fs/ext4/"+v.Device()+"/trigger_fs_error", []byte("for the test"), 0), "stopping %s", v.Name)
		return
	}
	const goingDown, noLogFlush = 0x8004587d, 2 // XFS_IOC_GOINGDOWN
	d, err := os.Open(v.Target("a"))
	t.Check(err, "stopping %s", v.Name)
	defer func() { _ = d.Close() }()
	t.Check(unix.IoctlSetPointerInt(int(d.Fd()), goingDown, noLogFlush), "stopping %s", v.Name)
}

// brokenIsLetGo: what cannot be reached can be let go all the same: what is broken at once, what is well not before its
// data is safe (B078).
func brokenIsLetGo(t *lab.T) {
	s, p := cell(t)
	ext4 := t.Volume(p, p, lab.VolumeSpec{Name: "ext4", Size: 64 * mib})
	xfs := t.Volume(p, p, lab.VolumeSpec{Name: "xfs", FS: "xfs", Size: 512 * mib})
	raw := t.Volume(p, p, lab.VolumeSpec{Name: "raw", Size: 16 * mib, Block: true})
	well := t.Volume(p, p, lab.VolumeSpec{Name: "well", Size: 64 * mib})
	broken := []*lab.Volume{ext4, xfs, raw}
	for _, v := range append(slices.Clone(broken), well) {
		v.Up("a")
	}
	t.Write(filepath.Join(well.Target("a"), "file"), "safe")
	_ = unsynced(t, filepath.Join(well.Target("a"), "dirty"), 0).Close()
	stopFS(t, ext4)
	stopFS(t, xfs)
	s.Kill()
	for _, v := range broken {
		for range 2 {
			t.Check(t.Within(10*time.Second, "unpublish of "+v.Name, func(ctx context.Context) error { return v.TryUnpublishFrom(ctx, "a") }), "unpublish of %s", v.Name)
		}
		if lab.Exists(v.Target("a")) {
			t.Errorf("the target of %s is still there", v.Name)
		}
		for range 2 {
			t.Check(t.Within(10*time.Second, "unstage of "+v.Name, v.TryUnstage), "unstage of %s", v.Name)
		}
		if d := v.Devices(); len(d) > 0 {
			t.Errorf("%s still has the devices %v", v.Name, d)
		}
	}
	t.Check(t.Within(10*time.Second, "unpublish of what is not there", func(ctx context.Context) error { return ext4.TryUnpublishFrom(ctx, "nobody") }), "an unknown target")
	t.Check(t.Within(10*time.Second, "unpublish of what is well", func(ctx context.Context) error { return well.TryUnpublishFrom(ctx, "a") }), "unpublish of %s", well.Name)
	for range 2 {
		if t.Within(5*time.Second, "unstage of what is well", well.TryUnstage) == nil {
			t.Errorf("a file system with dirty pages was let go without a server")
		}
	}
	s.Start()
	t.TryUntil(30*time.Second, "unstage", well.TryUnstage)
	pod := well.Up("b")
	t.Expect(filepath.Join(pod, "file"), "safe")
	if got := lab.ReadText(filepath.Join(pod, "dirty")); !strings.HasPrefix(got, "dirt") {
		t.Errorf("the dirty pages did not survive the server's absence: %.20q", got)
	}
}

// killedInUnmount: a plugin whose unmount waits for a server is killed and replaced all the same. The next one gives the
// device up only when that unmount has ended, and until then serves other volumes (H76).
func killedInUnmount(t *lab.T) {
	s, controller, p := splitCell(t)
	v := t.Volume(controller, p, lab.VolumeSpec{Name: "v", Size: 64 * mib})
	pod := v.Up("a")
	t.Write(filepath.Join(pod, "file"), "safe")
	_ = unsynced(t, filepath.Join(pod, "dirty"), 0).Close()
	s.Kill()
	v.UnpublishFrom("a")
	t.Refused(t.Within(5*time.Second, "unstage without a server", v.TryUnstage), "unstage without a server")
	began := time.Now()
	p.Restart()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the plugin was replaced after %v only", took)
	}
	t.Refused(t.Within(10*time.Second, "unstage by the next plugin", v.TryUnstage), "unstage by the next plugin")
	s.Start()
	other := t.Volume(controller, p, lab.VolumeSpec{Name: "other", Size: 64 * mib})
	t.Write(filepath.Join(other.Up("a"), "file"), "served")
	t.TryUntil(time.Minute, "unstage", v.TryUnstage)
	pod = v.Up("b")
	t.Expect(filepath.Join(pod, "file"), "safe")
	if got := lab.ReadText(filepath.Join(pod, "dirty")); !strings.HasPrefix(got, "dirt") {
		t.Errorf("the dirty pages did not survive: %.20q", got)
	}
}

// randomKills: calls are cut off at random, by a kill of the plugin, by one of the server, or by their deadline. Once
// each is repeated all is as it was, and all data is there.
func randomKills(t *lab.T) {
	s, p := cell(t)
	base := t.Baseline()
	volumes := []*lab.Volume{
		t.Volume(p, p, lab.VolumeSpec{Name: "ext4", Size: 64 * mib}),
		t.Volume(p, p, lab.VolumeSpec{Name: "xfs", FS: "xfs", Size: 512 * mib}),
		t.Volume(p, p, lab.VolumeSpec{Name: "raw", Size: 16 * mib, Block: true}),
	}
	rounds, failures := t.Rounds(6, 200), 0
	random := t.Random()
	for _, v := range volumes {
		v.Create()
	}
	cut := func(what string, call func(context.Context) error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		after := time.Duration(random.IntN(400)) * time.Millisecond
		ended := make(chan error, 1)
		how := random.IntN(8)
		if how >= 6 {
			ctx, cancel = context.WithTimeout(ctx, after)
			defer cancel()
		}
		go func() { ended <- call(ctx) }()
		switch {
		case how < 5:
			t.Pause(after)
			p.Kill()
			p.Start()
		case how == 5:
			t.Pause(after)
			s.Kill()
			s.Start()
		}
		if err := <-ended; err != nil {
			failures++
			t.Logf("%s, cut off after %v (%d): %v", what, after, how, err)
		}
		t.TryUntil(time.Minute, what, call)
	}
	for round := 0; failures < rounds && round < 3*rounds; round++ {
		v := volumes[round%len(volumes)]
		text := fmt.Sprintf("round %d", round/len(volumes))
		cut("controller publish", v.TryPublish)
		cut("stage", v.TryStage)
		oneDevice(t, v, "after a stage that was cut off")
		cut("publish", func(ctx context.Context) error { return v.TryPublishTo(ctx, "a", false) })
		at := v.Target("a")
		if !v.Block {
			at = filepath.Join(at, "file")
		}
		if round >= len(volumes) {
			t.Expect(at, fmt.Sprintf("round %d", round/len(volumes)-1))
		}
		t.Write(at, text)
		cut("unpublish", func(ctx context.Context) error { return v.TryUnpublishFrom(ctx, "a") })
		cut("unstage", v.TryUnstage)
		cut("controller unpublish", v.TryUnpublish)
		t.Clean(fmt.Sprintf("after %d failures", failures), base)
	}
	t.Figure("%d calls cut off by a kill or a deadline, no residue", failures)
	for _, v := range volumes {
		s.CheckImage(v)
	}
}

// attachDevice: people without an orchestrator have the same devices, kept by attachd.
func attachDevice(t *lab.T) {
	t.LoadDriver()
	t.Sh("rm", "-f", "/run/gabion/node") // another name than the last scenario's
	s := t.Server()
	s.Volume("db", "64MiB")
	gabion := func(args ...string) (string, error) {
		out, err := t.Try(lab.Gabion, append([]string{"--server", lab.AddrA + ":7400," + lab.AddrB + ":7400"}, args...)...)
		return strings.TrimSpace(out), err
	}
	watcher := lab.Spec{Name: "attachd", Args: []string{lab.Gabion, "attachd", "--server", lab.AddrA + ":7400," + lab.AddrB + ":7400", "--node", "desk"}}
	attachd := t.Start(watcher)
	path, err := gabion("attach", "db", "--device", "--node", "desk")
	t.Check(err, "gabion attach --device")
	again, err := gabion("attach", "db", "--device", "--node", "desk")
	t.Check(err, "gabion attach --device, again")
	if path == "" || again != path {
		t.Fatalf("attached twice: %q and %q", path, again)
	}
	t.Sh("mkfs.ext4", "-q", path)
	t.Sh("mkdir", "-p", "/mnt/db")
	t.Sh("mount", path, "/mnt/db")
	t.Cleanup(func() { _, _ = t.Try("umount", "/mnt/db") })
	l := t.Load("/mnt/db")
	l.Outage("the server killed and restarted at another address, attachd watching", func() { s.Restart(lab.AddrB) })
	l.Outage("the server restarted while attachd is away", func() {
		attachd.Kill()
		s.Restart(lab.AddrA)
		attachd = t.Start(watcher)
	})
	l.Stop()
	t.NoIOErrors()
	_, err = gabion("detach", "db", "--node", "desk")
	t.Refused(err, "detaching what is mounted", "mounted at /mnt/db")
	t.Sh("umount", "/mnt/db")
	_, err = gabion("detach", "db", "--node", "desk")
	t.Check(err, "gabion detach")
	if lab.Exists("/sys/block/" + filepath.Base(path)) {
		t.Errorf("%s is still there", path)
	}
	_, err = gabion("detach", "db", "--node", "desk")
	t.Check(err, "gabion detach, again")

	// Revoked from elsewhere: a device that nobody uses goes by itself.
	path, err = gabion("attach", "db", "--device", "--node", "desk")
	t.Check(err, "gabion attach --device")
	s.Detach("db", "desk")
	t.Eventually(30*time.Second, "attachd ends a revoked device", func() bool { return !lab.Exists("/sys/block/" + filepath.Base(path)) })
	attachd.Terminate(15 * time.Second)
	t.Sh("rm", "-f", "/run/gabion/node")
}

// openers: while others open and close every device, mkfs and mount find theirs (B042).
func openers(t *lab.T) {
	_, p := cell(t)
	stop := opener(t)
	probe := t.Background(func() { _, _ = t.Try("sh", "-c", "blkid -p /dev/nbd*") })
	stages := t.Rounds(2, 100)
	for i := range stages {
		v := t.Volume(p, p, lab.VolumeSpec{Name: fmt.Sprintf("v%d", i), Size: 64 * mib})
		pod := v.Up("a")
		t.Write(filepath.Join(pod, "file"), v.Name)
		if i%3 == 0 {
			p.Restart()
		}
		t.Expect(filepath.Join(pod, "file"), v.Name)
		v.UnpublishFrom("a")
		t.TryUntil(20*time.Second, "unstage", v.TryUnstage)
		v.Unpublish()
		v.Delete()
	}
	stop()
	probe()
}

// lookedUp: no number is remembered (B046), and a mount that only bears a device's name counts for nothing (B082).
func lookedUp(t *lab.T) {
	_, p := cell(t)
	var volumes []*lab.Volume
	for _, name := range []string{"a", "b", "c"} {
		v := t.Volume(p, p, lab.VolumeSpec{Name: name, Size: 64 * mib})
		t.Write(filepath.Join(v.Up("pod"), "file"), name)
		volumes = append(volumes, v)
	}
	for _, v := range volumes {
		v.Down()
	}
	slices.Reverse(volumes)
	for _, v := range volumes {
		v.Up("pod")
	}
	p.Restart()
	for i, v := range volumes {
		size := int64(i+2) * 64 * mib
		v.Expand(size)
		t.Expect(filepath.Join(v.Target("pod"), "file"), v.Name)
		if v.DeviceSize() != size {
			t.Errorf("volume %s has %d bytes after it was grown to %d", v.Name, v.DeviceSize(), size)
		}
		stats, err := v.TryStats(t.Context())
		t.Check(err, "stats of %s", v.Name)
		if total := stats.GetUsage()[0].GetTotal(); total > size || total < size/2 {
			t.Errorf("volume %s of %d bytes has a file system of %d", v.Name, size, total)
		}
	}
	v := volumes[0]
	name := "/dev/" + v.Device()
	v.Down()
	t.Sh("mkdir", "-p", "/mnt/orphan")
	t.Sh("mount", "-t", "tmpfs", name, "/mnt/orphan")
	t.Cleanup(func() { _, _ = t.Try("umount", "/mnt/orphan") })
	v.Up("pod")
	if "/dev/"+v.Device() != name {
		t.Errorf("the number of %s is not used again: %s", name, v.Device())
	}
	v.Down()
	if len(v.Devices()) > 0 {
		t.Errorf("the device stays because of a mount that only bears its name")
	}
	if !strings.Contains(p.Process().Log(), "a mount is left of a device that has gone") {
		t.Errorf("the orphan is not reported")
	}
}

// blockSize: a volume's logical block size stays, whatever happens to its device (B050).
func blockSize(t *lab.T) {
	s, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: "small", Size: 512 * mib, Block: true, Parameters: map[string]string{"blockSize": "512"}})
	check := func(when string) {
		for _, name := range []string{"logical_block_size"} {
			if got := v.Queue("queue/" + name); got != "512" {
				t.Errorf("%s is %s %s", name, got, when)
			}
		}
	}
	pod := v.Up("a")
	check("at the first attach")
	t.Sh("sh", "-c", "echo 'label: gpt\nstart=2048' | sfdisk --no-reread --no-tell-kernel "+pod)
	t.Sh("mkfs.xfs", "-q", "-f", "-s", "size=512", pod) // over the table
	s.Restart(lab.AddrB)
	_, err := lab.ReadDirect(pod, 0, 4096)
	t.Check(err, "reading after a failover")
	check("after a failover")
	p.Restart()
	check("with another plugin")
	v.Down()
	t.Sh("xfs_repair", "-n", "-f", s.Image(v))
	v.Up("b")
	check("at the next attach")
	other := t.Volume(p, p, v.VolumeSpec)
	other.Parameters = map[string]string{"blockSize": "4096"}
	t.RefusedAs(other.TryCreate(t.Context()), "another block size", lab.AlreadyExists)
}

// sizes: export, kernel and orchestrator agree to the byte, and the last block is there (B027).
func sizes(t *lab.T) {
	s, p := cell(t)
	for _, grain := range []int64{512, 4096} {
		for _, size := range []int64{tib, 2*tib - 4096, 2 * tib, 2*tib + 4096, 16 * tib, 64 * tib} {
			v := t.Volume(p, p, lab.VolumeSpec{Name: fmt.Sprintf("s%d-%d", size, grain), Size: size, Block: true, Parameters: map[string]string{"blockSize": fmt.Sprint(grain)}})
			v.Create()
			// Before it is a device: beside one nobody else may connect.
			if got := strings.TrimSpace(t.Elsewhere("nbdinfo", "--size", s.Attach(v.ID, "n1"))); got != fmt.Sprint(size) {
				t.Errorf("the export has %s bytes, the volume %d", got, size)
			}
			pod := v.Up("a")
			if got := v.DeviceSize(); got != size {
				t.Errorf("the device has %d bytes, the volume %d", got, size)
			}
			f, err := os.OpenFile(pod, os.O_RDWR, 0)
			t.Check(err, "the device")
			last := slices.Repeat([]byte("end."), 1024)
			_, err = f.WriteAt(last, size-4096)
			t.Check(err, "writing the last block")
			_, err = f.WriteAt(last, size)
			t.Refused(err, "writing past the end", "no space")
			t.Check(f.Sync(), "syncing the last block")
			t.Check(f.Close(), "closing")
			got, err := lab.ReadDirect(pod, size-4096, 4096)
			t.Check(err, "reading the last block")
			if !slices.Equal(got, last) {
				t.Errorf("the last block of %d bytes reads as %.8q", size, got)
			}
			v.Down()
			v.Delete()
		}
	}
}

// attachAndDetach: devices that come and go leave nothing in the plugin, and what a node takes is a constant (B065).
func attachAndDetach(t *lab.T) {
	t.LoadDriver()
	t.Server()
	p := t.Plugin(lab.Injectable()...)
	volumes := raws(t, p, 10, 16*mib)
	limit(t, p)
	together(t, "stage", volumes, func(ctx context.Context, v *lab.Volume) error { return v.TryStage(ctx) })
	limit(t, p)
	t.Settle() // else the device manager may have one of the new devices open
	together(t, "unstage", volumes, func(ctx context.Context, v *lab.Volume) error { return v.TryUnstage(ctx) })
	cycles(t, p, volumes[0])
}

// limit: the number of volumes that a node takes is a constant (B065).
func limit(t *lab.T, p *lab.Plugin) {
	info, err := p.NodeClient.NodeGetInfo(t.Context(), &csispec.NodeGetInfoRequest{})
	t.Check(err, "NodeGetInfo")
	if got := info.GetMaxVolumesPerNode(); got != 250 {
		t.Errorf("the node takes %d volumes while some are staged", got)
	}
}

// cycles attaches and detaches a volume again and again.
func cycles(t *lab.T, p *lab.Plugin, v *lab.Volume) {
	settle := func() (goroutines float64, fds int) {
		t.Pause(3 * time.Second)
		return p.Metric("go_goroutines"), lab.FDs(p.Process().PID())
	}
	v.Stage()
	v.Unstage()
	g1, f1 := settle()
	rounds := t.Rounds(15, 50)
	for range rounds {
		t.Check(v.TryStage(t.Context()), "stage")
		t.Check(v.TryUnstage(t.Context()), "unstage")
	}
	g2, f2 := settle()
	t.Figure("%d attaches and detaches: goroutines %.0f → %.0f, descriptors %d → %d", rounds, g1, g2, f1, f2)
	if g2 > g1+3 || f2 > f1+2 {
		t.Errorf("the plugin grows")
	}
}

// volumesAtOnce: the last of many devices takes no longer than the first, all come and go at once, and the plugin stays small.
func volumesAtOnce(t *lab.T) {
	_, p := cell(t)
	volumes := raws(t, p, t.Rounds(20, 50), 16*mib)
	attach := func(v *lab.Volume) time.Duration {
		var took []time.Duration
		for range 5 {
			began := time.Now()
			v.Stage()
			took = append(took, time.Since(began))
			v.Unstage()
		}
		return slices.Sorted(slices.Values(took))[len(took)/2]
	}
	first := attach(volumes[0])
	began := time.Now()
	together(t, "stage", volumes[1:], func(ctx context.Context, v *lab.Volume) error { return t.Repeat(ctx, "stage of "+v.Name, v.TryStage) })
	t.Figure("%d volumes at once: staged within %.2f s", len(volumes)-1, time.Since(began).Seconds())
	t.Settle() // the device manager looks at what is new
	last := attach(volumes[0])
	t.Figure("a volume took %.3f s as the only one, and %.3f s as the last of %d", first.Seconds(), last.Seconds(), len(volumes))
	if last > 3*first { // the emulator has one processor, and the watch its share of it; flat would be 1
		t.Errorf("attach time is not flat")
	}
	volumes[0].Stage()
	const most = 40 * mib
	if rss := lab.RSS(p.Process().PID()); rss > most {
		t.Errorf("the plugin has %d MiB resident with %d volumes", rss>>20, len(volumes))
	} else {
		t.Figure("the plugin has %d MiB resident with %d volumes", rss>>20, len(volumes))
	}
	together(t, "unstage", volumes, func(ctx context.Context, v *lab.Volume) error { return v.TryUnstage(ctx) })
}

// manyVolumes: a plugin that is killed, ended in order and replaced is not noticed under many volumes, and still
// handles a server's failure afterwards (B047).
func manyVolumes(t *lab.T) {
	s, p := cell(t)
	volumes := raws(t, p, t.Rounds(10, 20), 16*mib)
	var places []string
	for _, v := range volumes {
		v.Stage()
		places = append(places, v.PublishTo("a"))
	}
	l := t.LoadOf(lab.Light, places...)
	l.Quiet(fmt.Sprintf("%d volumes, the plugin killed", len(volumes)), time.Second, func() {
		p.Kill()
		t.Pause(time.Second)
		p.Start()
		p.Restart()
	})
	l.Quiet(fmt.Sprintf("%d volumes, the plugin replaced in order", len(volumes)), time.Second, func() {
		p.Process().Terminate(15 * time.Second)
		p.Flags = []string{"--log-level", "debug"} // another version's
		p.Start()
	})
	l.Stall()
	s.Restart(lab.AddrB)
	l.Steady(30 * time.Second) // each device is moved; how soon after another is the emulator's doing
	t.Figure("%d volumes, the server killed and restarted: stall %.2f s", len(volumes), l.Stall().Seconds())
	l.Stop()
	t.NoIOErrors()
	for _, v := range volumes {
		oneDevice(t, v, "after all")
	}
}

// flushSurvives: the kernel knows of the write cache, and what was flushed is there after the power of the server's
// machine failed (B020).
func flushSurvives(t *lab.T) {
	t.LoadDriver()
	s := t.Server()
	if t.Boot == 0 {
		p := t.Plugin()
		v := t.Volume(p, p, lab.VolumeSpec{Name: "flushed", Size: 16 * mib, Block: true})
		pod := v.Up("a")
		queue(t, v)
		t.Write(pod, "flushed")
		t.PowerCut()
	}
	uri := s.Attach("flushed", "n1")
	copied := filepath.Join(t.Dir, "copy")
	t.Elsewhere("nbdcopy", uri, copied)
	t.Expect(copied, "flushed")
}
