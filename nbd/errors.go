package nbd

import (
	"errors"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// outcome is how the protocol tells one sentinel: as the errno of a request
// and as the reply to an option.
type outcome struct {
	err    error
	errno  uint32
	reply  uint32
	advice string // what the client is told beside the error's own text
}

const (
	refusedUnknown = protocol.NEGOTIATION_TYPE_REPLY_ERR_UNKNOWN
	refusedUnsup   = protocol.NEGOTIATION_TYPE_REPLY_ERR_UNSUPPORTED

	never  = "; this device must not connect again: attach the volume anew"
	verify = "; check the name and the token with `gabion attach`"
	later  = "; try again later"
)

// outcomes is the one table from the shared sentinels to the protocol, never
// written to. The first row that matches counts. RepErrPolicy is in it once:
// see DESIGN.md.
var outcomes = []outcome{
	{block.ErrCacheLost, wire.EIO, wire.RepErrPolicy, never},
	{block.ErrNotFound, wire.EIO, refusedUnknown, verify},
	{block.ErrPermission, wire.EPERM, refusedUnknown, verify},
	{block.ErrInvalid, wire.EINVAL, wire.RepErrInvalid, ""},
	{block.ErrTooLarge, wire.EINVAL, wire.RepErrTooBig, ""},
	{block.ErrReadOnly, wire.EPERM, wire.RepErrInvalid, ""},
	{block.ErrExists, wire.EIO, wire.RepErrInvalid, ""},
	{block.ErrNoSpace, wire.ENOSPC, wire.RepErrPlatform, ""},
	{block.ErrUnsupported, wire.ENOTSUP, refusedUnsup, ""},
	{block.ErrFormat, wire.EIO, wire.RepErrPlatform, ""},
	{block.ErrPrecondition, wire.EIO, wire.RepErrPlatform, ""},
	{block.ErrIO, wire.EIO, wire.RepErrPlatform, ""},
	{block.ErrCorrupt, wire.EIO, wire.RepErrPlatform, ""},
	{block.ErrInUse, wire.EIO, wire.RepErrShutdown, later},
	{block.ErrStale, wire.ESHUTDOWN, wire.RepErrInvalid, ""},
	{block.ErrUnavailable, wire.EIO, wire.RepErrShutdown, later},
	{block.ErrUnknown, wire.EIO, wire.RepErrShutdown, later},
	{block.ErrShutdown, wire.ESHUTDOWN, wire.RepErrShutdown, later},
}

// errnoOf is the errno of a request's outcome, EIO for what no row names.
func errnoOf(err error) uint32 {
	if err == nil {
		return 0
	}
	for _, o := range outcomes {
		if errors.Is(err, o.err) {
			return o.errno
		}
	}
	return wire.EIO
}

// refusalOf is the option reply for an error of Exports, and the sentence that goes with it.
func refusalOf(err error) (reply uint32, text string) {
	for _, o := range outcomes {
		if errors.Is(err, o.err) {
			return o.reply, err.Error() + o.advice
		}
	}
	return wire.RepErrPlatform, err.Error()
}
