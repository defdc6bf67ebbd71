package kernel_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/nbd/kernel/kerneltest"
	"github.com/gabion-storage/gabion/server/block"
)

func TestAttachAndDetach(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		if _, err := m.Find(v.Volume); !errors.Is(err, block.ErrNotFound) {
			t.Errorf("Find before: %v", err)
		}
		d := r.attach(m, v)
		if d.Identity != v.Identity || d.Size != v.Size || d.BlockSize != 4096 || d.Path != "/dev/nbd0" || d.Condition.Health != kernel.Connected {
			t.Errorf("Attach: %+v", d)
		}
		again := r.attach(m, v)
		if again.Index != d.Index || r.one.Sessions() != 4 {
			t.Errorf("the second Attach: %+v, after %d connections", again, r.one.Sessions())
		}
		found, err := m.Find(v.Volume)
		if err != nil || found.Index != d.Index {
			t.Errorf("Find: %+v, %v", found, err)
		}
		if err := <-r.f.Start(d.Index); err != nil {
			t.Error(err)
		}
		r.detach(m, v)
		r.detach(m, v)
		r.noResidue()
	})
}

// Whoever asks at once gets one device.
func TestAttachRacesWithItself(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if d, err := m.Attach(context.Background(), v.Volume, false); err != nil || d.Index != 0 {
					t.Errorf("Attach: %+v, %v", d, err)
				}
			})
		}
		wg.Wait()
		if n := r.f.Calls("connect"); n != 1 {
			t.Errorf("%d devices were made", n)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

func TestReadOnly(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		d, err := m.Attach(context.Background(), v.Volume, true)
		if err != nil || !d.ReadOnly {
			t.Errorf("a device to read: %+v, %v", d, err)
		}
		if _, err := m.Attach(context.Background(), v.Volume, false); !errors.Is(err, block.ErrExists) {
			t.Errorf("the same to write: %v", err)
		}
		r.detach(m, v)
		v.ReadOnly = true
		r.attachment(v, oneHost)
		if d := r.attach(m, v); !d.ReadOnly {
			t.Errorf("a device of an attachment to read: %+v", d)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

func TestNotAttached(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		r.md.Remove(v.Volume)
		if _, err := m.Attach(context.Background(), v.Volume, false); !errors.Is(err, block.ErrNotFound) {
			t.Errorf("Attach: %v", err)
		}
		r.attachment(v, oneHost)
		r.one.Kill()
		begin := time.Now()
		_, err := m.Attach(context.Background(), v.Volume, false)
		if !errors.Is(err, block.ErrUnavailable) || time.Since(begin) > 11*time.Second || strings.Contains(err.Error(), "secret") {
			t.Errorf("without a server, after %v: %v", time.Since(begin), err)
		}
		r.noResidue()
		r.one.Serve()
		r.attach(m, v)
		r.detach(m, v)
	})
}

// The server's clock was ahead, or this one's state is lost: it knows of a newer session than any that this node would name.
func TestSessionNumbersOvertake(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		v.Newest = block.SessionNumber(time.Now().UnixMilli()) * 1000
		r.attach(m, v)
		r.detach(m, v)
	})
}

// B170: what a server says is checked, and a device that cannot be is not made.
func TestB170ServerLies(t *testing.T) {
	for name, lie := range map[string]func(*client.Export){
		"smaller than metadata says": func(e *client.Export) { e.Size -= 4096 },
		"larger than metadata says":  func(e *client.Export) { e.Size += 4096 },
		"not a multiple":             func(e *client.Export) { e.Size += 512 },
		"blocks too large":           func(e *client.Export) { e.MinBlock = 8192 },
		"no flush":                   func(e *client.Export) { e.Flags &^= 1 << 2 },
		"no multi-conn":              func(e *client.Export) { e.Flags &^= 1 << 8 },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				m := r.manager()
				defer m.Close()
				v := r.volume()
				r.one.Say(lie)
				_, err := m.Attach(context.Background(), v.Volume, false)
				if !errors.Is(err, block.ErrCorrupt) && !errors.Is(err, block.ErrUnsupported) {
					t.Errorf("Attach: %v", err)
				}
				r.noResidue()
			})
		})
	}
	for _, size := range []int64{0, -1, 1 << 63 >> 1, 4097} {
		bubble(t, func(t *testing.T, r *rig) {
			m := r.manager()
			defer m.Close()
			v := r.volume()
			v.Size = size
			r.attachment(v, oneHost)
			if _, err := m.Attach(context.Background(), v.Volume, false); !errors.Is(err, block.ErrInvalid) && !errors.Is(err, block.ErrTooLarge) {
				t.Errorf("Attach of %d bytes: %v", size, err)
			}
			r.noResidue()
		})
	}
}

// B069: a server that answers is there, whatever it answers. What cannot be read is
// found out by who reads, and not taken for a server that is away.
func TestB069Unreadable(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		v := r.volume()
		r.one.Break(v, true)
		begin := time.Now()
		d := r.attach(m, v)
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
		if err := <-r.f.Start(d.Index); !errors.Is(err, block.ErrIO) {
			t.Errorf("a read: %v", err)
		}
		r.one.Kill()
		r.one.Serve()
		eventually(t, "it is connected again", 10*time.Second, func() bool { return health(m, v) == "connected" })
		r.attach(m, v)
		r.detach(m, v)
		r.noResidue()
	})
}

// The volume has grown, and metadata is told a moment later.
func TestAttachMeetsGrowth(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		r.f.Change(func() { v.Size = 2 * gib })
		time.AfterFunc(time.Second, func() { r.attachment(v, oneHost) })
		if d := r.attach(m, v); d.Size != 2*gib {
			t.Errorf("Attach: %+v", d)
		}
		r.detach(m, v)
		r.noResidue()
	})
}

// B065: every index is busy: an error to try again on, and nothing is left.
func TestB065NoDeviceFree(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		r.f.Busy = true
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if _, err := m.Attach(ctx, v.Volume, false); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("Attach: %v", err)
		}
		r.noResidue()
	})
}

// B039: others take numbers; theirs are never touched.
func TestB039OthersTakeNumbers(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		for i, backend := range []string{"", "vol-a/gen1", "gabion/x", "gabion/" + block.NewUUID().String()} {
			r.f.Foreign(i, backend)
		}
		r.f.Foreign(6, "")
		for range 10 {
			v := r.volume()
			if d := r.attach(m, v); d.Index < 4 || d.Index == 6 {
				t.Errorf("took %s", d.Path)
			}
			defer r.detach(m, v)
		}
		time.Sleep(10 * time.Minute)
		for _, i := range []int{0, 1, 2, 3, 6} {
			if r.f.Touched(i) {
				t.Errorf("nbd%d was touched", i)
			}
		}
		if all, err := m.Devices(); err != nil || len(all) != 10 {
			t.Errorf("Devices: %d, %v", len(all), err)
		}
	})
}

// B039: a device manager that looks at a new device, while it is being connected, costs no index and leaves nothing.
func TestB039NewDeviceIsOpenForAMoment(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run()
		defer stop()
		r.f.Curious = 3
		v := r.volume()
		if d := r.attach(m, v); d.Index != 0 {
			t.Errorf("took %s", d.Path)
		}
		r.detach(m, v)
		if nodes, err := r.f.Places(); err != nil || len(nodes) > 0 {
			t.Errorf("left: %v, %v", nodes, err)
		}
	})
}

// H76: a call was cut off when it had made a device and not connected it: the next volume takes its number, and then
// it is gone. One that another program has left behind is not touched.
func TestH76DeviceMadeAndNotConnected(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		killed := r.manager()
		defer killed.Close()
		v := r.volume()
		r.f.Curious = 1000
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { _, err := killed.Attach(ctx, v.Volume, false); ended <- err }()
		eventually(t, "a device is made", time.Second, func() bool { return r.f.Calls("connect") > 1 })
		r.fork()
		cancel()
		if err := <-ended; err == nil {
			t.Error("it was attached")
		}
		r.f.Orphan()
		r.f.Curious = 0
		m, stop := r.run()
		defer stop()
		eventually(t, "its record is gone", 5*time.Second, func() bool { return len(r.records()) == 0 })
		other := r.volume()
		if d := r.attach(m, other); d.Index != 0 {
			t.Errorf("took %s", d.Path)
		}
		r.detach(m, other)
		r.noResidue()

		r.f.Blank(0)
		if d := r.attach(m, v); d.Index != 1 {
			t.Errorf("took %s, which somebody else has made", d.Path)
		}
		r.detach(m, v)
	})
}

// A device of Gabion's that neither a record nor metadata knows may be another cluster's.
func TestUnknownDeviceIsLeftAlone(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		defer m.Close()
		v := r.volume()
		d := r.attach(m, v)
		r.dir = stateDir(t)
		r.md.Remove(v.Volume)
		other, stop := r.run()
		defer stop()
		time.Sleep(5 * time.Minute)
		if err := <-r.f.Start(d.Index); err != nil {
			t.Errorf("it does not work any more: %v", err)
		}
		r.detach(other, v)
	})
}

// B046: a volume's device is found by what the kernel says it is.
func TestB046NumbersChange(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m := r.manager()
		a, b, c := r.volume(), r.volume(), r.volume()
		r.attach(m, a)
		r.attach(m, b)
		r.attach(m, c)
		r.detach(m, a)
		r.detach(m, b)
		r.detach(m, c)
		time.Sleep(time.Second)
		r.attach(m, c)
		r.attach(m, b)
		r.attach(m, a)
		_ = m.Close()
		m = r.manager()
		defer m.Close()
		for i, v := range []*kerneltest.Volume{c, b, a} {
			r.f.Change(func() { v.Size = gib * int64(i+2) })
			r.attachment(v, oneHost)
			d, err := m.Resize(context.Background(), v.Volume, v.Size)
			if err != nil || d.Index != i || d.Size != v.Size || d.Volume != v.Volume {
				t.Errorf("Resize: %+v, %v", d, err)
			}
		}
		r.detach(m, a)
		r.detach(m, b)
		r.detach(m, c)
		r.noResidue()
	})
}

// B037, B038: many at once, over and over, with passers-by that open devices.
func TestB037AttachAndDetachAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.log = t.Output()
		m, stop := r.run()
		ctx, cancel := context.WithCancel(context.Background())
		var passers, wg sync.WaitGroup
		passers.Go(func() {
			for ctx.Err() == nil {
				nodes, _ := r.f.Places()
				for _, n := range nodes {
					leave := r.f.Open(n.Index, "process 7 (udevd)")
					time.Sleep(3 * time.Millisecond)
					leave()
				}
				time.Sleep(5 * time.Millisecond)
			}
		})
		for range 9 {
			v := r.volume()
			wg.Go(func() {
				for range 100 {
					d, err := m.Attach(ctx, v.Volume, false)
					if err != nil || d.Volume != v.Volume {
						t.Errorf("Attach: %+v, %v", d, err)
					}
					if err := m.Detach(ctx, v.Volume); err != nil {
						t.Errorf("Detach: %v", err)
					}
				}
			})
		}
		wg.Wait()
		cancel()
		passers.Wait()
		stop()
		r.noResidue()
	})
}

// B085: what is there keeps what it was made with.
func TestB085OtherDefaults(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		m, stop := r.run(func(c *kernel.Config) { c.Connections, c.DeadTimeout = 2, time.Hour })
		v, w := r.volume(), r.volume()
		d := r.attach(m, v)
		stop()
		m, stop = r.run()
		defer stop()
		again := r.attach(m, v)
		time.Sleep(time.Minute)
		if again.Index != d.Index || r.one.Sessions() != 2 || r.f.DeadTimeout(d.Index) != time.Hour {
			t.Errorf("after a restart: %+v, %d connections, patience %v", again, r.one.Sessions(), r.f.DeadTimeout(d.Index))
		}
		r.one.Kill()
		r.one.Serve()
		time.Sleep(time.Second)
		if r.one.Sessions() != 4 || r.f.DeadTimeout(d.Index) != time.Hour {
			t.Errorf("after a move: %d connections, patience %v", r.one.Sessions(), r.f.DeadTimeout(d.Index))
		}
		r.attach(m, w)
		if r.one.Sessions() != 8 {
			t.Errorf("a new device: %d connections", r.one.Sessions())
		}
		r.detach(m, v)
		r.detach(m, w)
	})
}
