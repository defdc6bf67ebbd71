package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
	"github.com/gabion-storage/gabion/server/image"
	"github.com/gabion-storage/gabion/server/vfs"
)

const (
	checkEvery    = 2 * time.Second        // identity and space of each disk
	starvedEvery  = 250 * time.Millisecond // space, while somebody waits for it
	collectEvery  = time.Minute
	reopenFirst   = 100 * time.Millisecond
	reopenLongest = 5 * time.Second
	soundAfter    = time.Minute // an instance that lived so long: the next failure is not the same trouble
)

// Config is what a Store is made of.
type Config struct {
	FS       vfs.FS
	Paths    []string // the disks' directories, as the operator named them
	StateDir string   // of this server; must exist
	Cluster  block.ClusterID
	Geometry block.Geometry
	Mode     image.Mode
	Boot     block.UUID
	Process  block.UUID
	Registry Registry
	Log      *slog.Logger
	Fault    *fault.Set

	// Changed is called when a disk failed or came back; Space when there may be
	// room again after somebody was refused. From the goroutine of Run; must not block.
	Changed func(block.DiskID)
	Space   func()
}

// Report is one disk as the metadata service is told of it.
type Report struct {
	ID                  block.DiskID // zero: the disk never could be opened
	Path                string
	Capacity, Available int64
	Online, Full        bool
	Problem             string // a sentence, if it is not online
	Mode                string
	Reflink             bool
	Incarnation         block.Incarnation
	Unknown             []block.VolumeID // volumes here that the metadata service does not know
}

// Store is the disks of a node. Safe for concurrent use.
type Store struct {
	cfg     Config
	starved atomic.Bool   // somebody was refused for space
	collect chan struct{} // capacity 1: look for deleted volumes now

	mu    sync.Mutex
	slots []*slot // in order of path
	seats map[key]*seat

	knownMu sync.Mutex
	known   map[string]block.DiskID // as knownFile has it
}

type key struct {
	disk   block.DiskID
	volume block.VolumeID
}

// slot is a path and what is open there. Fields are guarded by Store.mu.
type slot struct {
	path    string
	id      block.DiskID
	disk    *image.Disk // nil: failed
	problem error
	ended   bool // an instance ended since the start
	usage   image.Usage
	unknown []block.VolumeID
}

// Open opens all disks. A blank directory becomes a disk of the cluster, unless
// this server knew one at that path before. A disk that fails for a reason that
// can pass (I/O error, missing mount) is reported and tried again by Run; one
// that needs the operator (another cluster's, a newer format, in use, not
// blank, a disk named twice) is an error.
func Open(cfg Config) (*Store, error) {
	if err := cfg.Geometry.Validate(); err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg, collect: make(chan struct{}, 1), seats: map[key]*seat{}}
	known, err := s.readKnown()
	if err != nil {
		return nil, err
	}
	s.known = known
	for _, path := range cfg.Paths {
		sl := &slot{path: path, id: known[path]}
		s.slots = append(s.slots, sl)
		err := s.openSlot(sl)
		if err == nil || transient(err) {
			continue
		}
		return nil, errors.Join(err, s.Close())
	}
	if err := s.remember(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// transient reports whether a disk may become usable without a restart.
func transient(err error) bool {
	return errors.Is(err, block.ErrIO) || errors.Is(err, block.ErrUnavailable)
}

// openSlot opens what lies at the slot's path and makes it the slot's instance.
func (s *Store) openSlot(sl *slot) error {
	d, err := s.openDisk(sl)
	var u image.Usage
	if err == nil {
		u, err = d.Usage()
		if err != nil {
			err = errors.Join(fmt.Errorf("disk %s: %w", sl.path, err), d.Close())
			d = nil
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sl.disk, sl.problem, sl.usage = d, err, u
	if err != nil {
		s.cfg.Log.Error("disk cannot be used", "path", sl.path, "err", err)
		return err
	}
	sl.id = d.ID()
	s.cfg.Log.Info("disk opened", "disk_id", d.ID().String(), "path", sl.path, "instance", d.Incarnation().Instance.String())
	return nil
}

func (s *Store) openDisk(sl *slot) (*image.Disk, error) {
	if err := s.cfg.Fault.Hit("disk.open", sl.path); err != nil {
		return nil, fmt.Errorf("disk %s: %w", sl.path, err)
	}
	id, err := image.Probe(s.cfg.FS, sl.path)
	switch {
	case errors.Is(err, block.ErrNotFound) && !sl.id.IsZero():
		return nil, fmt.Errorf("disk %s: %w: disk %s was here and there is nothing now; mount its file system there (it is then picked up by itself), or remove its line from %s if it is gone for good",
			sl.path, block.ErrUnavailable, sl.id, filepath.Join(s.cfg.StateDir, knownFile))
	case errors.Is(err, block.ErrNotFound):
		id, err = image.Init(s.cfg.FS, sl.path, s.cfg.Cluster, s.cfg.Geometry)
	}
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", sl.path, err)
	}
	if other := s.pathOf(id.Disk, sl); other != "" {
		return nil, fmt.Errorf("disk %s: %w: %s is disk %s too; name each disk once, and never copy one onto another",
			sl.path, block.ErrInUse, other, id.Disk)
	}
	reserve, err := s.reserve(sl.path)
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", sl.path, err)
	}
	d, err := image.Open(s.cfg.FS, image.Config{
		Path: sl.path, Cluster: s.cfg.Cluster, Geometry: s.cfg.Geometry, Mode: s.cfg.Mode,
		Reserve: reserve, InstanceFile: filepath.Join(s.cfg.StateDir, "disk-"+id.Disk.String()+".json"),
		Ended: sl.ended, Boot: s.cfg.Boot, Process: s.cfg.Process, Log: s.cfg.Log, Fault: s.cfg.Fault,
	})
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", sl.path, err)
	}
	return d, nil
}

// pathOf is the path of another slot that has the disk open, or "".
func (s *Store) pathOf(id block.DiskID, except *slot) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sl := range s.slots {
		if sl != except && sl.disk != nil && sl.id == id {
			return sl.path
		}
	}
	return ""
}

// reserve keeps 2 % of a disk, at most 1 GiB, for records, renames and what
// frees space: those must work on a full disk.
func (s *Store) reserve(path string) (int64, error) {
	dir, err := s.cfg.FS.OpenDir(path)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	sp, err := dir.Space()
	return min(sp.Capacity/50, 1<<30), err
}

// Copy returns a volume's copy on a disk, bound to the disk's current open
// instance. Nothing is made before it is sealed. ErrUnavailable: the disk is
// not here, or failed.
func (s *Store) Copy(desc image.Description, id block.DiskID) (*Copy, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.slots, func(sl *slot) bool { return sl.id == id })
	if i < 0 {
		return nil, fmt.Errorf("%w: disk %s is not on this node", block.ErrUnavailable, id)
	}
	sl := s.slots[i]
	if sl.disk == nil || sl.disk.Err() != nil {
		return nil, fmt.Errorf("%w: disk %s (%s) has failed: %v", block.ErrUnavailable, id, sl.path, sl.problem)
	}
	k := key{id, desc.ID}
	if s.seats[k] == nil {
		s.seats[k] = &seat{fence: fence{idle: make(chan struct{}, 1)}}
	}
	return &Copy{store: s, seat: s.seats[k], disk: sl.disk, desc: desc}, nil
}

// CheckUnwritten refuses, with ErrPrecondition, a volume of which something was
// written on a disk here other than those given, its members: a metadata service
// that does not know of that was restored from before (H70). ErrCorrupt: an image
// cannot be read. A disk that is not usable now is not asked; one that hangs is
// waited for, since what it holds cannot be known.
func (s *Store) CheckUnwritten(id block.VolumeID, members []block.DiskID) error {
	for _, d := range s.online() {
		if slices.Contains(members, d.ID()) {
			continue
		}
		img, err := d.Image(id)
		if err == nil {
			err = compare(img, nil)
		}
		if err != nil && !errors.Is(err, block.ErrNotFound) && !transient(err) {
			return fmt.Errorf("volume %s on disk %s: %w", id, d.ID(), err)
		}
	}
	return nil
}

// Reports describes all disks, in order of path.
func (s *Store) Reports() []Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Report, 0, len(s.slots))
	for _, sl := range s.slots {
		r := Report{ID: sl.id, Path: sl.path, Unknown: slices.Clone(sl.unknown)}
		switch {
		case sl.disk == nil:
			r.Problem = fmt.Sprint(sl.problem)
		case sl.disk.Err() != nil:
			r.Problem = fmt.Sprint(sl.disk.Err())
		default:
			r.Online = true
			r.Capacity, r.Available = sl.usage.Capacity, max(0, sl.usage.Available)
			r.Full = r.Available < r.Capacity/100
			r.Mode, r.Reflink, r.Incarnation = sl.disk.Mode().String(), sl.disk.Reflink(), sl.disk.Incarnation()
		}
		out = append(out, r)
	}
	return out
}

// Collect makes the collector look now; call it when a volume was deleted.
func (s *Store) Collect() {
	select {
	case s.collect <- struct{}{}:
	default:
	}
}

// Run watches the disks, opens failed ones again and collects what is proven
// gone, until ctx ends. A hanging disk holds up only its own watch.
func (s *Store) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, sl := range s.slots {
		g.Go(func() error { s.watch(ctx, sl); return nil })
	}
	g.Go(func() error { s.collectLoop(ctx); return nil })
	g.Go(func() error { s.spaceLoop(ctx); return nil })
	return g.Wait()
}

// watch keeps one disk open. One that opens well and fails as soon as it is used
// is opened at a growing pace too: each time its volumes are taken over.
func (s *Store) watch(ctx context.Context, sl *slot) {
	pause := reopenFirst
	for ctx.Err() == nil {
		if d := s.current(sl); d != nil {
			opened := time.Now()
			s.guard(ctx, sl, d)
			if time.Since(opened) >= soundAfter {
				pause = reopenFirst
			}
			continue
		}
		if !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, reopenLongest)
		if s.openSlot(sl) != nil {
			continue
		}
		if err := s.remember(); err != nil {
			s.cfg.Log.Error("which disk is where cannot be recorded", "path", sl.path, "err", err)
		}
		s.cfg.Changed(sl.id)
	}
}

// guard returns when the instance has ended and is closed, or ctx has.
func (s *Store) guard(ctx context.Context, sl *slot, d *image.Disk) {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.Failed():
			s.retire(sl, d)
			return
		case <-tick.C:
			if d.Check() == nil {
				s.refresh(sl, d)
			}
		}
	}
}

// retire closes an instance that has ended.
func (s *Store) retire(sl *slot, d *image.Disk) {
	err := d.Err()
	s.cfg.Log.Error("disk failed; it will be opened again", "disk_id", d.ID().String(), "path", sl.path, "err", err)
	s.mu.Lock()
	sl.disk, sl.problem, sl.ended = nil, err, true
	s.mu.Unlock()
	s.cfg.Changed(sl.id)
	if err := d.Close(); err != nil {
		s.cfg.Log.Debug("closing a failed disk", "path", sl.path, "err", err)
	}
}

func (s *Store) refresh(sl *slot, d *image.Disk) {
	if u, err := d.Usage(); err == nil {
		s.mu.Lock()
		sl.usage = u
		s.mu.Unlock()
	}
}

// spaceLoop tells whoever was refused when there is room again. It looks
// often, but only while somebody waits, and asks at least once after a refusal.
func (s *Store) spaceLoop(ctx context.Context) {
	for sleep(ctx, starvedEvery) {
		if !s.starved.Load() {
			continue
		}
		room := false
		for _, d := range s.online() {
			u, err := d.Usage()
			room = room || err == nil && u.Available > 0
		}
		if room && s.starved.CompareAndSwap(true, false) {
			s.cfg.Space()
		}
	}
}

func (s *Store) current(sl *slot) *image.Disk {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sl.disk
}

func (s *Store) online() []*image.Disk {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*image.Disk
	for _, sl := range s.slots {
		if sl.disk != nil && sl.disk.Err() == nil {
			out = append(out, sl.disk)
		}
	}
	return out
}

// Close closes all disks after Run has returned and every operation has ended.
func (s *Store) Close() error {
	var errs []error
	for _, sl := range s.slots {
		if d := s.current(sl); d != nil {
			errs = append(errs, d.Close())
		}
	}
	return errors.Join(errs...)
}

// sleep reports false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
