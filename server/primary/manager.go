package primary

import (
	"bytes"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

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
type Manager struct {
	cfg    Config
	log    *slog.Logger
	start  time.Time
	ctx    context.Context // ends what Close does not wait for
	cancel context.CancelFunc
	wg     sync.WaitGroup // every goroutine of the manager's own
	events chan Event     // to the reporter; what does not fit is only logged
	checks chan struct{}  // limits how many maps of closed volumes are read at once

	mu        sync.Mutex
	closed    bool
	volumes   map[block.VolumeID]*opening
	unsettled map[block.VolumeID]*look // not open, and to be looked at
}

// look is the question whether a volume that is not open has something to confirm.
type look struct {
	busy  bool // somebody asks
	again bool // it changed meanwhile
}

// opening is a volume that is open, or on its way to being so.
type opening struct {
	ready   chan struct{} // closed when v or err is set
	v       *volume
	err     error
	changed bool // Changed came before it was ready
}

const (
	tickEvery   = 200 * time.Millisecond
	maxChecks   = 8
	eventsKept  = 256
	openTimeout = 30 * time.Second
)

// errNoAccess is the one answer to an unknown volume, an unknown token and a revoked one.
var errNoAccess = fmt.Errorf("%w: no such volume, or the token is wrong or was revoked", block.ErrPermission)

var errStopping = fmt.Errorf("%w: the server is stopping", block.ErrShutdown)

// New returns a manager without volumes. Close ends it.
func New(cfg Config) (*Manager, error) {
	if err := cfg.Geometry.Validate(); err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, log: cfg.Log, start: time.Now(),
		events: make(chan Event, eventsKept), checks: make(chan struct{}, maxChecks),
		volumes: make(map[block.VolumeID]*opening), unsettled: make(map[block.VolumeID]*look),
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.wg.Go(m.runTicker)
	m.wg.Go(m.runReporter)
	return m, nil
}

// Open resolves an export name `<volume id>/<token>[/<cache epoch>/<session>]`
// for a stream, opening the volume first if need be. It waits until older
// sessions of the attachment are closed and drained. The stream's requests go
// to the returned Device, and its Disconnect must be called in the end. The
// token is written in base64 (URL alphabet, no padding).
//
// ErrPermission: no such volume, or the token is wrong or revoked (one answer
// for all three). ErrInvalid: not a name. ErrCacheLost: permanent. ErrStale: a
// newer session exists. ErrInUse: a plain client while a numbered session is
// open. ErrUnavailable: try again.
func (m *Manager) Open(ctx context.Context, exportName string, s block.Stream) (block.Device, error) {
	n, err := parseName(exportName)
	if err != nil {
		return nil, err
	}
	v, id, err := m.find(ctx, n)
	if err != nil {
		return nil, err
	}
	d := newDevice(v, s, n)
	d.conn.Attachment = id
	v.event(func(c *Core) { c.Connect(&d.conn) })
	select {
	case err = <-d.answer:
	case <-ctx.Done():
		d.Disconnect()
		err = fmt.Errorf("%w: volume %s did not answer in time", block.ErrUnavailable, n.volume)
	}
	if errors.Is(err, block.ErrNotFound) { // deleted meanwhile
		return nil, errNoAccess
	}
	if n.session == 0 && errors.Is(err, block.ErrStale) { // the volume has another primary: nothing is wrong with the name
		err = fmt.Errorf("%w: %v", block.ErrUnavailable, err)
	}
	if err != nil {
		return nil, err
	}
	v.awaitSize(ctx)
	return d, nil
}

// Describe checks the name as Open does and tells what it would, without a session.
func (m *Manager) Describe(ctx context.Context, exportName string) (block.Info, error) {
	n, err := parseName(exportName)
	if err != nil {
		return block.Info{}, err
	}
	mp, err := m.cfg.Metadata.ReadMap(ctx, n.volume)
	if err != nil {
		return block.Info{}, accessError(n.volume, err)
	}
	a, ok := mp.find(n.digest)
	if !ok {
		return block.Info{}, errNoAccess
	}
	if n.session > 0 && n.epoch < mp.Volume.CacheEpoch {
		return block.Info{}, cacheLost(n.epoch, mp.Volume.CacheEpoch)
	}
	return info(&mp.Volume, a.ReadOnly, n.session), nil
}

// List is empty: names carry tokens.
func (m *Manager) List(context.Context) ([]string, error) { return nil, nil }

// find is the open volume of a name whose token is right. Before it refuses it
// reads the map once: the attachment may be newer than what is known here.
func (m *Manager) find(ctx context.Context, n name) (*volume, block.AttachmentID, error) {
	if v := m.opened(n.volume); v != nil {
		if id, ok := v.authorize(n.digest); ok {
			return v, id, nil
		}
	}
	mp, err := m.cfg.Metadata.ReadMap(ctx, n.volume)
	if err != nil {
		return nil, block.AttachmentID{}, accessError(n.volume, err)
	}
	if _, ok := mp.find(n.digest); !ok {
		return nil, block.AttachmentID{}, errNoAccess
	}
	v, err := m.open(ctx, mp)
	if errors.Is(err, block.ErrNotFound) { // the volume was there a moment ago, so it may be this node that is not known yet
		err = fmt.Errorf("%w: %v", block.ErrUnavailable, err)
	}
	if err != nil {
		return nil, block.AttachmentID{}, accessError(n.volume, err)
	}
	v.event(func(c *Core) { c.Learn(mp) })
	id, ok := v.authorize(n.digest)
	if !ok {
		return nil, block.AttachmentID{}, errNoAccess
	}
	return v, id, nil
}

// find is the attachment whose token has this digest, unless it is being detached.
func (m *Map) find(digest [32]byte) (found Attachment, ok bool) {
	for _, a := range m.Attachments {
		if same := subtle.ConstantTimeCompare(a.TokenDigest[:], digest[:]); same == 1 && !a.Revoking {
			found, ok = a, true
		}
	}
	return found, ok
}

// accessError is what a client is told when the metadata service did not help.
func accessError(id block.VolumeID, err error) error {
	switch {
	case errors.Is(err, block.ErrNotFound):
		return errNoAccess
	case errors.Is(err, block.ErrShutdown):
		return err
	}
	return fmt.Errorf("%w: volume %s cannot be opened now: %w", block.ErrUnavailable, id, err)
}

// opened is the volume if it is open.
func (m *Manager) opened(id block.VolumeID) *volume {
	m.mu.Lock()
	defer m.mu.Unlock()
	o := m.volumes[id]
	if o == nil {
		return nil
	}
	select {
	case <-o.ready:
		return o.v
	default:
		return nil
	}
}

// open is the volume that mp is of, opened if need be: once, however many ask.
func (m *Manager) open(ctx context.Context, mp Map) (*volume, error) {
	id := mp.Volume.ID
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil, errStopping
	}
	o := m.volumes[id]
	if o == nil {
		o = &opening{ready: make(chan struct{})}
		m.volumes[id] = o
		m.wg.Go(func() { m.grant(mp, o) })
	}
	m.mu.Unlock()
	select {
	case <-o.ready:
		return o.v, o.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// grant makes this server the primary of the volume that mp is of. The volume is
// ready with the grant: it answers sessions when it has taken over.
func (m *Manager) grant(mp Map, o *opening) {
	id := mp.Volume.ID
	ctx, cancel := context.WithTimeout(m.ctx, openTimeout)
	defer cancel()
	err := m.cfg.Fault.Hit("primary.open", id.String())
	if err == nil { // before the grant: what is refused again and again must not be a new generation each time
		err = m.cfg.Replicas.CheckUnwritten(ctx, id, mp.Members)
	}
	if err == nil {
		mp, err = m.cfg.Metadata.Grant(ctx, id)
	}
	m.mu.Lock()
	if err == nil && m.closed {
		err = errStopping
	}
	if err != nil {
		o.err = err
		delete(m.volumes, id)
		close(o.ready)
		if o.changed && !m.closed {
			m.check(id)
		}
		m.mu.Unlock()
		return
	}
	o.v = newVolume(m, mp)
	changed := o.changed
	close(o.ready)
	m.mu.Unlock()
	m.log.Info("volume opened", "volume_id", id, "generation", mp.Generation)
	o.v.event(func(c *Core) {
		if changed {
			c.Changed()
		}
	})
}

// retire forgets a volume that serves no more and closes it.
func (m *Manager) retire(v *volume, reason error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if o := m.volumes[v.id]; o != nil && o.v == v && !m.closed {
		delete(m.volumes, v.id)
		m.log.Info("volume retired", "volume_id", v.id, "err", reason)
		m.wg.Go(func() {
			if err := v.close(m.ctx); err != nil {
				m.log.Warn("volume closed badly", "volume_id", v.id, "err", err)
			}
		})
	}
}

// Changed says that something about a volume was changed in the metadata (an
// attachment, a wanted size, its deletion). If the volume is open here it reads
// its map again; if it is not, but granted to this node and with something to
// confirm, it is opened. Returns at once. Call it for every volume at start,
// and for every event that the watch brings.
func (m *Manager) Changed(id block.VolumeID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	if o := m.volumes[id]; o != nil {
		if o.v == nil {
			o.changed = true
			return
		}
		v := o.v
		m.wg.Go(func() { v.event((*Core).Changed) })
		return
	}
	m.check(id)
}

// check looks, on its own goroutine, whether a volume that is not open has
// something to confirm; mu is held. What fails is looked at again by the ticker.
func (m *Manager) check(id block.VolumeID) {
	l := m.unsettled[id]
	if l == nil {
		l = new(look)
		m.unsettled[id] = l
	}
	if l.busy {
		l.again = true
		return
	}
	l.busy, l.again = true, false
	m.wg.Go(func() {
		m.checks <- struct{}{}
		defer func() { <-m.checks }()
		err := m.confirm(id)
		m.mu.Lock()
		defer m.mu.Unlock()
		if l.busy = false; err == nil && !l.again {
			delete(m.unsettled, id)
		}
	})
}

// confirm opens a volume of this node if an intent waits for its primary.
func (m *Manager) confirm(id block.VolumeID) error {
	ctx, cancel := context.WithTimeout(m.ctx, metadataTimeout)
	defer cancel()
	mp, err := m.cfg.Metadata.ReadMap(ctx, id)
	if errors.Is(err, block.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	detach := slices.ContainsFunc(mp.Attachments, func(a Attachment) bool { return a.Revoking })
	if mp.Node != m.cfg.Node || !detach && mp.Volume.WantedSize <= mp.Volume.Size {
		return nil
	}
	v, err := m.open(ctx, mp)
	if err == nil {
		v.event(func(c *Core) { c.Learn(mp) })
	}
	return err
}

// SpaceChanged says that a disk may have room again. Returns at once.
func (m *Manager) SpaceChanged() { m.all((*Core).SpaceChanged) }

// DiskChanged says that a disk failed or was opened (again). Returns at once.
func (m *Manager) DiskChanged(disk block.DiskID) { m.all(func(c *Core) { c.DiskChanged(disk) }) }

// all feeds an event to every open volume, on a goroutine of its own: what
// comes of it may be work.
func (m *Manager) all(f func(*Core)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	list := m.list()
	m.wg.Go(func() {
		for _, v := range list {
			v.event(f)
		}
	})
}

// list is every open volume, in order of id; mu is held.
func (m *Manager) list() []*volume {
	var list []*volume
	for _, o := range m.volumes {
		if o.v != nil {
			list = append(list, o.v)
		}
	}
	slices.SortFunc(list, func(a, b *volume) int { return bytes.Compare(a.id.UUID[:], b.id.UUID[:]) })
	return list
}

// Status is a snapshot of every open volume, in order of id.
func (m *Manager) Status() []VolumeStatus {
	m.mu.Lock()
	list := m.list()
	m.mu.Unlock()
	all := make([]VolumeStatus, 0, len(list))
	for _, v := range list {
		v.mu.Lock()
		all = append(all, v.core.Status())
		v.mu.Unlock()
	}
	return all
}

// Close refuses new sessions, closes those that are open, waits for what is in
// flight, syncs every member and joins all goroutines, or returns an error when
// ctx is over first.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	m.closed = true
	list := m.list()
	m.mu.Unlock()
	errs := make([]error, len(list)+1)
	var wg sync.WaitGroup
	for i, v := range list {
		wg.Go(func() { errs[i] = v.close(ctx) })
	}
	wg.Wait()
	m.cancel()
	joined := make(chan struct{})
	go func() {
		m.wg.Wait()
		close(joined)
	}()
	select {
	case <-joined:
	case <-ctx.Done():
		errs[len(list)] = fmt.Errorf("%w: a call of the primary did not end", block.ErrUnavailable)
	}
	return errors.Join(errs...)
}

func (m *Manager) runTicker() {
	t := time.NewTicker(tickEvery)
	defer t.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-t.C:
		}
		now := time.Since(m.start)
		m.mu.Lock()
		list := m.list()
		if !m.closed {
			for id, l := range m.unsettled {
				if !l.busy {
					m.check(id)
				}
			}
		}
		m.mu.Unlock()
		for _, v := range list {
			v.event(func(c *Core) { c.Tick(now) })
		}
	}
}

// report logs an event and queues it for the cell's history.
func (m *Manager) report(e Event) {
	m.log.Info(e.Message, "event", e.Type, "volume_id", e.Volume, "disk_id", e.Disk)
	select {
	case m.events <- e:
	default:
	}
}

func (m *Manager) runReporter() {
	for {
		select {
		case <-m.ctx.Done():
			return
		case e := <-m.events:
			ctx, cancel := context.WithTimeout(m.ctx, metadataTimeout)
			if err := m.cfg.Metadata.ReportEvent(ctx, e); err != nil {
				m.log.Debug("event not reported", "event", e.Type, "volume_id", e.Volume, "err", err)
			}
			cancel()
		}
	}
}
