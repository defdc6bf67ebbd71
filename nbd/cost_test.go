package nbd_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
)

// handedOff is a Device that completes everything from another goroutine and allocates nothing. Reads bring zeros.
type handedOff struct {
	block.Device
	s    block.Stream
	todo chan *block.Request
	done sync.WaitGroup
}

func (d *handedOff) Submit(batch []*block.Request) {
	for _, r := range batch {
		d.todo <- r
	}
}

func (d *handedOff) work() {
	for r := range d.todo {
		if r.Op == block.OpRead {
			r.Err = d.s.ReadBuffer(r)
		}
		d.s.Complete(r)
	}
}

func (d *handedOff) Disconnect() {
	close(d.todo)
	d.done.Wait()
	d.Device.Disconnect()
}

// observed counts what an Observer is told.
type observed struct {
	block.Device
	mu                sync.Mutex
	started, finished int
}

func (d *observed) Started(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.started += n
}

func (d *observed) Finished(block.Op, int64, time.Duration, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.finished++
}

// wrapped is an Exports whose Devices are wrapped.
type wrapped struct {
	nbd.Exports
	wrap func(block.Device, block.Stream) block.Device
}

func (w wrapped) Open(ctx context.Context, name string, s block.Stream) (block.Device, error) {
	d, err := w.Exports.Open(ctx, name, s)
	if err != nil {
		return nil, err
	}
	return w.wrap(d, s), nil
}

// Nothing is allocated per request: not for reads or writes, small or large, in line or handed off, observed or not.
func TestRequestsAllocateNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools")
	}
	handoff := func(d block.Device, s block.Stream) block.Device {
		h := &handedOff{Device: d, s: s, todo: make(chan *block.Request, 64)}
		h.done.Go(h.work)
		return h
	}
	watch := func(d block.Device, _ block.Stream) block.Device { return &observed{Device: d} }
	for _, c := range []struct {
		name   string
		wrap   func(block.Device, block.Stream) block.Device
		write  bool
		length int
		flags  uint16
	}{
		{"read 4 KiB", nil, false, 4096, 0},
		{"read 128 KiB", nil, false, 128 << 10, 0},
		{"write 4 KiB", nil, true, 4096, 0},
		{"write 128 KiB", nil, true, 128 << 10, 0},
		{"read 4 KiB handed off", handoff, false, 4096, 0},
		{"write 4 KiB handed off", handoff, true, 4096, 0},
		{"read 4 KiB observed", watch, false, 4096, 0},
		{"refused", nil, false, 4096, 0x8000},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t, func(cfg *nbd.Config, s *served) {
				if c.wrap != nil {
					cfg.Exports = wrapped{s.exports, c.wrap}
				}
			})
			const depth = 32
			p := s.enter(t, false)
			defer p.close()
			var out []byte
			back := depth * wire.SimpleReplySize
			for i := range uint64(depth) {
				r := wire.Request{Cookie: i, Offset: i * uint64(c.length), Length: uint32(c.length), Flags: c.flags}
				if c.write {
					r.Command = 1
				}
				out = r.Append(out)
				if c.write {
					out = append(out, make([]byte, c.length)...)
				} else if c.flags == 0 {
					back += c.length
				}
			}
			in := make([]byte, back)
			var sending sync.WaitGroup
			again := make(chan bool)
			sending.Go(func() {
				for range again {
					if _, err := p.nc.Write(out); err != nil {
						t.Error(err)
					}
				}
			})
			round := func() {
				again <- true
				if _, err := io.ReadFull(p.nc, in); err != nil {
					t.Error(err)
				}
			}
			for range 20 {
				round()
			}
			if n := testing.AllocsPerRun(200, round); n >= 1 {
				t.Errorf("%v allocations per %d requests", n, depth)
			}
			close(again)
			sending.Wait()
		})
	}
}

// An Observer is told of each request once, and that it ended, however it ends.
func TestObserver(t *testing.T) {
	var d *observed
	s := serve(t, func(c *nbd.Config, s *served) {
		parked(s.volume)
		c.Exports = wrapped{s.exports, func(dev block.Device, _ block.Stream) block.Device {
			d = &observed{Device: dev}
			return d
		}}
	})
	p := s.enter(t, false)
	p.write(1, 0, block4k(2))
	p.reply()
	p.send(wire.Request{Command: 0, Length: 1}, nil) // refused: not observed
	p.reply()
	for i := range uint64(10) {
		p.write(i, 0, block4k(1))
	}
	p.write(11, 0, block4k(2))
	p.reply()
	_, _ = p.nc.Write(make([]byte, 64)) // no request: the connection ends without further replies
	p.closed()
	p.close()
	eventually(t, "the end of the stream", func() bool { return s.volume.Streams() == 0 })
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.started != 12 || d.finished != 12 {
		t.Errorf("%d started, %d finished, want 12", d.started, d.finished)
	}
}

// tool finds a program that a test needs: without it the test is skipped here and fails in CI.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s is needed", name)
		}
		t.Skipf("%s is not installed", name)
	}
	return path
}

// System calls of the whole server process per 4 KiB read at depth 32, counted by strace: at most 1.5.
func TestSystemCallsPerRequest(t *testing.T) {
	strace := tool(t, "strace")
	dir, err := os.MkdirTemp("", "nbd")
	must(t, err)
	defer os.RemoveAll(dir)
	socket, counts := filepath.Join(dir, "s"), filepath.Join(dir, "counts")
	_, stop := startHelper(t, "server", []string{strace, "-f", "-c", "-U", "name,calls", "-o", counts}, "NBD_TEST_SOCKET="+socket)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.Dial(ctx, client.Target{Network: "unix", Address: socket, Export: "v"}, client.Config{Depth: 32, Simple: true})
	must(t, err)
	const total = 40_000
	done := make(chan *client.Call, 32)
	for i := range 32 {
		c.Start(&client.Call{Op: block.OpRead, Offset: int64(i) * 4096, Data: make([]byte, 4096), Done: done})
	}
	for i := 32; i < total; i++ {
		call := <-done
		must(t, call.Err)
		call.Offset = int64(i%65536) * 4096
		c.Start(call)
	}
	for range 32 {
		must(t, (<-done).Err)
	}
	must(t, c.Close())
	stop()
	calls, table := countCalls(t, counts)
	perRequest := float64(calls) / total
	t.Logf("%.2f system calls per request\n%s", perRequest, table)
	if perRequest > 1.5 {
		t.Errorf("%.2f system calls per request, at most 1.5 are allowed", perRequest)
	}
}

// countCalls sums a table of "name calls".
func countCalls(t *testing.T, file string) (sum int, table string) {
	t.Helper()
	b, err := os.ReadFile(file)
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] != "total" {
			if n, err := strconv.Atoi(f[1]); err == nil {
				sum += n
			}
		}
	}
	if sum == 0 {
		t.Fatalf("no counts in %q", b)
	}
	return sum, string(b)
}

// An idle connection holds at most 32 KiB, also after it was busy.
func TestIdleConnectionsAreSmall(t *testing.T) {
	s := serve(t, nil)
	const n = 200
	first := s.enter(t, false)
	defer first.close()
	before := heap()
	var all []*peer
	for range n {
		p := s.enter(t, false)
		defer p.close()
		all = append(all, p)
		for i := range uint64(64) {
			p.write(i, i*4096, block4k(1))
			p.send(wire.Request{Command: 0, Cookie: i, Length: 4096}, nil)
		}
		p.send(wire.Request{Command: 0, Cookie: 64, Length: 1 << 20}, nil)
		for i := range 129 {
			p.replyTo([]int{0, 4096, 1 << 20}[i%2+i/128*2])
		}
	}
	eventually(t, "200 idle connections within 32 KiB each", func() bool {
		return heap()-before < n*32<<10
	})
	_ = all
}

// maxRSS of a process in bytes.
func maxRSS(pid int) int64 {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "VmHWM:"); ok {
			n, _ := strconv.ParseInt(strings.Fields(v)[0], 10, 64)
			return n << 10
		}
	}
	return 0
}

// Whatever clients send and do not read, memory stays within the server's budget.
func TestMemoryIsBounded(t *testing.T) {
	dir, err := os.MkdirTemp("", "nbd")
	must(t, err)
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	cmd, stop := startHelper(t, "server", nil, "NBD_TEST_SOCKET="+socket, "NBD_TEST_BYTES="+strconv.Itoa(64<<20), "GODEBUG=madvdontneed=1")
	defer stop()
	var all []*peer
	for range 8 {
		p := enter(t, "unix", socket, "v", false)
		defer p.close()
		all = append(all, p)
		var out []byte
		for i := range uint64(512) { // 512 MiB asked for on each of eight connections, nothing read
			out = wire.Request{Command: 0, Cookie: i, Offset: i << 20, Length: 1 << 20}.Append(out)
		}
		_, err := p.nc.Write(out)
		must(t, err)
	}
	other := enter(t, "unix", socket, "v", false)
	defer other.close()
	for i := range uint64(100) { // small requests go on meanwhile
		other.send(wire.Request{Command: 0, Cookie: i, Length: 4096}, nil)
		other.replyTo(4096)
	}
	if rss := maxRSS(cmd.Process.Pid); rss > 160<<20 {
		t.Errorf("%d MiB resident with a budget of 64 MiB", rss>>20)
	}
	_ = all
}
