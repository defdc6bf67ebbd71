package nodetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/server/block"
)

// ErrKilled is what every call of a killed plugin returns. It has no effect any more.
var ErrKilled = errors.New("killed")

// Fault is asked before (after false) and after each step that changes
// something; n counts the steps from 1. What it returns is the step's outcome;
// ErrKilled ends the plugin.
type Fault func(step string, n int, after bool) error

// Plugin is the host as one process of the node plugin sees it: node.Attacher,
// node.Mounter and, if Meta is set, node.Volumes.
type Plugin struct {
	host  *Host
	meta  node.Volumes
	linux *mount.Linux // for directories and files

	mu    sync.Mutex
	fault Fault
	steps int
	dead  bool
}

var (
	_ node.Attacher = (*Plugin)(nil)
	_ node.Mounter  = (*Plugin)(nil)
	_ node.Volumes  = (*Plugin)(nil)
)

// NewPlugin starts a process. fault may be nil.
func NewPlugin(h *Host, meta node.Volumes, fault Fault) *Plugin {
	return &Plugin{host: h, meta: meta, fault: fault, linux: mount.NewLinux()}
}

// Steps is how many steps there were.
func (p *Plugin) Steps() int { p.mu.Lock(); defer p.mu.Unlock(); return p.steps }

// step runs one step that changes something.
func (p *Plugin) step(name string, do func() error) error {
	p.mu.Lock()
	if p.dead {
		p.mu.Unlock()
		return ErrKilled
	}
	p.steps++
	n := p.steps
	p.mu.Unlock()
	if err := p.ask(name, n, false); err != nil {
		return err
	}
	err := do()
	return errors.Join(err, p.ask(name, n, true))
}

func (p *Plugin) ask(name string, n int, after bool) error {
	if p.fault == nil {
		return nil
	}
	err := p.fault(name, n, after)
	if errors.Is(err, ErrKilled) {
		p.mu.Lock()
		p.dead = true
		p.mu.Unlock()
	}
	return err
}

func (p *Plugin) alive() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return ErrKilled
	}
	return nil
}

// Describe implements node.Volumes.
func (p *Plugin) Describe(ctx context.Context, id block.VolumeID) (node.Volume, error) {
	if err := p.alive(); err != nil {
		return node.Volume{}, err
	}
	return p.meta.Describe(ctx, id)
}

// SetFormat implements node.Volumes.
func (p *Plugin) SetFormat(ctx context.Context, id block.VolumeID, a block.AttachmentID, f node.FormatState) error {
	return p.step(fmt.Sprintf("format state %d", f), func() error { return p.meta.SetFormat(ctx, id, a, f) })
}

// Attach implements node.Attacher.
func (p *Plugin) Attach(ctx context.Context, id block.VolumeID, readOnly bool) (dev node.Device, err error) {
	err = p.step("attach", func() error {
		v, err := p.meta.Describe(ctx, id)
		if err != nil {
			return err
		}
		h := p.host
		h.mu.Lock()
		defer h.mu.Unlock()
		if d := h.device(id); d != nil && d.Condition.State == node.Failed {
			h.remove(id) // as the kernel's: whoever has it open gets errors, and nobody else finds it
		}
		if d := h.device(id); d != nil {
			dev = d.Device
			if dev.Attachment != v.Attachment || dev.ReadOnly != readOnly {
				return fmt.Errorf("%w: %s is another one", block.ErrPrecondition, dev.Path)
			}
			return nil
		}
		n := h.free()
		dev = node.Device{Volume: id, Attachment: v.Attachment, Path: fmt.Sprintf("/dev/nbd%d", n), Number: mount.Number{Major: 43, Minor: n}, Size: v.Size, ReadOnly: readOnly}
		h.devices = append(h.devices, &device{Device: dev})
		h.attaches++
		return nil
	})
	return dev, err
}

// Find implements node.Attacher.
func (p *Plugin) Find(_ context.Context, id block.VolumeID) (node.Device, error) {
	if err := p.alive(); err != nil {
		return node.Device{}, err
	}
	p.host.mu.Lock()
	defer p.host.mu.Unlock()
	if d := p.host.device(id); d != nil {
		return d.Device, nil
	}
	return node.Device{}, fmt.Errorf("%w: no device", block.ErrNotFound)
}

// Detach implements node.Attacher.
func (p *Plugin) Detach(_ context.Context, id block.VolumeID) error {
	return p.step("detach", func() error { return p.host.end(id, func(*device) {}) })
}

// Fail implements node.Attacher.
func (p *Plugin) Fail(_ context.Context, id block.VolumeID, reason string) error {
	return p.step("fail", func() error {
		return p.host.end(id, func(d *device) { d.Condition = node.Condition{State: node.Failed, Message: reason} })
	})
}

// end does something to a volume's device, if it has one, and removes it unless it is used.
func (h *Host) end(id block.VolumeID, first func(*device)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.device(id)
	if d == nil {
		return nil
	}
	first(d)
	if h.held[id] || len(h.table.FileSystemOf(d.Number)) > 0 {
		return fmt.Errorf("%w: %s", block.ErrInUse, d.Path)
	}
	h.remove(id)
	return nil
}

// Resize implements node.Attacher.
func (p *Plugin) Resize(ctx context.Context, id block.VolumeID, size int64) (dev node.Device, err error) {
	err = p.step("resize", func() error {
		v, err := p.meta.Describe(ctx, id)
		if err != nil {
			return err
		}
		if v.Size < size {
			return fmt.Errorf("%w: the volume has %d bytes", block.ErrPrecondition, v.Size)
		}
		p.host.mu.Lock()
		defer p.host.mu.Unlock()
		d := p.host.device(id)
		if d == nil {
			return fmt.Errorf("%w: no device", block.ErrNotFound)
		}
		d.Size = max(d.Size, v.Size)
		dev = d.Device
		return nil
	})
	return dev, err
}

// Table implements node.Mounter.
func (p *Plugin) Table() (mount.Table, error) { return p.host.Table(), p.alive() }

// Resolve implements node.Mounter.
func (p *Plugin) Resolve(path string) (string, error) { return p.linux.Resolve(path) }

// Inspect implements node.Mounter.
func (p *Plugin) Inspect(path string) (mount.Block, error) {
	h := p.host
	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.byPath(path)
	if d == nil {
		return mount.Block{}, fmt.Errorf("%w: %s", block.ErrNotFound, path)
	}
	size := d.Size
	if h.largest > 0 {
		size = min(size, h.largest)
	}
	return mount.Block{Number: d.Number, Size: size, ReadOnly: d.ReadOnly}, nil
}

// on runs work on the disk behind a device's node.
func (p *Plugin) on(path string, work func(d *device, disk *Disk) error) error {
	h := p.host
	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.byPath(path)
	if d == nil {
		return fmt.Errorf("%w: %s", block.ErrNotFound, path)
	}
	return work(d, h.disk(d.Volume))
}

// Probe implements node.Mounter.
func (p *Plugin) Probe(path string) (c mount.Content, err error) {
	err = p.step("probe", func() error {
		return p.on(path, func(d *device, disk *Disk) error {
			if disk.Unreadable {
				return fmt.Errorf("%w: %s cannot be read", block.ErrIO, path)
			}
			if len(p.host.table.FileSystemOf(d.Number)) > 0 {
				return fmt.Errorf("%w: %s is mounted", block.ErrInUse, path)
			}
			c.Type = disk.Type
			return nil
		})
	})
	return c, err
}

// Format implements node.Mounter. Killed before its end it leaves half a file system, which has no signature yet.
func (p *Plugin) Format(f mount.Format) error {
	_ = p.on(f.Device, func(d *device, disk *Disk) error {
		if disk.Data || disk.Type != "" && disk.Type != string(mount.Ext4) && disk.Type != string(mount.XFS) {
			p.host.breaks("%s was formatted: %+v", d.Path, *disk)
		}
		if d.ReadOnly {
			p.host.breaks("%s is read-only and was formatted", d.Path)
		}
		p.host.formats++
		disk.Type = ""
		return nil
	})
	return p.step("mkfs", func() error {
		return p.on(f.Device, func(d *device, disk *Disk) error {
			disk.Type, disk.Size = string(f.Type), d.Size
			return nil
		})
	})
}

// Check implements node.Mounter.
func (p *Plugin) Check(path string, _ mount.FS) error {
	return p.step("fsck", func() error {
		return p.on(path, func(d *device, disk *Disk) error {
			p.host.checks++
			if len(p.host.table.FileSystemOf(d.Number)) > 0 {
				p.host.breaks("%s was checked while mounted", d.Path)
			}
			if d.ReadOnly {
				p.host.breaks("%s is read-only and was checked", d.Path)
			}
			if disk.Damaged {
				return fmt.Errorf("%w: %s needs a person", block.ErrCorrupt, path)
			}
			disk.ReadOnly = false
			return nil
		})
	})
}

// Try implements node.Mounter.
func (p *Plugin) Try(f mount.FileSystem) error {
	return p.step("try", func() error {
		return p.on(f.Device, func(_ *device, disk *Disk) error {
			if disk.Type != string(f.Type) {
				return fmt.Errorf("%w: no %s", block.ErrPrecondition, f.Type)
			}
			return nil
		})
	})
}

// Mount implements node.Mounter.
func (p *Plugin) Mount(f mount.FileSystem, point string) error {
	return p.step("mount", func() error {
		return p.on(f.Device, func(d *device, disk *Disk) error {
			if disk.Type != string(f.Type) {
				return fmt.Errorf("%w: no %s", block.ErrPrecondition, f.Type)
			}
			return p.host.add(mount.Entry{Number: d.Number, Root: "/", Point: point, Type: disk.Type, Source: d.Path, ReadOnly: f.ReadOnly, SuperReadOnly: f.ReadOnly, StopsOnError: disk.Type == string(mount.Ext4)})
		})
	})
}

// BindFS implements node.Mounter. What is published may be written to.
func (p *Plugin) BindFS(source, target string, n mount.Number, readOnly bool) error {
	return p.step("bind", func() error {
		h := p.host
		h.mu.Lock()
		defer h.mu.Unlock()
		e, ok := h.table.At(source)
		if !ok || e.Number != n || e.Node != (mount.Number{}) {
			return fmt.Errorf("%w: %s", block.ErrPrecondition, source)
		}
		e.Point, e.ReadOnly = target, e.ReadOnly || readOnly
		h.mark(n, e.ReadOnly)
		return h.add(e)
	})
}

// BindNode implements node.Mounter.
func (p *Plugin) BindNode(source, target string, n mount.Number, readOnly bool) error {
	return p.step("bind node", func() error {
		h := p.host
		h.mu.Lock()
		defer h.mu.Unlock()
		d := h.byPath(source)
		if d == nil || d.Number != n {
			return fmt.Errorf("%w: %s", block.ErrPrecondition, source)
		}
		h.mark(n, d.ReadOnly)
		return h.add(mount.Entry{Number: mount.Number{Minor: 6}, Node: n, Root: d.Path[len("/dev"):], Point: target, Type: "devtmpfs", Source: "devtmpfs", ReadOnly: readOnly})
	})
}

// mark says that a user may have written from now on.
func (h *Host) mark(n mount.Number, readOnly bool) {
	if d := h.numbered(n); d != nil && !readOnly {
		h.disk(d.Volume).Data = true
	}
}

// waits reports whether an unmount waits for a server.
func (h *Host) waits(point string) bool {
	disk, e, err := h.ofPoint(point)
	if err != nil || !disk.Dying {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.numbered(e.Number)
	if d == nil || d.Condition.State == node.Failed {
		return false
	}
	d.Condition.State = node.Waiting
	return true
}

// Unmount implements node.Mounter.
func (p *Plugin) Unmount(point string) error {
	return p.step("unmount", func() error {
		h := p.host
		for h.waits(point) {
			time.Sleep(time.Millisecond)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		e, ok := h.table.At(point)
		if !ok {
			return nil
		}
		if h.busy[point] {
			return fmt.Errorf("%w: %s is busy", block.ErrInUse, point)
		}
		if d := h.numbered(e.Number); d != nil && len(h.table.FileSystemOf(e.Number)) == 1 {
			h.disk(d.Volume).Unmounted = d.Condition.State
		}
		h.table = slices.DeleteFunc(h.table, func(o mount.Entry) bool { return o.ID == e.ID })
		return nil
	})
}

// Grow implements node.Mounter.
func (p *Plugin) Grow(path, point string, fs mount.FS) error {
	return p.step("grow", func() error {
		return p.on(path, func(d *device, disk *Disk) error {
			if e, ok := p.host.table.At(point); !ok || e.Number != d.Number || e.Type != string(fs) || e.Node != (mount.Number{}) {
				p.host.breaks("grow of %s by %s, which is not its mount", path, point)
			}
			disk.Size = d.Size
			return nil
		})
	})
}

// ofPoint returns the disk that is mounted at a path.
func (h *Host) ofPoint(point string) (*Disk, mount.Entry, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, ok := h.table.At(point)
	if !ok {
		return nil, e, fmt.Errorf("%w: %s", block.ErrNotFound, point)
	}
	if d := h.numbered(e.Number); d != nil {
		disk := *h.disk(d.Volume)
		return &disk, e, nil
	}
	return nil, e, fmt.Errorf("%w: the device of %s has gone", block.ErrIO, point)
}

// Usage implements node.Mounter.
func (p *Plugin) Usage(point string) (mount.Usage, error) {
	disk, _, err := p.host.ofPoint(point)
	if err != nil {
		return mount.Usage{}, err
	}
	if disk.Silent != nil {
		p.host.park(1)
		<-disk.Silent
		p.host.park(-1)
	}
	switch {
	case disk.Stopped:
		return mount.Usage{}, fmt.Errorf("%w: %w: %s", block.ErrIO, mount.ErrShutDown, point)
	case disk.NoUsage:
		return mount.Usage{}, fmt.Errorf("%w: %s", block.ErrIO, point)
	}
	return mount.Usage{Total: disk.Size, Used: 1 << 20, Available: disk.Size - 1<<20, Inodes: 100, InodesUsed: 11, InodesAvail: 89, Errors: disk.Errors}, nil
}

// Writable implements node.Mounter.
func (p *Plugin) Writable(point string) error {
	disk, e, err := p.host.ofPoint(point)
	switch {
	case err != nil:
		return err
	case disk.ReadOnly || e.ReadOnly || e.SuperReadOnly:
		return fmt.Errorf("%w: %s", block.ErrReadOnly, point)
	}
	return nil
}

// MakeDir implements node.Mounter.
func (p *Plugin) MakeDir(path string) (made bool, err error) {
	err = p.step("mkdir", func() error { made, err = p.linux.MakeDir(path); return err })
	return made, err
}

// MakeFile implements node.Mounter.
func (p *Plugin) MakeFile(path string) (made bool, err error) {
	err = p.step("mkfile", func() error { made, err = p.linux.MakeFile(path); return err })
	return made, err
}

// Remove implements node.Mounter.
func (p *Plugin) Remove(path string) error {
	return p.step("remove", func() error {
		if _, mounted := p.host.Table().At(path); mounted {
			return fmt.Errorf("%w: %s is mounted", block.ErrInUse, path)
		}
		return p.linux.Remove(path)
	})
}
