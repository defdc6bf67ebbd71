package nbd_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/nbdtest"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

func block4k(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }

// content is the first byte of the block at off.
func content(m *nbdtest.Memory, off int64) byte {
	var p [1]byte
	m.ReadAt(p[:], off)
	return p[0]
}

// parked makes every write with a first byte of 1 wait until it is released or dropped, and counts those that came.
func parked(m *nbdtest.Memory) *atomic.Int64 {
	n := new(atomic.Int64)
	m.Hold = func(r *block.Request) bool {
		hold := r.Op == block.OpWrite && r.Data[0] == 1
		if hold {
			n.Add(1)
		}
		return hold
	}
	return n
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for tick := time.NewTicker(time.Millisecond); !is(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not seen: %s", what)
		}
	}
}

// H01: W1(x=1) is parked on a; the client gives a up, sends it again on b, then W2(x=2) and FLUSH.
func TestH01ParkedWriteAndItsResend(t *testing.T) {
	var n *atomic.Int64
	s := serve(t, func(_ *nbd.Config, s *served) { n = parked(s.volume) })
	a, b := s.enter(t, false), s.enter(t, false)
	defer b.close()
	a.write(1, 0, block4k(1))
	eventually(t, "the parked write", func() bool { return n.Load() == 1 })
	a.close()
	eventually(t, "the end of a", func() bool { return s.volume.Streams() == 1 })

	b.write(2, 0, block4k(3)) // the resend, with other bytes
	b.reply()
	b.write(3, 0, block4k(2))
	b.send(wire.Request{Command: wire.CmdFlush, Cookie: 4}, nil)
	b.reply()
	if r := b.reply(); r.errno != 0 {
		t.Fatalf("errno %d", r.errno)
	}
	s.volume.Release()
	if got := content(s.volume, 0); got != 2 {
		t.Errorf("x=%d, want 2", got)
	}
}

// H02, a process that was stopped: what lay in the sockets meanwhile is never executed, on any connection.
func TestH02BytesParsedLateAfterAStop(t *testing.T) {
	var boot atomic.Int64
	s := serve(t, func(c *nbd.Config, _ *served) {
		c.BootTime = func() time.Duration { return time.Duration(boot.Load()) }
	})
	a, b := s.enter(t, false), s.enter(t, false)
	a.write(1, 0, block4k(5))
	if r := a.reply(); r.errno != 0 {
		t.Fatalf("before the stop: errno %d", r.errno)
	}
	boot.Add(int64(3 * time.Second)) // stopped, or suspended
	// Written after the clock jumped: the server sees them as what came while it was stopped.
	a.write(2, 0, block4k(1))
	b.write(3, 4096, block4k(1))
	if n := a.closed() + b.closed(); n != 0 {
		t.Errorf("%d bytes of replies after the stop", n)
	}
	if content(s.volume, 0) != 5 || content(s.volume, 4096) != 0 {
		t.Error("a write that came during the stop was executed")
	}
	eventually(t, "the stall in the statistics", func() bool { return s.Stats().Stalls == 1 })
	c := s.enter(t, false) // the resend
	defer c.close()
	c.write(4, 0, block4k(2))
	if r := c.reply(); r.errno != 0 || content(s.volume, 0) != 2 {
		t.Errorf("after the stop: errno %d, x=%d", r.errno, content(s.volume, 0))
	}
}

// H02, a reader that was held up: the write behind what held it up is never executed.
func TestH02BytesParsedLateByAHeldUpReader(t *testing.T) {
	var now atomic.Int64
	inside, goOn := make(chan struct{}), make(chan struct{})
	s := serve(t, func(_ *nbd.Config, s *served) {
		s.volume.Fail = func(r *block.Request) error {
			if r.Op == block.OpTrim { // blocks Submit, which a Device should not, and a full budget does
				close(inside)
				<-goOn
			}
			return nil
		}
	})
	s.SetClock(func() time.Duration { return time.Duration(now.Load()) })
	a, b := s.enter(t, false), s.enter(t, false)
	defer b.close()
	a.send(wire.Request{Command: wire.CmdTrim, Cookie: 1, Offset: 1 << 20, Length: 4096}, nil)
	<-inside
	a.write(2, 0, block4k(1)) // W1 lies unread
	b.write(3, 0, block4k(3)) // sent again on b
	b.reply()
	b.write(4, 0, block4k(2)) // W2
	b.reply()
	now.Add(int64(1100 * time.Millisecond))
	close(goOn)
	a.closed()
	if got := content(s.volume, 0); got != 2 {
		t.Errorf("x=%d, want 2", got)
	}
	eventually(t, "the reason in the log", func() bool { return strings.Contains(s.log.String(), "held up") })
}

// H02, a reader that was held up when it had read and parsed: what it has is not executed.
func TestH02HeldUpBeforeSubmit(t *testing.T) {
	var now atomic.Int64
	var faults fault.Set
	s := serve(t, func(c *nbd.Config, _ *served) { c.Fault = &faults })
	s.SetClock(func() time.Duration { return time.Duration(now.Load()) })
	a, b := s.enter(t, false), s.enter(t, false)
	defer b.close()
	must(t, faults.Arm(fault.Rule{Point: "nbd.parse", Hold: true, Count: 1}))
	a.write(1, 0, block4k(1))
	eventually(t, "the reader is held up", func() bool { return faults.Hits("nbd.parse") == 1 })
	b.write(2, 0, block4k(1)) // sent again on b
	b.reply()
	b.write(3, 0, block4k(2)) // W2
	b.reply()
	now.Add(int64(1100 * time.Millisecond))
	faults.Clear("")
	if n := a.closed(); n != 0 {
		t.Errorf("%d bytes of replies", n)
	}
	if got := content(s.volume, 0); got != 2 {
		t.Errorf("x=%d, want 2", got)
	}
}

// gated is an Exports whose Devices wait in Disconnect until the gate opens.
type gated struct {
	*nbdtest.Exports
	disconnecting chan struct{}
	gate          chan struct{}
}

type gatedDevice struct {
	block.Device
	g *gated
}

func (g *gated) Open(ctx context.Context, name string, s block.Stream) (block.Device, error) {
	d, err := g.Exports.Open(ctx, name, s)
	return gatedDevice{d, g}, err
}

func (d gatedDevice) Disconnect() {
	d.g.disconnecting <- struct{}{}
	<-d.g.gate
	d.Device.Disconnect()
}

// H03: a connection with 1,000 parked writes ends. They are gone before our FIN leaves, and none is executed afterwards.
func TestH03ClosingDropsWhatWasNotSent(t *testing.T) {
	for _, how := range []string{"fin", "rst", "garbage", "own close", "disc"} {
		t.Run(how, func(t *testing.T) {
			var n *atomic.Int64
			var g *gated
			var mu sync.Mutex
			var stream block.Stream
			s := serve(t, func(c *nbd.Config, s *served) {
				n = parked(s.volume)
				g = &gated{s.exports, make(chan struct{}), make(chan struct{})}
				s.volume.Resends = true
				s.exports.Opening = func(_ context.Context, _ string, st block.Stream) error {
					mu.Lock()
					defer mu.Unlock()
					stream = st
					return nil
				}
				c.Exports = g
			})
			p := enter(t, "tcp", s.tcp, "v", false)
			for i := range uint64(1000) {
				p.write(i, 4096*i, block4k(1))
			}
			p.write(1000, 8<<20, block4k(2)) // one that is finished: its reply shows that all was parsed
			p.reply()
			if n.Load() != 1000 {
				t.Fatalf("%d writes are parked", n.Load())
			}
			switch how {
			case "fin":
				must(t, p.nc.(*net.TCPConn).CloseWrite())
			case "rst":
				p.reset()
			case "garbage":
				p.send(wire.Request{}, nil)
				_, _ = p.nc.Write(make([]byte, 28))
			case "own close":
				mu.Lock()
				stream.Close(fmt.Errorf("revoked: %w", block.ErrPermission))
				mu.Unlock()
			case "disc":
				p.send(wire.Request{Command: 2}, nil)
			}
			<-g.disconnecting
			if how != "rst" {
				_ = p.nc.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
				if k, err := p.nc.Read(make([]byte, 1<<16)); err == nil && how != "garbage" || err != nil && ending(err) == "closed" {
					t.Errorf("before Disconnect returned the client got %d bytes, %v", k, err)
				}
				_ = p.nc.SetReadDeadline(time.Now().Add(20 * time.Second))
			}
			close(g.gate)
			if how != "rst" {
				p.closed()
			}
			eventually(t, "the end of the stream", func() bool { return s.volume.Streams() == 0 })
			s.volume.Release()
			if s.volume.Allocated() != 64<<10 || content(s.volume, 8<<20) != 2 {
				t.Errorf("%d bytes are allocated: something dropped was executed", s.volume.Allocated())
			}
			eventually(t, "payload bytes at the baseline", func() bool {
				st := s.Stats()
				return st.PayloadBytes == 0 && st.Connections == 0
			})
		})
	}
}

// What Disconnect dropped: a plain client is told ESHUTDOWN, one that re-sends gets no answer.
func TestDroppedRequests(t *testing.T) {
	for _, resends := range []bool{false, true} {
		var n *atomic.Int64
		s := serve(t, func(_ *nbd.Config, s *served) {
			n = parked(s.volume)
			s.volume.Resends = resends
		})
		p := s.enter(t, false)
		for i := range uint64(3) {
			p.write(i, 4096*i, block4k(1))
		}
		eventually(t, "the parked writes", func() bool { return n.Load() == 3 })
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		must(t, s.Shutdown(ctx))
		cancel()
		if !resends {
			for range 3 {
				if r := p.reply(); r.errno != wire.ESHUTDOWN {
					t.Errorf("errno %d", r.errno)
				}
			}
		}
		if k := p.closed(); k != 0 {
			t.Errorf("resends %v: %d bytes more", resends, k)
		}
		p.close()
	}
}

// H05, the server's side: sockets of one session live side by side; a newer session ends the older ones before it is
// answered, and then nothing of them can be executed.
func TestH05NewSessionEndsTheOlder(t *testing.T) {
	var mu sync.Mutex
	older := map[block.Stream]bool{}
	s := serve(t, func(_ *nbd.Config, v *served) {
		parked(v.volume)
		v.exports.Volumes["v2"] = v.volume
		v.exports.Opening = func(_ context.Context, name string, st block.Stream) error {
			mu.Lock()
			defer mu.Unlock()
			if name == "v" {
				older[st] = true
				return nil
			}
			for o := range older {
				o.Close(fmt.Errorf("a newer session: %w", block.ErrStale))
			}
			eventually(t, "the end of older sessions", func() bool { return v.volume.Streams() == 0 })
			return nil
		}
	})
	var four []*peer
	for range 4 {
		four = append(four, s.enter(t, false))
	}
	for i, p := range four { // none evicted another
		p.write(uint64(i), uint64(i)*4096, block4k(1)) // parked
		p.write(9, 1<<20, block4k(byte(2+i)))
		if r := p.reply(); r.errno != 0 {
			t.Fatalf("socket %d: errno %d", i, r.errno)
		}
	}
	newest := enter(t, "unix", s.unix, "v2", false)
	defer newest.close()
	newest.write(1, 0, block4k(7))
	newest.reply()
	for i, p := range four {
		_, _ = p.nc.Write(append(wire.Request{Command: 1, Cookie: 1, Length: 4096}.Append(nil), block4k(8)...))
		p.closed()
		if got := content(s.volume, int64(i)*4096); got == 1 || got == 8 {
			t.Errorf("a write of an older session was executed at block %d", i)
		}
		p.close()
	}
}

// H14: a write that waits for space holds up no flush and no read, on its connection or another.
func TestH14ParkedWritesHoldUpNobody(t *testing.T) {
	s := serve(t, func(_ *nbd.Config, s *served) { parked(s.volume) })
	a, b := s.enter(t, false), s.enter(t, false)
	defer a.close()
	defer b.close()
	a.write(1, 0, block4k(1))
	for _, p := range []*peer{a, b} {
		p.send(wire.Request{Command: wire.CmdFlush, Cookie: 2}, nil)
		if r := p.reply(); r.cookie != 2 || r.errno != 0 {
			t.Errorf("flush: %+v", r)
		}
		p.send(wire.Request{Command: 0, Cookie: 3, Offset: 1 << 20, Length: 4096}, nil)
		if r := p.replyTo(4096); r.cookie != 3 || r.errno != 0 {
			t.Errorf("read: %d, errno %d", r.cookie, r.errno)
		}
	}
	s.volume.Release()
	if r := a.reply(); r.cookie != 1 || r.errno != 0 {
		t.Errorf("the parked write: %+v", r)
	}
}

// H02, a reader that waits for bytes because the client does not take its replies: when it comes back, what lay behind
// is not executed.
func TestH02BytesParsedLateForWantOfMemory(t *testing.T) {
	var now atomic.Int64
	s := serve(t, func(c *nbd.Config, _ *served) { c.ConnectionBytes = block.MaxPayload })
	s.SetClock(func() time.Duration { return time.Duration(now.Load()) })
	p := s.enter(t, false)
	defer p.close()
	for i := range uint64(64) { // 64 MiB asked for, 32 MiB may be in flight
		p.send(wire.Request{Command: 0, Cookie: i, Length: 1 << 20}, nil)
	}
	p.write(64, 0, block4k(1))
	eventually(t, "a full budget", func() bool { return s.Stats().ReplyBytes > 30<<20 })
	now.Add(int64(2 * time.Second))
	p.closed()
	if content(s.volume, 0) != 0 {
		t.Error("the write behind was executed")
	}
}

// A budget smaller than what is asked for slows a client down and nothing else.
func TestSmallBudgets(t *testing.T) {
	for _, async := range []bool{false, true} {
		s := serve(t, func(c *nbd.Config, s *served) {
			s.volume.Async = async
			c.ConnectionBytes, c.ServerBytes, c.MaxRequests = block.MaxPayload, 2*block.MaxPayload, 8
		})
		var all sync.WaitGroup
		for i := range 4 {
			all.Go(func() {
				c := s.dial(t, client.Config{})
				defer c.Abort()
				p := make([]byte, 16<<20)
				for round := range 4 {
					copy(p, bytes.Repeat([]byte{byte(i + round)}, 1<<20))
					if _, err := c.WriteAt(p[:1<<20], int64(i)<<20); err != nil {
						t.Error(err)
					}
					if _, err := c.ReadAt(p, 0); err != nil || p[i<<20] != byte(i+round) {
						t.Errorf("client %d, round %d: %d, %v", i, round, p[i<<20], err)
					}
				}
			})
		}
		all.Wait()
	}
}

// A read that waits for bytes which a finished reply of the same batch holds gets them.
func TestBudgetWithinABatch(t *testing.T) {
	s := serve(t, func(c *nbd.Config, _ *served) { c.ConnectionBytes = block.MaxPayload })
	p := s.enter(t, false)
	defer p.close()
	out := wire.Request{Command: 0, Cookie: 1, Length: 128 << 10}.Append(nil)
	_, err := p.nc.Write(wire.Request{Command: 0, Cookie: 2, Length: block.MaxPayload}.Append(out))
	must(t, err)
	if r := p.replyTo(128 << 10); r.cookie != 1 || r.errno != 0 {
		t.Errorf("reply %d, errno %d", r.cookie, r.errno)
	}
	if r := p.replyTo(block.MaxPayload); r.cookie != 2 || r.errno != 0 {
		t.Errorf("reply %d, errno %d", r.cookie, r.errno)
	}
}

// A client that stops in the middle of a payload does not hold its memory for ever.
func TestStalledPayload(t *testing.T) {
	s := serve(t, func(c *nbd.Config, _ *served) { c.StallTimeout = 50 * time.Millisecond })
	idle := s.enter(t, false)
	defer idle.close()
	for _, flags := range []uint16{0, 1 << 15} { // taken and refused
		p := s.enter(t, false)
		defer p.close()
		p.send(wire.Request{Command: 1, Flags: flags, Cookie: 1, Length: 32 << 20}, make([]byte, 1<<20))
		if n := p.closed(); n != 0 {
			t.Errorf("%d bytes of replies", n)
		}
	}
	idle.write(1, 0, block4k(1)) // an idle client may be silent for as long as it likes
	idle.reply()
}
