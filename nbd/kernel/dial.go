package kernel

import (
	"context"

	"github.com/gabion-storage/gabion/nbd/client"
)

// Dialer opens sessions at servers.
type Dialer interface {
	// Dial connects to a server and opens an export, with simple replies: what
	// it returns can be handed to the kernel. ctx bounds both. Errors are those
	// of client.Handshake, or wrap block.ErrUnavailable.
	Dial(ctx context.Context, t client.Target) (Socket, client.Export, error)
}
