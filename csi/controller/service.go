package controller

import (
	"context"

	"github.com/gabion-storage/gabion/server/block"
)

// VolumeService is what the controller asks of the metadata service. Errors
// wrap a sentinel of block; their text is a full sentence. Safe for concurrent
// use; every call ends with its context at the latest.
type VolumeService interface {
	// CreateVolume is idempotent by name: ErrExists, naming what differs, if a volume of
	// that name has another size or policy, or lies in none of the racks. ErrNoSpace:
	// not now, perhaps in other racks. ErrTooLarge, ErrInvalid, ErrPrecondition: never like this.
	CreateVolume(ctx context.Context, w Wish) (Volume, error)
	// VolumeByName and VolumeByID: ErrNotFound.
	VolumeByName(ctx context.Context, name string) (Volume, error)
	VolumeByID(ctx context.Context, id block.VolumeID) (Volume, error)
	// ListVolumes returns one page of at most limit volumes, 0 being the service's choice.
	// ErrStale: the token is none of this service's.
	ListVolumes(ctx context.Context, limit int, token string) (Page, error)
	// ResizeVolume returns when the new size is served, or would be by the next open.
	ResizeVolume(ctx context.Context, id block.VolumeID, size int64) (Volume, error)
	// DeleteVolume: an absent volume is deleted. ErrInUse names who has it.
	DeleteVolume(ctx context.Context, id block.VolumeID) error

	// Attach is idempotent by (volume, node). ErrExists: this node has it in the other
	// mode; ErrInUse names the node that has it; ErrNoSpace: the node takes no more.
	// Of calls that contradict each other one succeeds, however close they come.
	Attach(ctx context.Context, id block.VolumeID, node string, t Terms) (Attachment, error)
	// Detach returns when nothing of the node can reach the volume any more. node ""
	// means all of them. What is not there is detached.
	Detach(ctx context.Context, id block.VolumeID, node string) error
	// Consumer: ErrNotFound if no node of that name ever made itself known.
	Consumer(ctx context.Context, name string) (Consumer, error)

	// Capacity is what volumes of the policy can still take, in a rack or, with "", in the cell.
	Capacity(ctx context.Context, p Policy, rack string) (Capacity, error)
}

// Policy is how a volume is kept. The zero value of a field leaves it to the cell.
type Policy struct {
	Replicas   uint32 // 1 to 3
	Spread     Spread
	Access     Access
	Durability Durability
	OnFull     OnFull
	BlockSize  uint32 // 512 or 4096
	FSType     string // what it is to be formatted with; "": nothing was said. Only told apart, by CreateVolume
}

// The words of a policy; "" is the cell's default.
type (
	Spread     string
	Access     string
	Durability string
	OnFull     string
)

// What they take.
const (
	SpreadRack   Spread     = "rack"
	SpreadNode   Spread     = "node"
	AccessCell   Access     = "cluster"
	AccessRack   Access     = "rack"
	Flush        Durability = "flush"
	WriteThrough Durability = "write-through"
	OnFullWait   OnFull     = "wait"
	OnFullError  OnFull     = "error"
)

// Wish is a volume to be made.
type Wish struct {
	Name   string
	Size   int64 // bytes
	Policy Policy
	// Racks the volume must be reachable from, the preferred first; none: no wish.
	Racks []string
}

// Volume is one as it is.
type Volume struct {
	ID      block.VolumeID
	Name    string
	Size    int64 // bytes that were asked for last: served, or on the way to be
	Policy  Policy
	Rack    string   // with AccessRack: the only one it is reachable from
	Nodes   []string // it is attached to
	Trouble []Trouble
}

// Trouble is one thing that is wrong with a volume now.
type Trouble struct {
	Severe  bool   // it does not serve; else it serves, but not as it should
	Reason  string // CamelCase
	Message string // what is wrong and what to do
}

// Page is part of a list; Next is "" for the last.
type Page struct {
	Volumes []Volume
	Next    string
}

// Terms are what a node gets a volume for.
type Terms struct {
	ReadOnly bool
	Alone    bool // no other node may have it meanwhile, though all only read
}

// Attachment is one node's right to a volume.
type Attachment struct {
	ID       block.AttachmentID
	ReadOnly bool
}

// Consumer is a node that volumes can be published to.
type Consumer struct{ Name, Rack string }

// Capacity is in bytes of volumes, whatever their copies take.
type Capacity struct {
	Available int64
	Largest   int64 // volume that is accepted now
}
