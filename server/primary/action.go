package primary

import "github.com/gabion-storage/gabion/server/block"

// Action is something a Core wants done; the comment names the event that
// answers it. An action on a copy or a metadata call is answered exactly once,
// also when the core is over.
type Action interface{ action() }

// SealCopy finds the copy's Member and seals it. Sealed.
type SealCopy struct {
	Copy   *Copy
	Volume VolumeInfo
	Size   int64 // bytes the image must have at least
	Born   []block.RunIndex
}

// SyncCopy calls the member's Sync. Synced.
type SyncCopy struct{ Copy *Copy }

// BirthRuns calls the member's Birth. Born.
type BirthRuns struct {
	Copy *Copy
	Runs []block.RunIndex
}

// GrowCopy calls the member's Grow. Grown.
type GrowCopy struct {
	Copy *Copy
	Size int64
}

// ClearMarks calls the member's ClearMarks. Cleared.
type ClearMarks struct {
	Copy *Copy
	Upto block.Sequence
}

// Place calls PlaceRuns. Placed.
type Place struct{ Runs []block.RunIndex }

// Send proposes a command. Proposed.
type Send struct {
	Fence   Fence
	Command Command
}

// ReadMap reads the map. MapRead.
type ReadMap struct{}

// CloseConn asks the stream to end; the core takes nothing from it any more. Disconnect, in time.
type CloseConn struct {
	Conn   *Conn
	Reason error
}

// Answer tells whoever called Connect how it ended. No event.
type Answer struct {
	Conn *Conn
	Err  error
}

// Report is for the log and the cell's history. No event.
type Report struct{ Event Event }

// Retire says that this core serves no more and never will. No event.
type Retire struct{ Reason error }

func (SealCopy) action()   {}
func (SyncCopy) action()   {}
func (BirthRuns) action()  {}
func (GrowCopy) action()   {}
func (ClearMarks) action() {}
func (Place) action()      {}
func (Send) action()       {}
func (ReadMap) action()    {}
func (CloseConn) action()  {}
func (Answer) action()     {}
func (Report) action()     {}
func (Retire) action()     {}
