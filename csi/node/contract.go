package node

import (
	"context"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// Attacher makes volumes block devices of this host. A device belongs to a
// volume because the kernel says so (its backend identifier), never because its
// number was remembered. Errors wrap a sentinel of block. Safe for concurrent
// use; every call ends with its context at the latest, and may then have
// happened.
type Attacher interface {
	// Attach returns the volume's device, made if there is none. A device of the same
	// attachment is returned as it is, its session left alone. ErrPrecondition: there
	// is one of an earlier attachment, or of the other mode: it is to be detached first.
	// ErrNotFound: the volume is not attached to this node.
	Attach(ctx context.Context, volume block.VolumeID, readOnly bool) (Device, error)
	// Find returns the volume's device. ErrNotFound: the kernel has none. Cheap,
	// and answers whatever state the device is in.
	Find(ctx context.Context, volume block.VolumeID) (Device, error)
	// Detach returns nil when the kernel shows the volume's device gone, also if
	// there was none. ErrInUse: it is mounted or held by somebody, and stays.
	Detach(ctx context.Context, volume block.VolumeID) error
	// Fail ends the volume's device for good, used or not: every request fails, what was not flushed is lost.
	// ErrInUse: it has ended, and Detach finds it gone when it is not mounted or held any more.
	Fail(ctx context.Context, volume block.VolumeID, reason string) error
	// Resize makes the device at least size bytes, as large as the server says it
	// is; 0: as large as the server says. It never shrinks. ErrPrecondition: the
	// volume itself is smaller than that. ErrUnavailable: not now.
	Resize(ctx context.Context, volume block.VolumeID, size int64) (Device, error)
}

// Device is a volume's block device as the kernel has it now.
type Device struct {
	Volume     block.VolumeID     // of the kernel's backend identifier
	Attachment block.AttachmentID // of the kernel's backend identifier
	Path       string             // of its node, such as /dev/nbd3
	Number     mount.Number
	Size       int64 // bytes
	ReadOnly   bool
	Condition  Condition
}

// State is how a device does.
type State uint8

// The states of a device.
const (
	Healthy State = iota
	Waiting       // no server answers it now; requests wait, and go on by themselves
	Failed        // refused for good: every request fails, and only to unstage it helps
)

// Condition is what is wrong with a device; the zero value: nothing.
type Condition struct {
	State   State
	Lost    bool   // with Failed: unflushed data was lost
	Reason  string // CamelCase
	Message string // a sentence
}

// Volumes is what the node asks of the metadata service about volumes that are
// attached to it. Errors wrap a sentinel of block. Safe for concurrent use.
type Volumes interface {
	// Describe is linearizable. ErrNotFound: the volume is not attached to this node.
	Describe(ctx context.Context, volume block.VolumeID) (Volume, error)
	// SetFormat records how far formatting has come, on behalf of a current attachment.
	// FormatStarted is refused (ErrPrecondition) unless the volume is FormatNone with
	// nothing born, or FormatStarted, and if others may write to it by the same
	// attachment. Durable on return.
	SetFormat(ctx context.Context, volume block.VolumeID, attachment block.AttachmentID, f FormatState) error
}

// FormatState is what was recorded of a volume's file system.
type FormatState uint8

// The states; the only way is from the first to the last.
const (
	FormatNone    FormatState = iota // nothing was ever said
	FormatStarted                    // mkfs was begun on a volume without a born extent; nobody has used its outcome
	FormatDone                       // there is a file system, or whatever else a user wrote: never to be formatted
)

// Volume is an attached volume.
type Volume struct {
	Attachment block.AttachmentID
	Size       int64 // bytes served
	ReadOnly   bool  // of the attachment
	Format     FormatState
	Born       bool // some extent has been born: the volume may hold data
}

// Mounter is the host: *mount.Linux, or a fake. Errors wrap a sentinel of block.
// Safe for concurrent use, as far as different devices and paths are concerned.
// Calls without a context return when they are done.
type Mounter interface {
	// Table is the mount table of the plugin's own mount namespace.
	Table() (mount.Table, error)
	// Resolve returns path as the mount table spells it: the links of its parent resolved, the last part left as it is.
	// ErrNotFound: there is no such parent.
	Resolve(path string) (string, error)
	// Inspect looks at a device's node. ErrNotFound, ErrPrecondition: it is none.
	Inspect(device string) (mount.Block, error)

	// Probe says what a device holds. ErrIO: it cannot be read. ErrInUse: a program or a mount claims it.
	Probe(device string) (mount.Content, error)
	// Format makes a file system, durable on return.
	Format(f mount.Format) error
	// Check repairs what can be repaired safely. ErrCorrupt: the rest needs a person. The file system is not mounted.
	Check(device string, t mount.FS) error
	// Grow makes a mounted file system as large as its device.
	Grow(device, point string, t mount.FS) error
	// Writable begins and ends a change of a mounted file system. ErrReadOnly, ErrIO: it takes none.
	Writable(point string) error
	// Usage asks a mounted file system. mount.ErrShutDown: it has stopped after an error.
	Usage(point string) (mount.Usage, error)

	// Try mounts and unmounts a file system where nobody can see it.
	Try(f mount.FileSystem) error
	// Mount mounts a file system at a directory.
	Mount(f mount.FileSystem, point string) error
	// BindFS shows the file system mounted at source, which must be device n's, at the directory target. ErrPrecondition: it is not.
	BindFS(source, target string, n mount.Number, readOnly bool) error
	// BindNode shows a device's node, which must be device n's, at the file target. ErrPrecondition: it is not.
	BindNode(source, target string, n mount.Number, readOnly bool) error
	// Unmount removes the topmost mount at point; ErrInUse: it is busy. Nothing is mounted there: nil.
	Unmount(point string) error

	// MakeDir and MakeFile make what something is mounted on; made is false if it was there. ErrPrecondition: there is something else.
	MakeDir(path string) (made bool, err error)
	MakeFile(path string) (made bool, err error)
	// Remove removes what MakeDir or MakeFile made, if it is there. Never what has content.
	Remove(path string) error
}
