package primary

import (
	"context"

	"github.com/gabion-storage/gabion/server/block"
)

// Member is one disk's copy of the volume as the primary reaches it: local
// today, over the replica protocol later. A Member belongs to one open
// instance of its disk; when that has ended every call fails, and Replicas
// hands out another Member once the disk is open again.
//
// Every operation that changes data carries a generation and is checked at the
// moment of the change, under the lock that Seal takes: ErrStale means that
// the disk has seen a higher one, and nothing was changed. ErrIO or ErrCorrupt
// on a write or a sync means that the disk's open instance has ended; on a
// read it concerns that range only, and ErrUnavailable says that the instance
// has ended. Safe for concurrent use.
type Member interface {
	Disk() block.DiskID
	// Seal raises the copy to generation g, durably, finishes every admitted
	// lower operation, then answers. It makes the image if the disk has none.
	// size is the volume's, in bytes; a larger image is left as it is. born:
	// the committed runs placed on this disk.
	Seal(ctx context.Context, g block.Generation, size int64, born []block.RunIndex) (Sealed, error)
	// Birth makes the runs present and zero, durably. Repeating it is harmless
	// until the first write. ErrNoSpace: the disk took none of them.
	Birth(ctx context.Context, g block.Generation, runs []block.RunIndex) error
	// Grow makes the image at least size bytes long, durably.
	Grow(ctx context.Context, g block.Generation, size int64) error
	// Reserve takes space credit for io before any member writes; ErrNoSpace:
	// nothing happened. Write, and TryWrite when done, give it back. It always
	// succeeds for what needs no new space.
	Reserve(io *block.IO) error
	// Release gives credit back for an io that will not be written.
	Release(io *block.IO)
	// TryWrite does io in line. done false and no error: it would have blocked,
	// or the disk cannot tell, and nothing happened. An error is an end: the
	// credit is given back.
	TryWrite(io *block.IO) (done bool, err error)
	// WriteCached is TryWrite that may wait for the page cache, but not for a sync.
	WriteCached(io *block.IO) (done bool, err error)
	// Write does io and may block. ErrNoSpace after a Reserve that succeeded:
	// every 4 KiB block of the range is wholly old or wholly new.
	Write(io *block.IO) error
	// TryRead is Read in line; done false: it would have blocked.
	TryRead(g block.Generation, p []byte, off int64) (done bool, err error)
	// Read fills p from off, a range of committed runs.
	Read(g block.Generation, p []byte, off int64) error
	// Status appends what is allocated in [off, off+length), a range of
	// committed runs, to dst: at most limit more descriptors, covering at
	// least its beginning.
	Status(dst []block.Status, off, length int64, limit int) ([]block.Status, error)
	// Sync makes every write that was completed before the call durable. The
	// member, and nobody else, says that there is nothing to do.
	Sync(ctx context.Context, g block.Generation) error
	// ClearMarks forgets marks that a completed Sync made redundant: everything
	// up to seq, in extents not written later. Losing the clearing is harmless.
	ClearMarks(ctx context.Context, g block.Generation, upto block.Sequence) error
}

// Sealed is what a member says of itself when it was sealed.
type Sealed struct {
	Incarnation block.Incarnation
	// Unflushed: some region is marked unflushed, so a reboot may have cost acknowledged data.
	Unflushed bool
	// Lost: committed on this disk, but without a good record. In order.
	Lost []block.ExtentIndex
}

// Replicas finds the copies on the disks that this server can reach.
type Replicas interface {
	// Member returns the volume's copy on a disk, without making anything.
	// ErrUnavailable: the disk is not there, or not usable, now.
	Member(ctx context.Context, v VolumeInfo, disk block.DiskID) (Member, error)
	// CheckUnwritten refuses, with ErrPrecondition, a volume of which something was
	// written on a disk that is no member: no Seal would look there. ErrCorrupt: an
	// image there cannot be read.
	CheckUnwritten(ctx context.Context, id block.VolumeID, members []Membership) error
}
