package nbd

import (
	"fmt"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

const (
	minBlock      = 512
	maxZeroLength = 1<<32 - minBlock // of a command without payload
)

// parse takes one request out of the read buffer, which holds at least its
// header, and puts it into the batch; or answers it, if it is refused.
func (c *conn) parse() error {
	rd := &c.reader
	h, ok := wire.ParseRequest(rd.in.data[rd.r:rd.w])
	if !ok {
		return errMagic
	}
	if h.Command == protocol.TRANSMISSION_TYPE_REQUEST_WRITE && int64(h.Length) > int64(rd.w-rd.r-wire.RequestSize) {
		// Nothing parsed before waits for the payload.
		if err := c.submit(between); err != nil {
			return err
		}
	}
	rd.r += wire.RequestSize
	if h.Command == protocol.TRANSMISSION_TYPE_REQUEST_DISC {
		if err := c.submit(within); err != nil {
			return err
		}
		return errDisconnect
	}
	refusal := c.check(h)
	r := c.request()
	r.command, r.Cookie, r.Stream, r.Start = h.Command, h.Cookie, c, int64(rd.readAt)
	switch {
	case h.Command == protocol.TRANSMISSION_TYPE_REQUEST_WRITE:
		if refusal != nil {
			if err := c.refusedPayload(r, h); err != nil {
				return err
			}
			break
		}
		return c.parseWrite(r, h)
	case refusal != nil:
	case h.Command == wire.CmdBlockStatus:
		return c.askStatus(r, h)
	default:
		c.accept(r, h, opOf(h.Command))
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
func (c *conn) accept(r *request, h wire.Request, op block.Op) {
	r.Op = op
	r.FUA = h.Flags&wire.CmdFlagFUA != 0
	r.NoHole = h.Flags&wire.CmdFlagNoHole != 0
	r.Offset, r.Length = int64(h.Offset), int64(h.Length)
	r.observed = c.observer != nil
	c.reader.batch = append(c.reader.batch, &r.Request)
}

// parseWrite reads a write's payload. If that has to be waited for, the batch is empty.
func (c *conn) parseWrite(r *request, h wire.Request) error {
	rd := &c.reader
	n := int(h.Length)
	weight := sizeOf(int64(n))
	if !c.payloads.try(weight) {
		err := c.submit(within)
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
	r.Data = r.buf.data[:n:n]
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
func (c *conn) refusedPayload(r *request, h wire.Request) error {
	err := c.submit(within)
	if err == nil && h.Length > maxDrain {
		err = fmt.Errorf("nbd: a write of %d bytes: %w", h.Length, block.ErrTooLarge)
	}
	if err == nil {
		err = c.discard(int64(h.Length))
	}
	if err != nil {
		c.unused(r)
	}
	return err
}

// enterOne counts a request that is not submitted as in flight; its reply does not wait for flush.
func (c *conn) enterOne(r *request) error {
	if err := c.submit(within); err != nil { // what came before is not held up by what is refused
		c.unused(r)
		return err
	}
	if err := c.enter(1, false); err != nil {
		c.unused(r)
		return err
	}
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
	case wire.CmdFlush:
		return block.OpFlush
	case wire.CmdTrim:
		return block.OpTrim
	case wire.CmdWriteZeroes:
		return block.OpZero
	}
	panic(fmt.Sprintf("nbd: command %d passed the check", command))
}

// check judges a request completely. It returns a bare sentinel, so that refusing allocates nothing.
func (c *conn) check(h wire.Request) error {
	const (
		read  = protocol.TRANSMISSION_TYPE_REQUEST_READ
		write = protocol.TRANSMISSION_TYPE_REQUEST_WRITE
	)
	flags := wire.CmdFlagFUA
	longest := uint32(maxZeroLength)
	switch h.Command {
	case read:
		if longest = block.MaxPayload; c.structured {
			flags |= wire.CmdFlagDF
		}
	case write:
		longest = block.MaxPayload
	case wire.CmdWriteZeroes:
		flags |= wire.CmdFlagNoHole
	case wire.CmdTrim:
	case wire.CmdBlockStatus:
		if !c.allocation {
			return block.ErrInvalid
		}
		flags |= wire.CmdFlagReqOne
	case wire.CmdFlush:
		if h.Flags&^flags != 0 || h.Length != 0 || h.Offset != 0 {
			return block.ErrInvalid
		}
		return nil
	default:
		return block.ErrInvalid
	}
	if h.Flags&^flags != 0 {
		return block.ErrInvalid
	}
	changes := h.Command == write || h.Command == wire.CmdTrim || h.Command == wire.CmdWriteZeroes
	if changes && c.info.ReadOnly {
		return block.ErrReadOnly
	}
	if h.Length == 0 || h.Length > longest || (h.Offset|uint64(h.Length))%minBlock != 0 {
		return block.ErrInvalid
	}
	if !c.within(h) {
		if h.Command == write || h.Command == wire.CmdWriteZeroes {
			return block.ErrNoSpace
		}
		return block.ErrInvalid
	}
	return nil
}

// within checks the bounds, against the size that the Device has now.
func (c *conn) within(h wire.Request) bool {
	inside := func() bool {
		return h.Offset <= uint64(c.size) && uint64(h.Length) <= uint64(c.size)-h.Offset
	}
	if inside() {
		return true
	}
	c.size = max(c.size, c.dev.Info().Size)
	return inside()
}
