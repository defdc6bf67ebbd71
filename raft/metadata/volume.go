package metadata

import (
	"cmp"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

func (d *draft) createVolume(c *metapb.CreateVolume) (*metapb.Volume, error) {
	id, err := parseVolume(c.Id)
	if err != nil {
		return nil, err
	}
	if err := ValidateName(c.Name); err != nil {
		return nil, err
	}
	if err := block.ValidateSize(c.Size); err != nil {
		return nil, fmt.Errorf("volume %q: %w", c.Name, err)
	}
	if err := ValidatePolicy(c.Policy); err != nil {
		return nil, fmt.Errorf("volume %q: %w", c.Name, err)
	}
	if c.Rack != "" {
		if err := ValidateRack(c.Rack); err != nil {
			return nil, fmt.Errorf("volume %q: %w", c.Name, err)
		}
	}
	if old := d.VolumeByName(c.Name); old != nil {
		return old, sameVolume(old, c)
	}
	if old := d.Volume(id); old != nil {
		return nil, fmt.Errorf("%w: volume id %s is that of volume %q", block.ErrExists, id, old.Name)
	}
	if at, ok := d.Tombstone(id); ok {
		return nil, fmt.Errorf("%w: volume id %s was used and deleted at index %d", block.ErrExists, id, at)
	}
	if err := d.cell().CheckCreate(d.Promises(), c.Policy, pinnedTo(c.Policy, c.Rack), c.Size); err != nil {
		return nil, fmt.Errorf("volume %q: %w", c.Name, err)
	}
	v := &volume{id: id, runs: newRuns(), Volume: &metapb.Volume{
		Id: c.Id, Name: c.Name, Size: c.Size, WantedSize: c.Size, Policy: proto.CloneOf(c.Policy),
		Version: 1, CacheEpoch: 1, CreatedAt: d.time, Rack: c.Rack, Format: metapb.Volume_NONE,
	}}
	d.volumes, d.names = d.volumes.Set(id, v), d.names.Set(v.Name, id)
	d.promise(v.Volume, v.WantedSize)
	d.emitVolume(VolumeCreated, v, "", "volume %q of %d bytes was created", v.Name, v.Size)
	return v.Volume, nil
}

// pinnedTo is the rack that all copies of a volume must lie in, if there is one.
func pinnedTo(p *metapb.Policy, rack string) string {
	if p.GetAccess() == metapb.Policy_SAME_RACK {
		return rack
	}
	return ""
}

// promise counts bytes more (or less) of a volume's wanted size.
func (d *draft) promise(v *metapb.Volume, bytes int64) {
	rack := pinnedTo(v.Policy, v.Rack)
	if rack == "" {
		d.demand[v.Policy.Replicas] += bytes
		return
	}
	of, _ := d.pinned.Get(rack)
	of[v.Policy.Replicas] += bytes
	if of == (placement.Demand{}) {
		d.pinned = d.pinned.Delete(rack)
	} else {
		d.pinned = d.pinned.Set(rack, of)
	}
}

// sameVolume returns ErrExists, naming each difference, unless a volume is what
// a create of its name asks for. Where a volume that is reachable from every
// rack lies is no difference.
func sameVolume(v *metapb.Volume, c *metapb.CreateVolume) error {
	var differs []string
	differ := func(what string, has, asked any) {
		if has != asked {
			differs = append(differs, fmt.Sprintf("%s %v instead of %v", what, has, asked))
		}
	}
	has, asked := v.Policy, c.Policy
	differ("size", v.WantedSize, c.Size)
	differ("replicas", has.Replicas, asked.Replicas)
	differ("spread", has.Spread, asked.Spread)
	differ("access", has.Access, asked.Access)
	differ("durability", has.Durability, asked.Durability)
	differ("on-full", has.OnFull, asked.OnFull)
	differ("block size", has.BlockSize, asked.BlockSize)
	differ("file system", cmp.Or(has.FsType, "any"), cmp.Or(asked.FsType, "any"))
	if c.Rack != "" && has.Access == metapb.Policy_SAME_RACK {
		differ("rack", v.Rack, c.Rack)
	}
	if differs == nil {
		return nil
	}
	return fmt.Errorf("%w: volume %q is there with %s", block.ErrExists, v.Name, strings.Join(differs, ", "))
}

func (d *draft) resizeVolume(c *metapb.ResizeVolume) (*metapb.Volume, error) {
	v, err := d.find(c.Id)
	if err != nil {
		return nil, err
	}
	if err := block.ValidateSize(c.Size); err != nil {
		return nil, fmt.Errorf("volume %q: %w", v.Name, err)
	}
	if c.Size < v.WantedSize {
		return nil, fmt.Errorf("%w: shrinking is refused: volume %q has %d bytes, %d were asked for",
			block.ErrInvalid, v.Name, v.WantedSize, c.Size)
	}
	if c.Size == v.WantedSize {
		return v.Volume, nil
	}
	more := c.Size - v.WantedSize
	if err := d.cell().CheckGrowth(d.Promises(), v.Policy, pinnedTo(v.Policy, v.Rack), more); err != nil {
		return nil, fmt.Errorf("growing volume %q: %w", v.Name, err)
	}
	next := v.changed()
	next.WantedSize = c.Size
	d.promise(next.Volume, more)
	if v.unserved() {
		next.Size = c.Size
		d.emitVolume(VolumeGrown, next, "", "volume %q grew from %d to %d bytes", v.Name, v.Size, next.Size)
	} else {
		d.emitVolume(VolumeResizeRequested, next, v.grant.Node, "volume %q is to grow from %d to %d bytes", v.Name, v.Size, next.WantedSize)
	}
	return d.store(next), nil
}

func (d *draft) deleteVolume(c *metapb.DeleteVolume) error {
	id, err := parseVolume(c.Id)
	if err != nil {
		return err
	}
	v, ok := d.volumes.Get(id)
	if !ok {
		return nil
	}
	if len(v.attachments) > 0 {
		return fmt.Errorf("%w: volume %q is attached to %s: detach it first", block.ErrInUse, v.Name, nodesOf(v.attachments))
	}
	d.volumes, d.names = d.volumes.Delete(id), d.names.Delete(v.Name)
	d.tombstones = d.tombstones.Set(id, d.index)
	d.promise(v.Volume, -v.WantedSize)
	d.emitVolume(VolumeDeleted, v, v.grant.GetNode(), "volume %q was deleted", v.Name)
	return nil
}

// find returns a live volume by the text of its id.
func (d *draft) find(text string) (*volume, error) {
	id, err := parseVolume(text)
	if err != nil {
		return nil, err
	}
	v, ok := d.volumes.Get(id)
	if ok {
		return v, nil
	}
	if at, ok := d.Tombstone(id); ok {
		return nil, fmt.Errorf("%w: volume %s was deleted at index %d", block.ErrNotFound, id, at)
	}
	return nil, fmt.Errorf("%w: no volume %s", block.ErrNotFound, id)
}

// changed returns a copy to modify, at the next version. Slices and trees are
// still shared with v and must be replaced, not written to.
func (v *volume) changed() *volume {
	next := *v
	next.Volume = proto.CloneOf(v.Volume)
	next.Version++
	return &next
}

// store puts a changed volume back.
func (d *draft) store(v *volume) *metapb.Volume {
	d.volumes = d.volumes.Set(v.id, v)
	return v.Volume
}
