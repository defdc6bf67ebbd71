package nbd

import (
	"context"
	"net"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// Exports is what a server offers. Its methods are called from many
// connections at once, and never before a complete, well-formed name was
// received. Errors wrap block sentinels; their text is shown to the client, so
// it says what is wrong and what helps, and never contains a token.
type Exports interface {
	// Open resolves an export name (OPT_GO, OPT_EXPORT_NAME) for a stream. It may block until older sessions are
	// drained; ctx ends when the client leaves, with the server, or after Config.OpenTimeout. The stream may be
	// closed through s before Open returns. A returned Device is always given back with Disconnect.
	Open(ctx context.Context, name string, s block.Stream) (block.Device, error)
	// Describe answers OPT_INFO and the metadata context options: it checks the name and opens no session.
	Describe(ctx context.Context, name string) (block.Info, error)
	// List answers OPT_LIST.
	List(ctx context.Context) ([]string, error)
}

// Client is what else Open is told of a stream's other end: the stream implements it.
type Client interface {
	// RemoteAddr is where the client connected from; of a UNIX socket it says nothing.
	RemoteAddr() net.Addr
}

// RemoteAddr implements Client.
func (c *conn) RemoteAddr() net.Addr { return c.nc.RemoteAddr() }

// Observer counts requests. A Device that implements it is told of every
// request that passed validation. Both methods are called on the request path,
// from several goroutines: they must not block and should not allocate.
type Observer interface {
	// Started: n requests are about to be submitted. Each ends with one Finished.
	Started(n int)
	// Finished: a request's reply is about to be sent, or its connection ended first (err wraps block.ErrShutdown).
	// bytes is the request's length, latency counts from the time it was parsed.
	Finished(op block.Op, bytes int64, latency time.Duration, err error)
}
