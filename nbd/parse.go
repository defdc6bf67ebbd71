package nbd

import (
	"fmt"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// parse takes one request out of the read buffer, which holds at least its
// header, and puts it into the batch; or answers it, if it is refused.
func (c *conn) parse() error {
	rd := &c.reader
	h, ok := parseHeader(rd.in.data[rd.r:rd.w])
	if !ok {
		return errMagic
	}
	rd.r += requestHeaderSize
	if h.command == protocol.TRANSMISSION_TYPE_REQUEST_DISC {
		if err := c.submit(); err != nil {
			return err
		}
		return errDisconnect
	}
	refusal := c.check(h)
	r := c.request()
	r.command, r.Cookie, r.Stream, r.Start = h.command, h.cookie, c, int64(rd.readAt)
	switch {
	case h.command == protocol.TRANSMISSION_TYPE_REQUEST_WRITE:
		if refusal != nil {
			if err := c.refusedPayload(r, h); err != nil {
				return err
			}
			break
		}
		return c.parseWrite(r, h)
	case refusal != nil:
	case h.command == cmdBlockStatus:
		return c.askStatus(r, h)
	default:
		rd.limit = chunkSize
		c.accept(r, h, opOf(h.command))
		if r.Op == block.OpRead {
			rd.bytes += r.Length
		}
		return nil
	}
	r.Err = refusal
	if err := c.enterOne(r); err != nil {
		return err
	}
	c.complete(r)
	return nil
}

// accept puts a checked request into the batch.
func (c *conn) accept(r *request, h header, op block.Op) {
	r.Op = op
	r.FUA = h.flags&cmdFlagFUA != 0
	r.NoHole = h.flags&cmdFlagNoHole != 0
	r.Offset, r.Length = int64(h.offset), int64(h.length)
	r.observed = c.observer != nil
	c.reader.batch = append(c.reader.batch, &r.Request)
}

// parseWrite reads a write's payload. Nothing parsed before waits for it.
func (c *conn) parseWrite(r *request, h header) error {
	rd := &c.reader
	n := int(h.length)
	weight := sizeOf(int64(n))
	if !c.payloads.try(weight) {
		err := c.submit()
		if err == nil {
			err = c.payloads.take(weight)
		}
		if err == nil {
			if err = c.tooLate(c.srv.now()); err != nil {
				c.payloads.put(weight)
			}
		}
		if err != nil {
			c.unused(r)
			return err
		}
	}
	r.Op, r.taken, r.buf = block.OpWrite, weight, c.srv.pools.get(n)
	rd.limit = chunkSize
	if n >= largePayload {
		rd.limit = shortFill
	}
	r.Data = r.buf.data[:n:n]
	if n > rd.w-rd.r {
		if err := c.submit(); err != nil {
			c.unused(r)
			return err
		}
	}
	if err := c.readFull(r.Data); err != nil {
		c.unused(r)
		return err
	}
	r.Start = int64(rd.readAt)
	c.accept(r, h, block.OpWrite)
	rd.bytes += int64(n)
	return nil
}

// refusedPayload reads and drops what comes with a refused write.
func (c *conn) refusedPayload(r *request, h header) error {
	err := c.submit()
	if err == nil && h.length > maxDrain {
		err = fmt.Errorf("nbd: a write of %d bytes: %w", h.length, block.ErrTooLarge)
	}
	if err == nil {
		err = c.discard(int64(h.length))
	}
	if err != nil {
		c.unused(r)
	}
	return err
}

// enterOne counts a request that is not submitted as in flight; its reply is not gathered.
func (c *conn) enterOne(r *request) error {
	if err := c.submit(); err != nil { // what came before is not held up by what is refused
		c.unused(r)
		return err
	}
	if err := c.enter(1); err != nil {
		c.unused(r)
		return err
	}
	c.mu.Lock()
	c.gathering = false
	c.mu.Unlock()
	return nil
}

// unused takes back a request that came to nothing.
func (c *conn) unused(r *request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inflight++ // recycle counts it down
	r.observed = false
	c.recycle(r)
}

// opOf is the operation of a checked command.
func opOf(command uint16) block.Op {
	switch command {
	case protocol.TRANSMISSION_TYPE_REQUEST_READ:
		return block.OpRead
	case cmdFlush:
		return block.OpFlush
	case cmdTrim:
		return block.OpTrim
	case cmdWriteZeroes:
		return block.OpZero
	}
	panic(fmt.Sprintf("nbd: command %d passed the check", command))
}

// check judges a request completely. It returns a bare sentinel, so that refusing allocates nothing.
func (c *conn) check(h header) error {
	const (
		read  = protocol.TRANSMISSION_TYPE_REQUEST_READ
		write = protocol.TRANSMISSION_TYPE_REQUEST_WRITE
	)
	flags := cmdFlagFUA
	longest := uint32(maxZeroLength)
	switch h.command {
	case read:
		if longest = block.MaxPayload; c.structured {
			flags |= cmdFlagDF
		}
	case write:
		longest = block.MaxPayload
	case cmdWriteZeroes:
		flags |= cmdFlagNoHole
	case cmdTrim:
	case cmdBlockStatus:
		if !c.allocation {
			return block.ErrInvalid
		}
		flags |= cmdFlagReqOne
	case cmdFlush:
		if h.flags&^flags != 0 || h.length != 0 || h.offset != 0 {
			return block.ErrInvalid
		}
		return nil
	default:
		return block.ErrInvalid
	}
	if h.flags&^flags != 0 {
		return block.ErrInvalid
	}
	changes := h.command == write || h.command == cmdTrim || h.command == cmdWriteZeroes
	if changes && c.info.ReadOnly {
		return block.ErrReadOnly
	}
	if h.length == 0 || h.length > longest || (h.offset|uint64(h.length))%minBlock != 0 {
		return block.ErrInvalid
	}
	if !c.within(h) {
		if h.command == write || h.command == cmdWriteZeroes {
			return block.ErrNoSpace
		}
		return block.ErrInvalid
	}
	return nil
}

// within checks the bounds, against the size that the Device has now.
func (c *conn) within(h header) bool {
	inside := func() bool {
		return h.offset <= uint64(c.size) && uint64(h.length) <= uint64(c.size)-h.offset
	}
	if inside() {
		return true
	}
	c.size = max(c.size, c.dev.Info().Size)
	return inside()
}
