package kernel

import (
	"context"
	"log/slog"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

// Config is what a Manager works with. Zero durations and numbers mean the defaults.
type Config struct {
	State    string // directory of the state, made if absent: tmpfs of the host, like /run/gabion/nbd
	Kernel   Kernel
	Dialer   Dialer
	Metadata Metadata
	Log      *slog.Logger
	Faults   *fault.Set // may be nil

	// What the next device is made with; one that is there keeps its own.
	Connections int           // sockets, default min(4, CPUs): more carry nothing
	Timeout     time.Duration // T, whole seconds, default 3 s
	DeadTimeout time.Duration // default a day
}

// Manager makes, keeps and ends the devices of this node's volumes. It knows
// them from the kernel; its state directory only makes it quicker and lets it
// work without the metadata service. Several processes may share the directory:
// what they do to one volume is done by one at a time. Safe for concurrent use.
type Manager struct{ cfg Config }

// New returns a manager that has touched nothing yet but its state directory. Close it.
func New(cfg Config) (*Manager, error) { return &Manager{cfg: cfg}, nil }

// Close waits for what is under way. Devices stay as they are.
func (m *Manager) Close() error { return nil }

// Run keeps the devices connected until ctx ends: it adopts those it finds, also
// ones that other processes made, moves them to new sockets when theirs die,
// for ever, and ends those that are refused for good.
func (m *Manager) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Attach returns the volume's device, which it makes unless it is there. It is
// of this node's attachment and its current cache epoch, connected, and has
// answered a request's handshake. readOnly: the kernel refuses writes, whatever
// the attachment allows. On an error nothing is left that a repeat does not find.
func (m *Manager) Attach(ctx context.Context, id block.VolumeID, readOnly bool) (Device, error) {
	return Device{}, block.ErrUnsupported
}

// Find returns the volume's device, the usable one if there are several.
// ErrNotFound: it has none. It asks nobody but the kernel.
func (m *Manager) Find(id block.VolumeID) (Device, error) { return Device{}, block.ErrUnsupported }

// Detach ends the volume's devices and returns when the kernel shows them gone.
// ErrInUse: one is mounted anywhere, held or open; nothing was done to it then,
// or it is a zombie whose last user has not closed it. Without a device it does
// nothing. Metadata and servers need not be there.
func (m *Manager) Detach(ctx context.Context, id block.VolumeID) error { return block.ErrUnsupported }

// Fail ends the volume's devices even though they are used: every request gets
// EIO, what was not flushed is lost. A device that is in use stays as a zombie
// until its last user closes it. It is the operator's last resort.
func (m *Manager) Fail(ctx context.Context, id block.VolumeID, reason string) error {
	return block.ErrUnsupported
}

// Resize makes the volume's device as large as the volume is served, at least
// size bytes; it never makes it smaller. ErrUnavailable: the volume has not
// grown so far yet, or its server does not answer now; the device is untouched.
func (m *Manager) Resize(ctx context.Context, id block.VolumeID, size int64) (Device, error) {
	return Device{}, block.ErrUnsupported
}

// Devices lists all devices of Gabion's on this machine, by index.
func (m *Manager) Devices() ([]Device, error) { return nil, block.ErrUnsupported }

// Condition tells how the volume's device is. ErrNotFound: it has none.
func (m *Manager) Condition(id block.VolumeID) (Condition, error) {
	return Condition{}, block.ErrUnsupported
}
