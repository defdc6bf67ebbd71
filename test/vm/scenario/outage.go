package scenario

import (
	"fmt"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func outage() []lab.Scenario {
	return []lab.Scenario{
		{Name: "load/plugin-killed", Run: pluginKilled, Once: true, Timeout: 5 * time.Minute},
		{Name: "load/server-killed", Run: serverKilled, CPUs: 2, Timeout: 5 * time.Minute},
		{Name: "load/server-silent", Run: serverSilent, Waits: true, Timeout: 10 * time.Minute},
	}
}

// underLoad runs faults while ext4, XFS and a raw device are written to and synced: no error, no stall beyond the
// outage, all data there, file systems clean.
func underLoad(t *lab.T, faults func(s *lab.Server, p *lab.Plugin, l *lab.Load)) {
	s, p := cell(t)
	volumes := []*lab.Volume{
		t.Volume(p, p, lab.VolumeSpec{Name: "ext4"}),
		t.Volume(p, p, lab.VolumeSpec{Name: "xfs", FS: "xfs"}),
		t.Volume(p, p, lab.VolumeSpec{Name: "raw", Block: true}),
	}
	var places []string
	for _, v := range volumes {
		places = append(places, v.Up("pod"))
	}
	l := t.Load(places...)
	faults(s, p, l)
	l.Stop()
	t.NoIOErrors()
	for _, v := range volumes {
		v.Down()
		s.CheckImage(v)
	}
}

// pluginKilled: nobody notices that the plugin is killed, ended in order, or away (B047, H85), and it takes the devices
// over when it is back.
func pluginKilled(t *lab.T) {
	underLoad(t, func(s *lab.Server, p *lab.Plugin, l *lab.Load) {
		random := t.Random()
		kills := t.Rounds(3, 20)
		l.Quiet(fmt.Sprintf("the plugin killed %d times", kills), time.Second, func() {
			for range kills {
				t.Pause(time.Duration(random.IntN(1500)) * time.Millisecond)
				p.Kill()
				p.Launch()
			}
			p.WaitReady()
		})
		l.Quiet("the plugin ended by SIGTERM", time.Second, func() {
			p.Process().Terminate(15 * time.Second)
			p.Start()
		})
		l.Outage("the server restarts while the plugin is away", func() {
			p.Kill()
			s.Restart(lab.AddrA)
			p.Start()
		})
		l.Outage("the server restarts after that", func() { s.Restart(lab.AddrA) })
	})
}

// serverKilled: the plugin moves the devices to the next process, wherever it listens (B029).
func serverKilled(t *lab.T) {
	underLoad(t, func(s *lab.Server, _ *lab.Plugin, l *lab.Load) {
		rounds := t.Rounds(1, 20)
		for range rounds {
			l.Outage("the server killed and restarted", func() { s.Restart(lab.AddrA) })
		}
		l.Outage("the server killed and restarted at another address", func() { s.Restart(lab.AddrB) })
		l.Outage("and back", func() { s.Restart(lab.AddrA) })
	})
}

// serverSilent: a server that only stops answering, and a network that only loses packets, send no word (B035, H83).
func serverSilent(t *lab.T) {
	underLoad(t, func(s *lab.Server, _ *lab.Plugin, l *lab.Load) {
		pauses := []time.Duration{8 * time.Second}
		if t.Long {
			pauses = []time.Duration{10 * time.Second, 20 * time.Second, 45 * time.Second, 90 * time.Second}
		}
		for _, d := range pauses {
			l.Outage("the server stopped for "+d.String(), func() {
				s.Process().Freeze()
				t.Pause(d)
				s.Process().Thaw()
			})
			l.Outage("packets lost for "+d.String(), func() {
				t.Net().Drop()
				t.Pause(d)
				t.Net().Heal()
			})
		}
	})
}
