package image

import (
	"sync"

	"github.com/gabion-storage/gabion/server/vfs"
)

const (
	bounceSize  = 1 << 20   // bytes of one aligned buffer
	bounceCount = 8         // per disk; who finds none waits
	zerosSize   = 256 << 10 // bytes written at once where zeros have to be written
)

// buffers are the aligned buffers of a direct disk, for what its callers did
// not align. An operation holds one at a time, so waiting always ends.
type buffers struct {
	slots chan struct{}
	pool  sync.Pool
	zeros func() []byte // never written
}

func newBuffers() *buffers {
	return &buffers{
		slots: make(chan struct{}, bounceCount),
		pool:  sync.Pool{New: func() any { b := vfs.AlignedBuffer(bounceSize); return &b }},
		zeros: sync.OnceValue(func() []byte { return vfs.AlignedBuffer(zerosSize) }),
	}
}

func (b *buffers) get() *[]byte {
	b.slots <- struct{}{}
	return b.pool.Get().(*[]byte)
}

func (b *buffers) put(p *[]byte) {
	b.pool.Put(p)
	<-b.slots
}
