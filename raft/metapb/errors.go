package metapb

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gabion-storage/gabion/server/block"
)

// ErrorDomain marks the ErrorInfo detail of every error that the service
// itself answered. A status without it was made on the way (a connection that
// broke, a proxy), so nothing is known about what the service did.
const ErrorDomain = "gabion"

// What only this API can answer, beside the sentinels of block.
var (
	ErrPageToken   = errors.New("invalid page token")    // ask for the first page again
	ErrIndexGone   = errors.New("index no longer kept")  // read anew, then watch
	ErrSlowWatcher = errors.New("watcher fell behind")   // resume after the last index received
	ErrInternal    = errors.New("internal server error") // a defect; the server's log has the rest
)

// The table. Reasons are stable names on the wire. Where an error wraps
// several sentinels the first row that matches decides, so what restricts the
// caller's conclusions most comes first.
var table = []struct {
	sentinel error
	code     codes.Code
	reason   string
}{
	{block.ErrUnknown, codes.Aborted, "UNKNOWN_OUTCOME"},
	{block.ErrStale, codes.Aborted, "SUPERSEDED"},
	{ErrPageToken, codes.Aborted, "PAGE_TOKEN"}, // the code CSI asks for
	{ErrSlowWatcher, codes.Aborted, "SLOW_WATCHER"},
	{ErrIndexGone, codes.OutOfRange, "INDEX_GONE"},
	{block.ErrTooLarge, codes.OutOfRange, "TOO_LARGE"},
	{block.ErrInvalid, codes.InvalidArgument, "INVALID"},
	{block.ErrNotFound, codes.NotFound, "NOT_FOUND"},
	{block.ErrExists, codes.AlreadyExists, "EXISTS"},
	{block.ErrInUse, codes.FailedPrecondition, "IN_USE"},
	{block.ErrReadOnly, codes.FailedPrecondition, "READ_ONLY"},
	{block.ErrFormat, codes.FailedPrecondition, "FORMAT"},
	{block.ErrPrecondition, codes.FailedPrecondition, "PRECONDITION"},
	{block.ErrNoSpace, codes.ResourceExhausted, "NO_SPACE"},
	{block.ErrPermission, codes.PermissionDenied, "PERMISSION"},
	{block.ErrCacheLost, codes.DataLoss, "CACHE_LOST"},
	{block.ErrCorrupt, codes.DataLoss, "CORRUPT"},
	{block.ErrUnsupported, codes.Unimplemented, "UNSUPPORTED"},
	{block.ErrShutdown, codes.Unavailable, "SHUTDOWN"},
	{block.ErrUnavailable, codes.Unavailable, "UNAVAILABLE"},
	{block.ErrIO, codes.Internal, "IO"},
	{ErrInternal, codes.Internal, "INTERNAL"},
}

// What a status without our detail most likely means.
var foreign = map[codes.Code]error{
	codes.Canceled:           context.Canceled,
	codes.InvalidArgument:    block.ErrInvalid,
	codes.DeadlineExceeded:   context.DeadlineExceeded,
	codes.NotFound:           block.ErrNotFound,
	codes.AlreadyExists:      block.ErrExists,
	codes.PermissionDenied:   block.ErrPermission,
	codes.ResourceExhausted:  block.ErrTooLarge, // gRPC's own: a message over the limit
	codes.FailedPrecondition: block.ErrPrecondition,
	codes.Aborted:            block.ErrUnknown,
	codes.OutOfRange:         block.ErrTooLarge,
	codes.Unimplemented:      block.ErrUnsupported,
	codes.Unavailable:        block.ErrUnavailable,
	codes.DataLoss:           block.ErrCorrupt,
	codes.Unauthenticated:    block.ErrPermission,
}

// ToStatus is err as the service answers it. nil stays nil, a status stays as
// it is, and an error that wraps no sentinel is an internal one.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	code, reason := codes.Internal, "INTERNAL"
	switch row := find(err); {
	case row >= 0:
		code, reason = table[row].code, table[row].reason
	case errors.Is(err, context.DeadlineExceeded):
		code, reason = codes.DeadlineExceeded, "DEADLINE"
	case errors.Is(err, context.Canceled):
		code, reason = codes.Canceled, "CANCELED"
	}
	info := &errdetails.ErrorInfo{Domain: ErrorDomain, Reason: reason, Metadata: details(err)}
	s, detailErr := status.New(code, err.Error()).WithDetails(info)
	if detailErr != nil {
		return status.Error(code, err.Error())
	}
	return s.Err()
}

// FromStatus turns what a client call returned back into an error that wraps
// the sentinel the service meant and says only the service's sentence.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	e := &Error{message: s.Message(), code: s.Code(), sentinel: foreign[s.Code()]}
	for _, d := range s.Details() {
		info, ok := d.(*errdetails.ErrorInfo)
		if !ok || info.GetDomain() != ErrorDomain {
			continue
		}
		e.answered, e.details = true, info.GetMetadata()
		for _, row := range table {
			if row.reason == info.GetReason() {
				e.sentinel = row.sentinel
			}
		}
	}
	return e
}

// Error is a failed call as the client sees it. errors.Is finds its sentinel.
type Error struct {
	message  string
	code     codes.Code
	sentinel error
	answered bool
	details  map[string]string
}

// Error is the service's own sentence.
func (e *Error) Error() string {
	if e.message == "" {
		return e.code.String()
	}
	return e.message
}

// Unwrap is the sentinel, or nil if the status names none.
func (e *Error) Unwrap() error { return e.sentinel }

// Code is the gRPC code, for those who must pass it on.
func (e *Error) Code() codes.Code { return e.code }

// Answered reports whether the service itself answered. If not, the call may
// or may not have reached it.
func (e *Error) Answered() bool { return e.answered }

// Detail is a machine-readable fact of the answer ("tombstone": the id), or "".
func (e *Error) Detail(key string) string { return e.details[key] }

// DetailCluster is the id of the cluster that answers.
const DetailCluster = "cluster"

// WithDetail attaches one fact to an error, for ToStatus to carry.
func WithDetail(err error, key, value string) error { return &detailed{err, key, value} }

type detailed struct {
	error
	key, value string
}

func (d *detailed) Unwrap() error { return d.error }

// details are all facts that were attached to err.
func details(err error) map[string]string {
	all := map[string]string{}
	for d := (*detailed)(nil); errors.As(err, &d); err = d.error {
		all[d.key] = d.value
	}
	return all
}

// Reason is the stable name of err's sentinel, "" if it wraps none; for
// metrics and tests.
func Reason(err error) string {
	if row := find(err); row >= 0 {
		return table[row].reason
	}
	return ""
}

func find(err error) int {
	for i, row := range table {
		if errors.Is(err, row.sentinel) {
			return i
		}
	}
	return -1
}

// ParseVolumeID is block.ParseUUID for a field of a request.
func ParseVolumeID(field, s string) (block.VolumeID, error) {
	u, err := block.ParseUUID(s)
	if err != nil {
		return block.VolumeID{}, fmt.Errorf("%s: %w", field, err)
	}
	return block.VolumeID{UUID: u}, nil
}
