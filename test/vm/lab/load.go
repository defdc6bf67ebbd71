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

const loadBlock = 4096

// Shape is how many workers a load has at each place, and the size of the span in which each writes blocks in random
// order, syncing after each.
type Shape struct {
	Workers int
	Span    int64
	Pace    time.Duration // between two operations of a worker
}

// The shapes of loads: an ordinary one, whose pace leaves the emulator's processors to what the scenario does, one that
// keeps 32 requests in flight at each place, and one for many places.
var (
	Ordinary = Shape{Workers: 4, Span: 512 << 10, Pace: 200 * time.Millisecond}
	Deep     = Shape{Workers: 32, Span: 256 << 10}
	Light    = Shape{Workers: 1, Span: 128 << 10, Pace: 500 * time.Millisecond}
)

// Load is a workload that writes self-describing blocks and syncs each, until Stop. Any error of a write or a sync is a
// failure of the scenario, and so is a block that reads as what it must not.
type Load struct {
	t       *T
	start   time.Time
	stop    chan struct{}
	workers []*worker
	done    sync.WaitGroup
}

// worker is one goroutine of a load with a file, or a span of a device, of its own.
type worker struct {
	load   *Load
	name   string
	file   *os.File
	base   int64 // of the span in the file
	span   int64
	pace   time.Duration
	id     block.VolumeID
	log    *checker.Log
	random *rand.Rand
	buf    []byte

	ops     atomic.Int64
	began   atomic.Int64 // of the operation under way, in ns since the load's start; 0: none
	longest atomic.Int64 // operation, in ns, since the last Stall
}

// Load starts a workload on files in directories, and on block devices.
func (t *T) Load(places ...string) *Load { return t.LoadOf(Ordinary, places...) }

// LoadOf is Load of a certain shape.
func (t *T) LoadOf(shape Shape, places ...string) *Load {
	l := &Load{t: t, start: time.Now(), stop: make(chan struct{})}
	for _, place := range places {
		for i := range shape.Workers {
			l.workers = append(l.workers, l.worker(place, i, shape))
		}
	}
	for _, w := range l.workers {
		l.done.Go(w.run)
	}
	t.Cleanup(func() { l.end() })
	return l
}

func (l *Load) worker(place string, i int, shape Shape) *worker {
	w := &worker{load: l, name: place, span: shape.Span, pace: shape.Pace, id: block.VolumeID{UUID: block.NewUUID()}, random: l.t.Random(), buf: AlignedBlock()}
	w.log = checker.New(w.id, loadBlock, false)
	info, err := os.Stat(place)
	l.t.Check(err, "the load's place")
	if info.IsDir() {
		w.name = filepath.Join(place, fmt.Sprintf("load.%d", i))
	} else {
		w.base = int64(i) * shape.Span
	}
	w.file, err = os.OpenFile(w.name, os.O_RDWR|os.O_CREATE, 0o600)
	l.t.Check(err, "the load's file")
	return w
}

func AlignedBlock() []byte {
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
		began := time.Since(w.load.start)
		w.began.Store(int64(began))
		err := w.write()
		took := int64(time.Since(w.load.start) - began)
		w.began.Store(0)
		w.longest.Store(max(w.longest.Load(), took)) // Stall may take a value away meanwhile, never add one
		if err != nil {
			w.load.t.Errorf("load: after %.2f s: %v", time.Duration(took).Seconds(), err)
			return
		}
		w.ops.Add(1)
		time.Sleep(w.pace)
	}
}

// write writes one block and syncs it. The page cache answers reads at once; durable is what was synced.
func (w *worker) write() error {
	off := w.random.Int64N(w.span/loadBlock) * loadBlock
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
	wanted := make([]int64, len(l.workers))
	for i, w := range l.workers {
		wanted[i] = w.ops.Load() + 2
	}
	l.t.Eventually(limit, "the load goes on", func() bool {
		if l.t.Failed() {
			l.t.Fatalf("the load failed")
		}
		for i, w := range l.workers {
			if w.ops.Load() < wanted[i] {
				return false
			}
		}
		return true
	})
}

// Stall is the longest operation since the last call, those under way included.
func (l *Load) Stall() time.Duration {
	var longest int64
	for _, w := range l.workers {
		longest = max(longest, w.longest.Swap(0))
		if began := w.began.Load(); began != 0 {
			longest = max(longest, int64(time.Since(l.start))-began)
		}
	}
	return time.Duration(longest)
}

// requestTimeout is what a request in flight on a dead socket waits before the kernel sends it again.
const requestTimeout = 3 * time.Second

// lateness is how much later than promised an operation may be done before that is a failure: the emulator is ten times
// slower than a machine, and shares its processors. What is promised is printed beside what was seen.
const lateness = 2 * time.Second

// Outage runs a fault from its beginning until it is healed, waits until the load goes on, and fails the scenario if an
// operation took much longer than the promise, max(outage, T) + 1 s. It prints and returns the longest.
func (l *Load) Outage(what string, fault func()) time.Duration {
	l.Steady(30 * time.Second)
	l.Stall()
	began := time.Now()
	fault()
	outage := time.Since(began)
	allowed := max(outage, requestTimeout) + time.Second
	l.Steady(allowed + 30*time.Second)
	stall := l.Stall()
	l.t.Figure("%s: outage %.2f s, stall %.2f s of at most %.2f s, %d writes so far", what, outage.Seconds(), stall.Seconds(), allowed.Seconds(), l.Ops())
	if stall > allowed+lateness {
		l.t.Errorf("%s: a stall of %.2f s; allowed are %.2f s", what, stall.Seconds(), allowed.Seconds())
	}
	return stall
}

// Quiet runs what the load must not notice: no operation takes longer than allowed.
func (l *Load) Quiet(what string, allowed time.Duration, f func()) {
	l.Steady(30 * time.Second)
	l.Stall()
	f()
	l.Steady(30 * time.Second)
	stall := l.Stall()
	l.t.Figure("%s: longest write %.2f s, %d writes so far", what, stall.Seconds(), l.Ops())
	if stall > allowed {
		l.t.Errorf("%s: a write took %.2f s; allowed are %.2f s", what, stall.Seconds(), allowed.Seconds())
	}
}

// Stop ends the workload and verifies all that it wrote, past the page cache.
func (l *Load) Stop() {
	l.end()
	for _, w := range l.workers {
		l.t.Check(w.verify(), "load: verify")
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
func (w *worker) verify() error {
	f, err := os.OpenFile(w.name, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for off := int64(0); off < w.span; off += loadBlock {
		n, err := f.ReadAt(w.buf, w.base+off)
		if errors.Is(err, io.EOF) { // a file's end
			clear(w.buf[n:])
			err = nil
		}
		if err != nil {
			return err
		}
		if err := w.log.Read(off).Returned(w.buf); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
	}
	return nil
}
