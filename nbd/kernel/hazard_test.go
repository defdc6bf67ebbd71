package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/nbd/kernel/kerneltest"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

// points are the steps at which a process can be killed: attach, move, detach.
var points = map[string][]string{
	"attach": {"kernel.dial", "kernel.connect", "kernel.connected"},
	"move":   {"kernel.dial", "kernel.move", "kernel.moved"},
	"detach": {"kernel.disconnect", "kernel.disconnected"},
}

// killAt runs a step of a manager until it is at a point, and leaves it there for
// good, with the state as it is then. What it has open stays open, which the
// machine's next process does not mind.
func (r *rig) killAt(point string, step func(m *kernel.Manager)) {
	r.t.Helper()
	if err := r.faults.Arm(fault.Rule{Point: point, Hold: true, Count: 1}); err != nil {
		r.t.Fatal(err)
	}
	m := r.manager()
	go step(m)
	eventually(r.t, "being at "+point, 10*time.Second, func() bool { return r.faults.Hits(point) > 0 })
	time.Sleep(10 * time.Millisecond)
	r.fork()
	r.f.Orphan()
}

// B040, H76: killed at each step of an attach; a new process finds what is there. One device, or none.
func TestB040KilledWhileAttaching(t *testing.T) {
	for _, point := range points["attach"] {
		for _, retry := range []bool{true, false} {
			t.Run(point, func(t *testing.T) {
				bubble(t, func(t *testing.T, r *rig) {
					v := r.volume()
					r.killAt(point, func(m *kernel.Manager) { _, _ = m.Attach(context.Background(), v.Volume, false) })
					m, stop := r.run()
					defer stop()
					if retry {
						d := r.attach(m, v)
						if point == "kernel.connected" && r.one.Sessions() != 4 {
							t.Errorf("%d connections: it was not taken as it was", r.one.Sessions())
						}
						if nodes, _ := r.f.Places(); len(nodes) != 1 || <-r.f.Start(d.Index) != nil {
							t.Errorf("devices: %+v", nodes)
						}
					}
					time.Sleep(10 * time.Second)
					r.detach(m, v)
					r.noResidue()
				})
			})
		}
	}
}

// H76: killed at each step of a move, under load.
func TestH76KilledWhileMoving(t *testing.T) {
	for _, point := range points["move"] {
		t.Run(point, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m := r.manager()
				v := r.volume()
				d := r.attach(m, v)
				_ = m.Close()
				l := r.load(d.Index)
				r.one.Kill()
				r.one.Serve()
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				r.killAt(point, func(m *kernel.Manager) { _ = m.Run(ctx) })
				m, stop := r.run()
				defer stop()
				time.Sleep(5 * time.Second)
				l.end(t, timer+slack)
				if health(m, v) != "connected" || r.f.Established() != 4 {
					t.Errorf("%s, %d connections", health(m, v), r.f.Established())
				}
				r.detach(m, v)
				r.noResidue()
			})
		})
	}
}

// H76: killed at each step of a detach; the next process finishes it, or takes the device up again.
func TestH76KilledWhileDetaching(t *testing.T) {
	for _, point := range points["detach"] {
		for _, again := range []string{"detach", "attach", "nothing"} {
			t.Run(point+", then "+again, func(t *testing.T) {
				bubble(t, func(t *testing.T, r *rig) {
					m := r.manager()
					v := r.volume()
					r.attach(m, v)
					_ = m.Close()
					r.killAt(point, func(m *kernel.Manager) { _ = m.Detach(context.Background(), v.Volume) })
					m, stop := r.run()
					defer stop()
					switch again {
					case "attach":
						d := r.attach(m, v)
						if err := <-r.f.Start(d.Index); err != nil {
							t.Error(err)
						}
						time.Sleep(time.Minute)
						r.detach(m, v)
					case "detach":
						r.detach(m, v)
					default:
						time.Sleep(10 * time.Second)
					}
					r.noResidue()
				})
			})
		}
	}
}

// H76: a detach got as far as its record and no farther, and the device is used again, or whether it is cannot be found
// out: it is kept, and goes to a new server as any other.
func TestH76UsedAgainAfterDetachWasCutOff(t *testing.T) {
	for name, use := range map[string]func(r *rig, d kernel.Device) (leave func()){
		"mounted":           func(r *rig, d kernel.Device) func() { return r.f.Mount(d.Index, "/mnt") },
		"mounted elsewhere": func(r *rig, d kernel.Device) func() { return r.f.Mount(d.Index, "") },
		"open":              func(r *rig, d kernel.Device) func() { return r.f.Open(d.Index, "process 42 (dd)") },
		"not to be told": func(r *rig, _ kernel.Device) func() {
			r.f.OpenHangs = true
			return func() { r.f.OpenHangs = false }
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m := r.manager()
				v := r.volume()
				d := r.attach(m, v)
				_ = m.Close()
				r.killAt("kernel.disconnect", func(m *kernel.Manager) { _ = m.Detach(context.Background(), v.Volume) })
				leave := use(r, d)
				m, stop := r.run()
				defer stop()
				r.keeps(m, v, d)
				leave()
				r.detach(m, v)
				r.noResidue()
			})
		})
	}
}

// keeps checks that a device goes to a new server.
func (r *rig) keeps(m *kernel.Manager, v *kerneltest.Volume, d kernel.Device) {
	r.t.Helper()
	time.Sleep(5 * time.Second)
	r.one.Kill()
	time.Sleep(time.Second)
	r.one.Serve()
	select {
	case err := <-r.f.Start(d.Index):
		if err != nil {
			r.t.Errorf("a request: %v", err)
		}
	case <-time.After(10 * time.Second):
		r.t.Fatalf("a request waits, ten seconds after the server's return; the device is %s", health(m, v))
	}
	eventually(r.t, "connected", time.Second, func() bool { return health(m, v) == "connected" })
}

// H76: the driver is not asked, or refuses: the device is what it was.
func TestH76DetachFailsBeforeDisconnect(t *testing.T) {
	for name, fail := range map[string]func(r *rig, m *kernel.Manager, v *kerneltest.Volume) error{
		"an error": func(r *rig, m *kernel.Manager, v *kerneltest.Volume) error {
			if err := r.faults.Arm(fault.Rule{Point: "kernel.disconnect", Error: "unavailable", Count: 1}); err != nil {
				return err
			}
			return m.Detach(context.Background(), v.Volume)
		},
		"the driver is busy": func(r *rig, m *kernel.Manager, v *kerneltest.Volume) error {
			other := r.volume()
			release := r.f.Stick("connect")
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = m.Attach(context.Background(), other.Volume, false)
				_ = m.Detach(context.Background(), other.Volume)
			}()
			time.Sleep(time.Second)
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			err := m.Detach(ctx, v.Volume)
			release()
			<-ended
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m, stop := r.run()
				defer stop()
				v := r.volume()
				d := r.attach(m, v)
				if err := fail(r, m, v); !errors.Is(err, block.ErrUnavailable) {
					t.Errorf("Detach: %v", err)
				}
				unmount := r.f.Mount(d.Index, "/mnt")
				r.keeps(m, v, d)
				unmount()
				r.detach(m, v)
				r.noResidue()
			})
		})
	}
}

// B041: held open, it is not gone, however often one asks; then it is.
func TestB041HeldOpen(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		release := r.f.Open(d.Index, "process 42 (dd)")
		for range 3 {
			err := m.Detach(context.Background(), v.Volume)
			if !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), "process 42 (dd)") {
				t.Errorf("Detach: %v", err)
			}
		}
		if err := <-r.f.Start(d.Index); err != nil {
			t.Errorf("it was touched: %v", err)
		}
		release()
		r.detach(m, v)
		r.noResidue()
	})
}

// B041: whoever holds it cannot be seen: it becomes a zombie, which is an error until it is gone.
func TestB041Zombie(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		r.f.OpenUnseen(d.Index)
		for range 3 {
			if err := m.Detach(context.Background(), v.Volume); !errors.Is(err, block.ErrInUse) {
				t.Errorf("Detach: %v", err)
			}
			if c, err := condition(m, v); err != nil || c.Health != kernel.Zombie {
				t.Errorf("Condition: %+v, %v", c, err)
			}
			time.Sleep(time.Minute)
		}
		now := r.attach(m, v) // beside the zombie, which reaches no server any more
		if now.Index == d.Index {
			t.Error("the zombie was used again")
		}
		if found, err := m.Find(v.Volume); err != nil || found.Index != now.Index {
			t.Errorf("Find: %+v, %v", found, err)
		}
		time.Sleep(5 * time.Minute)
		if err := <-r.f.Start(now.Index); err != nil {
			t.Error(err)
		}
		r.f.CloseUnseen(d.Index)
		r.detach(m, v)
		r.noResidue()
	})
}

// B043, B045: mounted here, or in another namespace: refused, and nothing is done.
func TestB043Mounted(t *testing.T) {
	for _, where := range []string{"/var/lib/x", ""} {
		bubble(t, func(t *testing.T, r *rig) {
			m, stop := r.run()
			defer stop()
			v := r.volume()
			d := r.attach(m, v)
			unmount := r.f.Mount(d.Index, where)
			if err := m.Detach(context.Background(), v.Volume); !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), where) {
				t.Errorf("Detach: %v", err)
			}
			if err := <-r.f.Start(d.Index); err != nil {
				t.Errorf("it was touched: %v", err)
			}
			unmount()
			r.detach(m, v)
			r.noResidue()
		})
	}
}

// B043: whether a device is used elsewhere cannot be found out: it is left alone.
func TestB043CannotBeOpened(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		unmount := r.f.Mount(d.Index, "")
		r.f.OpenHangs = true
		if err := m.Detach(context.Background(), v.Volume); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("Detach: %v", err)
		}
		if err := <-r.f.Start(d.Index); err != nil {
			t.Errorf("it was touched: %v", err)
		}
		unmount()
		r.f.OpenHangs = false
		r.detach(m, v)
		r.noResidue()
	})
}

// B077, H86: the attachment is revoked, as the device is idle, in use, or mounted with requests that wait.
func TestH86Revoked(t *testing.T) {
	for name, use := range map[string]struct {
		mounted, away bool
		end           func(r *rig, change func())
	}{
		"idle":                          {end: (*rig).revoke},
		"mounted":                       {mounted: true, end: (*rig).revoke},
		"mounted, plugin away":          {mounted: true, away: true, end: (*rig).revoke},
		"mounted, server dead":          {mounted: true, end: (*rig).revokeDead},
		"mounted, server silent":        {mounted: true, end: (*rig).revokeSilent},
		"idle, server silent, and away": {away: true, end: (*rig).revokeSilent},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m, stop := r.run()
				v := r.volume()
				d := r.attach(m, v)
				unmount := func() {}
				if use.mounted {
					unmount = r.f.Mount(d.Index, "/mnt")
				}
				if use.away {
					stop()
				}
				use.end(r, func() { v.Revoked = true })
				r.md.Remove(v.Volume)
				writes := r.f.Start(d.Index)
				if use.away {
					time.Sleep(time.Hour)
					m, stop = r.run()
				}
				defer stop()
				begin := time.Now()
				if err := <-writes; !errors.Is(err, block.ErrIO) || time.Since(begin) > 10*time.Second {
					t.Errorf("a request, after %v: %v", time.Since(begin), err)
				}
				if use.mounted {
					c, err := condition(m, v)
					if err != nil || c.Health != kernel.Refused || !strings.Contains(c.Reason, "not attached") {
						t.Errorf("Condition: %+v, %v", c, err)
					}
					if err := m.Detach(context.Background(), v.Volume); !errors.Is(err, block.ErrInUse) {
						t.Errorf("Detach while mounted: %v", err)
					}
				}
				unmount()
				time.Sleep(3 * time.Second)
				r.detach(m, v)
				r.noResidue()
			})
		})
	}
}

func (r *rig) revoke(change func()) { r.f.Change(change) }

func (r *rig) revokeDead(change func()) {
	r.one.Kill()
	r.f.Change(change)
}

func (r *rig) revokeSilent(change func()) {
	r.one.Stop()
	r.f.Change(change)
}

// The plugin is rolled out with the servers of another cell, which know nothing of the
// devices that are there, or of ones that do not say whose word it is: nothing is ended.
func TestAnotherCellIsNoProof(t *testing.T) {
	for name, other := range map[string]*kerneltest.Metadata{
		"another": {Cluster: block.ClusterID{UUID: block.NewUUID()}},
		"unsaid":  {},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m, stop := r.run()
				v := r.volume()
				d := r.attach(m, v)
				stop()
				r.md.Cluster = block.ClusterID{UUID: block.NewUUID()}
				_, stop = r.run() // learns it of a device that was made before
				time.Sleep(5 * time.Minute)
				stop()

				m, stop = r.run(func(c *kernel.Config) { c.Metadata = other })
				l := r.load(d.Index)
				time.Sleep(5 * time.Minute)
				r.one.Kill()
				r.one.Serve()
				time.Sleep(time.Minute)
				l.end(t, timer+slack)
				if h := health(m, v); h != "connected" {
					t.Error(h)
				}
				if _, err := m.Attach(context.Background(), v.Volume, false); !errors.Is(err, block.ErrPrecondition) && !errors.Is(err, block.ErrUnavailable) {
					t.Errorf("Attach: %v", err)
				}
				stop()

				r.md.Remove(v.Volume)
				_, stop = r.run()
				defer stop()
				time.Sleep(5 * time.Minute)
				r.noResidue()
			})
		})
	}
}

// A server's word alone that it knows no such attachment ends nothing.
func TestNoAccessIsNoProof(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		l := r.load(d.Index)
		r.f.Change(func() { v.Revoked = true })
		time.Sleep(time.Minute)
		if c, err := condition(m, v); err != nil || c.Health != kernel.Waiting {
			t.Errorf("Condition: %+v, %v", c, err)
		}
		r.md.Away(true, false)
		time.Sleep(time.Minute)
		r.f.Change(func() { v.Revoked = false })
		time.Sleep(10 * time.Second)
		l.end(t, 2*time.Minute+slack)
		r.detach(m, v)
	})
}

// H23, H86: the cache epoch has risen. The old device is refused for good once
// metadata says so, also by a process that has forgotten everything; a fresh one
// is made beside it.
func TestH86CacheEpoch(t *testing.T) {
	for _, forgotten := range []bool{false, true} {
		bubble(t, func(t *testing.T, r *rig) {
			m, stop := r.run()
			v := r.volume()
			old := r.attach(m, v)
			unmount := r.f.Mount(old.Index, "/mnt")
			stop()
			if forgotten {
				r.dir = stateDir(t)
			}
			r.one.Kill()
			r.f.Change(func() { v.Epoch = 2 })
			r.attachment(v, oneHost)
			r.md.Away(!forgotten, false)
			r.one.Serve()
			m, stop = r.run()
			defer stop()
			request := r.f.Start(old.Index)
			if !forgotten { // the server's word is not enough
				time.Sleep(time.Minute)
				if got := health(m, v); !strings.HasPrefix(got, "waiting") || !strings.Contains(got, "unflushed data was lost") {
					t.Errorf("without metadata: %s", got)
				}
				r.md.Away(false, false)
			}
			if err := <-request; !errors.Is(err, block.ErrIO) {
				t.Errorf("a request to the old device: %v", err)
			}
			if c, err := condition(m, v); err != nil || c.Health != kernel.Refused || !c.Lost() || !strings.Contains(c.Reason, "not flushed") {
				t.Errorf("Condition: %+v, %v", c, err)
			}
			fresh := r.attach(m, v)
			if fresh.Index == old.Index || fresh.Epoch != 2 || <-r.f.Start(fresh.Index) != nil {
				t.Errorf("the fresh device: %+v", fresh)
			}
			if c, err := condition(m, v); err != nil || c.Health != kernel.Connected {
				t.Errorf("Condition: %+v, %v", c, err)
			}
			unmount()
			time.Sleep(5 * time.Second)
			r.detach(m, v)
			r.noResidue()
		})
	}
}

// Somebody else has a server's address and refuses for good: metadata knows better, and the other server has the volume.
func TestImpostorRefusesForGood(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		lie := *v
		lie.Epoch = 7
		r.two.Add(&lie)
		r.one.Kill()
		r.attachment(v, another, oneHost)
		l := r.load(d.Index)
		time.Sleep(20 * time.Second)
		r.one.Serve()
		time.Sleep(10 * time.Second)
		l.end(t, 20*time.Second+slack)
		if got := health(m, v); got != "connected" {
			t.Error(got)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// H75: the volume was attached anew while the plugin was away: the watch ends the old device.
func TestH75WatchEndsTheOld(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		v := r.volume()
		d := r.attach(m, v)
		unmount := r.f.Mount(d.Index, "/staging")
		stop()
		r.one.Kill()
		v.Attachment, v.Token = block.AttachmentID{UUID: block.NewUUID()}, "secret-other"
		r.attachment(v, oneHost)
		r.one.Serve()
		m, stop = r.run()
		defer stop()
		if err := <-r.f.Start(d.Index); !errors.Is(err, block.ErrIO) {
			t.Errorf("a dirty page: %v", err)
		}
		if c, err := condition(m, v); err != nil || c.Health != kernel.Refused {
			t.Errorf("Condition: %+v, %v", c, err)
		}
		unmount()
		r.detach(m, v)
		r.noResidue()
	})
}

// H75: the node returns with a device of an attachment that has ended, and gets
// the volume again. The old device is never joined to the new attachment.
func TestH75NodeReturns(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		old := r.attach(m, v)
		unmount := r.f.Mount(old.Index, "/staging")
		r.one.Drop()
		dirty := r.f.Start(old.Index)
		time.Sleep(time.Minute)
		v.Attachment = block.AttachmentID{UUID: block.NewUUID()}
		v.Token = kernel.Token("secret-" + block.NewUUID().String())
		r.attachment(v, oneHost)
		r.one.Serve()
		before := r.one.Requests()
		if _, err := m.Attach(context.Background(), v.Volume, false); !errors.Is(err, block.ErrPrecondition) || !strings.Contains(err.Error(), "/staging") {
			t.Errorf("Attach while the old device is mounted: %v", err)
		}
		if err := <-dirty; !errors.Is(err, block.ErrIO) || r.one.Requests() != before {
			t.Errorf("a dirty page: %v, %d requests reached the server", err, r.one.Requests()-before)
		}
		unmount()
		time.Sleep(time.Second)
		if d := r.attach(m, v); d.Attachment != v.Attachment {
			t.Errorf("Attach: %+v", d)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// B044: all servers are gone for good, and metadata with them: nothing is ended by itself, and everything by an operator.
func TestB044ServersGoneForGood(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		unmount := r.f.Mount(d.Index, "/mnt")
		r.one.Stop()
		r.md.Away(true, false)
		dirty := r.f.Start(d.Index)
		time.Sleep(time.Hour)
		if c, err := condition(m, v); err != nil || c.Health != kernel.Waiting || c.Reason == "" {
			t.Errorf("Condition: %+v, %v", c, err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := m.Fail(ctx, v.Volume, "an operator said so"); !errors.Is(err, block.ErrInUse) {
			t.Errorf("Fail while mounted: %v", err)
		}
		if err := <-dirty; !errors.Is(err, block.ErrIO) {
			t.Errorf("a dirty page: %v", err)
		}
		unmount()
		r.detach(m, v)
		r.noResidue()
		w := r.volume(r.two)
		r.md.Away(false, false)
		r.attachment(w, another)
		if now := r.attach(m, w); now.Index != d.Index {
			t.Errorf("the number is not free: %s", now.Path)
		}
		r.detach(m, w)
	})
}

// A detach towards a server that takes no bytes: the sockets go first, so the machine's lock is not held.
func TestDetachFromASilentServer(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		r.attach(m, v)
		r.one.Stop()
		r.one.Fill(true)
		begin := time.Now()
		r.detach(m, v)
		if took := time.Since(begin); took > 500*time.Millisecond {
			t.Errorf("Detach took %v", took)
		}
		r.noResidue()
	})
}

// The server falls silent in the moment of a detach: the machine's lock is held until the watchdog ends the sockets.
func TestDetachMeetsSilence(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		r.attach(m, v)
		r.f.Before("disconnect", func() {
			r.one.Stop()
			r.one.Fill(true)
		})
		begin := time.Now()
		r.detach(m, v)
		if took := time.Since(begin); took > 3*time.Second {
			t.Errorf("Detach took %v", took)
		}
		r.noResidue()
	})
}

// The same, and whoever detaches leaves before the watchdog: others wait no longer for that.
func TestDetachLeavesInSilence(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v, w := r.volume(), r.volume(r.two)
		r.attachment(w, another)
		r.attach(m, v)
		r.f.Before("disconnect", func() {
			r.one.Stop()
			r.one.Fill(true)
		})
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		begin := time.Now()
		if err := m.Detach(ctx, v.Volume); !errors.Is(err, block.ErrUnknown) {
			t.Errorf("Detach: %v", err)
		}
		r.attach(m, w)
		if took := time.Since(begin); took > 3*time.Second {
			t.Errorf("another volume was attached after %v", took)
		}
		r.detach(m, v)
		r.detach(m, w)
		r.noResidue()
	})
}

// A call of another program, or of ours, hangs in the driver: callers leave by
// their deadlines, what waits is not made later, and everything is well when it is over.
func TestDriverHangs(t *testing.T) {
	for _, call := range []string{"connect", "reconfigure", "disconnect"} {
		t.Run(call, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m, stop := r.run()
				defer stop()
				v, w, x := r.volume(), r.volume(r.two), r.volume(r.two)
				r.attachment(w, another)
				r.attachment(x, another)
				if call != "connect" {
					r.attach(m, v)
				}
				release := r.f.Stick(call)
				defer release()
				limited := func(f func(ctx context.Context) error) error {
					ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
					defer cancel()
					begin := time.Now()
					err := f(ctx)
					if took := time.Since(begin); took > 6*time.Second {
						t.Errorf("it took %v", took)
					}
					return err
				}
				if call == "reconfigure" {
					r.one.Kill()
					r.one.Serve()
					time.Sleep(time.Second)
				}
				if err := limited(func(ctx context.Context) error {
					if call == "disconnect" {
						return m.Detach(ctx, v.Volume)
					}
					_, err := m.Attach(ctx, v.Volume, false)
					return err
				}); err == nil {
					t.Error("done, while the driver hangs")
				}
				err := limited(func(ctx context.Context) error { _, err := m.Attach(ctx, w.Volume, false); return err })
				if !errors.Is(err, block.ErrUnavailable) {
					t.Errorf("another volume: %v", err)
				}
				release()
				time.Sleep(10 * time.Second)
				r.attach(m, v)
				r.attach(m, x)
				for _, k := range []block.VolumeID{v.Volume, w.Volume, x.Volume} {
					if err := m.Detach(context.Background(), k); err != nil {
						t.Error(err)
					}
				}
				r.noResidue()
			})
		})
	}
}

// A stage is given up while the driver still makes its device, and the volume is
// detached: that is not done before the device can be seen, and ended.
func TestDetachWaitsForConnect(t *testing.T) {
	for _, watched := range []bool{false, true} {
		t.Run(fmt.Sprintf("watched=%v", watched), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m, stop := r.manager(), func() {}
				if watched {
					m, stop = r.run()
				}
				defer stop()
				v := r.volume()
				release := r.f.Stick("connect")
				defer release()
				limited := func(do func(ctx context.Context) error) error {
					ctx, cancel := context.WithTimeout(context.Background(), time.Second)
					defer cancel()
					return do(ctx)
				}
				if err := limited(func(ctx context.Context) error { _, err := m.Attach(ctx, v.Volume, false); return err }); !errors.Is(err, block.ErrUnknown) {
					t.Errorf("Attach: %v", err)
				}
				time.Sleep(10 * time.Second)
				if err := limited(func(ctx context.Context) error { return m.Detach(ctx, v.Volume) }); err == nil {
					t.Error("Detach: done, and there will be a device")
				}
				time.AfterFunc(time.Second, release)
				r.detach(m, v)
				r.md.Remove(v.Volume)
				r.noResidue()
			})
		})
	}
}

// The same, and the volume is staged again: its device is the one that was begun, not a second one.
func TestAttachWaitsForConnect(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		release := r.f.Stick("connect")
		defer release()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if _, err := m.Attach(ctx, v.Volume, false); !errors.Is(err, block.ErrUnknown) {
			t.Errorf("Attach: %v", err)
		}
		time.AfterFunc(time.Second, release)
		d := r.attach(m, v)
		if nodes, _ := r.f.Places(); len(nodes) != 1 {
			t.Errorf("beside %s there are %+v", d.Path, nodes)
		}
		if err := <-r.f.Start(d.Index); err != nil {
			t.Errorf("a request: %v", err)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// Calls that come and come, and cannot succeed, do not keep a device from being mended.
func TestCallsDoNotStopMoves(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		unmount := r.f.Mount(d.Index, "/mnt")
		r.f.Change(func() { v.Size = 2 * gib })
		l := r.load(d.Index)
		r.one.Kill()
		time.Sleep(time.Second)
		r.one.Slow(200 * time.Millisecond)
		r.one.Serve()
		end := time.Now().Add(5 * time.Second)
		for time.Now().Before(end) {
			if _, err := m.Resize(context.Background(), v.Volume, 2*gib); err == nil {
				t.Error("resized beyond what metadata says")
			}
			if err := m.Detach(context.Background(), v.Volume); !errors.Is(err, block.ErrInUse) {
				t.Errorf("Detach: %v", err)
			}
			time.Sleep(time.Millisecond)
		}
		l.end(t, timer+slack)
		unmount()
		r.detach(m, v)
	})
}

// Somebody disconnects our device by hand.
func TestDisconnectedByAnother(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		d := r.attach(m, v)
		unmount := r.f.Mount(d.Index, "/mnt")
		_ = r.f.Disconnect(d.Index)
		time.Sleep(10 * time.Second)
		if c, err := condition(m, v); err != nil || c.Health != kernel.Refused || !strings.Contains(c.Reason, "another program") {
			t.Errorf("Condition: %+v, %v", c, err)
		}
		unmount()
		time.Sleep(5 * time.Second)
		r.noResidue()
		d = r.attach(m, v)
		_ = r.f.Disconnect(d.Index)
		time.Sleep(10 * time.Second)
		r.noResidue()
	})
}

// between lets something happen, once, at a step on the machine.
type between struct {
	kernel.Kernel
	claiming, ending, connected func()
}

func (b *between) Claim(ctx context.Context, index int) (func(), error) {
	once(&b.claiming)
	return b.Kernel.Claim(ctx, index)
}

func (b *between) Destroy(id kernel.SocketID) error {
	once(&b.ending)
	return b.Kernel.Destroy(id)
}

func (b *between) Connect(c kernel.Connect) error {
	err := b.Kernel.Connect(c)
	once(&b.connected)
	return err
}

func once(do *func()) {
	if now := *do; now != nil {
		*do = nil
		now()
	}
}

// unread is a machine on which a device cannot be read after it was listed.
type unread struct{ kernel.Kernel }

func (unread) Node(index int) (kernel.Node, error) {
	return kernel.Node{}, fmt.Errorf("%w: nbd%d: too many open files", block.ErrUnavailable, index)
}

// A device that cannot be read is not gone: who was told so would give its volume to another node.
func TestDeviceThatCannotBeReadIsNotGone(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		d := r.attach(m, v)
		kept := r.dir
		r.dir = stateDir(t) // without a record it is asked for
		other := r.manager(func(c *kernel.Config) { c.Kernel = unread{r.f} })
		defer other.Close()
		if err := other.Detach(context.Background(), v.Volume); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("Detach: %v", err)
		}
		if err := <-r.f.Start(d.Index); err != nil {
			t.Error(err)
		}
		r.dir = kept
		r.detach(m, v)
		r.noResidue()
	})
}

// H76, B039: a device that is to be ended is ended by another program, and its number is another volume's when
// DISCONNECT has its turn: that one is not touched.
func TestH76NumberIsAnothers(t *testing.T) {
	for name, end := range map[string]func(m *kernel.Manager, id block.VolumeID) error{
		"detach": func(m *kernel.Manager, id block.VolumeID) error { return m.Detach(context.Background(), id) },
		"fail":   func(m *kernel.Manager, id block.VolumeID) error { return m.Fail(context.Background(), id, "given up") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				machine := &between{Kernel: r.f}
				m, other := r.manager(func(c *kernel.Config) { c.Kernel = machine }), r.manager()
				defer m.Close()
				defer other.Close()
				v, w := r.volume(), r.volume()
				d := r.attach(m, v)
				taken := func() {
					_ = r.f.Disconnect(d.Index)
					time.Sleep(time.Second)
					if e := r.attach(other, w); e.Index != d.Index {
						t.Errorf("the other volume has %s", e.Path)
					}
				}
				if name == "detach" {
					machine.claiming = taken
				} else {
					machine.ending = taken
				}
				if err := end(m, v.Volume); err != nil {
					t.Error(err)
				}
				if health(other, w) != "connected" {
					t.Errorf("the other volume's device: %s", health(other, w))
				}
				r.detach(other, w)
				r.noResidue()
			})
		})
	}
}

// H76, B039: the same while it is made: what is there by then is not undone.
func TestH76NumberIsAnothersBeforeItIsVerified(t *testing.T) {
	for _, backend := range []string{"", "vol-a/gen1"} {
		bubble(t, func(t *testing.T, r *rig) {
			machine := &between{Kernel: r.f}
			m := r.manager(func(c *kernel.Config) { c.Kernel = machine })
			defer m.Close()
			machine.connected = func() {
				_ = r.f.Disconnect(0)
				r.f.Foreign(0, backend)
			}
			v := r.volume()
			if d := r.attach(m, v); d.Index != 1 || r.f.Touched(0) {
				t.Errorf("backend %q: took %s; the other's is touched: %v", backend, d.Path, r.f.Touched(0))
			}
			r.detach(m, v)
		})
	}
}

// A kernel without backend identifiers is refused, and left as it was.
func TestOldKernel(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		r.f.NoBackend = true
		if _, err := m.Attach(context.Background(), v.Volume, false); !errors.Is(err, block.ErrPrecondition) {
			t.Errorf("Attach: %v", err)
		}
		r.noResidue()
	})
}

// A record is damaged: the kernel and metadata are enough.
func TestDamagedRecord(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		v := r.volume()
		d := r.attach(m, v)
		stop()
		for _, name := range r.records() {
			path := filepath.Join(r.dir, name)
			if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
				t.Errorf("%v, %v", fi.Mode(), err)
			}
			if err := os.WriteFile(path, []byte(`{"version": 1, "connections": `), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		m, stop = r.run()
		defer stop()
		time.Sleep(10 * time.Second)
		if health(m, v) != "connected" || <-r.f.Start(d.Index) != nil {
			t.Error(health(m, v))
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// A thousand devices come and go: no goroutine, descriptor or memory of them stays.
func TestNothingGrows(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		count := func() (goroutines, files int) {
			time.Sleep(time.Second)
			fds, err := os.ReadDir("/proc/self/fd")
			if err != nil {
				t.Fatal(err)
			}
			return runtime.NumGoroutine(), len(fds)
		}
		cycle := func() {
			v := r.volume()
			d := r.attach(m, v)
			r.one.Kill()
			r.one.Serve()
			if err := <-r.f.Start(d.Index); err != nil {
				t.Fatal(err)
			}
			r.detach(m, v)
			r.md.Remove(v.Volume)
		}
		cycle()
		goroutines, files := count()
		for range 1000 {
			cycle()
		}
		if g, f := count(); g > goroutines+2 || f > files+2 { // other tests' may end late; a leak is a thousand
			t.Errorf("goroutines %d → %d, files %d → %d", goroutines, g, files, f)
		}
		stop()
		r.noResidue()
	})
}
