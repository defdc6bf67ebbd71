// Package nbdtest has what tests of the NBD server, of Devices and of clients
// share: a Device in memory that can be held, delayed and made to fail, Exports
// of such Devices, a Stream that records, and the conformance suite of
// block.Device.
package nbdtest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gabion-storage/gabion/server/block"
)

const pageSize = 64 << 10

// Memory is a sparse volume in memory that any number of streams open. Set the
// fields before the first Device is opened.
type Memory struct {
	ReadOnly bool
	Resends  bool
	Single   bool // no multi-conn
	// Async completes requests from another goroutine, as a Device does that blocks.
	Async bool
	// Hold is asked about each request when it is submitted. True: it is parked until Release or Disconnect, like
	// a write that waits for space. Requests behind it go on.
	Hold func(*block.Request) bool
	// Fail gives the outcome of a request in place of executing it, if it is not nil.
	Fail func(*block.Request) error

	size    atomic.Int64
	Flushes atomic.Int64 // FLUSH and FUA so far
	Calls   atomic.Int64 // of Submit

	mu     sync.RWMutex
	pages  map[int64][]byte
	opened map[*device]struct{}
}

// NewMemory returns a volume of size bytes, all of it a hole.
func NewMemory(size int64) *Memory {
	m := &Memory{pages: map[int64][]byte{}, opened: map[*device]struct{}{}}
	m.size.Store(size)
	return m
}

// Grow makes the volume larger; open Devices see it at once.
func (m *Memory) Grow(size int64) { m.size.Store(size) }

// Open returns the volume as the stream s uses it.
func (m *Memory) Open(s block.Stream) block.Device {
	d := &device{m: m, s: s}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.opened[d] = struct{}{}
	return d
}

// Streams is how many Devices are open.
func (m *Memory) Streams() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return len(m.opened)
}

// Release executes what is held and returns when that is done.
func (m *Memory) Release() {
	m.mu.RLock()
	all := make([]*device, 0, len(m.opened))
	for d := range m.opened {
		all = append(all, d)
	}
	m.mu.RUnlock()
	for _, d := range all {
		d.release()
	}
}

// ReadAt copies the content of [off, off+len(p)) to p.
func (m *Memory) ReadAt(p []byte, off int64) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for len(p) > 0 {
		at := off % pageSize
		n := min(int64(len(p)), pageSize-at)
		if page := m.pages[off/pageSize]; page != nil {
			copy(p[:n], page[at:])
		} else {
			clear(p[:n])
		}
		p, off = p[n:], off+n
	}
}

// WriteAt copies p to [off, off+len(p)).
func (m *Memory) WriteAt(p []byte, off int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for len(p) > 0 {
		at := off % pageSize
		n := min(int64(len(p)), pageSize-at)
		page := m.pages[off/pageSize]
		if page == nil {
			page = make([]byte, pageSize)
			m.pages[off/pageSize] = page
		}
		copy(page[at:], p[:n])
		p, off = p[n:], off+n
	}
}

func (m *Memory) zero(off, length int64, keep bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !keep && length > pageSize*int64(len(m.pages)) { // fewer pages than the range has
		for i := range m.pages {
			from, to := max(off, i*pageSize), min(off+length, (i+1)*pageSize)
			if from < to {
				m.zeroPage(i, from-i*pageSize, to-i*pageSize, false)
			}
		}
		return
	}
	for length > 0 {
		at := off % pageSize
		n := min(length, pageSize-at)
		m.zeroPage(off/pageSize, at, at+n, keep)
		off, length = off+n, length-n
	}
}

func (m *Memory) zeroPage(i, from, to int64, keep bool) {
	page := m.pages[i]
	switch {
	case page == nil && keep:
		m.pages[i] = make([]byte, pageSize)
	case page == nil:
	case to-from == pageSize && !keep:
		delete(m.pages, i)
	default:
		clear(page[from:to])
	}
}

// Allocated is how many bytes are not holes.
func (m *Memory) Allocated() int64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return int64(len(m.pages)) * pageSize
}

// device is a Memory as one stream uses it.
type device struct {
	m       *Memory
	s       block.Stream
	running sync.WaitGroup // Async batches
	busy    sync.Mutex     // what was held is being executed

	mu   sync.Mutex
	held []*block.Request
}

// Info implements block.Device.
func (d *device) Info() block.Info {
	return block.Info{
		Size: d.m.size.Load(), MinBlock: 512, PreferredBlock: 4096,
		ReadOnly: d.m.ReadOnly, MultiConn: !d.m.Single, Resends: d.m.Resends,
	}
}

// Submit implements block.Device.
func (d *device) Submit(batch []*block.Request) {
	d.m.Calls.Add(1)
	if d.m.Hold == nil && !d.m.Async {
		d.run(batch)
		return
	}
	var now []*block.Request
	for _, r := range batch {
		if d.m.Hold != nil && d.m.Hold(r) {
			d.mu.Lock()
			d.held = append(d.held, r)
			d.mu.Unlock()
		} else {
			now = append(now, r)
		}
	}
	if d.m.Async {
		d.running.Go(func() { d.run(now) })
	} else {
		d.run(now)
	}
}

func (d *device) run(batch []*block.Request) {
	for _, r := range batch {
		r.Err = d.execute(r)
		d.s.Complete(r)
	}
}

func (d *device) execute(r *block.Request) error {
	if d.m.Fail != nil {
		if err := d.m.Fail(r); err != nil {
			return err
		}
	}
	switch r.Op {
	case block.OpRead:
		if err := d.s.ReadBuffer(r); err != nil {
			return err
		}
		d.m.ReadAt(r.Data, r.Offset)
	case block.OpWrite:
		d.m.WriteAt(r.Data, r.Offset)
	case block.OpTrim:
		d.m.zero(r.Offset, r.Length, false)
	case block.OpZero:
		d.m.zero(r.Offset, r.Length, r.NoHole)
	}
	if r.FUA || r.Op == block.OpFlush {
		d.m.Flushes.Add(1)
	}
	return nil
}

func (d *device) take() []*block.Request {
	d.mu.Lock()
	defer d.mu.Unlock()
	held := d.held
	d.held = nil
	return held
}

func (d *device) release() {
	d.busy.Lock()
	defer d.busy.Unlock()
	d.run(d.take())
}

// Status implements block.Device.
func (d *device) Status(dst []block.Status, off, length int64, limit int) ([]block.Status, error) {
	d.m.mu.RLock()
	defer d.m.mu.RUnlock()
	begin := len(dst)
	for length > 0 {
		n := min(length, pageSize-off%pageSize)
		hole := d.m.pages[off/pageSize] == nil
		if hole && off%pageSize == 0 && len(d.m.pages) == 0 {
			n = length
		}
		if k := len(dst); k > begin && dst[k-1].Hole == hole {
			dst[k-1].Length += n
		} else if k-begin == limit {
			break
		} else {
			dst = append(dst, block.Status{Length: n, Hole: hole, Zero: hole})
		}
		off, length = off+n, length-n
	}
	return dst, nil
}

// Disconnect implements block.Device.
func (d *device) Disconnect() {
	for _, r := range d.take() {
		r.Err = fmt.Errorf("dropped: %w", block.ErrShutdown)
		d.s.Complete(r)
	}
	d.busy.Lock()   // wait for a Release under way
	d.busy.Unlock() //nolint:staticcheck // nothing to do in between
	d.running.Wait()
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	delete(d.m.opened, d)
}

// Exports is an nbd.Exports of Memories by name. Refuse has the error of names
// that are refused. Any other name is not found.
type Exports struct {
	Volumes map[string]*Memory
	Refuse  map[string]error
	// Opening, if set, runs inside Open before the answer.
	Opening func(ctx context.Context, name string, s block.Stream) error
	// Calls counts calls of any method.
	Calls atomic.Int64
}

func (e *Exports) find(name string) (*Memory, error) {
	e.Calls.Add(1)
	if err := e.Refuse[name]; err != nil {
		return nil, err
	}
	m := e.Volumes[name]
	if m == nil {
		return nil, fmt.Errorf("no such export: %w", block.ErrNotFound)
	}
	return m, nil
}

// Open implements nbd.Exports.
func (e *Exports) Open(ctx context.Context, name string, s block.Stream) (block.Device, error) {
	m, err := e.find(name)
	if err == nil && e.Opening != nil {
		err = e.Opening(ctx, name, s)
	}
	if err != nil {
		return nil, err
	}
	return m.Open(s), nil
}

// Describe implements nbd.Exports.
func (e *Exports) Describe(_ context.Context, name string) (block.Info, error) {
	m, err := e.find(name)
	if err != nil {
		return block.Info{}, err
	}
	return (&device{m: m}).Info(), nil
}

// List implements nbd.Exports.
func (e *Exports) List(context.Context) ([]string, error) {
	e.Calls.Add(1)
	names := make([]string, 0, len(e.Volumes))
	for name := range e.Volumes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}
