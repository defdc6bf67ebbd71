package scenario

import (
	"context"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

// expandWhileSilent: a volume of which the server answers nothing cannot grow; the call says so by its deadline, and
// other volumes notice nothing (B031).
func expandWhileSilent(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin()
	v := t.Volume(p, p, lab.VolumeSpec{Name: "silent"})
	l := t.LoadOf(lab.Deep, v.Up("pod"))
	l.Steady(20 * time.Second)
	v.Grow(2 * gib)
	s.Arm(lab.Fault{Point: "primary.write", Match: v.ID, Hold: true})
	s.AwaitHit("primary.write")
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	err := v.TryNodeExpand(ctx)
	cancel()
	if took := time.Since(began); took > 11*time.Second {
		t.Errorf("the call took %v", took)
	}
	t.Refused(err, "expanding a silent volume")
	retryable(t, err)
	other := t.Volume(p, p, lab.VolumeSpec{Name: "other"})
	began = time.Now()
	pod := other.Up("pod")
	t.Write(filepath.Join(pod, "file"), "other")
	other.Expand(2 * gib)
	other.Down()
	t.Figure("another volume's life meanwhile: %.2f s", time.Since(began).Seconds())
	s.Disarm("")
	l.Steady(20 * time.Second)

	s.Process().Freeze() // and the metadata service with it
	began = time.Now()
	ctx, cancel = context.WithTimeout(t.Context(), 5*time.Second)
	err = v.TryNodeExpand(ctx)
	cancel()
	s.Process().Thaw()
	if took := time.Since(began); took > 6*time.Second {
		t.Errorf("the call took %v", took)
	}
	t.Refused(err, "expanding towards a server that was stopped")
	retryable(t, err)
	l.Steady(20 * time.Second)
	v.Expand(2 * gib)
	if v.DeviceSize() != 2*gib {
		t.Errorf("the device has %d bytes", v.DeviceSize())
	}
	l.Stop()
	t.NoIOErrors()
	v.Down()
	s.CheckImage(v)
}

// retryable: an orchestrator calls again.
func retryable(t *lab.T, err error) {
	switch c := lab.Code(err); c {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted:
	default:
		t.Errorf("%v is not what an orchestrator would call again for: %v", c, err)
	}
}

// expandAndKill: a server that dies while the driver changes a size, for which it holds up the device, costs no error (B031).
func expandAndKill(t *lab.T) {
	s, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: "ext4"})
	l := t.LoadOf(lab.Deep, v.Up("pod"))
	random := t.Random()
	rounds := t.Rounds(1, 20)
	for i := range rounds {
		size := v.Size + 64*mib
		v.Grow(size)
		l.Outage("the server killed during an expand", func() {
			done := make(chan struct{})
			go func() {
				defer close(done)
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				t.Logf("expand %d: %v", i, v.TryNodeExpand(ctx))
			}()
			t.Pause(time.Duration(random.IntN(120)) * time.Millisecond)
			s.Restart(lab.AddrA)
			<-done
		})
		v.NodeExpand()
		if v.DeviceSize() != size {
			t.Errorf("the device has %d bytes, not %d", v.DeviceSize(), size)
		}
	}
	l.Stop()
	t.NoIOErrors()
	v.Down()
	s.CheckImage(v)
}

// idleAndUpgraded: a device that nobody uses stays as it is (B036), and so does one whose plugin comes back with other
// values, which are those of the next device (B085).
func idleAndUpgraded(t *lab.T) {
	t.LoadDriver()
	t.Server()
	p := t.PluginUnder("taskset", "--cpu-list", "0") // of one processor makes one connection
	v := t.Volume(p, p, lab.VolumeSpec{Name: "old"})
	pod := v.Up("pod")
	t.Write(filepath.Join(pod, "file"), "first")
	mine := t.Net().Connections()
	if len(mine) != 1 {
		t.Fatalf("a device of a plugin with one processor has %d connections", len(mine))
	}
	said := len(t.KernelLines("nbd"))
	idle := 6 * time.Second
	if t.Long {
		idle = 15 * time.Minute
	}
	t.Pause(idle)
	same := func(when string) {
		now := t.Net().Connections()
		if len(now) < 1 || now[0] != mine[0] && (len(now) < 2 || now[1] != mine[0]) {
			t.Errorf("%s: connections %v became %v", when, mine, now)
		}
		if n := p.Reconnects(v); n != 0 {
			t.Errorf("%s: %d reconnects", when, n)
		}
		if lines := t.KernelLines("nbd"); len(lines) > said {
			t.Errorf("%s: the kernel has said %q", when, lines[said:])
		}
	}
	same("after a rest")
	l := t.Load(pod)
	l.Quiet("the plugin upgraded", time.Second, func() {
		p.Wrapper = nil
		p.Restart()
		v.Stage()
		v.PublishTo("pod")
		t.Pause(3 * time.Second)
	})
	same("after an upgrade")
	other := t.Volume(p, p, lab.VolumeSpec{Name: "new"})
	other.Up("pod")
	if n := len(t.Net().Connections()); n != 1+2 {
		t.Errorf("the old and a new device have %d connections", n)
	}
	l.Stop()
	t.NoIOErrors()
	other.Down()
	v.Down()
}

// statsOfTheSilent: calls about volumes whose server is silent end by their deadline and do not pile up (B086).
func statsOfTheSilent(t *lab.T) {
	s, controller, p := splitCell(t)
	var volumes []*lab.Volume
	var places []string
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		v := t.Volume(controller, p, lab.VolumeSpec{Name: name, Size: 256 * mib})
		volumes, places = append(volumes, v), append(places, v.Up("pod"))
	}
	l := t.LoadOf(lab.Shape{Workers: 2, Span: mib}, places...)
	l.Steady(20 * time.Second)
	threads := lab.Threads(p.Process().PID())
	s.Process().Freeze()
	t.Pause(time.Second)
	longest, late := time.Duration(0), 0
	for i := range 200 {
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := volumes[i%len(volumes)].TryStats(ctx)
		cancel()
		longest = max(longest, time.Since(began))
		if err != nil {
			late++
		}
		if i%20 == 0 {
			p.WaitReady()
		}
	}
	stuck := lab.Threads(p.Process().PID()) - threads
	t.Figure("200 stats of silent volumes: longest %.2f s, refused %d, more threads %d", longest.Seconds(), late, stuck)
	if longest > 1200*time.Millisecond {
		t.Errorf("a call with a deadline of 1 s took %v", longest)
	}
	if parked := lab.Parked(p.Process().PID()); parked > len(volumes) {
		t.Errorf("%d threads of the plugin wait in the kernel for %d volumes", parked, len(volumes))
	}
	s.Process().Thaw()
	l.Steady(20 * time.Second)
	l.Stop()
	t.NoIOErrors()
	for _, v := range volumes {
		if wrong := v.Health(); len(wrong) > 0 {
			t.Errorf("volume %s is still said to be unwell: %v", v.Name, wrong)
		}
		v.Down()
	}
}
