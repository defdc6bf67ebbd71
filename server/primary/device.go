package primary

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gabion-storage/gabion/server/block"
)

// device is a volume as one stream uses it; it satisfies block.Device.
type device struct {
	v      *volume
	stream block.Stream
	conn   Conn       // the core's
	answer chan error // capacity 1: of Connect

	// Requests submitted and not handed back; Disconnect waits for 0. closing
	// is set before it looks, and whoever reaches 0 looks at closing afterwards.
	pending atomic.Int64
	closing atomic.Bool
	zero    chan struct{} // capacity 1

	// Reads that have to wait for their buffers: one goroutine of this stream does, in order.
	mu        sync.Mutex
	reads     []*Op
	buffering bool
	buffer    func()
}

func newDevice(v *volume, s block.Stream, n name) *device {
	d := &device{v: v, stream: s, answer: make(chan error, 1), zero: make(chan struct{}, 1)}
	d.conn = Conn{Stream: s, Epoch: n.epoch, Number: n.session, Tag: d}
	d.buffer = d.runBuffer
	return d
}

// Info implements block.Device.
func (d *device) Info() block.Info {
	d.v.mu.Lock()
	defer d.v.mu.Unlock()
	return d.v.core.Info(&d.conn)
}

// Info is what a connection's client is told.
func (c *Core) Info(cn *Conn) block.Info { return info(&c.info, cn.readOnly, cn.Number) }

func info(v *VolumeInfo, readOnly bool, n block.SessionNumber) block.Info {
	return block.Info{
		Size: v.Size, MinBlock: 512, PreferredBlock: v.BlockSize,
		ReadOnly: readOnly, MultiConn: true, Resends: n > 0,
	}
}

// Submit implements block.Device.
func (d *device) Submit(batch []*block.Request) {
	d.pending.Add(int64(len(batch)))
	v := d.v
	s := v.scraps.Get().(*scratch)
	s.inline.begin(d.stream)
	v.mu.Lock()
	for _, r := range batch {
		r.Slot = d
		v.core.Submit(&d.conn, r)
	}
	v.pump(s)
	s.inline.begin(nil)
	v.scraps.Put(s)
}

// complete hands a request back to its stream.
func complete(r *block.Request) {
	d := r.Slot.(*device)
	r.Slot = nil
	r.Stream.Complete(r)
	if d.pending.Add(-1) == 0 && d.closing.Load() {
		select {
		case d.zero <- struct{}{}:
		default:
		}
	}
}

// Disconnect implements block.Device.
func (d *device) Disconnect() {
	d.v.event(func(c *Core) { c.Disconnect(&d.conn) })
	d.closing.Store(true)
	for d.pending.Load() != 0 {
		<-d.zero
	}
}

// later has a started read done by the stream's own goroutine: a client that
// does not take its data holds up nobody else.
func (d *device) later(op *Op) {
	d.mu.Lock()
	d.reads = append(d.reads, op)
	start := !d.buffering
	if start {
		d.buffering = true
		d.v.wg.Add(1)
	}
	d.mu.Unlock()
	if start {
		go d.buffer()
	}
}

func (d *device) runBuffer() {
	defer d.v.wg.Done()
	s := d.v.scraps.Get().(*scratch)
	for {
		d.mu.Lock()
		if len(d.reads) == 0 {
			d.buffering = false
			d.mu.Unlock()
			d.v.scraps.Put(s)
			return
		}
		op := d.reads[0]
		d.reads = slices.Delete(d.reads, 0, 1)
		d.mu.Unlock()
		if err := d.stream.ReadBuffer(op.Req); err != nil {
			op.Err = errConnClosed
			for i := range op.IOs {
				s.finished = append(s.finished, &op.IOs[i])
			}
		} else {
			d.v.read(op, s)
		}
		d.v.finish(s)
	}
}

// Status implements block.Device. It does not wait: what is blocked, or cannot be told, is called data.
func (d *device) Status(dst []block.Status, off, length int64, limit int) ([]block.Status, error) {
	first := len(dst)
	for length > 0 && len(dst)-first < limit {
		d.v.mu.Lock()
		p := d.v.core.Look(off, off+length)
		d.v.mu.Unlock()
		from := len(dst)
		switch {
		case p.Unborn:
			dst = append(dst, block.Status{Length: p.Length, Hole: true, Zero: true})
		case p.Member == nil:
			dst = append(dst, block.Status{Length: p.Length})
		default:
			more, err := p.Member.Status(dst, off, p.Length, limit-(len(dst)-first))
			if err != nil { // the disk's instance has ended, or fails here: a read finds out
				more = append(dst[:from], block.Status{Length: p.Length})
			}
			dst = more
		}
		covered := int64(0)
		for _, s := range dst[from:] {
			covered += s.Length
		}
		if covered <= 0 || covered > p.Length {
			return dst[:first], fmt.Errorf("%w: a status of %d bytes covers %d", block.ErrIO, p.Length, covered)
		}
		if from > first && from < len(dst) && sameKind(dst[from-1], dst[from]) {
			dst[from-1].Length += dst[from].Length
			dst = slices.Delete(dst, from, from+1)
		}
		off += covered
		length -= covered
	}
	return dst, nil
}

func sameKind(a, b block.Status) bool { return a.Hole == b.Hole && a.Zero == b.Zero }

// Stretch is a part of the address space with one answer to where it is.
type Stretch struct {
	Length int64
	Unborn bool
	Member Member // of one copy that serves it; nil: unborn, or blocked
}

// Look says where the beginning of [off, end) is, for BLOCK_STATUS.
func (c *Core) Look(off, end int64) Stretch {
	set, stop := c.stretch(off, end)
	s := Stretch{Length: stop - off, Unborn: set < firstSet}
	if s.Unborn {
		return s
	}
	for _, cp := range c.runs.set(set).copies {
		if cp.isMember() && cp.serves(c.geometry, off, stop) {
			s.Member = cp.Member
			break
		}
	}
	return s
}
