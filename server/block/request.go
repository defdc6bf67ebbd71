package block

import "fmt"

// Op is what a request asks for.
type Op uint8

const (
	OpRead Op = iota + 1
	OpWrite
	OpTrim  // content becomes zeros, space is given back
	OpZero  // content becomes zeros; NoHole keeps the space allocated
	OpFlush // everything acknowledged before is durable
	OpCache // prefetch hint: nothing to do
)

// Mutates reports whether the operation may change the content of its range.
func (o Op) Mutates() bool { return o == OpWrite || o == OpTrim || o == OpZero }

// String is the operation's name in logs, metrics and test scripts.
func (o Op) String() string {
	switch o {
	case OpRead:
		return "read"
	case OpWrite:
		return "write"
	case OpTrim:
		return "trim"
	case OpZero:
		return "zero"
	case OpFlush:
		return "flush"
	case OpCache:
		return "cache"
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// Stream is one client connection as a Device sees it: the owner of requests.
// All methods may be called from any goroutine.
type Stream interface {
	// ReadBuffer returns the r.Length bytes that a read's content goes to, and
	// stores them in r.Data. It may block on the stream's byte budget, so it is
	// called without locks, after the request was started. It returns an error
	// only if the stream is closed.
	ReadBuffer(r *Request) error
	// TryReadBuffer is ReadBuffer if that need not wait; false: nothing happened.
	TryReadBuffer(r *Request) bool
	// Blocking says, at most once in a Submit, that the goroutine that is in it,
	// having taken all of the batch, is about to wait for a disk. True: it may;
	// if it is long, another goroutine first calls handOff, which must not wait
	// and may come after the end of Submit, then reads on and calls Submit.
	// False: nothing may be waited for here.
	Blocking(handOff func()) bool
	// Complete hands back a finished request: r.Err is set, or r.Data filled.
	// It never blocks on the client. Each submitted request is completed
	// exactly once, also after the stream was closed; r belongs to the stream
	// again from then on.
	Complete(r *Request)
	// Close asks the stream to end: it stops reading at once and calls
	// Device.Disconnect. It does not wait.
	Close(reason error)
}

// Request is one validated request of one stream. The stream owns the memory
// and reuses it; a Device keeps no reference after Complete.
type Request struct {
	Op     Op
	FUA    bool // durable before it is completed
	NoHole bool // OpZero: keep the range allocated
	Offset int64
	Length int64  // 0 for OpFlush; Offset+Length is within the size the stream was told
	Data   []byte // write: the payload; read: set by ReadBuffer
	Err    error  // the outcome, wrapping a sentinel of this package

	Stream Stream
	Cookie uint64 // the client's, opaque
	Start  int64  // monotonic nanoseconds at which it was parsed

	// Slot is the Device's own state of this request while it holds it.
	Slot any
}

// Status describes a part of a volume's address space for BLOCK_STATUS.
type Status struct {
	Length int64 // bytes, positive, a multiple of the minimum block
	Hole   bool  // nothing is allocated
	Zero   bool  // reads as zeros
}

// Info is what a client is told when it opens a Device.
type Info struct {
	Size           int64 // bytes
	MinBlock       int64 // bytes, 512: the smallest grain of a request
	PreferredBlock int64 // bytes, a power of two: 4096 or 512
	ReadOnly       bool
	MultiConn      bool // a flush on one connection covers all
	Resends        bool // the client sends unanswered requests again elsewhere (the kernel): what Disconnect drops gets no reply
}

// Device is an open volume as one stream uses it.
type Device interface {
	// Info may change its Size (growth) from call to call.
	Info() Info
	// Submit takes the requests in order: each has its place in the range lock
	// when Submit returns. The slice is not retained. It does in line what
	// cannot block and hands off the rest; completions arrive through
	// Stream.Complete, some of them before Submit returns. Not called again
	// for the same stream before it returned or called Stream.Blocking, nor after Disconnect.
	Submit(batch []*Request)
	// Status appends descriptors of [off, off+length) to dst, at most limit of
	// them, covering at least its beginning. Adjacent descriptors differ.
	Status(dst []Status, off, length int64, limit int) ([]Status, error)
	// Disconnect drops what was submitted and not yet handed to a replica
	// (completing it with ErrShutdown) and returns when nothing of the stream
	// is in flight any more and every request has been completed.
	Disconnect()
}

// IO is one mutating operation as a primary hands it to a member: fenced,
// numbered, already ordered by the range lock.
type IO struct {
	Generation Generation
	Sequence   Sequence
	Op         Op   // OpWrite, OpTrim or OpZero
	Durable    bool // synced before the member answers (FUA, write-through)
	NoHole     bool
	Offset     int64
	Length     int64
	Data       []byte // OpWrite: Length bytes
}
