package kernel

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/gabion-storage/gabion/server/block"
)

// Metadata is what a Manager asks of the metadata service. It may be called from
// any goroutine.
type Metadata interface {
	// Attachment is this node's attachment to a volume. It never makes one.
	// ErrNotFound: the volume is not attached to this node, or is no more: a
	// linearizable answer, on which devices are ended; with it comes the Cluster
	// that says so. Any other error: not known now.
	Attachment(ctx context.Context, id block.VolumeID) (Attachment, error)
}

// Attachment is this node's right to use a volume, and where the volume is.
type Attachment struct {
	Cluster   block.ClusterID // zero: a service of before, which does not say
	ID        block.AttachmentID
	Token     Token
	Epoch     block.CacheEpoch
	Size      int64 // bytes that are served
	BlockSize int64 // bytes, of the kernel's device: 4096 or 512
	ReadOnly  bool
	Addresses []string // host:port of servers, the primary's first
}

// Token is an attachment's secret, as it stands in an export name. It shows
// itself nowhere.
type Token string

func (Token) String() string             { return "…" }
func (Token) GoString() string           { return "…" }
func (Token) LogValue() slog.Value       { return slog.StringValue("…") }
func (Token) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte("…")) }

// secret is the token itself.
func (t Token) secret() string { return string(t) }
