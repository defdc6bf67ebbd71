package kernel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"sync"
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

const (
	maxConnections     = 4
	defaultTimeout     = 3 * time.Second
	defaultDeadTimeout = 24 * time.Hour

	attachPatience = 10 * time.Second // for servers that do not take the session
	closePatience  = 5 * time.Second
)

// Manager makes, keeps and ends the devices of this node's volumes. It knows
// them from the kernel; its state directory only makes it quicker and lets it
// work without the metadata service. Several processes may share the directory:
// what they do to one volume is done by one at a time. Safe for concurrent use.
type Manager struct {
	cfg        Config
	state      state
	calls      *calls
	lanes      *lanes
	conditions conditions
	deaths     *deaths

	life    context.Context // ends with Close
	die     context.CancelFunc
	running sync.WaitGroup

	mu       sync.Mutex
	reserved map[int]bool // indexes that a call is trying
	blank    map[int]bool // indexes whose devices were made here, and not connected
}

// New returns a manager that has touched nothing yet but its state directory. Close it.
func New(cfg Config) (*Manager, error) {
	cfg.Connections = cmp.Or(cfg.Connections, min(maxConnections, runtime.NumCPU()))
	cfg.Timeout = cmp.Or(cfg.Timeout, defaultTimeout)
	cfg.DeadTimeout = cmp.Or(cfg.DeadTimeout, defaultDeadTimeout)
	if cfg.Connections < 1 || cfg.Timeout < time.Second || cfg.DeadTimeout < cfg.Timeout {
		return nil, fmt.Errorf("%w: %d connections, a timeout of %v and of %v without any: at least 1, 1s and the former are wanted",
			block.ErrInvalid, cfg.Connections, cfg.Timeout, cfg.DeadTimeout)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(cfg.State, 0o700); err != nil {
		return nil, fmt.Errorf("%w: the state directory: %w", block.ErrPrecondition, err)
	}
	m := &Manager{
		cfg: cfg, state: state{cfg.State}, calls: newCalls(),
		lanes:      &lanes{dir: cfg.State, of: make(map[block.VolumeID]*lane)},
		conditions: conditions{of: make(map[string]*memory)},
		deaths:     newDeaths(),
		reserved:   make(map[int]bool), blank: make(map[int]bool),
	}
	m.life, m.die = context.WithCancel(context.Background())
	return m, nil
}

// Close waits for what is under way, but not for long for a driver that hangs.
// Devices stay as they are. No other method may be called any more.
func (m *Manager) Close() error {
	m.die()
	idle := make(chan struct{})
	go func() {
		defer close(idle)
		m.calls.running.Wait()
		m.running.Wait()
	}()
	t := time.NewTimer(closePatience)
	defer t.Stop()
	select {
	case <-idle:
		return nil
	case <-t.C:
		return fmt.Errorf("%w: the nbd driver still holds a call", block.ErrUnavailable)
	}
}

// Attach returns the volume's device, which it makes unless it is there. It is
// of this node's attachment and its current cache epoch, connected, and its
// server has answered a request. readOnly: the kernel refuses writes, whatever
// the attachment allows. On an error nothing is left that a repeat does not find.
//
// Devices of other attachments and older epochs are ended first, used or not.
// ErrPrecondition, if one of another attachment is still mounted then: what
// wrote to it must be gone before the volume is used anew.
func (m *Manager) Attach(ctx context.Context, id block.VolumeID, readOnly bool) (Device, error) {
	ctx, leave, err := m.lanes.enter(ctx, id, false)
	if err != nil {
		return Device{}, err
	}
	defer leave()
	a, err := m.attachment(ctx, id)
	if err != nil {
		return Device{}, fmt.Errorf("attaching volume %s: %w", id, err)
	}
	r, err := m.attach(ctx, Identity{id, a.ID, a.Epoch}, a, readOnly)
	if err != nil {
		return Device{}, fmt.Errorf("attaching volume %s: %w", id, err)
	}
	return m.device(r.Index)
}

func (m *Manager) attach(ctx context.Context, i Identity, a Attachment, readOnly bool) (*record, error) {
	all, err := m.find(ctx, i.Volume)
	if err != nil {
		return nil, err
	}
	var mine *found
	for _, d := range all {
		switch {
		case d.rec.Attachment == i.Attachment && d.rec.Epoch > i.Epoch:
			return nil, fmt.Errorf("%w: metadata says less than %s of cache epoch %d proves", block.ErrUnavailable, d.rec.path(), d.rec.Epoch)
		case d.rec.Identity != i || d.rec.Refused != "" && !d.zombie:
			if err := m.supersede(ctx, d, a); err != nil {
				return nil, err
			}
		case !d.zombie:
			mine = &d
		}
	}
	ctx, cancel := context.WithTimeout(ctx, attachPatience)
	defer cancel()
	if mine == nil {
		return m.attachNew(ctx, i, a, readOnly)
	}
	if mine.ReadOnly != (readOnly || a.ReadOnly) {
		return nil, fmt.Errorf("%w: %s is there with read-only %v", block.ErrExists, mine.rec.path(), mine.ReadOnly)
	}
	mine.rec.learn(a)
	if mine.lost || mine.rec.Phase == phaseConnecting || mine.rec.Phase == phaseEnding {
		if err := m.adopt(ctx, *mine); err != nil {
			return nil, err
		}
	}
	return mine.rec, insist(ctx, func() error { return m.mend(ctx, mine.rec, true) })
}

// supersede ends a device that a newer attachment or epoch has taken the place of.
func (m *Manager) supersede(ctx context.Context, d found, a Attachment) error {
	err := m.fail(ctx, d, cmp.Or(d.rec.Refused, d.rec.verdict(a, nil)))
	if err == nil || d.rec.Attachment == a.ID && errors.Is(err, block.ErrInUse) {
		return nil
	}
	u, look := m.cfg.Kernel.Users(d.Index)
	if look != nil {
		return look
	}
	if len(u.Mounts) > 0 {
		return fmt.Errorf("%w: %s of an earlier attachment is still mounted at %s: unmount it first", block.ErrPrecondition, d.rec.path(), u.Mounts[0])
	}
	if errors.Is(err, block.ErrInUse) { // a zombie cannot reach a server any more
		return nil
	}
	return err
}

func (m *Manager) attachNew(ctx context.Context, i Identity, a Attachment, readOnly bool) (*record, error) {
	if err := block.ValidateSize(a.Size); err != nil {
		return nil, err
	}
	r := m.newRecord(i)
	r.Phase = phaseConnecting
	r.Size, r.BlockSize = a.Size, cmp.Or(a.BlockSize, block.SizeQuantum)
	r.learn(a)
	if old, err := m.state.load(i); err == nil && old != nil {
		r.Session = old.Session
	}
	return r, insist(ctx, func() error {
		if r.Phase == phaseConnecting { // else it is there, and mended
			if err := m.connect(ctx, r, readOnly); err != nil {
				r.Phase = phaseConnecting
				return m.reconsider(ctx, r, err)
			}
		}
		return m.mend(ctx, r, true)
	})
}

// reconsider looks whether a server's contradiction is but newer than the answer of metadata that a device is made by.
func (m *Manager) reconsider(ctx context.Context, r *record, failure error) error {
	if errors.Is(failure, block.ErrCorrupt) {
		a, err := m.attachment(ctx, r.Volume)
		if err == nil && r.verdict(a, nil) == "" && block.ValidateSize(a.Size) == nil {
			r.Size = a.Size
			r.learn(a)
		}
	}
	return failure
}

// mend makes a device work that is there: its sockets are alive, and its server
// answers. ask: a request is made to see that; after a move one is made anyway.
func (m *Manager) mend(ctx context.Context, r *record, ask bool) error {
	patience := answerTime
	if !m.alive(r) {
		if err := m.move(ctx, r, false); err != nil {
			return err
		}
		ask, patience = true, r.Timeout+answerTime
	}
	if r.Phase == phaseMoving { // a move was cut off, but the kernel had all it needs
		if err := m.calm(ctx, r); err != nil {
			return err
		}
	}
	return m.answers(ctx, r, ask, patience)
}

// insist repeats a step until ctx ends, while its error is one that passes.
func insist(ctx context.Context, step func() error) error {
	for b := (backoff{}); ; {
		err := step()
		if err == nil || !errors.Is(err, block.ErrUnavailable) && !errors.Is(err, block.ErrCorrupt) || b.wait(ctx) != nil {
			return err
		}
	}
}

const (
	backoffFirst = 50 * time.Millisecond
	backoffLast  = 500 * time.Millisecond
)

// backoff is the time between tries.
type backoff struct{ next time.Duration }

func (b *backoff) wait(ctx context.Context) error {
	b.next = max(b.next, backoffFirst)
	d := b.next
	b.next = min(b.next*3/2, backoffLast)
	return pause(ctx, d)
}

// device is a device of ours as it is now.
func (m *Manager) device(index int) (Device, error) {
	n, err := m.cfg.Kernel.Node(index)
	if err != nil {
		return Device{}, err
	}
	i, ours := ParseBackend(n.Backend)
	if !ours || !n.Configured {
		return Device{}, fmt.Errorf("%w: %s is not a device of Gabion's", block.ErrNotFound, devicePath(index))
	}
	r, err := m.state.load(i)
	if err != nil && !errors.Is(err, block.ErrCorrupt) {
		return Device{}, err
	}
	return Device{
		Identity: i, Index: n.Index, Path: devicePath(n.Index), Major: n.Major, Minor: n.Minor,
		Size: n.Size, BlockSize: n.BlockSize, ReadOnly: n.ReadOnly, Condition: m.condition(n, r),
	}, nil
}

// Devices lists all devices of Gabion's on this machine, by index.
func (m *Manager) Devices() ([]Device, error) {
	return m.devices(func(Identity) bool { return true })
}

// devices lists those of certain identities.
func (m *Manager) devices(wanted func(Identity) bool) ([]Device, error) {
	places, err := m.cfg.Kernel.Places()
	if err != nil {
		return nil, err
	}
	var all []Device
	for _, p := range places {
		if i, ours := ParseBackend(p.Backend); !ours || !wanted(i) {
			continue
		}
		d, err := m.device(p.Index)
		if errors.Is(err, block.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

// Find returns the volume's device, the usable one if there are several.
// ErrNotFound: it has none. It asks nobody but sysfs.
func (m *Manager) Find(id block.VolumeID) (Device, error) {
	all, err := m.devices(func(i Identity) bool { return i.Volume == id })
	if err != nil {
		return Device{}, err
	}
	if len(all) == 0 {
		return Device{}, fmt.Errorf("%w: volume %s has no device on this node", block.ErrNotFound, id)
	}
	return slices.MinFunc(all, func(a, b Device) int {
		return cmp.Or(cmp.Compare(a.Condition.Health, b.Condition.Health), cmp.Compare(b.Epoch, a.Epoch))
	}), nil
}

// Detach ends the volume's devices and returns when the kernel shows them gone.
// ErrInUse: one is mounted anywhere, held or open; nothing was done to it then,
// or it is a zombie whose last user has not closed it. Without a device it does
// nothing. Metadata and servers need not be there.
func (m *Manager) Detach(ctx context.Context, id block.VolumeID) error {
	return m.endAll(ctx, id, m.end)
}

// Fail ends the volume's devices even though they are used: every request gets
// EIO, what was not flushed is lost. ErrInUse: a device that was in use stays as
// a zombie until its last user closes it. It is the operator's last resort.
func (m *Manager) Fail(ctx context.Context, id block.VolumeID, reason string) error {
	return m.endAll(ctx, id, func(ctx context.Context, d found) error { return m.fail(ctx, d, reason) })
}

// endAll ends the volume's devices in one way, and forgets those that are gone already.
func (m *Manager) endAll(ctx context.Context, id block.VolumeID, end func(context.Context, found) error) error {
	ctx, leave, err := m.lanes.enter(ctx, id, false)
	if err != nil {
		return err
	}
	defer leave()
	all, err := m.find(ctx, id)
	if err != nil {
		return fmt.Errorf("detaching volume %s: %w", id, err)
	}
	var errs []error
	for _, d := range all {
		if err := end(ctx, d); err != nil {
			errs = append(errs, fmt.Errorf("detaching volume %s: %w", id, err))
		}
	}
	return errors.Join(append(errs, m.forgetGone(id))...)
}

// forgetGone removes records of which there is no device, as find has left them. The
// volume's turn is held.
func (m *Manager) forgetGone(id block.VolumeID) error {
	kept, err := m.state.list(id.String())
	if err != nil || len(kept) == 0 {
		return err
	}
	places, err := m.cfg.Kernel.Places()
	if err != nil {
		return err
	}
	for _, i := range kept {
		there := slices.ContainsFunc(places, func(p Place) bool { return p.Configured && p.Backend == i.Backend() })
		if there {
			continue
		}
		if r, err := m.state.load(i); err == nil && r != nil && r.Phase == phaseConnecting {
			m.begun(r.Index)
		}
		if err := m.state.remove(i); err != nil {
			return err
		}
	}
	return nil
}

// Resize makes the volume's device as large as the volume is served, at least
// size bytes; it never makes it smaller. ErrUnavailable: the volume has not
// grown so far yet, or its server does not answer now; the device keeps its size.
func (m *Manager) Resize(ctx context.Context, id block.VolumeID, size int64) (Device, error) {
	now, err := m.Find(id)
	if err != nil || now.Size >= size {
		return now, err
	}
	if now.Condition.Health != Connected { // who mends it is not to be disturbed
		return Device{}, fmt.Errorf("%w: resizing %s of volume %s: %s", block.ErrUnavailable, now.Path, id, now.Condition.Reason)
	}
	ctx, leave, err := m.lanes.enter(ctx, id, false)
	if err != nil {
		return Device{}, err
	}
	defer leave()
	d, err := m.usable(ctx, id)
	if err != nil {
		return Device{}, fmt.Errorf("resizing volume %s: %w", id, err)
	}
	if d.Size < size {
		if err := m.grow(ctx, d.rec, size); err != nil {
			return Device{}, fmt.Errorf("resizing volume %s: %w", id, err)
		}
	}
	return m.device(d.Index)
}

// usable is the volume's device that is no zombie.
func (m *Manager) usable(ctx context.Context, id block.VolumeID) (found, error) {
	all, err := m.find(ctx, id)
	if err != nil {
		return found{}, err
	}
	for _, d := range all {
		if !d.zombie && d.rec.Refused == "" {
			return d, nil
		}
	}
	return found{}, fmt.Errorf("%w: no device on this node", block.ErrNotFound)
}

func (m *Manager) grow(ctx context.Context, r *record, size int64) error {
	if !m.alive(r) { // metadata may hang with it
		return fmt.Errorf("%w: %s has no server now", block.ErrUnavailable, r.path())
	}
	if err := m.answers(ctx, r, true, answerTime); err != nil {
		return err
	}
	a, err := m.attachment(ctx, r.Volume)
	if err != nil {
		return err
	}
	if reason := r.verdict(a, nil); reason != "" {
		return fmt.Errorf("%w: %s", block.ErrPrecondition, reason)
	}
	if a.Size < size {
		return fmt.Errorf("%w: %d bytes are served until now, %d are wanted", block.ErrUnavailable, a.Size, size)
	}
	if err := block.ValidateSize(a.Size); err != nil {
		return err
	}
	return m.resize(ctx, r, a.Size)
}
