package metadata

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// putConsumer makes a node known as one that volumes can be published to.
// Repeated at every start of its plugin, so it changes only what differs.
func (d *draft) putConsumer(c *metapb.PutConsumer) error {
	if c.Consumer == nil {
		return fmt.Errorf("%w: no consumer to register", block.ErrInvalid)
	}
	next := proto.CloneOf(c.Consumer)
	if err := checkConsumer(next); err != nil {
		return err
	}
	old := d.Consumer(next.Name)
	next.RegisteredAt = d.time
	if old != nil {
		next.RegisteredAt = old.RegisteredAt
	}
	if proto.Equal(old, next) {
		return nil
	}
	d.consumers = d.consumers.Set(next.Name, next)
	d.emit(&metapb.Event{Type: ConsumerRegistered, Node: next.Name}, "volumes can be published to node %q of rack %q, %d at a time",
		next.Name, next.Rack, maxVolumes(next))
	return nil
}

// DefaultMaxVolumes is how many volumes a consumer takes that does not say.
const DefaultMaxVolumes = 250

// maxVolumes is how many volumes may be attached to a consumer, also to one that never registered.
func maxVolumes(c *metapb.Consumer) int64 {
	if n := c.GetMaxVolumes(); n > 0 {
		return int64(n)
	}
	return DefaultMaxVolumes
}

func checkConsumer(c *metapb.Consumer) error {
	if err := ValidateNodeName(c.Name); err != nil {
		return err
	}
	if err := ValidateRack(c.Rack); err != nil {
		return fmt.Errorf("node %q: %w", c.Name, err)
	}
	return nil
}

// setFormat records how far the formatting of a volume has come. A volume may
// be formatted only while it is proven blank: nothing of it was ever born, or
// what there is comes from a formatting that was recorded before it began.
func (d *draft) setFormat(c *metapb.SetFormat) (*metapb.Volume, error) {
	v, err := d.find(c.VolumeId)
	if err != nil {
		return nil, err
	}
	if err := v.mayFormat(c.AttachmentId); err != nil {
		return nil, err
	}
	switch c.Format {
	case metapb.Volume_DONE:
	case metapb.Volume_STARTED:
		if err := v.checkBlank(c.AttachmentId); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("%w: the format of volume %q can become STARTED or DONE, not %s", block.ErrInvalid, v.Name, c.Format)
	}
	if v.Format == c.Format {
		return v.Volume, nil
	}
	next := v.changed()
	next.Format = c.Format
	node := v.attachments[v.attachment(c.AttachmentId)].Node
	if c.Format == metapb.Volume_STARTED {
		d.emitVolume(FormatStarted, next, node, "node %q formats volume %q", node, v.Name)
	} else {
		d.emitVolume(FormatDone, next, node, "volume %q has a file system, says node %q", v.Name, node)
	}
	return d.store(next), nil
}

// mayFormat refuses an attachment that is over or only reads.
func (v *volume) mayFormat(attachment string) error {
	i := v.attachment(attachment)
	switch {
	case i < 0:
		return fmt.Errorf("%w: volume %q has no attachment %.80q: it was detached", block.ErrNotFound, v.Name, attachment)
	case v.attachments[i].Revoking:
		return fmt.Errorf("%w: volume %q is being detached from node %q", block.ErrPrecondition, v.Name, v.attachments[i].Node)
	case v.attachments[i].ReadOnly:
		return fmt.Errorf("%w: volume %q is attached to node %q read-only", block.ErrReadOnly, v.Name, v.attachments[i].Node)
	}
	return nil
}

func (v *volume) checkBlank(attachment string) error {
	a := v.attachments[v.attachment(attachment)]
	switch {
	case v.Format == metapb.Volume_DONE:
		return fmt.Errorf("%w: volume %q must not be formatted: it was before, and may hold data", block.ErrPrecondition, v.Name)
	case a.Foreign:
		return fmt.Errorf("%w: volume %q must not be formatted: it was also attached to node %q for somebody who may write anything to it: detach it there first",
			block.ErrPrecondition, v.Name, a.Node)
	case v.Format == metapb.Volume_NONE && v.runs.Len() > 0:
		return fmt.Errorf("%w: volume %q must not be formatted: parts of it are in use, and nobody recorded that they come from formatting",
			block.ErrPrecondition, v.Name)
	}
	return nil
}
