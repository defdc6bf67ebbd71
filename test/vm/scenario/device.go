package scenario

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func device() []lab.Scenario {
	return append([]lab.Scenario{
		{Name: "H75-B153-node-returns", Run: nodeReturns, Once: true, Timeout: 4 * time.Minute},
		{Name: "H72-H74-B114-B077-fenced", Run: fenced, Once: true, Timeout: 4 * time.Minute},
		{Name: "H76-B040-killed-at-each-step", Run: killedAtEachStep, Once: true, Timeout: 8 * time.Minute},
		{Name: "B041-B043-B045-in-use", Run: inUse, Once: true, Waits: true, Timeout: 4 * time.Minute},
		{Name: "B037-stage-unstage-race", Run: stageUnstageRace, CPUs: 2, Timeout: 10 * time.Minute},
		{Name: "B038-few-numbers", Run: fewNumbers, Once: true, Timeout: 10 * time.Minute},
		{Name: "B039-foreign-devices", Run: foreignDevices, Once: true, Timeout: 4 * time.Minute},
	}, device3()...)
}

// unsynced writes what nobody has synced.
func unsynced(t *lab.T, path string, off int64) *os.File {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	t.Check(err, "a file for dirty pages")
	dirt(t, f, off)
	return f
}

func dirt(t *lab.T, f *os.File, off int64) {
	_, err := f.WriteAt(bytes.Repeat([]byte("dirt"), 1024), off)
	t.Check(err, "dirty pages")
}

// nodeReturns: a node that was cut off, fenced and used without it comes back with its old mounts, dirty pages and
// credentials. None of them reaches the volume, and it is served anew only after a clean unstage (H75, B153, B114).
func nodeReturns(t *lab.T) {
	t.LoadDriver()
	s := t.Server()
	controller, p := t.ControllerPlugin(), t.NodePlugin()
	for _, order := range []string{"published before it returns", "published after it returned"} {
		name := strings.Fields(order)[1]
		fs := t.Volume(controller, p, lab.VolumeSpec{Name: "fs-" + name, Size: 64 * mib})
		raw := t.Volume(controller, p, lab.VolumeSpec{Name: "raw-" + name, Size: 16 * mib, Block: true})
		both := []*lab.Volume{fs, raw}
		for _, v := range both {
			v.Up("a")
		}
		file := filepath.Join(fs.Target("a"), "file")
		t.Write(file, "first")
		t.Write(raw.Target("a"), "first")
		device, err := os.OpenFile(raw.Target("a"), os.O_WRONLY, 0) // the last close would sync it
		t.Check(err, "the raw device")
		t.Settle()
		t.Net().Drop() // first: dirty pages may be written at any time
		dirt(t, device, 0)
		dirt(t, device, 8*mib)
		open := []*os.File{device, unsynced(t, file, 0), unsynced(t, filepath.Join(fs.Target("a"), "dirty"), 0)}
		for _, v := range both {
			v.Unpublish()
		}
		useElsewhere(t, s, fs, raw)
		publish := func() {
			for _, v := range both {
				v.Publish()
			}
		}
		if name == "before" {
			publish()
		}
		t.Net().Heal()
		for _, v := range both {
			t.Eventually(20*time.Second, "the old device of "+v.Name+" is refused", func() bool {
				return lab.TryWrite(map[bool]string{true: v.Target("a"), false: file}[v.Block], "late") != nil
			})
		}
		for _, f := range open {
			_ = f.Close()
		}
		if name == "after" {
			publish()
		}
		for _, v := range both {
			t.RefusedAs(v.TryStage(t.Context()), "staging upon the old mount", lab.FailedPrecondition, "unstage it first")
			v.UnpublishFrom("a")
			v.Unstage()
			v.Stage()
			v.PublishTo("b")
		}
		t.Expect(filepath.Join(fs.Target("b"), "file"), "second")
		if lab.Exists(filepath.Join(fs.Target("b"), "dirty")) {
			t.Errorf("a dirty file of the old mount reached the volume")
		}
		t.Expect(raw.Target("b"), "second")
		if b, err := lab.ReadDirect(raw.Target("b"), 8*mib, 4096); err != nil || bytes.Contains(b, []byte("dirt")) {
			t.Errorf("a dirty page of the old device reached the volume: %v", err)
		}
		for _, v := range both {
			v.Down()
		}
		s.CheckImage(fs)
	}
}

// useElsewhere lets another node see what was acknowledged to the first, and write.
func useElsewhere(t *lab.T, s *lab.Server, fs, raw *lab.Volume) {
	copied := filepath.Join(t.Dir, "elsewhere")
	defer func() { _ = os.Remove(copied) }()
	for _, v := range []*lab.Volume{fs, raw} {
		uri := s.Attach(v.ID, "n2")
		t.Elsewhere("nbdcopy", uri, copied)
		at := copied
		if !v.Block {
			t.Sh("modprobe", "loop")
			t.Sh("mkdir", "-p", "/tmp/n2")
			t.Sh("mount", "-o", "loop", copied, "/tmp/n2")
			at = "/tmp/n2/file"
		}
		t.Expect(at, "first")
		t.Write(at, "second")
		if !v.Block {
			t.Sh("umount", "/tmp/n2")
		}
		t.Elsewhere("nbdcopy", "--flush", copied, uri)
		s.Detach(v.ID, "n2")
	}
}

// fenced: whoever else wants the volume is refused until it is unpublished; from then on no write of the first node
// reaches a disk, by its device, by a new connection of its old token, or late (H72, H74, B077, B114).
func fenced(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	controller, p := t.ControllerPlugin(), t.NodePlugin()
	v := t.Volume(controller, p, lab.VolumeSpec{Name: "fenced", Size: 16 * mib, Block: true})
	pod := v.Up("a")
	t.Write(pod, "first")
	old := s.Attach(v.ID, "n1")
	_, err := s.TryCLI("attach", v.ID, "--node", "n2")
	t.Refused(err, "a second node", "n1")

	p.Restart()
	v.Unpublish() // and nothing of the node's
	_, err = t.TryElsewhere("nbdinfo", old)
	t.Refused(err, "a new connection with the old token")
	if lab.TryWrite(pod, "late") == nil {
		t.Errorf("a write was acknowledged after the volume was unpublished")
	}
	v.Publish()
	t.RefusedAs(v.TryStage(t.Context()), "staging upon the old mount", lab.FailedPrecondition, "unstage it first")
	if err := v.TryPublishTo(t.Context(), "b", false); err == nil {
		t.Errorf("the stale device was shown to another pod")
	}
	v.UnpublishFrom("a")
	v.Unstage()
	v.Stage()
	t.Expect(v.PublishTo("a"), "first")
	lateDuplicate(t, s, v)

	// The server is dead, the node's plugin too: the detach ends when there is a server, and holds.
	s.Kill()
	p.Kill()
	if err := t.Within(3*time.Second, "unpublish without a server", v.TryUnpublish); err == nil {
		t.Errorf("unpublish was confirmed by nobody")
	}
	s.Start()
	v.Unpublish()
	uri := s.Attach(v.ID, "n2")
	t.Elsewhere("nbdinfo", uri)
	p.Start()
	t.Eventually(20*time.Second, "the old device is refused", func() bool { return lab.TryWrite(pod, "late") != nil })
	s.Detach(v.ID, "n2")
	v.UnpublishFrom("a")
	v.Unstage()
	t.Expect(v.Up("c"), "first")
}

// lateDuplicate: an unpublish that hangs, and the publishes around it, touch only what they found (H74).
func lateDuplicate(t *lab.T, s *lab.Server, v *lab.Volume) {
	v.UnpublishFrom("a")
	v.Unstage()
	s.Arm(lab.Fault{Point: "primary.detach", Hold: true})
	var late sync.WaitGroup
	for range 3 {
		late.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			_ = v.TryUnpublish(ctx)
		})
	}
	_ = t.Within(2*time.Second, "publish while an unpublish hangs", v.TryPublish)
	s.Disarm("")
	t.TryUntil(20*time.Second, "publish", v.TryPublish)
	late.Wait()
	t.TryUntil(20*time.Second, "publish", v.TryPublish)
	v.Stage()
	pod := v.PublishTo("a")
	t.Expect(pod, "first")
	t.Pause(2 * time.Second)
	t.Write(pod, "first")
}

// killedAtEachStep: whatever step of stage and unstage the plugin is killed at, the next call finishes or undoes it
// from the kernel's facts: one device, no residue, nothing lost (H76, B040).
func killedAtEachStep(t *lab.T) {
	t.LoadDriver()
	t.Server()
	p := t.Plugin(lab.Injectable()...)
	base := t.Baseline()
	steps := []string{"kernel.dial", "kernel.connect", "kernel.connected", "mkfs", "mounted"}
	for i, step := range steps {
		then := []string{"stage", "unstage", "stage without state"}
		if !t.Long { // in turns
			then = then[i%len(then):][:1]
		}
		for _, next := range then {
			v := t.Volume(p, p, lab.VolumeSpec{Name: fmt.Sprintf("%d-%s", i, strings.Fields(next)[0]+fmt.Sprint(len(next))), Size: 64 * mib})
			v.Create()
			v.Publish()
			killStage(p, v, step)
			if next == "stage without state" {
				t.Sh("sh", "-c", "rm -rf /run/gabion/nbd/*.json /run/gabion/csi")
			}
			p.Start()
			what := fmt.Sprintf("killed at %s, then %s", step, next)
			if next == "unstage" { // mkfs goes on without the plugin, and nobody disturbs it
				t.TryUntil(30*time.Second, what, v.TryUnstage)
			} else {
				t.TryUntil(30*time.Second, what, v.TryStage)
				oneDevice(t, v, what)
				t.Write(filepath.Join(v.PublishTo("a"), "file"), what)
			}
			v.Down()
			t.Clean(what, base)
			if next != "unstage" {
				t.Expect(filepath.Join(v.Up("b"), "file"), what)
				v.Down()
			}
			v.Delete()
		}
	}
	killedUnstages(t, p, base)
}

func oneDevice(t *lab.T, v *lab.Volume, what string) {
	if d := v.Devices(); len(d) != 1 {
		t.Errorf("%s: volume %s has the devices %v", what, v.Name, d)
	}
}

func killStage(p *lab.Plugin, v *lab.Volume, step string) {
	switch step {
	case "mkfs":
		p.KillWhen("mkfs", func() bool { return lab.Running("mkfs") }, v.TryStage)
	case "mounted":
		p.KillWhen("the mount", func() bool { return lab.Mounted(v.Staging()) }, v.TryStage)
	default:
		p.KillAt(step, v.TryStage)
	}
}

func killedUnstages(t *lab.T, p *lab.Plugin, base func() []string) {
	v := t.Volume(p, p, lab.VolumeSpec{Name: "u", Size: 64 * mib})
	for i, step := range []string{"unmounted", "kernel.disconnect", "kernel.disconnected"} {
		then := []string{"unstage", "stage"}
		if !t.Long { // in turns
			then = then[i%len(then):][:1]
		}
		for _, next := range then {
			what := fmt.Sprintf("unstage killed at %s, then %s", step, next)
			pod := v.Up("a")
			t.Write(filepath.Join(pod, "file"), what)
			v.UnpublishFrom("a")
			if step == "unmounted" {
				p.KillWhen("the unmount", func() bool { return !lab.Mounted(v.Staging()) }, v.TryUnstage)
			} else {
				p.KillAt(step, v.TryUnstage)
			}
			p.Start()
			if next == "stage" {
				v.Stage()
				oneDevice(t, v, what)
				t.Expect(filepath.Join(v.PublishTo("a"), "file"), what)
			}
			v.Down()
			t.Clean(what, base)
		}
	}
}
