package nbd_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"runtime"
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
	"golang.org/x/sys/unix"
)

// heap is the memory in use after a collection.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// A hundred connections announce options of almost 4 GiB and stall.
func TestB005HugeOptionLength(t *testing.T) {
	s := serve(t, nil)
	before := heap()
	for i := range 100 {
		nc, err := net.Dial("unix", s.unix)
		must(t, err)
		defer nc.Close()
		id, length := uint32(0x7fff), uint32(0xffffffff-15*(i%2))
		if i%3 == 0 {
			id = wire.OptExportName
		}
		p := append(binary.BigEndian.AppendUint32(nil, 3), "IHAVEOPT"...)
		_, err = nc.Write(binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(p, id), length))
		must(t, err)
		_ = nc.SetReadDeadline(time.Now().Add(20 * time.Second))
		got, err := io.ReadAll(nc)
		if err != nil && ending(err) != "closed" {
			t.Fatalf("the server did not close: %v", err)
		}
		if id != wire.OptExportName && (len(got) < 38 || binary.BigEndian.Uint32(got[18+12:]) != wire.RepErrTooBig) {
			t.Fatalf("answer %q", got)
		}
	}
	if grown := heap() - before; grown > 8<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
	if s.exports.Calls.Load() != 0 {
		t.Error("Exports was asked")
	}
}

func TestB007RequestLength(t *testing.T) {
	s := serve(t, nil)
	other := s.enter(t, false)
	defer other.close()
	before := heap()
	p := s.enter(t, false)
	defer p.close()
	for _, length := range []uint32{0xffffffff, 0xfffffe00, block.MaxPayload + 1, block.MaxPayload + 512} {
		p.send(wire.Request{Command: 0, Cookie: 1, Length: length}, nil)
		if r := p.reply(); r.errno != wire.EINVAL {
			t.Errorf("READ of %d: errno %d", length, r.errno)
		}
		q := s.enter(t, false)
		q.send(wire.Request{Command: 1, Cookie: 1, Length: length}, nil)
		if length > 2*block.MaxPayload { // too long to be thrown away
			q.closed()
		}
		q.close()
		other.write(2, 0, block4k(2))
		if r := other.reply(); r.errno != 0 {
			t.Errorf("the other connection: errno %d", r.errno)
		}
	}
	if grown := heap() - before; grown > 8<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
}

// striped is a Device of alternating data and holes of 512 bytes.
type striped struct{ block.Device }

func (striped) Status(dst []block.Status, off, length int64, limit int) ([]block.Status, error) {
	for n := 0; length > 0 && n < limit; n++ {
		hole := off/512%2 == 0
		dst = append(dst, block.Status{Length: 512, Hole: hole, Zero: hole})
		off, length = off+512, length-512
	}
	return dst, nil
}

type stripedExports struct{ *nbdtest.Exports }

func (e stripedExports) Open(ctx context.Context, name string, s block.Stream) (block.Device, error) {
	d, err := e.Exports.Open(ctx, name, s)
	return striped{d}, err
}

func TestB011BlockStatusIsBounded(t *testing.T) {
	s := serve(t, func(c *nbd.Config, s *served) {
		s.volume.Grow(5 << 30)
		c.Exports = stripedExports{s.exports}
	})
	p := s.enter(t, true)
	defer p.close()
	before := heap()
	start := time.Now()
	for _, flags := range []uint16{0, wire.CmdFlagReqOne} {
		p.send(wire.Request{Command: wire.CmdBlockStatus, Flags: flags, Cookie: 1, Length: 0xfffffe00}, nil)
		r := p.reply()
		n, sum := len(r.data)/8, int64(0)
		for d := r.data; len(d) > 0; d = d[8:] {
			sum += int64(binary.BigEndian.Uint32(d))
		}
		if r.errno != 0 || n < 1 || n > 16384 || sum > 0xfffffe00 || flags != 0 && n != 1 {
			t.Errorf("flags %d: errno %d, %d descriptors over %d bytes", flags, r.errno, n, sum)
		}
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("took %v", d)
	}
	if grown := heap() - before; grown > 4<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
}

// Four connections, 32 in flight each, write blocks that hold their own offset, in line and from other goroutines.
func TestB017ParallelWrites(t *testing.T) {
	for _, async := range []bool{false, true} {
		s := serve(t, func(_ *nbd.Config, s *served) { s.volume.Async = async })
		c := s.dial(t, client.Config{Connections: 4, Depth: 32})
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		rnd := rand.New(rand.NewPCG(seed, 2))
		done := make(chan *client.Call, 4096)
		const n = 4096
		for _, i := range rnd.Perm(n) {
			p := make([]byte, 4096)
			binary.BigEndian.PutUint64(p, uint64(i))
			binary.BigEndian.PutUint64(p[4088:], uint64(i))
			c.Start(&client.Call{Op: block.OpWrite, Offset: int64(i) * 4096, Data: p, Done: done})
		}
		for range n {
			must(t, (<-done).Err)
		}
		got := make([]byte, n*4096)
		_, err := c.ReadAt(got, 0)
		must(t, err)
		for i := range uint64(n) {
			p := got[i*4096:]
			if binary.BigEndian.Uint64(p) != i || binary.BigEndian.Uint64(p[4088:]) != i {
				t.Fatalf("block %d holds %d and %d", i, binary.BigEndian.Uint64(p), binary.BigEndian.Uint64(p[4088:]))
			}
		}
		must(t, c.Close())
	}
}

// A client asks for 64 MiB and does not read. Others are served meanwhile, then it gets everything.
func TestB019ReaderThatStopsReading(t *testing.T) {
	s := serve(t, func(_ *nbd.Config, s *served) { s.exports.Volumes["w"] = nbdtest.NewMemory(size) })
	for i := range int64(64) {
		s.volume.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, 1<<20), i<<20)
	}
	stuck := s.enter(t, false)
	defer stuck.close()
	for i := range uint64(64) {
		stuck.send(wire.Request{Command: 0, Cookie: i, Offset: i << 20, Length: 1 << 20}, nil)
	}
	// It also goes on to send: its reader must not be stuck behind its replies.
	stuck.send(wire.Request{Command: wire.CmdTrim, Cookie: 64, Offset: 0, Length: 1 << 20}, nil)
	eventually(t, "the request behind the stuck replies", func() bool { return content(s.volume, 0) == 0 })
	for _, name := range []string{"v", "w"} {
		p := enter(t, "unix", s.unix, name, false)
		start := time.Now()
		for _, command := range []uint16{wire.CmdWriteZeroes, wire.CmdTrim} {
			p.send(wire.Request{Command: command, Cookie: 1, Offset: 0, Length: 4096}, nil)
			p.reply()
		}
		p.send(wire.Request{Command: wire.CmdFlush, Cookie: 2}, nil)
		p.reply()
		if d := time.Since(start); d > time.Second {
			t.Errorf("%s was served after %v", name, d)
		}
		p.close()
	}
	seen := map[uint64]bool{}
	for range 64 {
		r := stuck.replyTo(1 << 20)
		if r.errno != 0 || seen[r.cookie] || !bytes.Equal(r.data, bytes.Repeat([]byte{byte(r.cookie + 1)}, 1<<20)) {
			t.Fatalf("reply %d, errno %d: wrong", r.cookie, r.errno)
		}
		seen[r.cookie] = true
	}
	if r := stuck.reply(); r.cookie != 64 || r.errno != 0 {
		t.Errorf("the last reply: %+v", r)
	}
}

// A client that never takes its replies is closed after StallTimeout, and what it held is given back.
func TestB019ClientThatNeverReads(t *testing.T) {
	s := serve(t, func(c *nbd.Config, _ *served) { c.StallTimeout = 50 * time.Millisecond })
	p := s.enter(t, false)
	defer p.close()
	for i := range uint64(32) {
		p.send(wire.Request{Command: 0, Cookie: i, Length: 1 << 20}, nil)
	}
	eventually(t, "the end of the connection", func() bool { return s.Stats().Connections == 0 })
}

// The multi-conn flag is the Device's word, and a flush on one connection reaches the same Device.
func TestB021MultiConn(t *testing.T) {
	for _, single := range []bool{false, true} {
		s := serve(t, func(_ *nbd.Config, s *served) { s.volume.Single = single })
		c := s.dial(t, client.Config{})
		if c.Export().MultiConn() == single {
			t.Errorf("single %v: flags %#x", single, c.Export().Flags)
		}
		must(t, c.Close())
	}
}

func TestB020Flags(t *testing.T) {
	s := serve(t, nil)
	c := s.dial(t, client.Config{})
	const all = 1 | wire.TransFlush | wire.TransFUA | wire.TransTrim | wire.TransWriteZeroes
	if f := c.Export().Flags; f&all != all {
		t.Errorf("flags %#x lack some of %#x", f, all)
	}
	must(t, c.WriteDurable(block4k(1), 0))
	must(t, c.Flush())
	if n := s.volume.Flushes.Load(); n != 2 {
		t.Errorf("%d flushes, want 2", n)
	}
	must(t, c.Close())
}

// Connect, read, and leave in every way, many times: nothing stays.
func TestB024ConnectionSlots(t *testing.T) {
	s := serve(t, func(c *nbd.Config, _ *served) { c.MaxConnections = 8 })
	before, goroutines := heap(), runtime.NumGoroutine()
	for i := range 1000 {
		p := enter(t, "tcp", s.tcp, "v", i%2 == 0)
		p.send(wire.Request{Command: 0, Cookie: 1, Length: 512}, nil)
		p.replyTo(512)
		switch i % 4 {
		case 0:
			p.send(wire.Request{Command: 2}, nil)
			p.close()
		case 1:
			p.close()
		case 2:
			p.reset()
		case 3:
			p.send(wire.Request{Command: 1, Length: 4096}, make([]byte, 100))
			p.reset()
		}
		eventually(t, "a free slot", func() bool { return s.Stats().Connections < 8 })
	}
	eventually(t, "no connections", func() bool { return s.Stats().Connections == 0 })
	eventually(t, "no goroutines", func() bool { return runtime.NumGoroutine() <= goroutines })
	if grown := heap() - before; grown > 4<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
}

// What closes a client that vanished: keepalive and the user timeout, both below 60 s.
func TestB025DeadClient(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer ln.Close()
	out, err := net.Dial("tcp", ln.Addr().String())
	must(t, err)
	defer out.Close()
	in, err := ln.Accept()
	must(t, err)
	defer in.Close()
	must(t, nbd.Prepare(in))
	raw, err := in.(*net.TCPConn).SyscallConn()
	must(t, err)
	get := func(level, option int) (v int) {
		must(t, raw.Control(func(fd uintptr) { v, err = unix.GetsockoptInt(int(fd), level, option) }))
		must(t, err)
		return v
	}
	idle := get(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE) + get(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL)*get(unix.IPPROTO_TCP, unix.TCP_KEEPCNT)
	busy := get(unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) / 1000
	if get(unix.SOL_SOCKET, unix.SO_KEEPALIVE) == 0 || get(unix.IPPROTO_TCP, unix.TCP_NODELAY) == 0 || idle >= 60 || busy == 0 || busy >= 60 {
		t.Errorf("a vanished client is found after %d s idle, %d s busy", idle, busy)
	}
}

// Sockets stopped before the flags, in mid-option, in mid-payload, and requests in flight, when the server ends.
func TestB026ShutdownInMidHandshake(t *testing.T) {
	var n *atomic.Int64
	s := serve(t, func(c *nbd.Config, s *served) { n = parked(s.volume) })
	hello := handshakeBytes("v", true)
	for i := range 50 {
		nc, err := net.Dial("unix", s.unix)
		must(t, err)
		defer nc.Close()
		part := hello[:min(len(hello)-1, i%5*7)]
		_, err = nc.Write(part)
		must(t, err)
	}
	mid := s.enter(t, false)
	defer mid.close()
	mid.send(wire.Request{Command: 1, Cookie: 1, Length: 1 << 20}, make([]byte, 1000))
	p := s.enter(t, false)
	defer p.close()
	for i := range uint64(16) {
		p.write(i, i*4096, block4k(1))
	}
	eventually(t, "16 requests in flight", func() bool { return n.Load() == 16 })
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	start := time.Now()
	must(t, s.Shutdown(ctx))
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("it took %v: somebody was waited for", d)
	}
	for range 16 {
		if r := p.reply(); r.errno != 0 && r.errno != wire.ESHUTDOWN {
			t.Errorf("errno %d", r.errno)
		}
	}
	if k := mid.closed(); k != 0 {
		t.Errorf("%d bytes to a client in mid-payload", k)
	}
}

func TestB027LargeVolumes(t *testing.T) {
	for _, want := range []int64{1 << 40, 2<<40 - 4096, 2 << 40, 16 << 40, 64 << 40} {
		s := serve(t, func(_ *nbd.Config, s *served) { s.volume.Grow(want) })
		c := s.dial(t, client.Config{})
		if got := c.Export().Size; got != want {
			t.Errorf("size %d, want %d", got, want)
		}
		_, err := c.WriteAt(block4k(9), want-4096)
		must(t, err)
		got := make([]byte, 8192)
		n, err := c.ReadAt(got, want-4096)
		if n != 4096 || !errors.Is(err, io.EOF) || !bytes.Equal(got[:4096], block4k(9)) {
			t.Errorf("the last block of %d bytes: %d bytes, %v", want, n, err)
		}
		must(t, c.Close())
	}
}

// Eight goroutines write the sectors of one block over two connections.
func TestB028NeighbouringSectors(t *testing.T) {
	s := serve(t, nil)
	c := s.dial(t, client.Config{Connections: 2})
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			p, got := make([]byte, 512), make([]byte, 512)
			for round := range 200 {
				for j := range p {
					p[j] = byte(round)
				}
				if _, err := c.WriteAt(p, int64(i)*512); err != nil {
					t.Error(err)
					return
				}
				if _, err := c.ReadAt(got, int64(i)*512); err != nil || !bytes.Equal(got, p) {
					t.Errorf("sector %d in round %d holds %d, %v", i, round, got[0], err)
					return
				}
			}
		})
	}
	all.Wait()
	must(t, c.Close())
}

// Foreign bytes on the port: each is closed with one line at most, and a running session does not notice.
func TestB147ForeignBytes(t *testing.T) {
	s := serve(t, nil)
	running := s.enter(t, false)
	defer running.close()
	rnd := rand.New(rand.NewPCG(7, 7))
	for i := range 64 {
		p := make([]byte, 1+rnd.IntN(4000))
		for j := range p {
			p[j] = byte(rnd.Uint32())
		}
		switch i % 4 {
		case 1:
			p = []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		case 2:
			p = append([]byte{0, 0, 0, 3}, p...)
		}
		nc, err := net.Dial("tcp", s.tcp)
		must(t, err)
		_, _ = nc.Write(p)
		_ = nc.(*net.TCPConn).CloseWrite()
		_ = nc.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.Copy(io.Discard, nc); err != nil && ending(err) != "closed" {
			t.Fatalf("not closed: %v", err)
		}
		_ = nc.Close()
		running.write(1, 0, block4k(1))
		if r := running.reply(); r.errno != 0 {
			t.Fatalf("the running session: errno %d", r.errno)
		}
	}
	if s.exports.Calls.Load() != 1 {
		t.Error("Exports was asked by strangers")
	}
}

// Whatever strangers do, the log grows by a line a second (after ten).
func TestB162LogFlood(t *testing.T) {
	s := serve(t, func(c *nbd.Config, s *served) {
		c.Log = slog.New(slog.NewTextHandler(s.log, nil)) // as in production: Info and above
	})
	start := time.Now()
	for range 500 {
		nc, err := net.Dial("unix", s.unix)
		must(t, err)
		_, _ = nc.Write([]byte("nonsense, nonsense"))
		_, _ = io.Copy(io.Discard, nc)
		_ = nc.Close()
	}
	most := 11 + int(time.Since(start)/time.Second)
	eventually(t, "no connections", func() bool { return s.Stats().Connections == 0 })
	if n := strings.Count(s.log.String(), "\n"); n > most {
		t.Errorf("%d lines", n)
	}
	if s.Stats().SilencedLines < 400 {
		t.Errorf("%d lines held back", s.Stats().SilencedLines)
	}
}

// The secret part of an export's name is in no log line and no error.
func TestB166Secrets(t *testing.T) {
	const secret, id = "MARKER-0123456789abcdef", "00000000-0000-4000-8000-00000000000a"
	s := serve(t, func(_ *nbd.Config, s *served) {
		s.exports.Volumes[id+"/"+secret] = s.volume
		s.exports.Refuse["w/"+secret] = fmt.Errorf("volume w: %w", block.ErrPermission)
	})
	ctx := context.Background()
	var errs []string
	if c, err := client.Dial(ctx, client.Target{Network: "tcp", Address: s.tcp, Export: secret}, client.Config{}); err == nil { // the token alone
		_ = c.Close()
		t.Error("a name without a volume opened something")
	}
	for _, name := range []string{id + "/", "w/", "x/"} {
		target := client.Target{Network: "tcp", Address: s.tcp, Export: name + secret}
		errs = append(errs, target.String())
		c, err := client.Dial(ctx, target, client.Config{})
		if err != nil {
			errs = append(errs, err.Error())
			continue
		}
		_, err = c.WriteAt(block4k(1), size)
		errs = append(errs, err.Error())
		must(t, c.Close())
	}
	p := enter(t, "tcp", s.tcp, id+"/"+secret, false)
	_, _ = p.nc.Write([]byte(strings.Repeat("not a request ", 20)))
	p.closed()
	p.close()
	for _, uri := range []string{"nbd://h\x00st/v/" + secret, "nbd:///v/" + secret, "ftp://h/v/" + secret, "nbd+unix:///v/" + secret, ":" + secret} {
		_, err := client.ParseURI(uri)
		errs = append(errs, err.Error())
	}
	eventually(t, "no connections", func() bool { return s.Stats().Connections == 0 })
	for _, text := range append(errs, s.log.String()) {
		if strings.Contains(text, secret) {
			t.Errorf("the secret is in %q", text)
		}
	}
	if !strings.Contains(s.log.String(), "volume_id="+id) {
		t.Error("the log does not name the volume")
	}
}

// Strangers that say nothing cost no call, are closed by the deadline, and do not keep out one who speaks.
func TestB169WorkForStrangers(t *testing.T) {
	s := serve(t, func(c *nbd.Config, _ *served) {
		c.MaxHandshakes = 16
		c.HandshakeTimeout = 300 * time.Millisecond
	})
	before := heap()
	var strangers []net.Conn
	for i := range 200 {
		nc, err := net.Dial("tcp", s.tcp)
		must(t, err)
		defer nc.Close()
		strangers = append(strangers, nc)
		_, _ = nc.Write(handshakeBytes("v", false)[:i%3*5])
		if i%50 == 25 {
			start := time.Now()
			p := enter(t, "tcp", s.tcp, "v", false)
			p.close()
			if d := time.Since(start); d > 2*time.Second {
				t.Errorf("a legitimate client waited %v", d)
			}
		}
		if st := s.Stats(); st.HalfOpen > 16 {
			t.Fatalf("%d half-open connections", st.HalfOpen)
		}
	}
	if calls := s.exports.Calls.Load(); calls != 4 {
		t.Errorf("Exports was asked %d times, want 4", calls)
	}
	for _, nc := range strangers {
		_ = nc.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.Copy(io.Discard, nc); err != nil && ending(err) != "closed" {
			t.Fatalf("a stranger was not closed: %v", err)
		}
	}
	if grown := heap() - before; grown > 8<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
}

// A client that dribbles within one option does not live longer than the deadline.
func TestB169Dribble(t *testing.T) {
	s := serve(t, func(c *nbd.Config, _ *served) { c.HandshakeTimeout = 200 * time.Millisecond })
	nc, err := net.Dial("tcp", s.tcp)
	must(t, err)
	defer nc.Close()
	start := time.Now()
	for _, b := range handshakeBytes("v", false) {
		if _, err := nc.Write([]byte{b}); err != nil {
			break
		}
		_ = nc.SetReadDeadline(time.Now().Add(20 * time.Millisecond)) // the dribble's pace
		if _, err := io.Copy(io.Discard, nc); err == nil {
			break
		}
	}
	if d := time.Since(start); d > 2*time.Second || s.exports.Calls.Load() != 0 {
		t.Errorf("it lived for %v; %d calls", d, s.exports.Calls.Load())
	}
}
