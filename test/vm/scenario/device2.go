package scenario

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

// raws describes n small raw volumes, created and published to the node.
func raws(t *lab.T, p *lab.Plugin, n int, size int64) []*lab.Volume {
	var all []*lab.Volume
	for i := range n {
		v := t.Volume(p, p, lab.VolumeSpec{Name: fmt.Sprintf("v%d", i), Size: size, Block: true})
		v.Create()
		v.Publish()
		all = append(all, v)
	}
	return all
}

// together runs f for each volume at once, and ends the scenario with the first error.
func together(t *lab.T, what string, volumes []*lab.Volume, f func(context.Context, *lab.Volume) error) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	errs := make([]error, len(volumes))
	var all sync.WaitGroup
	for i, v := range volumes {
		all.Go(func() { errs[i] = f(ctx, v) })
	}
	all.Wait()
	for i, err := range errs {
		t.Check(err, "%s of volume %s", what, volumes[i].Name)
	}
}

// stageUnstageRace: devices that come and go at once leave nothing, and their numbers can be used again (B037).
func stageUnstageRace(t *lab.T) {
	_, p := cell(t)
	volumes := raws(t, p, 9, 16*mib)
	base := t.Baseline()
	rounds := t.Rounds(1, 200)
	began := time.Now()
	for range rounds {
		together(t, "stage, then unstage", volumes, func(ctx context.Context, v *lab.Volume) error {
			if err := v.TryStage(ctx); err != nil {
				return err
			}
			return v.TryUnstage(ctx)
		})
		t.Clean("a round", base)
	}
	t.Figure("9 volumes at once: %.2f s for stage and unstage", time.Since(began).Seconds()/float64(rounds))
	// The call that takes it back may come while the first is under way, or before it.
	for range rounds {
		together(t, "stage against unstage", volumes, func(ctx context.Context, v *lab.Volume) error {
			var stage sync.WaitGroup
			stage.Go(func() { _ = v.TryStage(ctx) })
			err := v.TryUnstage(ctx)
			stage.Wait()
			if err != nil && lab.Code(err) != lab.Aborted { // the other call took long
				return err
			}
			return v.TryUnstage(ctx)
		})
		t.Clean("a round", base)
	}
	together(t, "stage", volumes, func(ctx context.Context, v *lab.Volume) error { return v.TryStage(ctx) })
	for _, v := range volumes {
		var index int
		if _, err := fmt.Sscanf(v.Device(), "nbd%d", &index); err != nil || index > 31 {
			t.Errorf("after %d rounds volume %s is %q: numbers are not used again", 2*rounds, v.Name, v.Device())
		}
	}
}

// opener opens every nbd device there is for a moment, as udev and blkid do.
func opener(t *lab.T) (stop func()) {
	return t.Background(func() {
		devices, _ := filepath.Glob("/dev/nbd*")
		for _, d := range devices {
			if f, err := os.Open(d); err == nil {
				_, _ = f.Read(make([]byte, 4096))
				_ = f.Close()
			}
		}
		time.Sleep(time.Millisecond)
	})
}

// fewNumbers: volumes take turns on few device numbers, while others look at all devices all the time. What is read
// first after each attach is the volume's own (B038).
func fewNumbers(t *lab.T) {
	_, p := cell(t)
	volumes := raws(t, p, 8, 16*mib)
	for _, v := range volumes {
		v.Stage()
		t.Write("/dev/"+v.Device(), v.Name)
		v.Unstage()
	}
	stop := opener(t)
	cycles := t.Rounds(2, 125)
	numbers := make(map[string]bool)
	var seen sync.Mutex
	for range cycles {
		for i := 0; i < len(volumes); i += 4 {
			together(t, "a cycle", volumes[i:i+4], func(ctx context.Context, v *lab.Volume) error {
				if err := v.TryStage(ctx); err != nil {
					return err
				}
				seen.Lock()
				numbers[v.Device()] = true
				seen.Unlock()
				if err := holds("/dev/"+v.Device(), v.Name); err != nil {
					return err
				}
				return v.TryUnstage(ctx)
			})
		}
	}
	stop()
	t.Figure("%d attaches on %d numbers", cycles*len(volumes), len(numbers))
}

// holds reads the beginning of a device through the page cache.
func holds(device, text string) error {
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, len(text)+1)
	if _, err := f.Read(b); err != nil {
		return err
	}
	if string(b) != text+"\n" {
		return fmt.Errorf("%s begins with %q, not %q", device, b, text)
	}
	return nil
}

// foreignDevices: other programs have devices and take and leave numbers. Theirs are never touched; a number that is
// taken meanwhile is given up for another (B039).
func foreignDevices(t *lab.T) {
	t.Sh("modprobe", "-r", "nbd")
	s, p := cell(t)
	s.Volume("foreign", "16MiB")
	uri := s.Attach("foreign", "other")
	var held []*lab.Foreign
	t.Cleanup(func() {
		for _, f := range held {
			_ = f.End()
		}
	})
	for i := range 6 {
		t.TryUntil(5*time.Second, "a foreign device", func(context.Context) error { // udev may have it open when it is new
			f, err := t.TryForeign(uri, i, fmt.Sprintf("other-program-%d", i))
			if err == nil {
				held = append(held, f)
			}
			return err
		})
	}
	var grabbed atomic.Int64
	next := 6
	stop := t.Background(func() {
		next = 6 + (next+1)%10
		if f, err := t.TryForeign(uri, next, "grabber"); err == nil {
			grabbed.Add(1)
			time.Sleep(5 * time.Millisecond)
			_ = f.End()
		}
	})
	volumes := raws(t, p, 6, 16*mib)
	rounds := t.Rounds(1, 30)
	for range rounds {
		together(t, "stage", volumes, func(ctx context.Context, v *lab.Volume) error { return v.TryStage(ctx) })
		for _, v := range volumes {
			oneDevice(t, v, "beside others")
			t.Write("/dev/"+v.Device(), v.Name)
		}
		p.Restart()
		together(t, "unstage", volumes, func(ctx context.Context, v *lab.Volume) error { return v.TryUnstage(ctx) })
	}
	stop()
	for i := 6; i < 16; i++ { // where it was refused, a device was made that nobody uses
		if name := fmt.Sprintf("nbd%d", i); lab.Exists("/sys/block/"+name) && !lab.Exists("/sys/block/"+name+"/pid") {
			t.TryUntil(5*time.Second, "tidying up for the other program", func(context.Context) error {
				f, err := t.TryForeign(uri, i, "grabber")
				if err == nil {
					err = f.End()
				}
				return err
			})
		}
	}
	for i, f := range held {
		if got := lab.Backend(fmt.Sprintf("nbd%d", i)); got != f.Backend {
			t.Errorf("the foreign device nbd%d is %q now, not %q", i, got, f.Backend)
		}
		_, err := lab.ReadDirect(fmt.Sprintf("/dev/nbd%d", i), 0, 4096)
		t.Check(err, "reading a foreign device")
	}
	t.Figure("numbers grabbed and left by another program meanwhile: %d", grabbed.Load())
}

// inUse: a device that anybody uses stays as it is, with all that is written to it; each call says so, until it is let go.
func inUse(t *lab.T) {
	s, p := cell(t)
	heldOpen(t, p)
	heldElsewhere(t, s, p)
}

// heldOpen: an open device, and an open file (B041, B045).
func heldOpen(t *lab.T, p *lab.Plugin) {
	raw := t.Volume(p, p, lab.VolumeSpec{Name: "raw", Size: 16 * mib, Block: true})
	raw.Up("a")
	raw.UnpublishFrom("a")
	device := raw.Device()
	f, err := os.OpenFile("/dev/"+device, os.O_RDWR, 0)
	t.Check(err, "holding the device")
	for range 2 {
		t.Refused(raw.TryUnstage(t.Context()), "unstaging an open device", "held open by")
		if raw.Device() != device {
			t.Fatalf("the device is gone while it was held open")
		}
	}
	_, err = f.WriteAt(make([]byte, 4096), 0)
	t.Check(err, "writing to the held device")
	t.Check(f.Sync(), "syncing the held device")
	t.Check(f.Close(), "letting go")
	raw.Unstage()
	if lab.Exists("/sys/block/"+device) && lab.Backend(device) != "(no backend)" {
		t.Errorf("%s is still connected", device)
	}
	fs := t.Volume(p, p, lab.VolumeSpec{Name: "fs", Size: 64 * mib})
	pod := fs.Up("a")
	for _, place := range []struct {
		at   string
		undo func(context.Context) error
	}{
		{pod, func(ctx context.Context) error { return fs.TryUnpublishFrom(ctx, "a") }},
		{fs.Staging(), fs.TryUnstage},
	} {
		path := filepath.Join(place.at, "file-"+filepath.Base(place.at))
		f, err := os.Create(path)
		t.Check(err, "an open file")
		t.Refused(place.undo(t.Context()), "with an open file", "busy")
		_, err = f.WriteString("written while it was refused\n")
		t.Check(err, "a later write")
		t.Check(f.Sync(), "a later sync")
		t.Check(f.Close(), "closing")
		t.TryUntil(20*time.Second, "after the close", place.undo)
	}
	pod = fs.Up("b")
	for _, name := range []string{"file-mount", "file-globalmount"} {
		if got := lab.ReadText(filepath.Join(pod, name)); got != "written while it was refused" {
			t.Errorf("%s holds %q", name, got)
		}
	}
}

// heldElsewhere: mounts of another mount namespace, and devices built upon a device (B043).
func heldElsewhere(t *lab.T, s *lab.Server, p *lab.Plugin) {
	fs := t.Volume(p, p, lab.VolumeSpec{Name: "elsewhere", Size: 64 * mib})
	fs.Up("a")
	hidden := t.Start(lab.Spec{Name: "namespace", Args: []string{"unshare", "--mount", "--propagation", "private", "sleep", "1000"}})
	t.Eventually(10*time.Second, "another mount namespace", func() bool {
		own, _ := os.Readlink("/proc/self/ns/mnt")
		other, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", hidden.PID()))
		return other != "" && other != own && lab.ReadText(fmt.Sprintf("/proc/%d/comm", hidden.PID())) == "sleep"
	})
	fs.UnpublishFrom("a")
	device := fs.Device()
	for range 2 {
		t.Refused(fs.TryUnstage(t.Context()), "unstaging what another namespace has", "another mount namespace")
		_, err := t.Try(lab.Gabion, "--server", s.Metadata(), "detach", fs.ID, "--node", "n1")
		t.Refused(err, "gabion detach of what another namespace has", "another mount namespace")
		if fs.Device() != device {
			t.Fatalf("the device was ended while another namespace had it mounted")
		}
	}
	// The pod's mount went in every namespace, with its directory; the staged one is still there.
	t.Sh("nsenter", "--mount", "--target", fmt.Sprint(hidden.PID()), "sh", "-c", "echo written elsewhere > "+filepath.Join(fs.Staging(), "file"))
	hidden.Kill()
	t.TryUntil(20*time.Second, "unstage", fs.TryUnstage)
	if got := lab.ReadText(filepath.Join(fs.Up("b"), "file")); got != "written elsewhere" {
		t.Errorf("dirty data of the other namespace: %q", got)
	}

	raw := t.Volume(p, p, lab.VolumeSpec{Name: "held", Size: 16 * mib, Block: true})
	raw.Up("a")
	device = raw.Device()
	raw.UnpublishFrom("a")
	t.Sh("modprobe", "dm_mod")
	t.Sh("dmsetup", "create", "upon", "--table", fmt.Sprintf("0 %d linear /dev/%s 0", raw.Size/512, device))
	t.Cleanup(func() { _, _ = t.Try("dmsetup", "remove", "upon") })
	for range 2 {
		t.Refused(raw.TryUnstage(t.Context()), "unstaging what another device is built upon", "held by")
	}
	_, err := t.Try(lab.Gabion, "--server", s.Metadata(), "detach", raw.ID, "--node", "n1")
	t.Refused(err, "gabion detach of what another device is built upon", "held by")
	t.Write("/dev/mapper/upon", "through dm")
	t.Sh("dmsetup", "remove", "--retry", "upon")
	t.TryUntil(10*time.Second, "unstage", raw.TryUnstage)
	t.Expect(raw.Up("b"), "through dm")
}
