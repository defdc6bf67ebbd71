package image

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
	"github.com/gabion-storage/gabion/server/vfs"
)

const (
	volumesDir    = "volumes"
	quarantineDir = "quarantine"
	unfinished    = ".new-" // + volume: an image being made
	probeFile     = ".probe"
)

// Mode is how a disk's images are read and written.
type Mode uint8

const (
	Auto     Mode = iota // Buffered: the page cache serves what is hot
	Direct               // O_DIRECT: nothing of a volume's data in the host's page cache
	Buffered             // through the page cache
)

// String is the mode's name in flags and logs.
func (m Mode) String() string { return [...]string{"auto", "direct", "buffered"}[m] }

// Config is what Open needs.
type Config struct {
	Path         string          // the disk's directory
	Cluster      block.ClusterID // refused if the disk is another's
	Geometry     block.Geometry  // refused if the disk was made with another
	Mode         Mode
	Reserve      int64      // bytes of the file system that volumes never use, ≥ 0
	InstanceFile string     // path in the server's state directory, one per disk; empty: every open is a new instance
	Ended        bool       // this process saw the last instance end: this is a new one, whatever the file says
	Boot         block.UUID // the kernel's boot id
	Process      block.UUID // drawn at this process's start
	Log          *slog.Logger
	Fault        *fault.Set // nil: none
}

// Counters are totals since Open.
type Counters struct {
	Syncs        uint64 // of image files
	RecordSyncs  uint64 // of index files
	ReadErrors   uint64
	TrimsWritten uint64 // trims that wrote zeros because the file system cannot make holes
}

// Disk is one open instance of one disk. Safe for concurrent use. When an I/O
// error ends the instance, Failed is closed and everything returns ErrIO; the
// owner closes it and opens the disk anew, as another incarnation.
type Disk struct {
	fs       vfs.FS
	path     string
	identity Identity
	name     string // the disk's id as text
	raw      []byte // gabion.json as it was read
	mode     Mode
	reflink  bool
	boot     block.UUID
	process  block.UUID
	log      *slog.Logger
	fault    *fault.Set
	space    space
	buffers  *buffers

	dir, volumes, quarantine vfs.Dir
	where                    vfs.Identity // of dir
	inode                    uint64       // of gabion.json

	instance *instance
	failOnce sync.Once
	dead     atomic.Bool   // set after err
	err      error         // what ended the instance; written once, before dead
	failed   chan struct{} // closed after dead is set

	syncs, recordSyncs, readErrors, trimsWritten atomic.Uint64

	// gate is held shared by operations on the disk, exclusively by Close.
	gate   sync.RWMutex
	closed bool // guarded by gate

	mu      sync.Mutex
	holders map[block.VolumeID]*holder
}

// holder is the place of one volume on the disk. Its lock is held while the
// volume's directory is made, opened, checked or moved away.
type holder struct {
	mu     turn
	exists atomic.Bool // the directory is there; changed with mu held
	img    *Image      // nil: not open
}

func newHolder() *holder { return &holder{mu: newTurn()} }

// Probe reads gabion.json under path and nothing else. ErrNotFound: there is
// none (a blank directory, or a mount that is missing). ErrFormat: newer or
// foreign. ErrCorrupt: damaged.
func Probe(fs vfs.FS, path string) (Identity, error) {
	dir, err := fs.OpenDir(path)
	if err != nil {
		return Identity{}, fmt.Errorf("disk %s: %w", path, err)
	}
	defer dir.Close()
	id, _, err := readIdentity(dir, path)
	return id, err
}

// Init makes a blank directory a disk of the cluster, durably, and returns its
// new identity. ErrExists: it is a disk already. ErrPrecondition: it is not
// blank; names what was found (lost+found does not count).
func Init(fs vfs.FS, path string, cluster block.ClusterID, g block.Geometry) (Identity, error) {
	if err := g.Validate(); err != nil {
		return Identity{}, err
	}
	dir, err := fs.OpenDir(path)
	if err != nil {
		return Identity{}, fmt.Errorf("disk %s: %w", path, err)
	}
	defer dir.Close()
	if err := dir.Lock(); err != nil {
		return Identity{}, fmt.Errorf("disk %s: %w", path, err)
	}
	if err := checkBlank(dir, path); err != nil {
		return Identity{}, err
	}
	for _, name := range []string{volumesDir, quarantineDir} {
		if err := dir.Mkdir(name); err != nil && !errors.Is(err, block.ErrExists) {
			return Identity{}, fmt.Errorf("disk %s: %w", path, err)
		}
	}
	if err := dir.Sync(); err != nil {
		return Identity{}, fmt.Errorf("disk %s: %w", path, err)
	}
	id := Identity{Disk: block.DiskID{UUID: block.NewUUID()}, Cluster: cluster, Format: jsonFormat, Geometry: g}
	if err := vfs.Replace(dir, diskFile, id.encode()); err != nil {
		return Identity{}, fmt.Errorf("disk %s: %w", path, err)
	}
	return id, nil
}

// checkBlank accepts an empty directory, and what an interrupted Init leaves.
func checkBlank(dir vfs.Dir, path string) error {
	list, err := dir.ReadDir()
	if err != nil {
		return fmt.Errorf("disk %s: %w", path, err)
	}
	for _, e := range list {
		switch e.Name {
		case diskFile:
			return fmt.Errorf("disk %s: %w: it is a disk already", path, block.ErrExists)
		case "lost+found", diskFile + vfs.NewSuffix:
			continue
		case volumesDir, quarantineDir:
			if sub, err := dir.OpenDir(e.Name); err == nil {
				inside, err := sub.ReadDir()
				_ = sub.Close()
				if err == nil && len(inside) == 0 {
					continue
				}
			}
		}
		return fmt.Errorf("disk %s: %w: the directory is not empty, it has %.80q; empty it or name another",
			path, block.ErrPrecondition, e.Name)
	}
	return nil
}

// Open opens a disk exclusively. ErrInUse: another process has it.
// ErrPrecondition: another cluster or geometry. ErrFormat, ErrNotFound,
// ErrCorrupt as Probe. Images are opened lazily.
func Open(fs vfs.FS, c Config) (*Disk, error) {
	d := &Disk{
		fs: fs, path: c.Path, mode: c.Mode, boot: c.Boot, process: c.Process, log: c.Log, fault: c.Fault,
		failed: make(chan struct{}), holders: map[block.VolumeID]*holder{}, buffers: newBuffers(),
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if d.mode == Auto {
		d.mode = Buffered
	}
	if err := d.open(c); err != nil {
		if d.instance != nil && errors.Is(err, block.ErrIO) {
			err = errors.Join(err, d.instance.end()) // the next attempt may succeed, and proves nothing
		}
		d.closeDirs()
		return nil, err
	}
	return d, nil
}

func (d *Disk) open(c Config) (err error) {
	if d.dir, err = d.fs.OpenDir(d.path); err != nil {
		return fmt.Errorf("disk %s: %w", d.path, err)
	}
	if err := d.identify(c); err != nil {
		return err
	}
	if d.instance, err = openInstance(d.fs, c.InstanceFile, d.identity.Disk, c.Boot, d.where, c.Ended); err != nil {
		return err
	}
	if err := d.fault.Hit("disk.open", d.name); err != nil {
		return fmt.Errorf("open disk %s: %w", d.name, err)
	}
	if d.volumes, err = d.dir.OpenDir(volumesDir); err != nil {
		return fmt.Errorf("disk %s: %w: %w", d.name, block.ErrCorrupt, err)
	}
	if err := d.dir.Mkdir(quarantineDir); err != nil && !errors.Is(err, block.ErrExists) {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	if d.quarantine, err = d.dir.OpenDir(quarantineDir); err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	// A process that was killed may have left names that it had not synced.
	if err := errors.Join(d.dir.Sync(), d.volumes.Sync(), d.quarantine.Sync()); err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	if err := d.list(); err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	if err := d.probe(); err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	d.space.dir, d.space.reserve = d.dir, max(0, c.Reserve)
	if _, err := d.space.refresh(); err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	return nil
}

// identify takes the lock and proves that this is the disk that is meant.
func (d *Disk) identify(c Config) (err error) {
	before, _, err := readIdentity(d.dir, d.path)
	if err != nil {
		return err
	}
	if err := d.dir.Lock(); err != nil {
		return fmt.Errorf("disk %s at %s: %w", before.Disk, d.path, err)
	}
	// Again, now that nobody else can be making it.
	if d.identity, d.raw, err = readIdentity(d.dir, d.path); err != nil {
		return err
	}
	d.name = d.identity.Disk.String()
	if d.identity.Cluster != c.Cluster {
		return fmt.Errorf("disk %s at %s: %w: it belongs to cluster %s, this server to %s",
			d.name, d.path, block.ErrPrecondition, d.identity.Cluster, c.Cluster)
	}
	if d.identity.Geometry != c.Geometry {
		return fmt.Errorf("disk %s at %s: %w: it was made for extents of %d bytes, the cluster has %d",
			d.name, d.path, block.ErrPrecondition, d.identity.Geometry.ExtentSize, c.Geometry.ExtentSize)
	}
	if d.where, err = d.dir.Identity(); err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	info, err := d.dir.Stat(diskFile)
	if err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	d.inode = info.Inode
	return nil
}

// list finds the volumes and removes what an interrupted creation left.
func (d *Disk) list() error {
	entries, err := d.volumes.ReadDir()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if id, err := block.ParseUUID(e.Name); err == nil && e.Dir {
			h := newHolder()
			h.exists.Store(true)
			d.holders[block.VolumeID{UUID: id}] = h
		} else if strings.HasPrefix(e.Name, unfinished) && e.Dir {
			if err := removeDir(d.volumes, e.Name); err != nil {
				return err
			}
		} else {
			d.log.Warn("unknown file among the volumes is left alone", "disk_id", d.name, "name", e.Name)
		}
	}
	return nil
}

// probe finds out what the file system can do.
func (d *Disk) probe() error {
	f, err := d.dir.Open(diskFile, vfs.ReadOnly)
	if err != nil {
		return err
	}
	defer f.Close()
	if d.mode == Direct {
		direct, err := d.dir.Open(diskFile, vfs.ReadOnly|vfs.Direct)
		if err != nil {
			return fmt.Errorf("%w; use buffered mode on this file system", err)
		}
		_ = direct.Close()
	}
	clone, err := d.dir.Open(probeFile, vfs.Create)
	if err != nil {
		return nil //nolint:nilerr // full or read-only: no clones now; what matters fails by itself later
	}
	d.reflink = clone.CloneFrom(f) == nil
	_ = clone.Close()
	return d.dir.Unlink(probeFile)
}

// ID is the disk's identity.
func (d *Disk) ID() block.DiskID { return d.identity.Disk }

// Incarnation says which life of the disk this is; constant while open.
func (d *Disk) Incarnation() block.Incarnation {
	return block.Incarnation{Boot: d.boot, Process: d.process, Instance: d.instance.uuid}
}

// Mode is Direct or Buffered, never Auto.
func (d *Disk) Mode() Mode { return d.mode }

// Reflink reports whether the file system clones files (snapshots need it).
func (d *Disk) Reflink() bool { return d.reflink }

// Usage asks the file system.
func (d *Disk) Usage() (Usage, error) {
	if err := d.enter(); err != nil {
		return Usage{}, err
	}
	defer d.leave()
	u, err := d.space.usage()
	if err != nil {
		return u, fmt.Errorf("disk %s: %w", d.name, err)
	}
	return u, nil
}

// Counters are the disk's totals.
func (d *Disk) Counters() Counters {
	return Counters{
		Syncs: d.syncs.Load(), RecordSyncs: d.recordSyncs.Load(),
		ReadErrors: d.readErrors.Load(), TrimsWritten: d.trimsWritten.Load(),
	}
}

// all is every holder, by volume.
func (d *Disk) all() []*holder {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := make([]*holder, 0, len(d.holders))
	for _, id := range slices.SortedFunc(maps.Keys(d.holders), compareVolumes) {
		list = append(list, d.holders[id])
	}
	return list
}

// Close ends the use of the disk: waits for running operations, syncs, closes
// all images, gives up the lock. The incarnation's instance lives on for a
// successor in the same boot, unless an error ended it.
func (d *Disk) Close() error {
	d.gate.Lock()
	defer d.gate.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	var errs []error
	for _, h := range d.all() {
		if h.img != nil {
			errs = append(errs, h.img.close(true))
			h.img = nil
		}
	}
	d.closeDirs()
	return errors.Join(errs...)
}

func (d *Disk) closeDirs() {
	for _, dir := range []vfs.Dir{d.quarantine, d.volumes, d.dir} { // the lock goes last
		if dir != nil {
			_ = dir.Close()
		}
	}
	if d.instance != nil {
		d.instance.close()
	}
}
