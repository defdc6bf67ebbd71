package primary

import (
	"context"
	"errors"
	"log/slog"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

// Config is what a Manager is made of. Metadata, Replicas, Geometry and Node are required.
type Config struct {
	Metadata Metadata
	Replicas Replicas
	Geometry block.Geometry // the cluster's
	Node     string         // of this server, as grants name it
	Log      *slog.Logger   // nil: silent
	Fault    *fault.Set     // nil: none
}

// Manager opens volumes for clients and keeps them open. It satisfies
// nbd.Exports. Safe for concurrent use.
type Manager struct{ cfg Config }

// New returns a manager without volumes. Close ends it.
func New(cfg Config) (*Manager, error) { return &Manager{cfg: cfg}, nil }

// Open resolves an export name `<volume id>/<token>[/<cache epoch>/<session>]`
// for a stream, opening the volume first if need be. It waits until older
// sessions of the attachment are closed and drained. The stream's requests go
// to the returned Device, and its Disconnect must be called in the end.
//
// ErrPermission: no such volume, or the token is wrong or revoked (one answer
// for all three). ErrCacheLost: permanent. ErrStale: a newer session exists.
// ErrInUse: a plain client while a numbered session is open. ErrUnavailable: try again.
func (m *Manager) Open(ctx context.Context, name string, s block.Stream) (block.Device, error) {
	return nil, errors.ErrUnsupported
}

// Describe checks the name as Open does and tells what it would, without a session.
func (m *Manager) Describe(ctx context.Context, name string) (block.Info, error) {
	return block.Info{}, errors.ErrUnsupported
}

// List is empty: names carry tokens.
func (m *Manager) List(context.Context) ([]string, error) { return nil, nil }

// Changed says that something about a volume was changed in the metadata (an
// attachment, a wanted size, its deletion). If the volume is open here it reads
// its map again; if it is not, but granted to this node and with something to
// confirm, it is opened. Returns at once. Call it for every volume at start,
// and for every event that the watch brings.
func (m *Manager) Changed(id block.VolumeID) {}

// SpaceChanged says that a disk may have room again. Returns at once.
func (m *Manager) SpaceChanged() {}

// DiskChanged says that a disk was opened (again). Returns at once.
func (m *Manager) DiskChanged(disk block.DiskID) {}

// Status is a snapshot of every open volume, in order of id.
func (m *Manager) Status() []VolumeStatus { return nil }

// Close refuses new sessions, closes those that are open, waits for what is in
// flight, syncs every member and joins all goroutines, or returns ctx's error.
func (m *Manager) Close(ctx context.Context) error { return nil }
