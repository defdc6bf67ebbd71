package kernel_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/nbd/kernel/kerneltest"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

// slack is what a stall may have beyond the outage, or the driver's timer if that is longer.
const slack = time.Second

// B029: the server is killed under load 20 times, and comes back here or elsewhere.
func TestB029ServerKilled(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume(r.one, r.two)
		r.attachment(v, oneHost, another)
		r.two.Kill()
		d := r.attach(m, v)
		l := r.load(d.Index)
		here, there := r.one, r.two
		const outage = 2 * time.Second
		for i := range 20 {
			time.Sleep(timer + rand.N(time.Second)) // one outage at a time
			here.Kill()
			time.Sleep(rand.N(outage))
			if i%2 == 1 {
				here, there = there, here
			}
			here.Serve()
			eventually(t, "connected", 2*time.Second, func() bool { return health(m, v) == "connected" })
		}
		l.end(t, timer+slack)
		r.detach(m, v)
		r.noResidue()
	})
}

// B030, H83: the primary is silent, its host alive, and another takes the volume
// over. The old sockets are ended, and the new server gets the device's requests.
func TestB030TrafficMoves(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume(r.one, r.two)
		d := r.attach(m, v)
		l := r.load(d.Index)
		time.Sleep(time.Second)
		r.one.Stop()
		r.attachment(v, another)
		eventually(t, "requests at the new server", timer+slack, func() bool { return r.two.Requests() > 0 })
		l.end(t, timer+slack)
		before := r.one.Requests()
		r.one.Serve() // its return changes nothing
		time.Sleep(time.Minute)
		if err := <-r.f.Start(d.Index); err != nil || r.one.Requests() != before || health(m, v) != "connected" {
			t.Errorf("after the old server's return: %v, %d requests there, %s", err, r.one.Requests()-before, health(m, v))
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// B030: metadata names another primary, and both are well: the device moves there without a look at T.
func TestB030PlannedMove(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume(r.one, r.two)
		d := r.attach(m, v)
		r.attachment(v, another, oneHost)
		eventually(t, "a move", 5*time.Minute, func() bool { return r.two.Sessions() == 4 })
		time.Sleep(time.Second)
		before := r.two.Requests()
		if err := <-r.f.Start(d.Index); err != nil || r.two.Requests() != before+1 {
			t.Errorf("a request: %v, %d at the new server", err, r.two.Requests()-before)
		}
		// A primary that cannot be reached takes no device away from a server that works.
		r.one.Kill()
		r.attachment(v, oneHost, another)
		sessions := r.two.Sessions()
		l := r.slowLoad(d.Index, 100*time.Millisecond)
		time.Sleep(5 * time.Minute)
		l.end(t, 100*time.Millisecond)
		if r.two.Sessions() != sessions {
			t.Errorf("%d connections were opened for nothing", r.two.Sessions()-sessions)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// B030: ten moves within ten seconds.
func TestB030TenMoves(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume(r.one, r.two)
		r.attachment(v, oneHost, another)
		d := r.attach(m, v)
		l := r.load(d.Index)
		for i := range 10 {
			old, now := r.one, r.two
			if i%2 == 1 {
				old, now = now, old
			}
			before := now.Requests()
			old.Kill()
			time.Sleep(time.Second)
			old.Serve()
			r.attachment(v, map[bool]string{true: oneHost, false: another}[i%2 == 1])
			if err := <-r.f.Start(d.Index); err != nil || i == 0 && now.Requests() == before {
				t.Errorf("move %d: %v", i, err)
			}
		}
		l.end(t, 10*time.Second+timer+slack) // a request may meet the end of its sockets several times, and then waits for its timer
		r.detach(m, v)
		r.noResidue()
	})
}

// B033: server and plugin are away together.
func TestB033BothAway(t *testing.T) {
	for _, away := range []time.Duration{20 * time.Second, time.Minute, 85 * time.Second} {
		bubble(t, func(t *testing.T, r *rig) {
			m, stop := r.run(func(c *kernel.Config) { c.DeadTimeout = 90 * time.Second })
			v := r.volume()
			d := r.attach(m, v)
			l := r.load(d.Index)
			time.Sleep(time.Second)
			stop()
			r.one.Kill()
			time.Sleep(away)
			r.one.Serve()
			m, stop = r.run()
			defer stop()
			time.Sleep(10 * time.Second)
			l.end(t, away+slack)
			r.detach(m, v)
			r.noResidue()
		})
	}
}

// B035: the network is gone for a while.
func TestB035PacketsDropped(t *testing.T) {
	for _, away := range []time.Duration{time.Second, 10 * time.Second, 45 * time.Second, 90 * time.Second} {
		bubble(t, func(t *testing.T, r *rig) {
			m, stop := r.run()
			defer stop()
			v := r.volume()
			d := r.attach(m, v)
			l := r.load(d.Index)
			time.Sleep(time.Second)
			r.one.Drop()
			time.Sleep(away)
			r.one.Serve()
			time.Sleep(10 * time.Second)
			l.end(t, max(away, timer)+slack)
			if n := r.one.Sessions(); n > 8 {
				t.Errorf("%d connections: more than one move", n)
			}
			r.detach(m, v)
			r.noResidue()
		})
	}
}

// B036: an idle device stays as it is.
func TestB036Idle(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		time.Sleep(15 * time.Minute)
		if err := <-r.f.Start(d.Index); err != nil || r.one.Sessions() != 4 || r.f.Calls("reconfigure") > 1 {
			t.Errorf("after 15 minutes: %v, %d connections, %d changes", err, r.one.Sessions(), r.f.Calls("reconfigure"))
		}
		r.detach(m, v)
	})
}

// H05: one of four sockets dies, and the attempts of two managers to mend that
// get in each other's way: in the end one session has all sockets.
func TestH05OneOfFourSockets(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		other, stopOther := r.run()
		defer stopOther()
		v := r.volume()
		d := r.attach(m, v)
		l := r.load(d.Index)
		time.Sleep(time.Second)
		r.one.CloseOne(v)
		eventually(t, "connected", timer, func() bool { return r.one.Sessions() > 4 && health(m, v) == "connected" })
		time.Sleep(time.Minute)
		if n := r.one.Sessions(); n != 8 || r.f.Established() != 4 {
			t.Errorf("%d connections were made, %d stand", n, r.f.Established())
		}
		l.end(t, timer+slack)
		r.detach(other, v)
		r.noResidue()
	})
}

// H84: the server answers nothing for an hour, but takes sessions: no error, at most one move per T.
func TestH84Parked(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v, w := r.volume(), r.volume()
		d, e := r.attach(m, v), r.attach(m, w)
		r.one.Park(v, true)
		l := r.load(d.Index)
		healthy := r.slowLoad(e.Index, 200*time.Millisecond)
		time.Sleep(time.Hour)
		moves := (r.one.Sessions() - 8) / 4
		if most := int(time.Hour / timer); moves > most {
			t.Errorf("%d moves in an hour", moves)
		}
		t.Logf("%d moves", moves)
		healthy.end(t, 100*time.Millisecond)
		r.one.Park(v, false)
		time.Sleep(10 * time.Second)
		l.end(t, time.Hour+timer+slack)
		r.detach(m, v)
		r.detach(m, w)
		r.noResidue()
	})
}

// H85: the plugin is away for an hour; the primary moves and the volume grows meanwhile.
func TestH85PluginAway(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		v := r.volume(r.one, r.two)
		d := r.attach(m, v)
		l := r.slowLoad(d.Index, 200*time.Millisecond)
		stop()
		time.Sleep(30 * time.Minute)
		if stall := l.stall(); stall > 100*time.Millisecond {
			t.Errorf("a stall of %v while only the plugin is away", stall)
		}
		r.one.Kill()
		r.f.Change(func() { v.Size = 2 * gib })
		r.attachment(v, another)
		time.Sleep(30 * time.Minute)
		m, stop = r.run()
		defer stop()
		eventually(t, "connected", slack, func() bool { return health(m, v) == "connected" })
		if now, err := m.Find(v.Volume); err != nil || now.Size != gib {
			t.Errorf("the move changed the size: %+v, %v", now, err)
		}
		if now, err := m.Resize(context.Background(), v.Volume, 2*gib); err != nil || now.Size != 2*gib {
			t.Errorf("Resize: %+v, %v", now, err)
		}
		l.end(t, 30*time.Minute+slack)
		r.detach(m, v)
		r.noResidue()
	})
}

// B047: the plugin is killed over and over; nobody notices, and the next one handles a server's failure.
func TestB047PluginRestarts(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		var volumes []*kerneltest.Volume
		var loads []*load
		for range 20 {
			v := r.volume()
			volumes = append(volumes, v)
			loads = append(loads, r.slowLoad(r.attach(m, v).Index, 50*time.Millisecond))
		}
		for range 20 {
			stop()
			time.Sleep(rand.N(10 * time.Second))
			m, stop = r.run()
			time.Sleep(rand.N(10 * time.Second))
		}
		defer stop()
		for _, l := range loads {
			if stall := l.stall(); stall > 50*time.Millisecond {
				t.Errorf("a stall of %v", stall)
			}
		}
		if n := r.one.Sessions(); n != 80 {
			t.Errorf("%d connections", n)
		}
		r.one.Kill()
		time.Sleep(time.Second)
		r.one.Serve()
		time.Sleep(5 * time.Second)
		for i, l := range loads {
			l.end(t, timer+slack)
			r.detach(m, volumes[i])
		}
		r.noResidue()
	})
}

// Servers are there and metadata is not, in every way: a device reconnects with what its record says.
func TestMetadataAway(t *testing.T) {
	for _, hang := range []bool{false, true} {
		bubble(t, func(t *testing.T, r *rig) {
			m, stop := r.run()
			v := r.volume()
			d := r.attach(m, v)
			stop()
			r.md.Away(!hang, hang)
			m, stop = r.run()
			defer stop()
			l := r.load(d.Index)
			r.one.Kill()
			time.Sleep(20 * time.Second)
			r.one.Serve()
			time.Sleep(5 * time.Second)
			l.end(t, 20*time.Second+slack)
			r.detach(m, v)
			r.noResidue()
		})
	}
}

// The state is lost: the kernel and metadata are enough. Old sockets end when their server closes them.
func TestStateLost(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		v := r.volume(r.one, r.two)
		d := r.attach(m, v)
		stop()
		r.dir = stateDir(t)
		m, stop = r.run(func(c *kernel.Config) { c.Connections = 2 })
		defer stop()
		l := r.load(d.Index)
		time.Sleep(10 * time.Second)
		if health(m, v) != "connected" {
			t.Error(health(m, v))
		}
		r.one.Kill()
		r.attachment(v, another)
		time.Sleep(10 * time.Second)
		l.end(t, timer+slack)
		if all := len(r.records()); all != 1 {
			t.Errorf("%d records", all)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// The state is lost and the attachment has ended: the device is left alone, and
// the log names a way to end it that asks for nobody else's attachment.
func TestStateLostLeftAlone(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		v := r.volume()
		d := r.attach(m, v)
		stop()
		r.dir = stateDir(t)
		r.md.Remove(v.Volume)
		var log bytes.Buffer
		r.log = &log
		_, stop = r.run()
		time.Sleep(10 * time.Second)
		stop()
		if !strings.Contains(log.String(), "left alone") || !strings.Contains(log.String(), "`gabion detach --give-up /dev/nbd0` ends it") {
			t.Error(log.String())
		}
		if err := <-r.f.Start(d.Index); err != nil {
			t.Errorf("it was touched: %v", err)
		}
	})
}

// What happens to a device's record while all is well, and nobody has to do with the device, is noticed before its server ends.
func TestRecordChanges(t *testing.T) {
	for name, change := range map[string]func(path string) error{
		"lost": os.Remove,
		"a detach was cut off": func(path string) error {
			p, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(path, bytes.Replace(p, []byte(`"connected"`), []byte(`"ending"`), 1), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m, stop := r.run()
				defer stop()
				v := r.volume()
				d := r.attach(m, v)
				unmount := r.f.Mount(d.Index, "/mnt")
				time.Sleep(10 * time.Second)
				for _, name := range r.records() {
					if err := change(filepath.Join(r.dir, name)); err != nil {
						t.Fatal(err)
					}
				}
				r.keeps(m, v, d)
				unmount()
				r.detach(m, v)
				r.noResidue()
			})
		})
	}
}

// The state directory goes while a device is used, and its file system is no place for another.
func TestStateGoes(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		l := r.load(d.Index)
		time.Sleep(time.Second) // nobody works on the device any more
		if err := os.RemoveAll(r.dir); err != nil {
			t.Fatal(err)
		}
		r.one.Kill()
		r.one.Serve()
		time.Sleep(10 * time.Second)
		l.end(t, timer+slack)
		if n := len(r.records()); n != 1 || health(m, v) != "connected" {
			t.Errorf("%d records, %s", n, health(m, v))
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// The driver is slow to notice that sockets have ended, or says so to nobody.
func TestEventsLost(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		l := r.load(d.Index)
		r.f.Mute(true)
		r.one.Kill()
		r.one.Serve()
		time.Sleep(10 * time.Second)
		l.end(t, timer+slack)
		r.detach(m, v)
	})
}

// What a server says of an export that a device is of already is checked too.
func TestB170ServerLiesLater(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		for name, lie := range map[string]func(*client.Export){
			"smaller":      func(e *client.Export) { e.Size -= 4096 },
			"no trim":      func(e *client.Export) { e.Flags &^= 1 << 5 },
			"read-only":    func(e *client.Export) { e.Flags |= 1 << 1 },
			"odd size":     func(e *client.Export) { e.Size += 512 },
			"no multiconn": func(e *client.Export) { e.Flags &^= 1 << 8 },
		} {
			r.one.Say(lie)
			r.one.Kill()
			r.one.Serve()
			l := r.load(d.Index)
			time.Sleep(10 * time.Second)
			if c, _ := condition(m, v); c.Health != kernel.Waiting {
				t.Errorf("%s: %v %s", name, c.Health, c.Reason)
			}
			r.one.Say(nil)
			time.Sleep(5 * time.Second)
			l.end(t, 11*time.Second)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// B031: a resize while the server is silent ends with an error to try again on, others go on, and it succeeds later.
func TestB031ResizeOfASilentServer(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		w := r.volume(r.two)
		r.attachment(w, another)
		d := r.attach(m, v)
		r.f.Change(func() { v.Size = 2 * gib })
		r.attachment(v, oneHost)
		r.one.Stop()
		stopped := time.Now()
		var loads []*load
		for range 32 {
			loads = append(loads, r.load(d.Index))
		}
		time.Sleep(100 * time.Millisecond)
		begin := time.Now()
		if _, err := m.Resize(context.Background(), v.Volume, 2*gib); !errors.Is(err, block.ErrUnavailable) || time.Since(begin) > 2*time.Second {
			t.Errorf("Resize after %v: %v", time.Since(begin), err)
		}
		begin = time.Now()
		r.attach(m, w)
		r.detach(m, w)
		if took := time.Since(begin); took > time.Second {
			t.Errorf("another volume's attach and detach took %v", took)
		}
		time.Sleep(20 * time.Second)
		r.one.Serve()
		outage := time.Since(stopped)
		time.Sleep(5 * time.Second)
		if now, err := m.Resize(context.Background(), v.Volume, 2*gib); err != nil || now.Size != 2*gib {
			t.Errorf("Resize later: %+v, %v", now, err)
		}
		for _, l := range loads {
			l.end(t, outage+slack)
		}
		if r.f.DeadTimeout(d.Index) != 24*time.Hour {
			t.Errorf("its patience is %v", r.f.DeadTimeout(d.Index))
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// A device grows under load, never shrinks, and not beyond what is served.
func TestResize(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		if _, err := m.Resize(context.Background(), v.Volume, gib); !errors.Is(err, block.ErrNotFound) {
			t.Errorf("without a device: %v", err)
		}
		d := r.attach(m, v)
		l := r.load(d.Index)
		if _, err := m.Resize(context.Background(), v.Volume, 2*gib); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("before it has grown: %v", err)
		}
		r.f.Change(func() { v.Size = 3 * gib })
		r.attachment(v, oneHost)
		for _, size := range []int64{2 * gib, 3 * gib, gib} {
			if now, err := m.Resize(context.Background(), v.Volume, size); err != nil || now.Size != 3*gib {
				t.Errorf("to %d: %+v, %v", size, now, err)
			}
		}
		l.end(t, 100*time.Millisecond)
		r.detach(m, v)
	})
}

// The process is killed before it has given a device its patience back after a resize: the next one does.
func TestResizeKilled(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		v := r.volume()
		d := r.attach(m, v)
		r.f.Change(func() { v.Size = 2 * gib })
		r.attachment(v, oneHost)
		r.f.Before("resize", r.fork)
		if _, err := m.Resize(context.Background(), v.Volume, 2*gib); err != nil {
			t.Fatal(err)
		}
		_ = m.Close()
		if err := r.f.Reconfigure(d.Index, v.Backend(), kernel.Change{DeadTimeout: 10 * time.Second}); err != nil {
			t.Fatal(err)
		}
		m, stop := r.run()
		defer stop()
		time.Sleep(5 * time.Second)
		if got := r.f.DeadTimeout(d.Index); got != 24*time.Hour {
			t.Errorf("its patience is %v", got)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// The server falls silent in the moment of a resize: the machine hangs, but not for a day, and the caller not at all.
func TestResizeMeetsSilence(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		r.f.Change(func() { v.Size = 2 * gib })
		r.attachment(v, oneHost)
		r.f.Before("resize", func() { r.one.Drop(); r.f.Start(d.Index) })
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		begin := time.Now()
		if _, err := m.Resize(ctx, v.Volume, 2*gib); err == nil || time.Since(begin) > 6*time.Second {
			t.Errorf("Resize after %v: %v", time.Since(begin), err)
		}
		w := r.volume(r.two)
		r.attachment(w, another)
		time.Sleep(time.Minute)
		r.attach(m, w)
		r.one.Serve()
		time.Sleep(10 * time.Second)
		if got := r.f.DeadTimeout(d.Index); got != 24*time.Hour {
			t.Errorf("its patience is %v", got)
		}
		r.detach(m, w)
		r.detach(m, v)
	})
}

// A driver that receives from the first of its sockets only is given others at once: at an attach, before anybody uses
// the device, and after a move.
func TestDeafDriver(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		r.f.Deaf = 1
		r.f.Before("connect", func() { // a device manager reads what is new
			go func() {
				eventually(t, "a device", slack, func() bool { places, _ := r.f.Places(); return len(places) == 1 })
				<-r.f.Start(0)
			}()
		})
		r.f.Before("reconfigure", func() { r.one.CloseOne(v) }) // what replaces the sockets fails, too
		d := r.attach(m, v)
		if places, _ := r.f.Places(); len(places) != 1 {
			t.Errorf("one volume has %d devices", len(places))
		}
		l := r.load(d.Index)
		time.Sleep(time.Minute)
		l.end(t, 100*time.Millisecond)

		r.f.Deaf = 1
		l = r.load(d.Index)
		r.one.Kill()
		time.Sleep(time.Second)
		r.one.Serve()
		time.Sleep(2*timer + slack)
		l.end(t, 2*timer+slack) // what was sent to a socket waits for its timer, on the deaf one too
		l = r.load(d.Index)
		time.Sleep(time.Minute)
		l.end(t, 100*time.Millisecond)
		r.detach(m, v)
		r.noResidue()
	})
}

// A device that was made, proved bad and could not be ended is found by the next call; no second one is made.
func TestUndoThatFails(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v, other := r.volume(), r.volume(r.two)
		r.attachment(other, another)
		r.attach(m, other)
		if err := r.faults.Arm(fault.Rule{Point: "kernel.connected", Match: v.Volume.String(), Hold: true, Count: 1}); err != nil {
			t.Fatal(err)
		}
		attached := make(chan error, 1)
		go func() {
			_, err := m.Attach(context.Background(), v.Volume, false)
			attached <- err
		}()
		time.Sleep(time.Second)
		release := r.f.Stick("reconfigure") // the driver is busy with another volume
		resized := make(chan error, 1)
		other.Size = 2 * gib
		r.attachment(other, another)
		go func() {
			_, err := m.Resize(context.Background(), other.Volume, other.Size)
			resized <- err
		}()
		time.Sleep(100 * time.Millisecond)
		r.one.Kill()
		r.faults.Clear("kernel.connected")
		time.Sleep(5 * time.Second) // more than an end is waited for
		r.one.Serve()
		release()
		<-resized
		if err := <-attached; !errors.Is(err, block.ErrUnknown) || errors.Is(err, block.ErrUnavailable) {
			t.Errorf("attaching: %v", err)
		}
		d := r.attach(m, v)
		if places, _ := r.f.Places(); len(places) != 2 {
			t.Errorf("two volumes have %d devices", len(places))
		}
		r.load(d.Index).end(t, slack)
		r.detach(m, v)
		r.detach(m, other)
		r.noResidue()
	})
}

// A silence that is over when somebody could do something about it is nothing to do anything about.
func TestSilenceThatIsOver(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		l := r.load(d.Index)
		time.Sleep(time.Second)
		sessions := r.one.Sessions()
		r.md.Slow(timer*3/4 + 1500*time.Millisecond)
		attached := make(chan error, 1)
		go func() {
			_, err := m.Attach(context.Background(), v.Volume, false) // has the volume's turn while metadata thinks
			attached <- err
		}()
		time.Sleep(100 * time.Millisecond)
		r.one.Park(v, true)
		time.Sleep(timer*3/4 + 300*time.Millisecond)
		r.one.Park(v, false)
		if err := <-attached; err != nil {
			t.Error(err)
		}
		l.end(t, timer)
		if n := r.one.Sessions(); n != sessions {
			t.Errorf("%d sessions became %d", sessions, n)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// A volume whose device has another number than its last one is felt like any other.
func TestSilenceAtANewIndex(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume(r.one, r.two)
		first := r.attach(m, v)
		time.Sleep(2*time.Second + 100*time.Millisecond) // a scan of all has just been
		r.detach(m, v)
		r.f.Foreign(first.Index, "other")
		r.attachment(v, oneHost, another)
		d := r.attach(m, v)
		if d.Index == first.Index {
			t.Fatal("the index is the same")
		}
		r.one.Stop()
		l := r.load(d.Index)
		time.Sleep(3 * timer)
		l.end(t, timer+2*slack) // the silent server is asked first
		r.detach(m, v)
	})
}
