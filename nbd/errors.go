package nbd

import (
	"errors"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// The errnos of the protocol.
const (
	errnoIO       = uint32(5)
	errnoNoSpace  = uint32(28)
	errnoNotSup   = uint32(95)
	errnoShutdown = uint32(108)
)

// outcome is how the protocol tells one sentinel: as the errno of a request
// and as the reply to an option.
type outcome struct {
	err    error
	errno  uint32
	reply  uint32
	advice string // what the client is told beside the error's own text
}

// outcomes is the one table from the shared sentinels to the protocol. The
// first row that matches counts, so the row of a sentinel that wraps another
// stands before it. repErrPolicy is in it once: see DESIGN.md.
func outcomes() []outcome {
	const (
		eperm   = protocol.TRANSMISSION_ERROR_EPERM
		einval  = protocol.TRANSMISSION_ERROR_EINVAL
		unknown = protocol.NEGOTIATION_TYPE_REPLY_ERR_UNKNOWN
		unsup   = protocol.NEGOTIATION_TYPE_REPLY_ERR_UNSUPPORTED
		later   = "; try again later"
	)
	return []outcome{
		{block.ErrCacheLost, errnoIO, repErrPolicy, "; this device must not connect again: attach the volume anew"},
		{block.ErrNotFound, errnoIO, unknown, "; check the name and the token with `gabion attach`"},
		{block.ErrPermission, eperm, unknown, "; check the name and the token with `gabion attach`"},
		{block.ErrInvalid, einval, repErrInvalid, ""},
		{block.ErrTooLarge, einval, repErrTooBig, ""},
		{block.ErrReadOnly, eperm, repErrInvalid, ""},
		{block.ErrExists, errnoIO, repErrInvalid, ""},
		{block.ErrNoSpace, errnoNoSpace, repErrPlatform, ""},
		{block.ErrUnsupported, errnoNotSup, unsup, ""},
		{block.ErrFormat, errnoIO, repErrPlatform, ""},
		{block.ErrPrecondition, errnoIO, repErrPlatform, ""},
		{block.ErrIO, errnoIO, repErrPlatform, ""},
		{block.ErrCorrupt, errnoIO, repErrPlatform, ""},
		{block.ErrInUse, errnoIO, repErrShutdown, later},
		{block.ErrStale, errnoShutdown, repErrShutdown, later},
		{block.ErrUnavailable, errnoIO, repErrShutdown, later},
		{block.ErrUnknown, errnoIO, repErrShutdown, later},
		{block.ErrShutdown, errnoShutdown, repErrShutdown, later},
	}
}

// errnoOf is the errno of a request's outcome, EIO for what no row names.
func errnoOf(err error) uint32 {
	if err == nil {
		return 0
	}
	for _, o := range outcomes() {
		if errors.Is(err, o.err) {
			return o.errno
		}
	}
	return errnoIO
}

// refusalOf is the option reply for an error of Exports, and the sentence that goes with it.
func refusalOf(err error) (reply uint32, text string) {
	for _, o := range outcomes() {
		if errors.Is(err, o.err) {
			return o.reply, err.Error() + o.advice
		}
	}
	return repErrPlatform, err.Error()
}
