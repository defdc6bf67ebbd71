package lab

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/test/checker"
)

// The shape of a load: each worker writes blocks of its own span, in random order, and syncs after each.
const (
	loadWorkers = 4
	loadBlock   = 4096
	loadSpan    = 4 << 20
)

// Load is a workload that writes self-describing blocks and syncs each, until Stop. Any error of a write or a sync is a
// failure of the scenario, and so is a block that reads as what it must not.
type Load struct {
	t       *T
	path    string
	stop    chan struct{}
	workers []*worker
	done    sync.WaitGroup
}

// worker is one goroutine of a load with a file, or a span of a device, of its own.
type worker struct {
	load   *Load
	file   *os.File
	base   int64 // of the span in the file
	id     block.VolumeID
	log    *checker.Log
	random *rand.Rand
	buf    []byte

	ops     atomic.Int64
	began   atomic.Int64 // of the operation under way, in ns since the load's start; 0: none
	longest atomic.Int64 // operation, in ns, since the last Stall
}

var loadStart = time.Now()

// Load starts a workload on files in a directory, or on a block device.
func (t *T) Load(path string) *Load {
	l := &Load{t: t, path: path, stop: make(chan struct{})}
	info, err := os.Stat(path)
	t.Check(err, "the load's place")
	for i := range loadWorkers {
		w := &worker{load: l, id: block.VolumeID{UUID: block.NewUUID()}, random: rand.New(rand.NewPCG(uint64(i), 1)), buf: alignedBlock()}
		w.log = checker.New(w.id, loadBlock, false)
		name, flags := path, os.O_RDWR
		if info.IsDir() {
			name, flags = filepath.Join(path, fmt.Sprintf("load.%d", i)), os.O_RDWR|os.O_CREATE
		} else {
			w.base = int64(i) * loadSpan
		}
		w.file, err = os.OpenFile(name, flags, 0o600)
		t.Check(err, "the load's file")
		l.workers = append(l.workers, w)
	}
	for _, w := range l.workers {
		l.done.Go(w.run)
	}
	t.Cleanup(func() { l.end() })
	return l
}

func alignedBlock() []byte {
	raw := make([]byte, 2*loadBlock)
	skip := -int(uintptr(unsafe.Pointer(&raw[0]))) & (loadBlock - 1)
	return raw[skip : skip+loadBlock]
}

func (w *worker) run() {
	for {
		select {
		case <-w.load.stop:
			return
		default:
		}
		began := time.Since(loadStart)
		w.began.Store(int64(began))
		err := w.write()
		took := int64(time.Since(loadStart) - began)
		w.began.Store(0)
		w.longest.Store(max(w.longest.Load(), took)) // Stall may take a value away meanwhile, never add one
		if err != nil {
			w.load.t.Errorf("load: after %.2f s: %v", time.Duration(took).Seconds(), err)
			return
		}
		w.ops.Add(1)
	}
}

// write writes one block and syncs it. The page cache answers reads at once; durable is what was synced.
func (w *worker) write() error {
	off := w.random.Int64N(loadSpan/loadBlock) * loadBlock
	entry := w.log.Write(off, loadBlock, false)
	entry.Fill(w.buf)
	if _, err := w.file.WriteAt(w.buf, w.base+off); err != nil {
		return err
	}
	entry.Acked()
	flush := w.log.Flush()
	if err := w.file.Sync(); err != nil {
		return err
	}
	flush.Acked()
	return nil
}

// Ops is how many writes were synced so far.
func (l *Load) Ops() (n int64) {
	for _, w := range l.workers {
		n += w.ops.Load()
	}
	return n
}

// Steady waits until every worker has finished an operation that began after the call.
func (l *Load) Steady(limit time.Duration) {
	for _, w := range l.workers {
		want := w.ops.Load() + 2
		l.t.Eventually(limit, "the load goes on", func() bool {
			if l.t.Failed() {
				l.t.Fatalf("the load failed")
			}
			return w.ops.Load() >= want
		})
	}
}

// Stall is the longest operation since the last call, those under way included.
func (l *Load) Stall() time.Duration {
	var longest int64
	for _, w := range l.workers {
		longest = max(longest, w.longest.Swap(0))
		if began := w.began.Load(); began != 0 {
			longest = max(longest, int64(time.Since(loadStart))-began)
		}
	}
	return time.Duration(longest)
}

// Outage makes a fault, heals it with its second function, waits until the load goes on, and fails the scenario if any
// operation took longer than allowed. It prints and returns the longest.
func (l *Load) Outage(what string, allowed time.Duration, fault func()) time.Duration {
	l.Steady(30 * time.Second)
	l.Stall()
	fault()
	l.Steady(allowed + 30*time.Second)
	stall := l.Stall()
	l.t.Figure("%s: stall %.2f s (allowed %.1f s), %d writes so far", what, stall.Seconds(), allowed.Seconds(), l.Ops())
	if stall > allowed {
		l.t.Errorf("%s: a stall of %.2f s; allowed are %.1f s", what, stall.Seconds(), allowed.Seconds())
	}
	return stall
}

// Stop ends the workload and verifies all that it wrote, past the page cache.
func (l *Load) Stop() {
	l.end()
	for i, w := range l.workers {
		name := l.path
		if w.base == 0 && len(l.workers) > 1 && l.workers[1].base == 0 {
			name = filepath.Join(l.path, fmt.Sprintf("load.%d", i))
		}
		l.t.Check(w.verify(name), "load: verify")
	}
	l.t.Logf("load: %d writes verified", l.Ops())
}

func (l *Load) end() {
	select {
	case <-l.stop:
		return
	default:
		close(l.stop)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); l.done.Wait() }()
	select {
	case <-ended:
	case <-time.After(60 * time.Second):
		l.t.Errorf("load: the writes do not end: %v", blockedTasks())
		return
	}
	for _, w := range l.workers {
		_ = w.file.Close()
	}
}

// verify reads every block of the span from the device.
func (w *worker) verify(name string) error {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for off := int64(0); off < loadSpan; off += loadBlock {
		n, err := f.ReadAt(w.buf, w.base+off)
		if errors.Is(err, io.EOF) { // a file's end
			clear(w.buf[n:])
			err = nil
		}
		if err != nil {
			return err
		}
		if err := w.log.Read(off).Returned(w.buf); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
