package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// groupsPerNode makes a node cover 8192 extents: 512 GiB of a volume with
// extents of 64 MiB, in 2 KiB of memory.
const groupsPerNode = 128

// index is head.idx in memory. Which extents are present is a bit each, read
// without a lock; records are kept only for groups with marks or running
// writes, so an idle volume costs next to nothing.
//
// Locks, in order: turn, then mu.
type index struct {
	file     vfs.File
	geometry block.Geometry
	failed   func(error) error // judges a failed write or sync of the file: ErrNoSpace goes on, the rest ends the instance
	inject   func() error      // fault point disk.record
	syncs    *atomic.Uint64    // counts syncs of the file

	// turn is held by whoever writes to the file, across the I/O.
	turn   turn
	header header // guarded by turn

	commits rounds // shared commits of marks

	// mu is held for moments, never across I/O, and guards what follows.
	mu    sync.Mutex
	queue []*record // have wanted marks
	// tree is replaced when the volume grows; its pointers are set once.
	tree atomic.Pointer[[]atomic.Pointer[node]]
	// completed counts finished writes to the image, from 1: the open counts as one.
	completed atomic.Uint64
	// synced is the value of completed that the last good sync of the image covered.
	synced atomic.Uint64
}

type node [groupsPerNode]group

type group struct {
	// Bit i: extent i of the group has a good record and a file behind it. Changed only under mu.
	present atomic.Uint64
	// nil: no marks, no running writes; the records are in the file. Guarded by mu.
	live *records
}

type records [slotsPerPage]record

// record is an extent's record and what runs on it; guarded by index.mu.
type record struct {
	slot // as it is on disk, except that marks being cleared are gone already

	damaged bool           // neither slot on disk is good
	wanted  uint64         // marks asked for that are not durable yet
	queued  bool           // in index.queue
	busy    int32          // writes running on the extent
	seq     block.Sequence // the newest write in the sealed generation
	tick    uint64         // index.completed when the last write finished
}

// clean: the record needs no place in memory.
func (r *record) clean() bool {
	return r.behind|r.unflushed|r.wanted == 0 && !r.queued && r.busy == 0
}

// nodesFor is how many nodes a volume of size bytes needs, whole runs counted.
func (x *index) nodesFor(size int64) int {
	extents := x.geometry.Runs(size) * block.ExtentsPerRun
	return int((extents + groupsPerNode*slotsPerPage - 1) / (groupsPerNode * slotsPerPage))
}

// resize makes room for a volume of size bytes. Called with mu held, or before use.
func (x *index) resize(size int64) {
	n := x.nodesFor(size)
	old := x.tree.Load()
	if old != nil && len(*old) >= n {
		return
	}
	tree := make([]atomic.Pointer[node], n)
	if old != nil {
		for i := range *old {
			tree[i].Store((*old)[i].Load())
		}
	}
	x.tree.Store(&tree)
}

// group is nil if nothing was ever born near e. Safe without a lock.
func (x *index) group(e block.ExtentIndex) *group {
	tree := *x.tree.Load()
	k := int(e / slotsPerPage)
	if k/groupsPerNode >= len(tree) {
		return nil
	}
	n := tree[k/groupsPerNode].Load()
	if n == nil {
		return nil
	}
	return &n[k%groupsPerNode]
}

// makeGroup is group that is never nil; e is in the tree. Called with mu held, or before use.
func (x *index) makeGroup(e block.ExtentIndex) *group {
	p := &(*x.tree.Load())[e/slotsPerPage/groupsPerNode]
	if p.Load() == nil {
		p.Store(new(node))
	}
	return x.group(e)
}

// present reports whether e can be read and written. Safe without a lock.
func (x *index) present(e block.ExtentIndex) bool {
	g := x.group(e)
	return g != nil && g.present.Load()>>(e%slotsPerPage)&1 != 0
}

// absent is the first extent of [off, off+length) that is not present; ok if all are.
func (x *index) absent(off, length int64) (e block.ExtentIndex, ok bool) {
	last := x.geometry.Extent(off + length - 1)
	for e = x.geometry.Extent(off); e <= last; e++ {
		if !x.present(e) {
			return e, false
		}
	}
	return 0, true
}

// record is e's record if its group is in memory. Called with mu held.
func (x *index) record(e block.ExtentIndex) *record {
	g := x.group(e)
	if g == nil || g.live == nil {
		return nil
	}
	return &g.live[e%slotsPerPage]
}

// each visits all records in memory. Called with mu held.
func (x *index) each(visit func(*record)) {
	x.eachGroup(func(g *group) {
		for i := range g.live {
			visit(&g.live[i])
		}
	})
}

func (x *index) eachGroup(visit func(*group)) {
	for i := range *x.tree.Load() {
		n := (*x.tree.Load())[i].Load()
		if n == nil {
			continue
		}
		for j := range n {
			if n[j].live != nil {
				visit(&n[j])
			}
		}
	}
}

// writtenOutside lists the extents that are present, were written, and belong to none of the runs.
func (x *index) writtenOutside(runs map[block.RunIndex]bool) ([]block.ExtentIndex, error) {
	x.turn.Lock()
	defer x.turn.Unlock()
	var found []block.ExtentIndex
	groups := x.nodesFor(x.header.size) * groupsPerNode
	for k := range groups {
		first := block.ExtentIndex(k * slotsPerPage)
		g := x.group(first)
		if g == nil {
			continue
		}
		for here := g.present.Load(); here != 0; here &= here - 1 {
			e := first + block.ExtentIndex(bits.TrailingZeros64(here))
			if runs[e.RunOf()] {
				continue
			}
			if err := x.loadInTurn(e); err != nil {
				return nil, err
			}
			x.mu.Lock()
			if r := x.record(e); r != nil && r.flags&written != 0 {
				found = append(found, e)
			}
			x.mu.Unlock()
		}
	}
	return found, nil
}

// load brings the records of e's group into memory.
func (x *index) load(e block.ExtentIndex) error {
	x.turn.Lock()
	defer x.turn.Unlock()
	return x.loadInTurn(e)
}

func (x *index) loadInTurn(e block.ExtentIndex) error {
	x.mu.Lock()
	loaded := x.record(e) != nil
	x.mu.Unlock()
	if loaded {
		return nil
	}
	k := int64(e / slotsPerPage)
	pages := make([]byte, groupSize)
	if err := readUpTo(x.file, pages, groupOffset(k)); err != nil {
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.makeGroup(e).live = decodeGroup(pages, k, x.completed.Load())
	return nil
}

// readUpTo fills p with zeros behind the end of the file: a head.idx that was cut short has no records there.
func readUpTo(f vfs.File, p []byte, off int64) error {
	n, err := f.ReadAt(p, off)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	clear(p[n:])
	return nil
}

func decodeGroup(pages []byte, k int64, tick uint64) *records {
	live := new(records)
	for i := range live {
		e := block.ExtentIndex(k*slotsPerPage + int64(i))
		s, state := decodeRecord(pages[i*slotSize:], pages[pageSize+i*slotSize:], e)
		live[i] = record{slot: s, damaged: state == damaged, tick: tick}
	}
	return live
}

// scan is what opening reads: every part of the file that holds anything.
// fileSize is head.img's: an extent behind it is not present.
func (x *index) scan(fileSize int64) (damage int, err error) {
	const chunk = 32 * groupSize
	groups := int64(x.nodesFor(x.header.size)) * groupsPerNode
	var buf []byte
	for k := int64(0); k < groups; {
		at, err := x.file.SeekData(groupOffset(k))
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return damage, err
		}
		if buf == nil {
			buf = make([]byte, chunk)
		}
		k = max(k, (at-headerSize)/groupSize)
		if err := readUpTo(x.file, buf, groupOffset(k)); err != nil {
			return damage, err
		}
		for i := 0; i < len(buf) && k < groups; i += groupSize {
			damage += x.adopt(buf[i:i+groupSize], k, fileSize)
			k++
		}
	}
	return damage, nil
}

// adopt takes over one group as scan read it, and counts damaged records.
func (x *index) adopt(pages []byte, k, fileSize int64) (damage int) {
	if bytes.Count(pages, []byte{0}) == len(pages) {
		return 0
	}
	live := decodeGroup(pages, k, x.completed.Load())
	g := x.makeGroup(block.ExtentIndex(k * slotsPerPage))
	clean := true
	for i := range live {
		r := &live[i]
		clean = clean && r.clean()
		if r.damaged {
			damage++
		}
		if r.flags&present != 0 && min(x.header.size, (int64(r.extent)+1)*x.geometry.ExtentSize) <= fileSize {
			g.present.Store(g.present.Load() | 1<<i)
		}
	}
	if !clean {
		g.live = live
	}
	return damage
}

// writeSlots writes records to their places and syncs the file. Called in turn.
func (x *index) writeSlots(slots []slot) error {
	if err := x.inject(); err != nil {
		return x.failed(err)
	}
	var p [slotSize]byte
	for i := range slots {
		slots[i].encode(p[:])
		if _, err := x.file.WriteAt(p[:], slots[i].offset()); err != nil {
			return x.failed(err)
		}
	}
	return x.sync()
}

func (x *index) sync() error {
	x.syncs.Add(1)
	if err := x.file.Datasync(); err != nil {
		return x.failed(fmt.Errorf("%w: %w", errSync, err))
	}
	return nil
}

// writeHeader replaces the header, durably. Called in turn.
func (x *index) writeHeader(h header) error {
	h.counter = x.header.counter + 1
	if err := x.inject(); err != nil {
		return x.failed(err)
	}
	if _, err := x.file.WriteAt(h.encode(), h.offset()); err != nil {
		return x.failed(err)
	}
	if err := x.sync(); err != nil {
		return err
	}
	x.header = h
	return nil
}
