package vfs

import (
	"io"
	"maps"
	"slices"

	"github.com/gabion-storage/gabion/server/block"
)

// maxOlder bounds how many earlier contents of a block are remembered: the
// durable one and the newest of the others.
const maxOlder = 8

type memFile struct {
	m    *Mem
	n    *memNode
	name string
	life int
	flag Flag
}

func (f *memFile) enter(op string) error {
	f.m.mu.Lock()
	if f.life != f.m.life || f.n == nil {
		f.m.mu.Unlock()
		return &OpError{Op: op, Name: f.name, Kind: block.ErrIO, Cause: errDead}
	}
	return nil
}

// enterIO also checks what direct I/O demands, so that a mistake shows in memory too.
func (f *memFile) enterIO(op string, p []byte, off int64, writes bool) error {
	if off < 0 || f.flag&Direct != 0 && (off%DirectAlign != 0 || !Aligned(p)) || writes && f.flag&ReadOnly != 0 {
		return memErr(op, f.name, block.ErrInvalid)
	}
	return f.enter(op)
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.enterIO("read", p, off, false); err != nil {
		return 0, err
	}
	defer f.m.mu.Unlock()
	n := int(max(0, min(int64(len(p)), f.n.size-off)))
	for done := 0; done < n; {
		at := off + int64(done)
		in := at % memBlock
		part := p[done:min(n, done+int(memBlock-in))]
		if b := f.n.blocks[at/memBlock]; b != nil {
			copy(part, b[in:])
		} else {
			clear(part)
		}
		done += len(part)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.enterIO("write", p, off, true); err != nil {
		return 0, err
	}
	defer f.m.mu.Unlock()
	done := 0
	for done < len(p) {
		at := off + int64(done)
		in := at % memBlock
		part := p[done:min(len(p), done+int(memBlock-in))]
		if f.n.blocks[at/memBlock] == nil && f.m.used+memBlock > f.m.capacity {
			return done, memErr("write", f.name, block.ErrNoSpace)
		}
		f.edit(at/memBlock, func(b *[memBlock]byte) { copy(b[in:], part) })
		done += len(part)
		f.n.writtenEnd = max(f.n.writtenEnd, at+int64(len(part)))
		if end := at + int64(len(part)); end > f.n.size {
			f.resize(end)
		}
	}
	return done, nil
}

// edit replaces a block by a changed copy and remembers what it was.
func (f *memFile) edit(i int64, change func(*[memBlock]byte)) {
	b := new([memBlock]byte)
	if old := f.n.blocks[i]; old != nil {
		*b = *old
	} else {
		f.m.used += memBlock
	}
	change(b)
	f.remember(i)
	f.n.blocks[i] = b
}

func (f *memFile) remember(i int64) {
	h := append(f.n.older[i], f.n.blocks[i])
	if len(h) > maxOlder {
		h = slices.Delete(h, 1, 2)
	}
	f.n.older[i] = h
}

func (f *memFile) resize(size int64) {
	f.n.sizes = append(f.n.sizes, f.n.size)
	f.n.size = size
}

func (f *memFile) TryReadAt(p []byte, off int64) (int, error) {
	if f.tryRefused() {
		return 0, block.ErrUnsupported
	}
	n, err := f.ReadAt(p, off)
	if err == io.EOF { //nolint:errorlint // ReadAt returns it bare
		err = nil
	}
	return n, err
}

func (f *memFile) TryWriteAt(p []byte, off int64) (int, error) {
	if f.tryRefused() {
		return 0, block.ErrUnsupported
	}
	return f.WriteAt(p, off)
}

func (f *memFile) tryRefused() bool {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return f.m.noTry || f.flag&Direct != 0
}

func (f *memFile) Datasync() error {
	if err := f.enter("datasync"); err != nil {
		return err
	}
	defer f.m.mu.Unlock()
	clear(f.n.older)
	if len(f.n.sizes) > 0 {
		// Only as much of the size as the data needs to be found again.
		f.n.sizes = []int64{max(f.n.sizes[0], min(f.n.size, f.n.writtenEnd))}
	}
	return nil
}

func (f *memFile) Sync() error {
	if err := f.enter("sync"); err != nil {
		return err
	}
	defer f.m.mu.Unlock()
	clear(f.n.older)
	f.n.sizes, f.n.writtenEnd = nil, 0
	return nil
}

func (f *memFile) PunchHole(off, length int64) error {
	if err := f.enter("punch"); err != nil {
		return err
	}
	defer f.m.mu.Unlock()
	if off < 0 || length <= 0 {
		return memErr("punch", f.name, block.ErrInvalid)
	}
	f.zeroBlocks(off, min(off+length, f.n.size), true)
	return nil
}

// zeroBlocks clears [off, end) and, with free, gives back the whole blocks in
// it. It visits what is allocated, not the range: ranges may be terabytes.
func (f *memFile) zeroBlocks(off, end int64, free bool) {
	for _, i := range slices.Sorted(maps.Keys(f.n.blocks)) {
		start := i * memBlock
		from, to := max(off, start), min(end, start+memBlock)
		switch {
		case from >= to:
		case free && (to-from == memBlock || from == start && to == f.n.size):
			f.remember(i)
			delete(f.n.blocks, i)
			f.m.used -= memBlock
		default:
			f.edit(i, func(b *[memBlock]byte) { clear(b[from-start : to-start]) })
		}
	}
}

func (f *memFile) ZeroRange(off, length int64) error {
	if err := f.enter("zero"); err != nil {
		return err
	}
	defer f.m.mu.Unlock()
	if off < 0 || length <= 0 {
		return memErr("zero", f.name, block.ErrInvalid)
	}
	f.zeroBlocks(off, off+length, false)
	for i := off / memBlock; i <= (off+length-1)/memBlock; i++ {
		if f.n.blocks[i] != nil {
			continue
		}
		if f.m.used+memBlock > f.m.capacity {
			return memErr("zero", f.name, block.ErrNoSpace)
		}
		f.edit(i, func(*[memBlock]byte) {})
	}
	return nil
}

func (f *memFile) Truncate(size int64) error {
	if err := f.enter("truncate"); err != nil {
		return err
	}
	defer f.m.mu.Unlock()
	if size < 0 {
		return memErr("truncate", f.name, block.ErrInvalid)
	}
	if size < f.n.size {
		f.zeroBlocks(size, f.n.size, true)
	}
	f.resize(size)
	return nil
}

// Evict has nothing to drop: nothing is cached that differs from the disk.
func (f *memFile) Evict() error {
	if err := f.enter("evict"); err != nil {
		return err
	}
	f.m.mu.Unlock()
	return nil
}

func (f *memFile) SeekData(off int64) (int64, error) {
	if err := f.enter("seek"); err != nil {
		return 0, err
	}
	defer f.m.mu.Unlock()
	best := int64(-1)
	for i := range f.n.blocks {
		if start := i * memBlock; start+memBlock > off && start < f.n.size && (best < 0 || start < best) {
			best = start
		}
	}
	if best < 0 || off >= f.n.size {
		return 0, io.EOF
	}
	return max(best, off), nil
}

func (f *memFile) SeekHole(off int64) (int64, error) {
	if err := f.enter("seek"); err != nil {
		return 0, err
	}
	defer f.m.mu.Unlock()
	if off >= f.n.size {
		return 0, io.EOF
	}
	for at := off; at < f.n.size; at = (at/memBlock + 1) * memBlock {
		if f.n.blocks[at/memBlock] == nil {
			return at, nil
		}
	}
	return f.n.size, nil
}

func (f *memFile) Mapped(off, length int64) (bool, error) {
	if err := f.enter("map"); err != nil {
		return false, err
	}
	defer f.m.mu.Unlock()
	for i := off / memBlock; i <= (off+length-1)/memBlock; i++ {
		if f.n.blocks[i] == nil {
			return false, nil
		}
	}
	return true, nil
}

func (f *memFile) CloneFrom(src File) error {
	s, ok := src.(*memFile)
	if !ok || s.m != f.m {
		return memErr("clone", f.name, block.ErrUnsupported)
	}
	if err := f.enter("clone"); err != nil {
		return err
	}
	defer f.m.mu.Unlock()
	f.zeroBlocks(0, f.n.size, true)
	for i, b := range s.n.blocks {
		f.remember(i)
		f.n.blocks[i] = b
		f.m.used += memBlock
	}
	f.resize(s.n.size)
	return nil
}

func (f *memFile) Stat() (Info, error) {
	if err := f.enter("stat"); err != nil {
		return Info{}, err
	}
	defer f.m.mu.Unlock()
	return f.n.info(), nil
}

func (f *memFile) Close() error {
	if err := f.enter("close"); err != nil {
		return nil //nolint:nilerr // the handle died with its process
	}
	defer f.m.mu.Unlock()
	f.n.opens--
	f.m.release(f.n)
	f.n = nil
	return nil
}
