package primary

import (
	"errors"
	"fmt"

	"github.com/gabion-storage/gabion/server/block"
)

var (
	errConnClosed = fmt.Errorf("%w: the connection was closed", block.ErrShutdown)
	errNoMembers  = fmt.Errorf("%w: the placement names no disk", block.ErrInvalid)
)

type outcome uint8

// In order of weight: of several IOs the heaviest decides.
const (
	outcomeOK outcome = iota
	outcomeFailed
	outcomeNoSpace
	outcomeAgain // a copy was lost: what it answered proves nothing
)

type judgement struct {
	outcome outcome
	err     error
	disk    block.DiskID // of the copy that decided
}

// judge weighs the outcomes of an op's IOs, and takes note of what they say about the copies.
func (c *Core) judge(op *Op) judgement {
	if op.Err != nil {
		return judgement{outcome: outcomeFailed, err: op.Err}
	}
	var worst judgement
	for i := range op.IOs {
		io := &op.IOs[i]
		if io.Copy == nil {
			continue
		}
		o := c.judgeIO(io, op.Req.Op)
		if o > worst.outcome {
			worst = judgement{outcome: o, err: io.Err, disk: io.Copy.Disk}
		}
	}
	return worst
}

func (c *Core) judgeIO(io *IO, kind block.Op) outcome {
	cp, err := io.Copy, io.Err
	switch {
	case errors.Is(err, block.ErrStale):
		c.depose(err)
		return outcomeFailed
	case io.life != cp.life: // ended since it was sent
		return outcomeAgain
	case err == nil:
		return outcomeOK
	case errors.Is(err, block.ErrNoSpace):
		return outcomeNoSpace
	case errors.Is(err, block.ErrInvalid), errors.Is(err, block.ErrTooLarge):
		return outcomeFailed
	case kind == block.OpRead && (errors.Is(err, block.ErrIO) || errors.Is(err, block.ErrCorrupt)):
		return outcomeFailed
	default:
		c.lose(cp, err)
		return outcomeAgain
	}
}
