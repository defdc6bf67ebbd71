package metadata

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

func (d *draft) attachVolume(c *metapb.AttachVolume) (*metapb.Attachment, error) {
	if c.Attachment == nil {
		return nil, fmt.Errorf("%w: no attachment to make", block.ErrInvalid)
	}
	a := proto.CloneOf(c.Attachment)
	if err := checkAttachment(a); err != nil {
		return nil, err
	}
	v, err := d.find(a.VolumeId)
	if err != nil {
		return nil, err
	}
	// One consumer at a time, also for readers: what a second one may see of the first one's unflushed writes is not decided.
	if len(v.attachments) > 0 {
		return attached(v, a)
	}
	if c.Version != 0 && c.Version != v.Version {
		return nil, fmt.Errorf("%w: volume %q changed from version %d to %d since it was looked up",
			block.ErrStale, v.Name, c.Version, v.Version)
	}
	digest := sha256.Sum256(a.Token)
	a.TokenDigest, a.CreatedAt, a.Revoking = digest[:], d.time, false
	next := v.changed()
	next.attachments = []*metapb.Attachment{a}
	d.attachments++
	d.store(next)
	d.emitVolume(Attached, next, a.Node, "volume %q was attached to node %q", v.Name, a.Node)
	return a, nil
}

func checkAttachment(a *metapb.Attachment) error {
	if _, err := parseID("attachment", a.Id); err != nil {
		return err
	}
	if err := ValidateNodeName(a.Node); err != nil {
		return err
	}
	if n := len(a.Token); n < minToken || n > maxToken {
		return fmt.Errorf("%w: the token of attachment %s has %d bytes; it takes %d to %d", block.ErrInvalid, a.Id, n, minToken, maxToken)
	}
	return nil
}

// attached is the outcome of an attach to a volume that is attached already.
func attached(v *volume, want *metapb.Attachment) (*metapb.Attachment, error) {
	has := v.attachments[0]
	switch {
	case has.Revoking:
		return nil, fmt.Errorf("%w: volume %q is being detached from node %q: try again when that is done", block.ErrInUse, v.Name, has.Node)
	case has.Node != want.Node:
		return nil, fmt.Errorf("%w: volume %q is attached to node %q: detach it there first", block.ErrInUse, v.Name, has.Node)
	case has.ReadOnly != want.ReadOnly:
		return nil, fmt.Errorf("%w: volume %q is attached to node %q %s: detach it first to change that",
			block.ErrExists, v.Name, has.Node, access(has))
	}
	return has, nil
}

func access(a *metapb.Attachment) string {
	if a.ReadOnly {
		return "read-only"
	}
	return "for reading and writing"
}

// detachVolume answers with the attachment while its end has to be confirmed, with nil when it is gone.
func (d *draft) detachVolume(c *metapb.DetachVolume) (*metapb.Attachment, error) {
	id, err := parseVolume(c.VolumeId)
	if err != nil {
		return nil, err
	}
	v, ok := d.volumes.Get(id)
	if !ok {
		return nil, nil
	}
	i := v.attachment(c.AttachmentId)
	if i < 0 {
		return nil, nil
	}
	old := v.attachments[i]
	if old.Revoking {
		return old, nil
	}
	next := v.changed()
	if v.grant == nil {
		d.detach(next, i)
		return nil, nil
	}
	a := proto.CloneOf(old)
	a.Revoking = true
	next.attachments = slices.Clone(v.attachments)
	next.attachments[i] = a
	d.store(next)
	d.emitVolume(DetachRequested, next, a.Node, "volume %q is to be detached from node %q", v.Name, a.Node)
	return a, nil
}

// attachment is the place of an attachment id, or -1.
func (v *volume) attachment(id string) int {
	return slices.IndexFunc(v.attachments, func(a *metapb.Attachment) bool { return a.Id == id })
}

// detach removes attachment i of a changed volume and stores it.
func (d *draft) detach(v *volume, i int) {
	node := v.attachments[i].Node
	v.attachments = slices.Delete(slices.Clone(v.attachments), i, i+1)
	d.attachments--
	d.store(v)
	d.emitVolume(Detached, v, node, "volume %q was detached from node %q", v.Name, node)
}

// WithoutToken is a copy of an attachment that carries the digest only.
func WithoutToken(a *metapb.Attachment) *metapb.Attachment {
	c := proto.CloneOf(a)
	c.Token = nil
	return c
}

// digestMatches reports whether the digest of an attachment is that of its token.
func digestMatches(a *metapb.Attachment) bool {
	digest := sha256.Sum256(a.Token)
	return bytes.Equal(digest[:], a.TokenDigest)
}
