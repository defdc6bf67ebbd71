package scenario

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func failover() []lab.Scenario {
	return []lab.Scenario{
		{Name: "B029-in-flight-when-killed", Run: inFlightWhenKilled, Once: true, CPUs: 2, Timeout: 5 * time.Minute},
		{Name: "H01-H02-stale-write", Run: staleWrite, Waits: true},
		{Name: "H05-one-of-the-sockets", Run: oneOfTheSockets, CPUs: 2},
		{Name: "B030-move", Run: tenMoves, CPUs: 2, Timeout: 3 * time.Minute},
		{Name: "B031-expand-while-silent", Run: expandWhileSilent, Once: true},
		{Name: "B031-expand-and-kill", Run: expandAndKill, Once: true, Timeout: 3 * time.Minute},
		{Name: "B033-H83-server-and-plugin-away", Run: serverAndPluginAway, Once: true, Waits: true, Timeout: 5 * time.Minute},
		{Name: "B035-pause", Run: networkPause, Once: true, Waits: true, Timeout: 6 * time.Minute},
		{Name: "B036-B085-idle-and-upgraded", Run: idleAndUpgraded, Once: true, CPUs: 2, Timeout: 20 * time.Minute},
		{Name: "B086-stats-of-the-silent", Run: statsOfTheSilent, Once: true},
	}
}

// inFlightWhenKilled: with 32 requests in flight on a raw device and as many on ext4, the server is killed at random
// moments (B029).
func inFlightWhenKilled(t *lab.T) {
	s, p := cell(t)
	raw := t.Volume(p, p, lab.VolumeSpec{Name: "raw", Block: true})
	fs := t.Volume(p, p, lab.VolumeSpec{Name: "ext4"})
	l := t.LoadOf(lab.Deep, raw.Up("pod"), fs.Up("pod"))
	random := t.Random()
	rounds := t.Rounds(1, 20)
	for range rounds {
		t.Pause(time.Duration(random.IntN(1000)) * time.Millisecond)
		l.Outage("the server killed with 64 writers", func() { s.Restart(lab.AddrA) })
	}
	l.Stop()
	t.NoIOErrors()
	fs.Down()
	raw.Down()
	s.CheckImage(fs)
}

// staleWrite: a write that the server has held up, and that the kernel has sent again meanwhile, is never done after a
// newer one was acknowledged: neither when it was parsed and handed on (H01), nor when it was only received (H02).
func staleWrite(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin()
	v := t.Volume(p, p, lab.VolumeSpec{Name: "raw", Block: true})
	pod := v.Up("pod")
	f, err := os.OpenFile(pod, os.O_RDWR|unix.O_DIRECT, 0)
	t.Check(err, "the device")
	defer func() { _ = f.Close() }()
	block := lab.AlignedBlock()
	fill := func(c byte) {
		for i := range block {
			block[i] = c
		}
	}
	fill('0')
	_, err = f.WriteAt(block, 0) // its extent is born
	t.Check(err, "writing")
	for _, point := range []string{"disk.write", "primary.write", "nbd.parse", "nbd.reply"} {
		s.Arm(lab.Fault{Point: point, Match: v.ID, Hold: true, Count: 1})
		before := p.Reconnects(v)
		fill('A')
		written := make(chan error, 1)
		go func() {
			_, err := f.WriteAt(block, 0)
			written <- err
		}()
		s.AwaitHit(point)
		// Until the kernel has sent it again, or its new session waits for the old.
		acknowledged := false
		select {
		case err := <-written:
			t.Check(err, "writing A")
			acknowledged = true
		case <-time.After(6 * time.Second):
		}
		if parsed := point == "disk.write" || point == "primary.write"; parsed == acknowledged {
			t.Errorf("%s is held, and that A was acknowledged is %v", point, acknowledged)
		}
		if !acknowledged {
			s.Disarm(point)
			t.Check(<-written, "writing A")
		}
		fill('B')
		_, err := f.WriteAt(block, 0)
		t.Check(err, "writing B")
		s.Disarm(point) // what was held goes on, if it can
		for range 20 {
			t.Pause(50 * time.Millisecond)
			got, err := lab.ReadDirect(pod, 0, len(block))
			t.Check(err, "reading")
			if got[0] != 'B' {
				t.Fatalf("held up at %s: %q came back after it was overwritten", point, got[0])
			}
		}
		t.Figure("held up at %s: acknowledged meanwhile %v, reconnects %d", point, acknowledged, p.Reconnects(v)-before)
	}
	t.NoIOErrors()
	t.Check(f.Close(), "closing the device")
	v.Down()
}

// oneOfTheSockets: one connection of a device dies without a word, and later an attempt to connect anew comes to its end
// only after the next one has (H05).
func oneOfTheSockets(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin()
	v := t.Volume(p, p, lab.VolumeSpec{Name: "ext4"})
	l := t.Load(v.Up("pod"))
	l.Outage("one connection cut off", func() {
		all := t.Net().Connections()
		if len(all) < 2 {
			t.Fatalf("the device has %d connections", len(all))
		}
		t.Net().CutOff(all[0])
	})
	t.Net().Join()
	l.Outage("an attempt that ends after the next", func() {
		s.Arm(lab.Fault{Point: "nbd.handshake", Match: v.ID, Hold: true, Count: 2})
		t.Net().Destroy()
		s.AwaitHit("nbd.handshake")
		p.Restart()
		t.Eventually(20*time.Second, "the next attempt succeeds", func() bool { return len(t.Net().Connections()) == 2 })
		s.Disarm("nbd.handshake")
	})
	l.Quiet("after the first attempt has come to its end", time.Second, func() { t.Pause(time.Second) })
	if n := len(t.Net().Connections()); n != 2 {
		t.Errorf("the device has %d connections", n)
	}
	l.Stop()
	t.NoIOErrors()
	v.Down()
}

// tenMoves: a device is moved ten times within ten seconds, is usable after each, and its requests arrive at the server
// that the connections show (B030).
func tenMoves(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin()
	v := t.Volume(p, p, lab.VolumeSpec{Name: "ext4"})
	l := t.Load(v.Up("pod"))
	l.Steady(10 * time.Second)
	l.Stall()
	began := time.Now()
	for i := range 10 {
		t.Net().Destroy()
		t.Eventually(5*time.Second, "connections are there again", func() bool {
			return p.Reconnects(v) > i && len(t.Net().Connections()) == 2
		})
		if d := time.Until(began.Add(time.Duration(i+1) * time.Second)); d > 0 {
			t.Pause(d)
		}
	}
	took := time.Since(began)
	l.Steady(10 * time.Second)
	t.Figure("ten moves in %.1f s, reconnects %d, longest write %.2f s", took.Seconds(), p.Reconnects(v), l.Stall().Seconds())
	if n := s.Metric("gabion_volume_sessions", v.ID); n != 2 {
		t.Errorf("the server has %v connections of the device", n)
	}
	l.Stop()
	t.NoIOErrors()
	v.Down()
}

// serverAndPluginAway: server and plugin are away together, and the plugin has forgotten all when it is back; and the
// same with a server that is only silent (B033, H83).
func serverAndPluginAway(t *lab.T) {
	underLoad(t, func(s *lab.Server, p *lab.Plugin, l *lab.Load) {
		pauses := []time.Duration{8 * time.Second}
		if t.Long {
			pauses = append(pauses, 20*time.Second, 60*time.Second)
		}
		for _, d := range pauses {
			l.Outage("server and plugin away for "+d.String(), func() {
				s.Kill()
				p.Kill()
				t.Sh("rm", "-rf", "/run/gabion")
				t.Pause(d)
				p.Launch()
				s.Start()
				p.WaitReady()
			})
		}
		l.Outage("the server stopped, the plugin killed and without its state", func() {
			s.Process().Freeze()
			p.Kill()
			t.Sh("rm", "-rf", "/run/gabion")
			p.Launch()
			t.Pause(8 * time.Second)
			s.Process().Thaw()
			p.WaitReady()
		})
	})
}

// networkPause: a pause of the network costs no error and at most one reconnect (B035).
func networkPause(t *lab.T) {
	s, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: "ext4"})
	l := t.Load(v.Up("pod"))
	pauses := []time.Duration{8 * time.Second}
	if t.Long {
		pauses = append(pauses, 20*time.Second, 45*time.Second, 90*time.Second)
	}
	for _, d := range pauses {
		before := p.Reconnects(v)
		l.Outage("packets lost for "+d.String(), func() {
			t.Net().Drop()
			t.Pause(d)
			t.Net().Heal()
		})
		t.Pause(time.Second)
		if n := p.Reconnects(v) - before; n > 1 {
			t.Errorf("%d reconnects for one pause", n)
		}
	}
	l.Stop()
	t.NoIOErrors()
	v.Down()
	s.CheckImage(v)
}
