package client

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// ErrProtocol: the server broke the protocol.
var ErrProtocol = errors.New("the server broke the NBD protocol")

// RefusedError is a server's refusal of an option. It unwraps to a block
// sentinel; ErrCacheLost stands for a Gabion server's permanent refusal of a
// device whose unflushed data was lost.
type RefusedError struct {
	Code uint32 // the reply type, with bit 31
	Text string // the server's words, without secrets
}

func (e *RefusedError) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("the server refused with code %d", e.Code&^wire.RepErr)
	}
	return "the server refused: " + e.Text
}

// Unwrap is the sentinel that the code stands for.
func (e *RefusedError) Unwrap() error {
	switch e.Code {
	case wire.RepErrPolicy:
		return block.ErrCacheLost
	case protocol.NEGOTIATION_TYPE_REPLY_ERR_UNKNOWN:
		return block.ErrNotFound
	case protocol.NEGOTIATION_TYPE_REPLY_ERR_UNSUPPORTED, wire.RepErrTLS:
		return block.ErrUnsupported
	case wire.RepErrInvalid:
		return block.ErrInvalid
	case wire.RepErrTooBig:
		return block.ErrTooLarge
	}
	return block.ErrUnavailable
}

// printable keeps what a peer sent from doing harm in a terminal or a log.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, text)
}

// errnoError is the error of a reply's errno, nil for 0.
func errnoError(errno uint32) error {
	switch errno {
	case 0:
		return nil
	case wire.EPERM:
		return block.ErrPermission
	case wire.EIO:
		return block.ErrIO
	case wire.EINVAL:
		return block.ErrInvalid
	case wire.ENOSPC:
		return block.ErrNoSpace
	case wire.EOVERFLOW:
		return block.ErrTooLarge
	case wire.ENOTSUP:
		return block.ErrUnsupported
	case wire.ESHUTDOWN:
		return block.ErrShutdown
	case wire.ENOMEM:
		return block.ErrUnavailable
	}
	return fmt.Errorf("errno %d: %w", errno, block.ErrIO)
}
