package nbd

import (
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// The role of reading a connection belongs to one goroutine at a time. A Device
// that does a request in line on it may have to wait for a disk (Blocking); then
// another goroutine reads on, so that no disk ever holds up the reader: bytes
// that lie unread for too long cost the connection (see DESIGN.md).

// takeoverTime is how long the reader may wait in Submit before it is replaced.
const takeoverTime = 4 * time.Millisecond

// deliver calls Submit and reports whether the caller still has the role of reading.
func (c *conn) deliver(batch []*block.Request, at where) bool {
	c.mu.Lock()
	reads := c.reads
	c.between = at == between
	c.mu.Unlock()

	c.dev.Submit(batch)

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reads != reads {
		return false // what is the reader's is not ours any more
	}
	c.between, c.blocking = false, false
	return true
}

// Blocking implements block.Stream.
func (c *conn) Blocking(handOff func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.between {
		return false
	}
	c.blocking, c.handOff = true, handOff
	if c.takeover == nil {
		c.takeover = time.AfterFunc(takeoverTime, c.takeOver)
	} else {
		c.takeover.Reset(takeoverTime)
	}
	return true
}

// takeOver makes the calling goroutine the reader if the present one still
// waits. A timer of an earlier Submit may do it too soon, which is harmless.
func (c *conn) takeOver() {
	c.mu.Lock()
	if !c.blocking {
		c.mu.Unlock()
		return
	}
	c.between, c.blocking = false, false
	c.reads++
	c.srv.running.Add(1) // the old reader counts until it has found out, so this is not from 0
	defer c.srv.running.Done()
	c.gathering = false
	c.wakeWriter()
	handOff := c.handOff
	c.mu.Unlock()
	handOff()

	rd := &c.reader
	clear(rd.batch)
	rd.batch, rd.bytes, rd.unsent = rd.batch[:0], 0, false
	c.readOn(c.heldUp(c.srv.now()))
}
