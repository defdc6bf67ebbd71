package block

import "errors"

// The shared sentinels: each layer wraps one of them once with the operation
// and the identity it concerned. Four tables translate them at a boundary and
// nowhere else: nbd (errno), server/wire (frame status), raft/metapb and
// csi/driver (gRPC codes). Match with errors.Is.
var (
	ErrInvalid      = errors.New("invalid argument")        // the request can never succeed as it stands
	ErrTooLarge     = errors.New("too large")               // beyond a fixed limit
	ErrNotFound     = errors.New("not found")               // no such object
	ErrExists       = errors.New("already exists")          // the key is taken by something incompatible
	ErrInUse        = errors.New("in use")                  // refused while something else holds it; names the holder
	ErrNoSpace      = errors.New("no space")                // a disk or the cluster is full
	ErrReadOnly     = errors.New("read-only")               // a write to a read-only export
	ErrPermission   = errors.New("permission denied")       // token wrong or revoked
	ErrStale        = errors.New("superseded")              // an older generation, version, session or attempt
	ErrCacheLost    = errors.New("unflushed data was lost") // permanent: the session's cache epoch is over
	ErrUnavailable  = errors.New("unavailable")             // try again later: not served, no leader, not reachable
	ErrUnknown      = errors.New("outcome unknown")         // a command may or may not have been applied
	ErrIO           = errors.New("input/output error")      // a disk failed the operation
	ErrCorrupt      = errors.New("corrupt")                 // what was read is not what was written
	ErrFormat       = errors.New("unsupported format")      // newer or foreign; never touched
	ErrUnsupported  = errors.New("not supported")           // a feature that is not there
	ErrPrecondition = errors.New("precondition failed")     // the object's state does not allow it; names the remedy
	ErrShutdown     = errors.New("shutting down")           // the server is going away
)
