package adapt

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"

	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Node is node.Volumes and kernel.Metadata over the metadata API, on behalf of one consumer.
type Node struct {
	API  metapb.MetadataClient
	Name string
}

var (
	_ node.Volumes    = Node{}
	_ kernel.Metadata = Node{}
)

// Describe implements node.Volumes. It is one read, so that what it says of the
// format and of births is of one moment.
func (n Node) Describe(ctx context.Context, id block.VolumeID) (node.Volume, error) {
	r, err := n.API.GetVolume(ctx, &metapb.GetVolumeRequest{Volume: byID(id)})
	if err != nil {
		return node.Volume{}, err
	}
	for _, a := range r.GetAttachments() {
		if a.GetNode() != n.Name {
			continue
		}
		if a.GetRevoking() { // nothing new is built on it, and it is listed until its volume's primary knows
			return node.Volume{}, fmt.Errorf("%w: volume %s is being detached from node %s", block.ErrUnavailable, id, n.Name)
		}
		aid, err := attachmentID(a)
		v := r.GetVolume()
		return node.Volume{
			Attachment: aid, Size: v.GetSize(), ReadOnly: a.GetReadOnly(), Format: formatFrom(v.GetFormat()), Born: r.GetBornExtents() != 0,
		}, err
	}
	return node.Volume{}, fmt.Errorf("%w: volume %s is not attached to node %s", block.ErrNotFound, id, n.Name)
}

// formatFrom takes what a newer version may say for a volume that is in use: never to be formatted.
func formatFrom(f metapb.Volume_Format) node.FormatState {
	switch f {
	case metapb.Volume_FORMAT_UNSPECIFIED, metapb.Volume_NONE: // a volume of before the field has none
		return node.FormatNone
	case metapb.Volume_STARTED:
		return node.FormatStarted
	}
	return node.FormatDone
}

func formatTo(f node.FormatState) metapb.Volume_Format {
	switch f {
	case node.FormatNone:
		return metapb.Volume_NONE
	case node.FormatStarted:
		return metapb.Volume_STARTED
	}
	return metapb.Volume_DONE
}

// SetFormat implements node.Volumes.
func (n Node) SetFormat(ctx context.Context, id block.VolumeID, a block.AttachmentID, f node.FormatState) error {
	_, err := n.API.SetFormat(ctx, &metapb.SetFormatRequest{Volume: byID(id), AttachmentId: a.String(), Format: formatTo(f)})
	return err
}

// Attachment implements kernel.Metadata. The service has ErrNotFound for one that
// is being detached: it opens nothing any more and never will, so its device may end.
func (n Node) Attachment(ctx context.Context, id block.VolumeID) (kernel.Attachment, error) {
	r, err := n.API.GetAttachment(ctx, &metapb.GetAttachmentRequest{Volume: byID(id), Node: n.Name})
	if err != nil {
		var says *metapb.Error
		if !errors.As(err, &says) {
			return kernel.Attachment{}, err
		}
		return kernel.Attachment{Cluster: clusterID(says.Detail(metapb.DetailCluster))}, err
	}
	v, a := r.GetVolume(), r.GetAttachment()
	aid, err := attachmentID(a)
	out := kernel.Attachment{
		Cluster: clusterID(r.GetClusterId()), ID: aid, Token: kernel.Token(base64.RawURLEncoding.EncodeToString(a.GetToken())), Epoch: block.CacheEpoch(v.GetCacheEpoch()),
		Size: v.GetSize(), BlockSize: int64(v.GetPolicy().GetBlockSize()), ReadOnly: a.GetReadOnly(),
	}
	for _, e := range r.GetEndpoints() {
		out.Addresses = append(out.Addresses, e.GetNbdAddress())
	}
	return out, err
}

// clusterID is zero for what a service of before does not say.
func clusterID(text string) block.ClusterID {
	id, err := block.ParseUUID(text)
	if err != nil {
		return block.ClusterID{}
	}
	return block.ClusterID{UUID: id}
}
