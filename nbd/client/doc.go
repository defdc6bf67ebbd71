// Package client is a pipelined NBD client in user space: for copies, the CLI
// and tests. It trusts a server's numbers no further than it checked them: a
// reply that cannot be right ends its connection with ErrProtocol, and a server
// that falls silent with os.ErrDeadlineExceeded.
//
// Errors of requests wrap the block sentinel of the errno: EPERM
// block.ErrPermission, EIO block.ErrIO, EINVAL block.ErrInvalid, ENOSPC
// block.ErrNoSpace, ENOTSUP block.ErrUnsupported, ESHUTDOWN block.ErrShutdown.
// A request whose connection ended unanswered wraps block.ErrUnavailable: it
// may or may not have been executed.
package client
