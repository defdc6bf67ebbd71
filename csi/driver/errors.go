package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gabion-storage/gabion/server/block"
)

// ErrPending is for a call that would have to wait for an earlier one about the
// same volume. The caller repeats it; it never stays once the other has ended.
var ErrPending = errors.New("another call is under way")

// The table. Where an error wraps several sentinels the first row that matches
// decides, so what restricts the caller's conclusions most comes first: to a
// container orchestrator ABORTED and UNAVAILABLE mean that the volume may exist.
var table = []struct {
	sentinel error
	code     codes.Code
}{
	{ErrPending, codes.Aborted},
	{block.ErrUnknown, codes.Aborted},
	{block.ErrStale, codes.Aborted}, // also a page token that is none: the code the specification asks for
	{block.ErrTooLarge, codes.OutOfRange},
	{block.ErrInvalid, codes.InvalidArgument},
	{block.ErrNotFound, codes.NotFound},
	{block.ErrExists, codes.AlreadyExists},
	{block.ErrInUse, codes.FailedPrecondition},
	{block.ErrReadOnly, codes.FailedPrecondition},
	{block.ErrFormat, codes.FailedPrecondition},
	{block.ErrPrecondition, codes.FailedPrecondition},
	{block.ErrNoSpace, codes.ResourceExhausted},
	{block.ErrPermission, codes.PermissionDenied},
	{block.ErrCacheLost, codes.DataLoss},
	{block.ErrCorrupt, codes.DataLoss},
	{block.ErrUnsupported, codes.Unimplemented},
	{block.ErrShutdown, codes.Unavailable},
	{block.ErrUnavailable, codes.Unavailable},
	{block.ErrIO, codes.Internal},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
}

// code is the gRPC code of what a service returned. A status, which the
// generated code makes for what a service does not have, keeps its own.
func code(err error) codes.Code {
	if err == nil {
		return codes.OK
	}
	for _, row := range table {
		if errors.Is(err, row.sentinel) {
			return row.code
		}
	}
	if s, ok := status.FromError(err); ok {
		return s.Code()
	}
	return codes.Internal
}

// toStatus is err as the caller gets it, its text being the sentence.
func toStatus(err error, sentence string) error {
	if err == nil {
		return nil
	}
	return status.Error(code(err), sentence)
}

// maxSentence is how much of an error becomes an event, in bytes; Kubernetes cuts at 1024.
const maxSentence = 1000

// sentence is an error's text in one line of bounded length.
func sentence(err error) string {
	text := err.Error()
	if s, ok := status.FromError(err); ok && s.Code() != codes.OK {
		text = s.Message()
	}
	text = strings.ToValidUTF8(text, "?")
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
	if len(text) <= maxSentence {
		return text
	}
	cut := maxSentence
	for !utf8.RuneStart(text[cut]) {
		cut--
	}
	return fmt.Sprintf("%s… (%d bytes more)", text[:cut], len(text)-cut)
}
