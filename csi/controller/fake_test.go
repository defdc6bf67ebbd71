package controller

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"

	"github.com/gabion-storage/gabion/server/block"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// cell is a VolumeService in memory: the rules of the real one, and a list of the calls it got.
type cell struct {
	mu       sync.Mutex
	volumes  map[block.VolumeID]*Volume
	readers  map[block.VolumeID]map[string]Terms // by node
	ids      map[string]block.AttachmentID       // by volume and node
	nodes    map[string]string                   // rack by name
	racks    []string                            // with storage
	room     int64
	calls    []string
	failWith error // of every call
}

func newCell() *cell {
	return &cell{
		volumes: map[block.VolumeID]*Volume{}, readers: map[block.VolumeID]map[string]Terms{}, ids: map[string]block.AttachmentID{},
		nodes: map[string]string{"n1": "r1", "n2": "r2"}, racks: []string{"r1", "r2", "r3"}, room: 1 << 50,
	}
}

func (c *cell) call(format string, args ...any) (func(), error) {
	c.mu.Lock()
	c.calls = append(c.calls, fmt.Sprintf(format, args...))
	return c.mu.Unlock, c.failWith
}

func (c *cell) made() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := strings.Join(c.calls, " ")
	c.calls = nil
	return s
}

func (c *cell) CreateVolume(_ context.Context, w Wish) (Volume, error) {
	done, err := c.call("create:%s:%d", w.Name, w.Size)
	defer done()
	if err != nil {
		return Volume{}, err
	}
	full := Policy{Replicas: cmp.Or(w.Policy.Replicas, 1), Spread: cmp.Or(w.Policy.Spread, SpreadRack), Access: cmp.Or(w.Policy.Access, AccessCell),
		Durability: cmp.Or(w.Policy.Durability, Flush), OnFull: cmp.Or(w.Policy.OnFull, OnFullWait), BlockSize: cmp.Or(w.Policy.BlockSize, 4096), FSType: w.Policy.FSType}
	for _, v := range c.volumes {
		if v.Name != w.Name {
			continue
		}
		if v.Size != w.Size || v.Policy != full || v.Rack != "" && len(w.Racks) > 0 && !slices.Contains(w.Racks, v.Rack) {
			return Volume{}, fmt.Errorf("%w: volume %s is there with size %d, %v", block.ErrExists, w.Name, v.Size, v.Policy)
		}
		return c.view(v), nil
	}
	v := &Volume{ID: block.VolumeID{UUID: block.NewUUID()}, Name: w.Name, Size: w.Size, Policy: full}
	if full.Access == AccessRack {
		at := slices.IndexFunc(w.Racks, func(r string) bool { return slices.Contains(c.racks, r) })
		if at < 0 && len(w.Racks) > 0 {
			return Volume{}, fmt.Errorf("%w: no rack of %v has disks", block.ErrNoSpace, w.Racks)
		}
		v.Rack = append(w.Racks, c.racks...)[max(at, 0)]
	}
	if w.Size > c.room {
		return Volume{}, fmt.Errorf("%w: %d bytes are left", block.ErrNoSpace, c.room)
	}
	c.volumes[v.ID] = v
	return *v, nil
}

func (c *cell) view(v *Volume) Volume {
	out := *v
	out.Nodes = slices.Sorted(maps.Keys(c.readers[v.ID]))
	return out
}

func (c *cell) VolumeByName(_ context.Context, name string) (Volume, error) {
	done, err := c.call("name:%s", name)
	defer done()
	for _, v := range c.volumes {
		if v.Name == name {
			return c.view(v), err
		}
	}
	return Volume{}, cmp.Or(err, fmt.Errorf("%w: there is no volume %q", block.ErrNotFound, name))
}

func (c *cell) find(id block.VolumeID) (*Volume, error) {
	if v := c.volumes[id]; v != nil {
		return v, nil
	}
	return nil, fmt.Errorf("%w: there is no volume %s", block.ErrNotFound, id)
}

func (c *cell) VolumeByID(_ context.Context, id block.VolumeID) (Volume, error) {
	done, err := c.call("get")
	defer done()
	v, missing := c.find(id)
	if err = cmp.Or(err, missing); err != nil {
		return Volume{}, err
	}
	return c.view(v), nil
}

func (c *cell) ListVolumes(_ context.Context, limit int, token string) (Page, error) {
	done, err := c.call("list:%d:%s", limit, token)
	defer done()
	if err != nil {
		return Page{}, err
	}
	if token != "" && !strings.HasPrefix(token, "after ") {
		return Page{}, fmt.Errorf("%w: token %q", block.ErrStale, token)
	}
	var p Page
	for _, v := range slices.SortedFunc(maps.Values(c.volumes), func(a, b *Volume) int { return cmp.Compare(a.Name, b.Name) }) {
		if "after "+v.Name <= token {
			continue
		}
		if len(p.Volumes) == cmp.Or(limit, 100) {
			p.Next = "after " + p.Volumes[len(p.Volumes)-1].Name
			break
		}
		p.Volumes = append(p.Volumes, c.view(v))
	}
	return p, nil
}

func (c *cell) ResizeVolume(_ context.Context, id block.VolumeID, size int64) (Volume, error) {
	done, err := c.call("resize:%d", size)
	defer done()
	v, missing := c.find(id)
	if err = cmp.Or(err, missing); err != nil {
		return Volume{}, err
	}
	if size < v.Size {
		return Volume{}, fmt.Errorf("%w: volumes do not shrink", block.ErrInvalid)
	}
	v.Size = size
	return c.view(v), nil
}

func (c *cell) DeleteVolume(_ context.Context, id block.VolumeID) error {
	done, err := c.call("delete")
	defer done()
	for node := range c.readers[id] {
		return fmt.Errorf("%w: it is attached to %s", block.ErrInUse, node)
	}
	delete(c.volumes, id)
	return err
}

func (c *cell) Attach(_ context.Context, id block.VolumeID, node string, t Terms) (Attachment, error) {
	done, err := c.call("attach:%s:%v", node, t.ReadOnly)
	defer done()
	_, missing := c.find(id)
	if err = cmp.Or(err, missing); err != nil {
		return Attachment{}, err
	}
	for n, has := range c.readers[id] {
		switch {
		case n == node && has.ReadOnly != t.ReadOnly:
			return Attachment{}, fmt.Errorf("%w: node %s has it with read-only %v", block.ErrExists, n, has.ReadOnly)
		case n == node:
			t.Alone = t.Alone || has.Alone
		case !has.ReadOnly || !t.ReadOnly || has.Alone || t.Alone:
			return Attachment{}, fmt.Errorf("%w: it is attached to %s", block.ErrInUse, n)
		}
	}
	if c.readers[id] == nil {
		c.readers[id] = map[string]Terms{}
	}
	key := id.String() + node
	if _, has := c.readers[id][node]; !has {
		c.ids[key] = block.AttachmentID{UUID: block.NewUUID()}
	}
	c.readers[id][node] = t
	return Attachment{c.ids[key], t.ReadOnly}, nil
}

func (c *cell) Detach(_ context.Context, id block.VolumeID, node string) error {
	done, err := c.call("detach:%s", node)
	defer done()
	if node == "" {
		delete(c.readers, id)
	}
	delete(c.readers[id], node)
	return err
}

func (c *cell) Consumer(_ context.Context, name string) (Consumer, error) {
	done, err := c.call("consumer:%s", name)
	defer done()
	rack, ok := c.nodes[name]
	if !ok && err == nil {
		err = fmt.Errorf("%w: node %q never registered", block.ErrNotFound, name)
	}
	return Consumer{name, rack}, err
}

func (c *cell) Capacity(_ context.Context, p Policy, rack string) (Capacity, error) {
	done, err := c.call("capacity:%d:%s:%s", p.Replicas, p.Access, rack)
	defer done()
	return Capacity{c.room, min(c.room, block.MaxVolumeSize)}, err
}

// What requests are made of.

const writer = csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER

func mounted(fs string, m csispec.VolumeCapability_AccessMode_Mode) *csispec.VolumeCapability {
	return &csispec.VolumeCapability{
		AccessType: &csispec.VolumeCapability_Mount{Mount: &csispec.VolumeCapability_MountVolume{FsType: fs}},
		AccessMode: &csispec.VolumeCapability_AccessMode{Mode: m},
	}
}

func raw(m csispec.VolumeCapability_AccessMode_Mode) *csispec.VolumeCapability {
	return &csispec.VolumeCapability{
		AccessType: &csispec.VolumeCapability_Block{Block: &csispec.VolumeCapability_BlockVolume{}},
		AccessMode: &csispec.VolumeCapability_AccessMode{Mode: m},
	}
}

func caps(list ...*csispec.VolumeCapability) []*csispec.VolumeCapability { return list }

// create makes a volume of the size, 0 being none.
func create(t *testing.T, c *Controller, name string, required int64) *csispec.Volume {
	t.Helper()
	r, err := c.CreateVolume(t.Context(), &csispec.CreateVolumeRequest{
		Name: name, CapacityRange: &csispec.CapacityRange{RequiredBytes: required}, VolumeCapabilities: caps(raw(writer)),
	})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetVolume()
}
