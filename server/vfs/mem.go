package vfs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/gabion-storage/gabion/server/block"
)

// Mem is a file system in memory that remembers, besides what programs see,
// everything a power cut could leave behind: every content a block had, every
// size, every change to a directory since its last sync. Crash makes the disk
// that a reboot might find; Kill is the end of the processes only.
type Mem struct {
	mu       sync.Mutex
	root     *memNode
	inodes   uint64
	mount    uint64
	life     int   // handles of an earlier life are dead
	capacity int64 // bytes
	used     int64 // bytes in allocated blocks
	// Changes to directories that no sync has made durable, oldest first.
	changes []*change
	// Whether TryReadAt and TryWriteAt work, as on a file system with RWF_NOWAIT.
	noTry bool
}

// MemCapacity is what a new Mem holds, in bytes, until SetCapacity.
const MemCapacity = 1 << 40

const memBlock = 4096

// memNode is a file or a directory. Blocks are immutable: a write replaces
// the pointer, so that histories and crash clones share them.
type memNode struct {
	inode uint64
	links int
	opens int

	// A directory.
	entries map[string]*memNode // nil for a file
	durable map[string]*memNode // what a power cut leaves for certain
	lock    *memDir

	// A file. A missing block is a hole.
	size   int64
	blocks map[int64]*[memBlock]byte
	// older holds, for blocks changed since the last sync, what they were: the
	// first is durable, the rest came after it. Any of them, or the present one,
	// may be found after a power cut, sector by sector.
	older map[int64][]*[memBlock]byte
	// sizes are the earlier sizes since the last Sync, the first durable.
	sizes      []int64
	writtenEnd int64 // how far WriteAt reached since the last Sync
}

// change is one directory operation: the names it touched and what they led
// to afterwards. It survives a power cut as a whole or not at all.
type change struct{ edits []edit }

type edit struct {
	dir  *memNode
	name string
	to   *memNode // nil: gone
}

// NewMem returns an empty file system.
func NewMem() *Mem {
	m := &Mem{capacity: MemCapacity, mount: 1}
	m.root = m.newNode(true)
	m.root.links = 1
	return m
}

func (m *Mem) newNode(dir bool) *memNode {
	m.inodes++
	n := &memNode{inode: m.inodes}
	if dir {
		n.entries, n.durable = map[string]*memNode{}, map[string]*memNode{}
	} else {
		n.blocks, n.older = map[int64]*[memBlock]byte{}, map[int64][]*[memBlock]byte{}
	}
	return n
}

// SetCapacity changes the size of the file system, in bytes; below what is used, it is full.
func (m *Mem) SetCapacity(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.capacity = n
}

// SetTry says whether the try-variants work; by default they do.
func (m *Mem) SetTry(on bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.noTry = !on
}

// Remount gives the file system another mount identity, as if it had been
// unmounted (nothing lost) and mounted again.
func (m *Mem) Remount() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mount++
}

// MkdirAll makes a directory and its parents, durably.
func (m *Mem) MkdirAll(path string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	at := m.root
	for _, name := range components(path) {
		next := at.entries[name]
		if next == nil {
			next = m.newNode(true)
			next.links = 1
			at.entries[name] = next
		}
		at.durable[name] = next
		if at = next; at.entries == nil {
			return memErr("mkdir", path, block.ErrNotFound)
		}
	}
	return nil
}

func components(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(s string) bool { return s == "" || s == "." })
}

// OpenDir implements FS.
func (m *Mem) OpenDir(path string) (Dir, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	at := m.root
	for _, name := range components(path) {
		if at = at.entries[name]; at == nil || at.entries == nil {
			return nil, memErr("open directory", path, block.ErrNotFound)
		}
	}
	return m.openDir(at, path), nil
}

func (m *Mem) openDir(n *memNode, name string) *memDir {
	n.opens++
	return &memDir{m: m, n: n, name: name, life: m.life}
}

func memErr(op, name string, kind error) error { return &OpError{Op: op, Name: name, Kind: kind} }

var errDead = errors.New("the process that opened it is gone")

type memDir struct {
	m      *Mem
	n      *memNode
	name   string
	life   int
	closed bool
}

// enter locks the file system for one operation on a live handle.
func (d *memDir) enter(op, name string) error {
	d.m.mu.Lock()
	if d.closed || d.life != d.m.life {
		d.m.mu.Unlock()
		return &OpError{Op: op, Name: name, Kind: block.ErrIO, Cause: errDead}
	}
	if name != d.name {
		if err := checkName(op, name); err != nil {
			d.m.mu.Unlock()
			return err
		}
	}
	return nil
}

func (d *memDir) record(edits ...edit) {
	for _, e := range edits {
		if e.to == nil {
			delete(e.dir.entries, e.name)
		} else {
			e.dir.entries[e.name] = e.to
		}
	}
	d.m.changes = append(d.m.changes, &change{edits})
}

func (d *memDir) Open(name string, flag Flag) (File, error) {
	if err := d.enter("open", name); err != nil {
		return nil, err
	}
	defer d.m.mu.Unlock()
	n := d.n.entries[name]
	switch {
	case n == nil && flag&Create == 0:
		return nil, memErr("open", name, block.ErrNotFound)
	case n == nil:
		n = d.m.newNode(false)
		n.links = 1
		d.record(edit{d.n, name, n})
	case flag&Exclusive != 0:
		return nil, memErr("open", name, block.ErrExists)
	case n.entries != nil:
		return nil, memErr("open", name, block.ErrInvalid)
	}
	n.opens++
	return &memFile{m: d.m, n: n, name: name, life: d.life, flag: flag}, nil
}

func (d *memDir) OpenDir(name string) (Dir, error) {
	if err := d.enter("open directory", name); err != nil {
		return nil, err
	}
	defer d.m.mu.Unlock()
	n := d.n.entries[name]
	if n == nil || n.entries == nil {
		return nil, memErr("open directory", name, block.ErrNotFound)
	}
	return d.m.openDir(n, name), nil
}

func (d *memDir) Mkdir(name string) error {
	if err := d.enter("mkdir", name); err != nil {
		return err
	}
	defer d.m.mu.Unlock()
	if d.n.entries[name] != nil {
		return memErr("mkdir", name, block.ErrExists)
	}
	n := d.m.newNode(true)
	n.links = 1
	d.record(edit{d.n, name, n})
	return nil
}

func (d *memDir) Rename(name string, to Dir, newName string) error {
	target, ok := to.(*memDir)
	if !ok || target.m != d.m {
		return memErr("rename", name, block.ErrInvalid)
	}
	if err := checkName("rename", newName); err != nil {
		return err
	}
	if err := d.enter("rename", name); err != nil {
		return err
	}
	defer d.m.mu.Unlock()
	n, old := d.n.entries[name], target.n.entries[newName]
	if n == nil {
		return memErr("rename", name, block.ErrNotFound)
	}
	if old == n {
		return nil
	}
	if old != nil {
		if (old.entries == nil) != (n.entries == nil) || len(old.entries) > 0 {
			return memErr("rename", name, block.ErrExists)
		}
		d.m.unlinked(old)
	}
	d.record(edit{d.n, name, nil}, edit{target.n, newName, n})
	return nil
}

func (d *memDir) Unlink(name string) error { return d.remove("unlink", name, false) }
func (d *memDir) Rmdir(name string) error  { return d.remove("rmdir", name, true) }

func (d *memDir) remove(op, name string, dir bool) error {
	if err := d.enter(op, name); err != nil {
		return err
	}
	defer d.m.mu.Unlock()
	n := d.n.entries[name]
	switch {
	case n == nil:
		return memErr(op, name, block.ErrNotFound)
	case dir != (n.entries != nil):
		return memErr(op, name, block.ErrInvalid)
	case len(n.entries) > 0:
		return memErr(op, name, block.ErrExists)
	}
	d.record(edit{d.n, name, nil})
	d.m.unlinked(n)
	return nil
}

func (m *Mem) unlinked(n *memNode) {
	n.links--
	m.release(n)
}

// release gives back the space of a file that nothing refers to any more.
// Its blocks stay: a power cut may bring the name back.
func (m *Mem) release(n *memNode) {
	if n.links == 0 && n.opens == 0 {
		m.used -= int64(len(n.blocks)) * memBlock
	}
}

func (d *memDir) ReadDir() ([]Entry, error) {
	if err := d.enter("read directory", d.name); err != nil {
		return nil, err
	}
	defer d.m.mu.Unlock()
	var list []Entry
	for _, name := range slices.Sorted(maps.Keys(d.n.entries)) {
		list = append(list, Entry{Name: name, Dir: d.n.entries[name].entries != nil})
	}
	return list, nil
}

func (d *memDir) Stat(name string) (Info, error) {
	if err := d.enter("stat", name); err != nil {
		return Info{}, err
	}
	defer d.m.mu.Unlock()
	n := d.n.entries[name]
	if n == nil {
		return Info{}, memErr("stat", name, block.ErrNotFound)
	}
	return n.info(), nil
}

func (n *memNode) info() Info {
	return Info{
		Size: n.size, Allocated: int64(len(n.blocks)) * memBlock, Inode: n.inode, Device: 1,
		Links: uint64(n.links), Dir: n.entries != nil,
	}
}

// Sync makes durable what touched this directory, and with it the earlier
// changes to directories it was renamed from or to: a journal knows no other order.
func (d *memDir) Sync() error {
	if err := d.enter("sync directory", d.name); err != nil {
		return err
	}
	defer d.m.mu.Unlock()
	needed := map[*memNode]bool{d.n: true}
	keep := make([]bool, len(d.m.changes))
	for i, c := range slices.Backward(d.m.changes) {
		touches := slices.ContainsFunc(c.edits, func(e edit) bool { return needed[e.dir] })
		for _, e := range c.edits {
			needed[e.dir] = needed[e.dir] || touches
		}
		keep[i] = !touches
	}
	var rest []*change
	for i, c := range d.m.changes {
		if keep[i] {
			rest = append(rest, c)
			continue
		}
		for _, e := range c.edits {
			e.apply(e.dir.durable)
		}
	}
	d.m.changes = rest
	return nil
}

func (e edit) apply(entries map[string]*memNode) {
	if e.to == nil {
		delete(entries, e.name)
	} else {
		entries[e.name] = e.to
	}
}

func (d *memDir) Lock() error {
	if err := d.enter("lock", d.name); err != nil {
		return err
	}
	defer d.m.mu.Unlock()
	if d.n.lock != nil && d.n.lock != d {
		return memErr("lock", d.name, block.ErrInUse)
	}
	d.n.lock = d
	return nil
}

func (d *memDir) Space() (Space, error) {
	if err := d.enter("statfs", d.name); err != nil {
		return Space{}, err
	}
	defer d.m.mu.Unlock()
	return Space{Capacity: d.m.capacity, Available: max(0, d.m.capacity-d.m.used)}, nil
}

func (d *memDir) Identity() (Identity, error) {
	if err := d.enter("stat", d.name); err != nil {
		return Identity{}, err
	}
	defer d.m.mu.Unlock()
	return Identity{Device: 1, Inode: d.n.inode, Mount: fmt.Sprintf("mem/%d", d.m.mount), Type: "mem"}, nil
}

func (d *memDir) Close() error {
	if err := d.enter("close", d.name); err != nil {
		return nil //nolint:nilerr // the handle died with its process
	}
	defer d.m.mu.Unlock()
	d.closed = true
	d.n.opens--
	if d.n.lock == d {
		d.n.lock = nil
	}
	return nil
}
