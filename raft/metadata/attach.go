package metadata

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

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
	if has := v.attachedTo(a.Node); has != nil {
		return d.attachAgain(v, has, a, c.Version)
	}
	if err := d.mayShare(v, a); err != nil {
		return nil, err
	}
	if err := d.mayTakeMore(a.Node); err != nil {
		return nil, fmt.Errorf("volume %q: %w", v.Name, err)
	}
	if err := v.seenAt(c.Version); err != nil {
		return nil, err
	}
	digest := sha256.Sum256(a.Token)
	a.TokenDigest, a.CreatedAt, a.Revoking = digest[:], d.time, false
	next := v.changed()
	i, _ := slices.BinarySearchFunc(v.attachments, a.Node, byNode)
	next.attachments = slices.Insert(slices.Clone(v.attachments), i, a)
	d.countAttachment(a.Node, 1)
	d.emitVolume(Attached, next, a.Node, "volume %q was attached to node %q", v.Name, a.Node)
	d.endFormatting(next, a)
	d.store(next)
	return a, nil
}

// endFormatting ends a formatting that was begun, now that somebody may write
// what nobody records: who formatted again might format that.
func (d *draft) endFormatting(v *volume, a *metapb.Attachment) {
	if a.Foreign && !a.ReadOnly && v.Format == metapb.Volume_STARTED {
		v.Format = metapb.Volume_DONE
		d.emitVolume(FormatDone, v, a.Node, "formatting of volume %q had begun and is not repeated: node %q may write anything", v.Name, a.Node)
	}
}

// seenAt refuses a change that was decided upon at another version of the volume; 0: not checked.
func (v *volume) seenAt(version uint64) error {
	if version != 0 && version != v.Version {
		return fmt.Errorf("%w: volume %q changed from version %d to %d since it was looked up", block.ErrStale, v.Name, version, v.Version)
	}
	return nil
}

func byNode(a *metapb.Attachment, node string) int { return strings.Compare(a.Node, node) }

// attachedTo is the attachment to a node, nil if there is none.
func (v *volume) attachedTo(node string) *metapb.Attachment {
	if i, ok := slices.BinarySearchFunc(v.attachments, node, byNode); ok {
		return v.attachments[i]
	}
	return nil
}

// attachAgain attaches a volume to a node that has it: the attachment stays,
// and is on the terms of all who asked for it, since all have its token.
func (d *draft) attachAgain(v *volume, has, want *metapb.Attachment, version uint64) (*metapb.Attachment, error) {
	switch {
	case has.Revoking:
		return nil, beingDetached(v, has)
	case has.ReadOnly != want.ReadOnly:
		return nil, fmt.Errorf("%w: volume %q is attached to node %q %s: detach it first to change that",
			block.ErrExists, v.Name, has.Node, access(has))
	}
	a := proto.CloneOf(has)
	a.Foreign, a.Alone = has.Foreign || want.Foreign, has.Alone || want.Alone
	if proto.Equal(a, has) {
		return has, nil
	}
	if err := d.mayShare(v, a); err != nil {
		return nil, err
	}
	if err := v.seenAt(version); err != nil {
		return nil, err
	}
	next := v.changed()
	next.attachments = slices.Clone(v.attachments)
	next.attachments[v.attachment(a.Id)] = a
	d.endFormatting(next, a)
	d.store(next)
	return a, nil
}

// mayShare refuses an attachment beside those of other nodes, unless all of
// them only read (what one may see of another's writes is not decided) and none
// is to be alone.
func (d *draft) mayShare(v *volume, want *metapb.Attachment) error {
	for _, has := range v.attachments {
		read := has.ReadOnly && want.ReadOnly
		switch {
		case has.Node == want.Node, d.at >= levelConsumers && read && !has.Alone && !want.Alone:
		case has.Revoking:
			return beingDetached(v, has)
		case read && (has.Alone || want.Alone):
			return fmt.Errorf("%w: volume %q is attached to node %q read-only, and one of the two nodes is to have it alone: detach it there first",
				block.ErrInUse, v.Name, has.Node)
		case has.ReadOnly || want.ReadOnly:
			return fmt.Errorf("%w: volume %q is attached to node %q %s: detach it there first, or let all nodes only read it",
				block.ErrInUse, v.Name, has.Node, access(has))
		default:
			return fmt.Errorf("%w: volume %q is attached to node %q: detach it there first", block.ErrInUse, v.Name, has.Node)
		}
	}
	return nil
}

func beingDetached(v *volume, a *metapb.Attachment) error {
	return fmt.Errorf("%w: volume %q is being detached from node %q: try again when that is done", block.ErrInUse, v.Name, a.Node)
}

// mayTakeMore refuses an attachment to a node that has all it takes.
func (d *draft) mayTakeMore(node string) error {
	most := maxVolumes(d.Consumer(node))
	if d.at >= levelConsumers && int64(d.Load(node)) >= most {
		return fmt.Errorf("%w: node %q takes %d volumes at a time and has them all: detach one there first, or use another node",
			block.ErrNoSpace, node, most)
	}
	return nil
}

// countAttachment counts an attachment of a node that comes or goes.
func (d *draft) countAttachment(node string, more int) {
	d.attachments += more
	if n := d.Load(node) + more; n > 0 {
		d.loads = d.loads.Set(node, n)
	} else {
		d.loads = d.loads.Delete(node)
	}
}

// nodesOf names the nodes of attachments, of which there is at least one.
func nodesOf(list []*metapb.Attachment) string {
	if len(list) == 1 {
		return fmt.Sprintf("node %q", list[0].Node)
	}
	const most = 5
	var names []string
	for _, a := range list[:min(most, len(list))] {
		names = append(names, fmt.Sprintf("%q", a.Node))
	}
	if more := len(list) - most; more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return "nodes " + strings.Join(names, ", ")
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
	if v.unserved() {
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
	d.countAttachment(node, -1)
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
