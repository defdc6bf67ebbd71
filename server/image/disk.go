package image

import (
	"log/slog"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
	"github.com/gabion-storage/gabion/server/vfs"
)

// Mode is how a disk's images are read and written.
type Mode uint8

const (
	Auto     Mode = iota // Buffered: the page cache serves what is hot
	Direct               // O_DIRECT: nothing of a volume's data in the host's page cache
	Buffered             // through the page cache
)

// Identity is what gabion.json says of a disk.
type Identity struct {
	Disk     block.DiskID
	Cluster  block.ClusterID
	Format   int
	Geometry block.Geometry
}

// Config is what Open needs.
type Config struct {
	Path         string          // the disk's directory
	Cluster      block.ClusterID // refused if the disk is another's
	Geometry     block.Geometry  // refused if the disk was made with another
	Mode         Mode
	Reserve      int64      // bytes of the file system that volumes never use, ≥ 0
	InstanceFile string     // path in the server's state directory, one per disk
	Boot         block.UUID // the kernel's boot id
	Process      block.UUID // drawn at this process's start
	Log          *slog.Logger
	Fault        *fault.Set
}

// Usage is a disk's space in bytes, both less the reserve.
type Usage struct{ Capacity, Available int64 }

// Disk is one open instance of one disk. Safe for concurrent use. When an I/O
// error ends the instance, Failed is closed and everything returns ErrIO; the
// owner closes it and opens the disk anew, as another incarnation.
type Disk struct{}

// Probe reads gabion.json under path and nothing else. ErrNotFound: there is
// none (a blank directory, or a mount that is missing). ErrFormat: newer or
// foreign. ErrCorrupt: damaged.
func Probe(fs vfs.FS, path string) (Identity, error) { return Identity{}, block.ErrUnsupported }

// Init makes a blank directory a disk of the cluster, durably, and returns its
// new identity. ErrExists: it is a disk already. ErrPrecondition: it is not
// blank; names what was found (lost+found does not count).
func Init(fs vfs.FS, path string, cluster block.ClusterID, g block.Geometry) (Identity, error) {
	return Identity{}, block.ErrUnsupported
}

// Open opens a disk exclusively. ErrInUse: another process has it.
// ErrPrecondition: another cluster or geometry. ErrFormat, ErrNotFound,
// ErrCorrupt as Probe. Images are opened lazily.
func Open(fs vfs.FS, c Config) (*Disk, error) { return nil, block.ErrUnsupported }

// ID is the disk's identity.
func (d *Disk) ID() block.DiskID { return block.DiskID{} }

// Incarnation says which life of the disk this is; constant while open.
func (d *Disk) Incarnation() block.Incarnation { return block.Incarnation{} }

// Mode is Direct or Buffered, never Auto.
func (d *Disk) Mode() Mode { return Buffered }

// Reflink reports whether the file system clones files (snapshots need it).
func (d *Disk) Reflink() bool { return false }

// Usage asks the file system.
func (d *Disk) Usage() (Usage, error) { return Usage{}, block.ErrUnsupported }

// Failed is closed when the instance has ended; Err then says why.
func (d *Disk) Failed() <-chan struct{} { return nil }

// Err is nil while the instance lives, else what ended it, wrapping ErrIO.
func (d *Disk) Err() error { return nil }

// Check compares what lies at the path now with what was opened (a lost
// mount, a replaced directory, unlinked files) and ends the instance if it is
// not the same. The owner calls it every few seconds.
func (d *Disk) Check() error { return block.ErrUnsupported }

// Images lists the volumes that have a directory here, sorted.
func (d *Disk) Images() []block.VolumeID { return nil }

// Quarantined lists the volumes that have something in quarantine, sorted.
func (d *Disk) Quarantined() []block.VolumeID { return nil }

// Image opens a volume's image, once; later calls return the same.
// ErrNotFound: none here. ErrCorrupt, ErrFormat: it cannot be opened.
func (d *Disk) Image(id block.VolumeID) (*Image, error) { return nil, block.ErrUnsupported }

// CreateImage makes an empty image durable (no extent born, generation 0) and
// opens it. An image that exists is returned as it is.
func (d *Disk) CreateImage(desc Description) (*Image, error) { return nil, block.ErrUnsupported }

// Quarantine closes an image, waiting for what runs on it, and moves its files
// durably to quarantine/. ErrNotFound: none here.
func (d *Disk) Quarantine(id block.VolumeID, reason string) error { return block.ErrUnsupported }

// Purge deletes everything of a volume that is in quarantine; nothing there is
// a success. The caller holds the proof that nobody needs it.
func (d *Disk) Purge(id block.VolumeID) error { return block.ErrUnsupported }

// Close ends the use of the disk: waits for running operations, syncs, closes
// all images, gives up the lock. The incarnation's instance lives on for a
// successor in the same boot, unless an error ended it.
func (d *Disk) Close() error { return block.ErrUnsupported }
