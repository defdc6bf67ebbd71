package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/image"
	"github.com/gabion-storage/gabion/server/primary"
	"github.com/gabion-storage/gabion/server/replica"
	"github.com/gabion-storage/gabion/server/vfs"
)

// host is a machine: what a power cut ends. It has disks, each with a file
// system of its own, and runs one server process at a time.
type host struct {
	*world
	boot  block.UUID
	mode  image.Mode
	disks []*disk
	dead  bool // between the fault and its discovery: nothing works any more

	// A fault in the middle of a file operation: after so many more of them.
	faultIn int
	fault   func() // what happens then

	badReads int // reads that were made to fail
	excuses  int // for a rise of the cache epoch: power cuts, and I/O errors that were armed
}

// disk is a drive with the store of the running process on it.
type disk struct {
	host    *host
	n       int
	mem     *vfs.Mem
	rules   vfs.Rules
	store   *replica.Store // nil: no process has it open
	state   string         // the server's state directory for it
	id      block.DiskID   // known once it was opened
	ended   bool           // its instance ended: a new one is to be opened
	missing bool           // it cannot be opened now
	tears   bool           // an error is armed that may cost what was not synced
	torn    bool           // it happened: what is left is decided at the next open

	held [kinds][]func() // operations that hang, per kind; nil: none is held
	one  [kinds]bool     // only the first of them
}

// kind is what can be held at a disk.
type kind uint8

const (
	reads kind = iota
	writes
	syncs
	seals
	births
	clears
	grows
	kinds
)

const diskPath = "disk"

func newHost(w *world, disks int, state func() string) *host {
	h := &host{world: w, boot: block.NewUUID(), mode: image.Buffered}
	for n := range disks {
		d := &disk{host: h, n: n, mem: vfs.NewMem(), state: state()}
		if err := errors.Join(d.mem.MkdirAll(diskPath), d.mem.MkdirAll(d.state)); err != nil {
			w.failf("disk %d: %v", n, err)
		}
		d.roomAgain()
		h.disks = append(h.disks, d)
	}
	return h
}

var errDead = fmt.Errorf("%w: the host is gone", block.ErrIO)

// hook runs before every file operation.
func (d *disk) hook(op vfs.Op) error {
	h := d.host
	if h.dead {
		return errDead
	}
	if h.faultIn > 0 {
		if h.faultIn--; h.faultIn == 0 {
			h.tracef("disk %d: struck before %s %s", d.n, op.Kind, op.Name)
			h.dead = true
			f := h.fault
			h.after(0, f)
			return errDead
		}
	}
	return d.rules.Hook(op)
}

// open opens the disk for a process.
func (d *disk) open(cluster block.ClusterID, g block.Geometry, process block.UUID) error {
	if d.missing {
		return fmt.Errorf("%w: disk %d is missing", block.ErrUnavailable, d.n)
	}
	if d.torn {
		d.mem, d.torn = d.mem.Crash(d.host.rand.Uint64()|2), false
	}
	s, err := replica.Open(replica.Config{
		FS: vfs.Inject(d.mem, d.hook), Paths: []string{diskPath}, StateDir: d.state, Cluster: cluster, Geometry: g,
		Mode: d.host.mode, Boot: d.host.boot, Process: process, Registry: nobody{}, Log: slog.New(slog.DiscardHandler),
		Changed: func(block.DiskID) {}, Space: func() {},
	})
	if err != nil {
		return err
	}
	if r := s.Reports()[0]; !r.Online {
		return errors.Join(fmt.Errorf("%w: %s", block.ErrUnavailable, r.Problem), s.Close())
	}
	d.store, d.id, d.ended = s, s.Reports()[0].ID, false
	d.host.tracef("disk %d: open, id %s", d.n, d.id)
	return nil
}

// nobody answers for a collector that does not run here.
type nobody struct{}

func (nobody) Fate(context.Context, block.ClusterID, block.VolumeID) (replica.Fate, error) {
	return replica.Live, nil
}

// check finds out whether the instance has ended; the server then opens the disk again.
func (d *disk) check() (ended bool) {
	if d.store == nil || d.ended || d.host.dead || d.store.Reports()[0].Online {
		return false
	}
	d.ended, d.torn = true, d.tears
	d.host.tracef("disk %d: instance ended", d.n)
	return true
}

// close is the end of the process that had the disk open.
func (d *disk) close() {
	if d.store != nil {
		_ = d.store.Close() // of an ended instance: it reports why it ended
		d.store = nil
	}
}

// failSync makes the next sync of an image fail; what was not synced before it may then be gone.
func (d *disk) failSync() {
	d.tears = true
	d.arm("datasync head.img #1 eio")
}

// arm adds a fault in the words of vfs.Rule.
func (d *disk) arm(rule string) {
	d.host.excuses++
	if err := d.rules.Add(rule); err != nil {
		d.host.failf("%v", err)
	}
}

// hold makes operations of a kind hang until release.
func (d *disk) hold(k kind) {
	if d.held[k] == nil {
		d.held[k] = []func(){}
	}
}

func (d *disk) release(k kind) {
	list := d.held[k]
	d.held[k], d.one[k] = nil, false
	for _, f := range list {
		d.host.after(0, f)
	}
}

// holdNext makes only the next operation of a kind hang, until release.
func (d *disk) holdNext(k kind) {
	d.hold(k)
	d.one[k] = true
}

// do lets an operation take effect now or, if its kind is held, later.
func (d *disk) do(k kind, f func()) {
	if d.held[k] != nil && !(d.one[k] && len(d.held[k]) > 0) {
		d.held[k] = append(d.held[k], func() { d.do(k, f) })
		return
	}
	f()
}

// strike lets a fault happen before the n-th file operation from now.
func (h *host) strike(n int, fault func()) { h.faultIn, h.fault = n, fault }

// powerOff drops what was not synced, as the seed decides.
func (h *host) powerOff() {
	h.tracef("power cut")
	h.excuses += len(h.disks) // each may come back by itself
	h.dead, h.faultIn, h.boot = false, 0, block.NewUUID()
	for _, d := range h.disks {
		d.store, d.ended, d.torn = nil, false, false
		d.mem = d.mem.Crash(h.rand.Uint64() | 2)
		d.forget()
	}
}

// endProcess leaves everything that was written in the page cache.
func (h *host) endProcess() {
	h.dead, h.faultIn = false, 0
	for _, d := range h.disks {
		d.store, d.ended = nil, false
		d.mem.Kill()
		d.forget()
	}
}

// forget drops the operations that hang here: whoever issued them is gone.
func (d *disk) forget() {
	for k := range d.held {
		if d.held[k] != nil {
			d.held[k] = []func(){}
		}
	}
	d.rules.Clear()
	d.tears = false
}

// member is the volume's copy on the disk, as cmd/gabion hands it to a primary.
func (d *disk) member(v primary.VolumeInfo) (primary.Member, error) {
	if d.store == nil || d.ended || d.host.dead {
		return nil, fmt.Errorf("%w: disk %d", block.ErrUnavailable, d.n)
	}
	c, err := d.store.Copy(image.Description{ID: v.ID, Name: v.Name, Size: v.Size, Version: v.Version}, d.id)
	if err != nil {
		return nil, err
	}
	return member{c}, nil
}

// member is a copy in the primary's words.
type member struct{ *replica.Copy }

func (m member) Seal(ctx context.Context, g block.Generation, size int64, born []block.RunIndex) (primary.Sealed, error) {
	s, err := m.Copy.Seal(ctx, g, size, born)
	return primary.Sealed(s), err
}

// reopenAfter is the pause before an ended instance is followed by another.
const reopenAfter = 150 * time.Millisecond

// leave lets so many bytes be free on the disk, above what the store keeps in reserve.
func (d *disk) leave(free int64) {
	sp := d.space()
	d.mem.SetCapacity(sp.Capacity - sp.Available + reserve + free)
	d.host.tracef("disk %d: %d bytes are left", d.n, free)
}

const (
	// diskCapacity is small enough for the store to ask the file system for every credit.
	diskCapacity = 512 << 20
	// reserve is what the store takes of that when it opens the disk.
	reserve = diskCapacity / 50
)

func (d *disk) roomAgain() { d.mem.SetCapacity(diskCapacity) }

func (d *disk) space() vfs.Space {
	dir, err := d.mem.OpenDir(diskPath)
	if err != nil {
		d.host.failf("disk %d: %v", d.n, err)
	}
	defer dir.Close()
	sp, err := dir.Space()
	if err != nil {
		d.host.failf("disk %d: %v", d.n, err)
	}
	return sp
}
