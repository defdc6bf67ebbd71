package nbd

import (
	"math/bits"
	"sync"
)

const (
	minClass = 12 // 4 KiB: a multiple of every block, and aligned to it (see pools.get)
	maxClass = 25 // 32 MiB: block.MaxPayload
	// chunk is the size of a connection's read buffer and of an arena.
	chunkClass = 18
	chunkSize  = 1 << chunkClass
)

// buffer is pooled memory of one size class.
type buffer struct {
	data []byte // 1<<class bytes
	// An arena's state, guarded by its connection's mu.
	used int // bytes handed out
	refs int // replies that have space in it; at 0 used may start again
}

// pools hands out buffers of powers of two. What is free belongs to the
// garbage collector's pools, so an idle server gives it back.
type pools struct {
	classes [maxClass + 1]sync.Pool
}

// classOf is the smallest class that holds n bytes, 0 < n ≤ block.MaxPayload.
func classOf(n int) int { return max(minClass, bits.Len(uint(n-1))) }

// sizeOf is what a buffer for n bytes weighs in a budget.
func sizeOf(n int64) int64 { return 1 << classOf(int(n)) }

// get returns a buffer of at least n bytes with any content. Its memory is
// aligned to 4 KiB: the allocator places objects of these sizes at multiples
// of the page or of their own size.
func (p *pools) get(n int) *buffer {
	class := classOf(n)
	if b, ok := p.classes[class].Get().(*buffer); ok {
		return b
	}
	return &buffer{data: make([]byte, 1<<class)}
}

func (p *pools) put(b *buffer) {
	b.used, b.refs = 0, 0
	p.classes[classOf(len(b.data))].Put(b)
}
