package primary

import (
	"context"

	"github.com/gabion-storage/gabion/server/block"
)

// Metadata is what a primary asks of the metadata service, on behalf of the
// server process it runs in.
//
// Errors: ErrStale = refused by generation or version; ErrUnknown (and any
// error not listed here) = may or may not be applied; ErrUnavailable = not
// now; ErrNotFound = the volume was deleted or never was; ErrNoSpace (of
// PlaceRuns) = no disk has room; ErrInvalid, ErrPrecondition = refused.
// Safe for concurrent use.
type Metadata interface {
	// Grant makes this server the primary under a new generation and returns
	// the whole map at an index not below the grant's.
	Grant(ctx context.Context, id block.VolumeID) (Map, error)
	// ReadMap returns the whole map, linearizably.
	ReadMap(ctx context.Context, id block.VolumeID) (Map, error)
	// PlaceRuns chooses disks for unborn runs, at most MaxRunsPerBirth. Nothing is committed.
	PlaceRuns(ctx context.Context, id block.VolumeID, g block.Generation, runs []block.RunIndex) ([]Run, error)
	// Propose commits one fenced command and returns the version it made.
	Propose(ctx context.Context, f Fence, c Command) (block.Version, error)
	// ReportEvent puts an operator-visible event into the cell's history.
	ReportEvent(ctx context.Context, e Event) error
}

// MaxRunsPerBirth bounds one batch of births.
const MaxRunsPerBirth = 256

// VolumeInfo is what the metadata service says of a volume itself.
type VolumeInfo struct {
	ID         block.VolumeID
	Name       string
	Size       int64 // bytes, what is served
	WantedSize int64 // bytes, at least Size; above it while a growth is to be done
	// WriteThrough: acknowledged only when durable; else durable after FLUSH or FUA.
	WriteThrough bool
	// WaitWhenFull: a write waits for space; else it fails with ErrNoSpace.
	WaitWhenFull bool
	BlockSize    int64 // bytes, 4096 or 512: what clients are told to prefer
	Replicas     int
	Version      block.Version
	CacheEpoch   block.CacheEpoch
}

// Map is everything a primary needs to know of its volume, as of Index.
type Map struct {
	Index       uint64 // applied index it was read at
	Volume      VolumeInfo
	Generation  block.Generation // of the current grant; 0: never granted
	Node        string           // that holds the grant
	Process     string           // of that node, that asked for it
	Opened      bool             // a takeover was committed under it
	Runs        []Run            // committed ones, in order of Index
	Members     []Membership     // in order of Disk
	Attachments []Attachment     // in order of ID
}

// Run is a committed placement: the disks that hold a run.
type Run struct {
	Index block.RunIndex
	Disks []block.DiskID
}

// Membership is one disk's standing in the volume, the default for all its runs.
type Membership struct {
	Disk        block.DiskID
	In          bool
	Incarnation block.Incarnation // when last admitted
	Admitted    block.Generation  // in which it was last admitted
}

// Attachment is one consumer's right to connect.
type Attachment struct {
	ID          block.AttachmentID
	Node        string
	ReadOnly    bool
	Revoking    bool     // a detach was asked for
	TokenDigest [32]byte // SHA-256
}

// Fence is what every command of a primary carries; it is refused with
// ErrStale unless generation and version are the volume's current ones.
type Fence struct {
	Volume     block.VolumeID
	Generation block.Generation
	Version    block.Version
}

// Command is a Takeover, CommitRuns, ConfirmSize or ConfirmDetach.
type Command interface{ command() }

// Takeover records, as one command, who was admitted with which incarnation
// and whether acknowledged data may be gone. It comes at every open, and
// whenever a member returns as another incarnation.
type Takeover struct {
	Members         []Membership // all of them, in order of Disk
	RaiseCacheEpoch bool
}

// CommitRuns commits births that are durable on every disk of each run.
type CommitRuns struct {
	Runs    []Run
	Members []Membership // disks that become members by it, as they were sealed
}

// ConfirmSize says that all members have grown to Size bytes.
type ConfirmSize struct{ Size int64 }

// ConfirmDetach says that the attachment's sessions are closed and drained.
type ConfirmDetach struct{ Attachment block.AttachmentID }

func (Takeover) command()      {}
func (CommitRuns) command()    {}
func (ConfirmSize) command()   {}
func (ConfirmDetach) command() {}

// Event is one thing an operator may want to know.
type Event struct {
	Type    string // CamelCase, stable
	Volume  block.VolumeID
	Disk    block.DiskID // zero if it concerns none
	Message string       // one sentence
}
