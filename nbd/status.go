package nbd

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
)

const (
	allocationID = uint32(1) // of base:allocation, on every connection
	maxStatus    = 16384     // descriptors in one reply
)

// statusQueue is the BLOCK_STATUS requests of one connection. They may have to
// look at a disk, so a goroutine that lives while there are any asks the
// Device, one after the other.
type statusQueue struct {
	mu      sync.Mutex
	waiting []*request
	running bool
	done    sync.WaitGroup
}

func (q *statusQueue) wait() { q.done.Wait() }

// next takes the first request; nil ends the goroutine.
func (q *statusQueue) next() *request {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.running, q.waiting = false, nil
		return nil
	}
	r := q.waiting[0]
	q.waiting = q.waiting[1:]
	return r
}

// askStatus queues a checked BLOCK_STATUS.
func (c *conn) askStatus(r *request, h wire.Request) error {
	r.Offset, r.Length = int64(h.Offset), int64(h.Length)
	r.reqOne = h.Flags&wire.CmdFlagReqOne != 0
	if err := c.enterOne(r); err != nil {
		return err
	}
	q := &c.status
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, r)
	if !q.running {
		q.running = true
		q.done.Go(c.answerStatus)
	}
	return nil
}

func (c *conn) answerStatus() {
	var found []block.Status
	for r := c.status.next(); r != nil; r = c.status.next() {
		limit := maxStatus
		if r.reqOne {
			limit = 1
		}
		if c.why() != nil {
			r.Err = errShutdown
		} else if found, r.Err = c.dev.Status(found[:0], r.Offset, r.Length, limit); r.Err == nil {
			r.Err = c.describe(r, found)
		}
		c.complete(r)
	}
}

// describe writes the descriptors of r's range as the payload of its reply.
// Neighbours that say the same are joined, and the last ends with the range.
func (c *conn) describe(r *request, found []block.Status) error {
	weight := sizeOf(int64(4 + 8*len(found)))
	if err := c.replies.take(weight); err != nil {
		return err
	}
	r.taken, r.buf = weight, c.srv.pools.get(4+8*len(found))
	p := r.buf.data
	binary.BigEndian.PutUint32(p, allocationID)
	n := 4
	var length int64
	var flags uint32
	left := r.Length
	emit := func() {
		if length > 0 {
			binary.BigEndian.PutUint32(p[n:], uint32(length))
			binary.BigEndian.PutUint32(p[n+4:], flags)
			n += 8
		}
	}
	for _, s := range found {
		if f := statusFlags(s); f != flags || length == 0 {
			emit()
			length, flags = 0, f
		}
		take := min(s.Length, left)
		length += take
		if left -= take; left == 0 {
			break
		}
	}
	emit()
	if n == 4 {
		return fmt.Errorf("nbd: the device describes nothing of %d bytes at %d: %w", r.Length, r.Offset, block.ErrIO)
	}
	r.Data = p[:n]
	return nil
}

func statusFlags(s block.Status) (flags uint32) {
	if s.Hole {
		flags |= wire.StatusHole
	}
	if s.Zero {
		flags |= wire.StatusZero
	}
	return flags
}
