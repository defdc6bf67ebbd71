package kernel

import (
	"context"
	"fmt"
	"net/netip"
	"syscall"
	"time"
)

// Kernel is this machine's nbd driver, its TCP sockets, and what sysfs and the
// mount table show of them. Its methods may be called from any goroutine.
//
// Connect, Reconfigure and Disconnect go over generic netlink, which serves one
// call at a time for the whole machine: a call may hang, and all later ones with
// it, those of other programs too. Watch, when it begins, and Check ask there
// too, and hang with them. Nothing else here may hang for long.
type Kernel interface {
	// Connect makes a device of sockets. ErrInUse: the index is taken, or is
	// just being given up; another one may be tried with the same sockets.
	// ErrPrecondition, before anything is made: this kernel keeps no backends, by
	// which devices are told apart.
	Connect(Connect) error
	// Reconfigure changes a connected device. Without a change it is a probe.
	// ErrNotFound: no device of this backend is connected at the index: it is
	// unused, a zombie, or another's. Success says nothing of what was done:
	// sockets that the kernel does not need are closed without a word.
	Reconfigure(index int, backend string, c Change) error
	// Disconnect ends a device: what it has not answered gets EIO, and it is gone
	// when nobody has it open any more. A device that is unused is disconnected.
	Disconnect(index int) error
	// Watch calls dead with the index of a device each time one of its sockets
	// dies, and with -1 when such a word may have been missed. It returns when
	// ctx ends or the words cannot be had.
	Watch(ctx context.Context, dead func(index int)) error

	// Places lists the nbd devices there are, used or not, by index. It is cheap, however many there are.
	Places() ([]Place, error)
	// Node is all about one of them. ErrNotFound: there is none of this index, for sure;
	// one that cannot be read is ErrUnavailable.
	Node(index int) (Node, error)
	// InFlight counts the requests of a device that are not answered, 0 if there is no device. It is quick.
	InFlight(index int) int
	// Users says who else uses a device, as far as that can be seen; see Users.
	Users(index int) (Users, error)
	// Claim opens a device exclusively, so that nobody can mount it or build
	// upon it. ErrInUse: somebody did, perhaps in another mount namespace.
	Claim(ctx context.Context, index int) (release func(), err error)
	// Tune raises the queue limits of a device that was just connected. It is not essential.
	Tune(index int) error
	// Poke asks a device for pages of [0, size) that are not cached, one from each
	// of its queues, so that each of its sockets carries a request, and returns when
	// they are there or ctx ends. A page that its server cannot read is never there.
	Poke(ctx context.Context, index int, size int64) error

	// Socket tells how a socket is. ErrNotFound: it is no more.
	Socket(SocketID) (SocketInfo, error)
	// Destroy ends a socket at once, whoever holds it and whatever the peer does. Without such a socket it does nothing.
	Destroy(SocketID) error

	// Check returns an error if something is missing without which no device
	// can be had, and otherwise a sentence for each thing that ought to be different.
	Check() (advice []string, err error)
}

// Connect is what a device is made of. Every field is set.
type Connect struct {
	Index       int
	Backend     string // its identity for all its life, < 200 bytes
	Size        int64  // bytes
	BlockSize   int64  // bytes, 512 to 4096
	Flags       uint16 // NBD transmission flags, which stay
	Timeout     time.Duration
	DeadTimeout time.Duration // how long requests wait while no socket is alive, before EIO
	Sockets     []Socket      // in the transmission phase; the kernel takes references of its own
}

// Change is what Reconfigure changes. Sockets and Size exclude each other: a new
// size waits for the requests in flight, which wait for the new sockets.
type Change struct {
	Sockets     []Socket
	Size        int64
	DeadTimeout time.Duration
}

// Place says which nbd device has an index.
type Place struct {
	Index      int
	Backend    string // empty if it has none
	Configured bool   // connected, or a zombie: see Reconfigure
}

// Node is what sysfs shows of an nbd device.
type Node struct {
	Place
	Size         int64 // bytes; stays while it is a zombie
	BlockSize    int64
	ReadOnly     bool
	Major, Minor uint32
	InFlight     int // requests that are not answered
	Queues       int // as many as it has sockets, or CPUs if they are fewer
}

// Users says who uses a device.
type Users struct {
	Mounts  []string // where a file system on it, or its device node, is mounted in this mount namespace
	Holders []string // devices built upon it
	Openers []string // processes that have it open, as far as /proc shows them
}

// Any reports whether there is a user.
func (u Users) Any() bool { return len(u.Mounts)+len(u.Holders)+len(u.Openers) > 0 }

func (u Users) String() string {
	switch {
	case len(u.Mounts) > 0:
		return fmt.Sprintf("mounted at %s", u.Mounts[0])
	case len(u.Holders) > 0:
		return fmt.Sprintf("held by the device %s", u.Holders[0])
	case len(u.Openers) > 0:
		return fmt.Sprintf("held open by %s", u.Openers[0])
	}
	return "used by nobody that can be seen"
}

// SocketID names a TCP socket of this machine. The cookie tells it from a later
// one with the same addresses.
type SocketID struct {
	Local  netip.AddrPort `json:"local"`
	Remote netip.AddrPort `json:"remote"`
	Cookie uint64         `json:"cookie"`
}

// SocketInfo is how a socket is.
type SocketInfo struct {
	Established bool
	Taken       uint64 // bytes that were received since it was opened, and taken by whoever has it
	Untaken     uint32 // bytes that were received and wait to be taken
	Unsent      uint32 // bytes that wait in its send buffer, sent and not acknowledged ones included
}

// Socket is a connection to a server that can be handed to the kernel.
type Socket interface {
	syscall.Conn
	ID() SocketID
	// Close gives up this process's reference. The kernel's own keep it alive.
	Close() error
}
