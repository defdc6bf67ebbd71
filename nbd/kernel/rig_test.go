package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/nbd/kernel/kerneltest"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

const (
	gib     = int64(1) << 30
	timer   = 3 * time.Second
	oneHost = "192.0.2.1:10809"
	another = "192.0.2.2:10809"
)

// rig is a machine, two servers and a metadata service.
type rig struct {
	t        *testing.T
	f        *kerneltest.Fake
	md       *kerneltest.Metadata
	one, two *kerneltest.Server
	dir      string
	faults   fault.Set
	log      io.Writer
}

// bubble runs a test on a rig, in time of its own.
func bubble(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	dir := stateDir(t)
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, f: kerneltest.New(), md: &kerneltest.Metadata{}, dir: dir, log: t.Output()}
		r.one, r.two = r.f.Server(oneHost), r.f.Server(another)
		defer r.faults.Clear("")
		defer r.f.Close()
		test(t, r)
	})
}

// stateDir is in memory where that can be had, as /run is.
func stateDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "gabion-test")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// manager starts one on the rig's machine. It is closed with the test.
func (r *rig) manager(change ...func(*kernel.Config)) *kernel.Manager {
	r.t.Helper()
	cfg := kernel.Config{
		State: r.dir, Kernel: r.f, Dialer: r.f, Metadata: r.md, Faults: &r.faults, Connections: 4,
		Log: slog.New(slog.NewTextHandler(r.log, nil)),
	}
	for _, c := range change {
		c(&cfg)
	}
	m, err := kernel.New(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

// run is a manager with its watch, until stop.
func (r *rig) run(change ...func(*kernel.Config)) (_ *kernel.Manager, stop func()) {
	r.t.Helper()
	m := r.manager(change...)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	return m, sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Error(err)
		}
		if err := m.Close(); err != nil {
			r.t.Error(err)
		}
	})
}

// volume makes one that is attached to this node and served.
func (r *rig) volume(servers ...*kerneltest.Server) *kerneltest.Volume {
	v := &kerneltest.Volume{
		Identity: kernel.Identity{Volume: block.VolumeID{UUID: block.NewUUID()}, Attachment: block.AttachmentID{UUID: block.NewUUID()}, Epoch: 1},
		Token:    kernel.Token("secret-" + block.NewUUID().String()), Size: gib,
	}
	if len(servers) == 0 {
		servers = []*kerneltest.Server{r.one}
	}
	for _, s := range servers {
		s.Add(v)
	}
	r.attachment(v, oneHost)
	return v
}

// attachment tells metadata what a volume is now, and where.
func (r *rig) attachment(v *kerneltest.Volume, addresses ...string) {
	r.md.Set(v.Volume, kernel.Attachment{
		ID: v.Attachment, Token: v.Token, Epoch: v.Epoch, Size: v.Size, BlockSize: 4096, ReadOnly: v.ReadOnly, Addresses: addresses,
	})
}

func (r *rig) attach(m *kernel.Manager, v *kerneltest.Volume) kernel.Device {
	r.t.Helper()
	d, err := m.Attach(context.Background(), v.Volume, false)
	if err != nil {
		r.t.Fatal(err)
	}
	return d
}

func (r *rig) detach(m *kernel.Manager, v *kerneltest.Volume) {
	r.t.Helper()
	if err := m.Detach(context.Background(), v.Volume); err != nil {
		r.t.Fatal(err)
	}
}

// noResidue checks that no device, connection and record is left.
func (r *rig) noResidue() {
	r.t.Helper()
	time.Sleep(time.Second)
	if nodes, _ := r.f.Places(); len(nodes) > 0 {
		r.t.Errorf("devices are left: %+v", nodes)
	}
	if n := r.f.Established(); n > 0 {
		r.t.Errorf("%d connections are left", n)
	}
	if names := r.records(); len(names) > 0 {
		r.t.Errorf("records are left: %v", names)
	}
}

func (r *rig) records() (names []string) {
	entries, err := os.ReadDir(r.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "lock" {
			names = append(names, e.Name())
		}
	}
	return names
}

// fork is the state directory as a process that is killed now leaves it.
func (r *rig) fork() {
	r.t.Helper()
	dir := stateDir(r.t)
	for _, name := range r.records() {
		p, err := os.ReadFile(filepath.Join(r.dir, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), p, 0o600)
		}
		if err != nil {
			r.t.Fatal(err)
		}
	}
	r.dir = dir
}

// load sends requests to a device, one after the other, and measures.
type load struct {
	stop, done chan struct{}

	mu      sync.Mutex
	longest time.Duration
	failed  error
	count   int
}

func (r *rig) load(index int) *load { return r.slowLoad(index, 10*time.Millisecond) }

// slowLoad makes a pause between requests, for tests of long times.
func (r *rig) slowLoad(index int, every time.Duration) *load {
	l := &load{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		for l.request(r, index) == nil {
			select {
			case <-l.stop:
				return
			case <-time.After(every):
			}
		}
	}()
	return l
}

func (l *load) request(r *rig, index int) error {
	begin := time.Now()
	err := <-r.f.Start(index)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.longest, l.failed = max(l.longest, time.Since(begin)), err
	l.count++
	return err
}

// stall is the longest request until now.
func (l *load) stall() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.longest
}

// end stops the load and checks that nothing failed and that nothing took longer than most.
func (l *load) end(t *testing.T, most time.Duration) {
	t.Helper()
	close(l.stop)
	<-l.done
	if l.failed != nil {
		t.Errorf("a request failed after %d: %v", l.count, l.failed)
	}
	if l.longest > most {
		t.Errorf("a request took %v, of at most %v", l.longest, most)
	}
	t.Logf("%d requests, the longest took %v", l.count, l.longest)
}

// eventually waits, in steps of the bubble's time.
func eventually(t *testing.T, what string, limit time.Duration, is func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// condition is how the volume's device is.
func condition(m *kernel.Manager, v *kerneltest.Volume) (kernel.Condition, error) {
	d, err := m.Find(v.Volume)
	return d.Condition, err
}

func health(m *kernel.Manager, v *kerneltest.Volume) string {
	c, err := condition(m, v)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(fmt.Sprintf("%v %s", c.Health, c.Reason))
}
