package primary

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/gabion-storage/gabion/server/block"
)

// memMember is a copy in memory: always ready unless slow, failing by order.
type memMember struct {
	disk        block.DiskID
	geometry    block.Geometry
	incarnation block.Incarnation

	mu        sync.Mutex
	data      []byte
	born      map[block.RunIndex]bool
	sealed    block.Generation
	size      int64
	unflushed bool
	lost      []block.ExtentIndex
	syncs     int
	cleared   []block.Sequence
	full      bool // no credit for writes

	slow      bool          // nothing is done in line
	gate      chan struct{} // not nil: Write, Read and Sync wait for it
	waiting   int           // how many did
	writeErr  error
	readErr   error
	syncErr   error
	writes    int
	available bool
}

func newMember(disk block.DiskID, g block.Geometry, size int64) *memMember {
	return &memMember{
		disk: disk, geometry: g, data: make([]byte, size), born: make(map[block.RunIndex]bool), available: true,
		incarnation: block.Incarnation{Boot: id(0xb0), Process: id(0xc0), Instance: id(0xd0)},
	}
}

func id(b byte) block.UUID { return block.UUID{0: b, 15: b} }

func (m *memMember) Disk() block.DiskID { return m.disk }

func (m *memMember) stale(g block.Generation) error {
	if g != m.sealed {
		return fmt.Errorf("%w: generation %d at %d", block.ErrStale, g, m.sealed)
	}
	return nil
}

func (m *memMember) Seal(_ context.Context, g block.Generation, size int64, born []block.RunIndex) (Sealed, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g < m.sealed {
		return Sealed{}, m.stale(g)
	}
	m.sealed, m.size = g, max(m.size, size)
	return Sealed{Incarnation: m.incarnation, Unflushed: m.unflushed, Lost: m.lost}, nil
}

func (m *memMember) Birth(_ context.Context, g block.Generation, runs []block.RunIndex) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full {
		return block.ErrNoSpace
	}
	for _, r := range runs {
		m.born[r] = true
	}
	return m.stale(g)
}

func (m *memMember) Grow(_ context.Context, g block.Generation, size int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.size = max(m.size, size)
	return m.stale(g)
}

func (m *memMember) Reserve(io *block.IO) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full && io.Op == block.OpWrite {
		return block.ErrNoSpace
	}
	return nil
}

func (m *memMember) Release(*block.IO) {}

func (m *memMember) wait() {
	m.mu.Lock()
	gate := m.gate
	if gate != nil {
		m.waiting++
	}
	m.mu.Unlock()
	if gate != nil {
		<-gate
	}
}

func (m *memMember) TryWrite(io *block.IO) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.slow || m.gate != nil {
		return false, nil
	}
	return true, m.write(io)
}

func (m *memMember) WriteCached(io *block.IO) (bool, error) { return true, m.Write(io) }

func (m *memMember) Write(io *block.IO) error {
	m.wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.write(io)
}

func (m *memMember) write(io *block.IO) error {
	if err := m.stale(io.Generation); err != nil {
		return err
	}
	if m.writeErr != nil {
		return m.writeErr
	}
	for r := m.geometry.Run(io.Offset); r <= m.geometry.Run(io.Offset+io.Length-1); r++ {
		if !m.born[r] {
			return fmt.Errorf("%w: run %d was never born", block.ErrCorrupt, r)
		}
	}
	m.writes++
	m.unflushed = true
	if io.Op == block.OpWrite {
		copy(m.data[io.Offset:], io.Data)
	} else {
		clear(m.data[io.Offset : io.Offset+io.Length])
	}
	return nil
}

func (m *memMember) TryRead(g block.Generation, p []byte, off int64) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.slow || m.gate != nil {
		return false, nil
	}
	return true, m.read(g, p, off)
}

func (m *memMember) Read(g block.Generation, p []byte, off int64) error {
	m.wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.read(g, p, off)
}

func (m *memMember) read(g block.Generation, p []byte, off int64) error {
	if m.readErr != nil {
		return m.readErr
	}
	copy(p, m.data[off:])
	return m.stale(g)
}

func (m *memMember) Status(dst []block.Status, off, length int64, limit int) ([]block.Status, error) {
	return append(dst, block.Status{Length: length}), nil
}

func (m *memMember) Sync(_ context.Context, g block.Generation) error {
	m.wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.syncs++
	if m.syncErr != nil {
		return m.syncErr
	}
	return m.stale(g)
}

func (m *memMember) ClearMarks(_ context.Context, g block.Generation, upto block.Sequence) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cleared = append(m.cleared, upto)
	m.unflushed = false
	return m.stale(g)
}

// set changes a field under the member's lock.
func (m *memMember) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// memDisks is Replicas over memMembers.
type memDisks struct {
	mu      sync.Mutex
	members []*memMember
}

func (d *memDisks) CheckUnwritten(context.Context, block.VolumeID, []Membership) error { return nil }

func (d *memDisks) Member(_ context.Context, _ VolumeInfo, disk block.DiskID) (Member, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.members {
		if m.disk == disk && m.available {
			return m, nil
		}
	}
	return nil, fmt.Errorf("%w: disk %s", block.ErrUnavailable, disk)
}

// memMetadata is the metadata service for one volume, in a few lines.
type memMetadata struct {
	mu      sync.Mutex
	m       Map
	place   func(block.RunIndex) []block.DiskID
	fail    func(call string) error // before the call has any effect
	lose    func(call string) error // after it
	events  []Event
	deleted bool
	grants  int
}

func (s *memMetadata) failed(call string) error {
	if s.fail != nil {
		return s.fail(call)
	}
	return nil
}

func (s *memMetadata) lost(call string) error {
	if s.lose != nil {
		return s.lose(call)
	}
	return nil
}

func (s *memMetadata) copyMap() Map {
	m := s.m
	m.Runs, m.Members, m.Attachments = slices.Clone(m.Runs), slices.Clone(m.Members), slices.Clone(m.Attachments)
	return m
}

func (s *memMetadata) Grant(_ context.Context, id block.VolumeID) (Map, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.failed("grant"); err != nil {
		return Map{}, err
	}
	if s.deleted || id != s.m.Volume.ID {
		return Map{}, block.ErrNotFound
	}
	s.grants++
	s.m.Generation++
	s.m.Volume.Version++
	s.m.Opened, s.m.Node = false, "n1"
	return s.copyMap(), s.lost("grant")
}

func (s *memMetadata) ReadMap(_ context.Context, id block.VolumeID) (Map, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.failed("read"); err != nil {
		return Map{}, err
	}
	if s.deleted || id != s.m.Volume.ID {
		return Map{}, block.ErrNotFound
	}
	return s.copyMap(), nil
}

func (s *memMetadata) PlaceRuns(_ context.Context, _ block.VolumeID, g block.Generation, runs []block.RunIndex) ([]Run, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.failed("place"); err != nil {
		return nil, err
	}
	var placed []Run
	for _, r := range runs {
		placed = append(placed, Run{Index: r, Disks: s.place(r)})
	}
	return placed, nil
}

func (s *memMetadata) Propose(_ context.Context, f Fence, c Command) (block.Version, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	call := fmt.Sprintf("%T", c)[len("primary."):]
	if err := s.failed(call); err != nil {
		return 0, err
	}
	if f.Generation != s.m.Generation || f.Version != s.m.Volume.Version {
		return 0, fmt.Errorf("%w: %+v", block.ErrStale, f)
	}
	s.m.Volume.Version++
	switch c := c.(type) {
	case Takeover:
		s.m.Members, s.m.Opened = slices.Clone(c.Members), true
		if c.RaiseCacheEpoch {
			s.m.Volume.CacheEpoch++
		}
	case CommitRuns:
		s.m.Members = append(s.m.Members, c.Members...)
		s.m.Runs = append(s.m.Runs, c.Runs...)
		slices.SortFunc(s.m.Runs, func(a, b Run) int { return int(a.Index) - int(b.Index) })
	case ConfirmSize:
		s.m.Volume.Size = c.Size
	case ConfirmDetach:
		s.m.Attachments = slices.DeleteFunc(s.m.Attachments, func(a Attachment) bool { return a.ID == c.Attachment })
	}
	return s.m.Volume.Version, s.lost(call)
}

func (s *memMetadata) ReportEvent(_ context.Context, e Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, e)
	return nil
}

// edit changes the map as an administrator's command would.
func (s *memMetadata) edit(f func(*Map)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.m)
	s.m.Volume.Version++
}

// memStream is a client connection that remembers what was completed.
type memStream struct {
	done   chan *block.Request
	closed chan error
	buf    func(r *block.Request) error
	asked  chan func() // not nil: Submit may wait, and this gets what hands off
}

func newStream() *memStream {
	return &memStream{done: make(chan *block.Request, 4096), closed: make(chan error, 1)}
}

func (s *memStream) ReadBuffer(r *block.Request) error {
	if s.buf != nil {
		return s.buf(r)
	}
	if int64(cap(r.Data)) < r.Length {
		r.Data = make([]byte, r.Length)
	}
	r.Data = r.Data[:r.Length]
	return nil
}

func (s *memStream) TryReadBuffer(r *block.Request) bool {
	return s.buf == nil && s.ReadBuffer(r) == nil
}

func (s *memStream) Blocking(handOff func()) bool {
	if s.asked == nil {
		return false
	}
	s.asked <- handOff
	return true
}

func (s *memStream) Complete(r *block.Request) { s.done <- r }

func (s *memStream) Close(reason error) {
	select {
	case s.closed <- reason:
	default:
	}
}
