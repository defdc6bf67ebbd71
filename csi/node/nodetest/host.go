package nodetest

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/server/block"
)

// Host is one machine. Safe for concurrent use.
type Host struct {
	mu      sync.Mutex
	devices []*device
	disks   map[block.VolumeID]*Disk // what volumes hold, wherever they are attached
	table   mount.Table
	nextID  int

	busy     map[string]bool // mount points with open files
	held     map[block.VolumeID]bool
	broken   []string // what must never happen, and did
	formats  int
	checks   int
	largest  int64 // beyond which the kernel does not show a new size yet; 0: at once
	attaches int
	parked   int // questions about usage that wait
}

type device struct {
	node.Device
	gone bool // the kernel has it no more, though something may still be mounted
}

// Disk is what a volume holds.
type Disk struct {
	Type       string // as blkid names it; "" is nothing that is known
	Data       bool   // a user may have written
	Size       int64  // of the file system
	Unreadable bool
	ReadOnly   bool // the file system has turned read-only after an error
	Hidden     bool // with ReadOnly: the mount table does not show it
	Damaged    bool // for a person
	Errors     int64
	Silent     chan struct{}
	Stopped    bool       // the file system was shut down by an error
	NoUsage    bool       // whoever asks how full the file system is gets an error that says nothing of it
	Dying      bool       // no server answers from its unmount on, which waits until the device has failed
	Unmounted  node.State // of the device when its file system was unmounted last
}

// NewHost returns a machine without devices.
func NewHost() *Host {
	return &Host{disks: map[block.VolumeID]*Disk{}, busy: map[string]bool{}, held: map[block.VolumeID]bool{}, nextID: 100}
}

// Do changes what a volume holds.
func (h *Host) Do(id block.VolumeID, change func(*Disk)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(h.disk(id))
}

func (h *Host) disk(id block.VolumeID) *Disk {
	if h.disks[id] == nil {
		h.disks[id] = &Disk{}
	}
	return h.disks[id]
}

// Busy says whether a process has files open below a mount point.
func (h *Host) Busy(point string, busy bool) { h.mu.Lock(); defer h.mu.Unlock(); h.busy[point] = busy }

// Hold says whether somebody keeps a volume's device open.
func (h *Host) Hold(id block.VolumeID, held bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held[id] = held
}

// Delay keeps the kernel from showing sizes beyond most; 0: no more.
func (h *Host) Delay(most int64) { h.mu.Lock(); defer h.mu.Unlock(); h.largest = most }

// Counts are how often devices were made, file systems made, and checked.
func (h *Host) Counts() (attaches, formats, checks int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.attaches, h.formats, h.checks
}

// Parked is how many questions about usage wait for an answer.
func (h *Host) Parked() int { h.mu.Lock(); defer h.mu.Unlock(); return h.parked }

func (h *Host) park(n int) { h.mu.Lock(); defer h.mu.Unlock(); h.parked += n }

// Table is the mount table.
func (h *Host) Table() mount.Table {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.table)
}

// SetTable changes the mount table behind everybody's back.
func (h *Host) SetTable(change func(mount.Table) mount.Table) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.table = change(h.table)
}

// SetDevice changes what the kernel says of a volume's device.
func (h *Host) SetDevice(id block.VolumeID, change func(*node.Device)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if d := h.device(id); d != nil {
		change(&d.Device)
	}
}

// Lose takes a device away under its mounts, as when it was ended by force.
func (h *Host) Lose(id block.VolumeID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.remove(id)
}

func (h *Host) remove(id block.VolumeID) {
	for _, d := range h.devices {
		if d.Volume == id && !d.gone {
			d.gone = true
			for i, e := range h.table {
				if e.Node == d.Number {
					h.table[i].Root += "//deleted"
				}
			}
		}
	}
}

func (h *Host) device(id block.VolumeID) *device {
	for _, d := range h.devices {
		if d.Volume == id && !d.gone {
			return d
		}
	}
	return nil
}

// numbered is the device that has a number, or nil.
func (h *Host) numbered(n mount.Number) *device {
	for _, d := range h.devices {
		if d.Number == n && !d.gone {
			return d
		}
	}
	return nil
}

// free is the lowest number that neither a device nor the mount of one has.
func (h *Host) free() uint32 {
	for n := uint32(0); ; n++ {
		taken := slices.ContainsFunc(h.devices, func(d *device) bool {
			return d.Number.Minor == n && (!d.gone || len(h.table.FileSystemOf(d.Number)) > 0)
		})
		if !taken {
			return n
		}
	}
}

// Residue says what there is besides nothing: devices and mounts.
func (h *Host) Residue() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []string
	for _, d := range h.devices {
		if !d.gone {
			list = append(list, "device "+d.Path)
		}
	}
	for _, p := range h.table.Points() {
		list = append(list, "mount "+p)
	}
	return strings.Join(list, ", ")
}

// Broken lists what must never happen and did: a format of data, a check of a mounted file system, …
func (h *Host) Broken() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.broken)
}

func (h *Host) breaks(format string, args ...any) {
	h.broken = append(h.broken, fmt.Sprintf(format, args...))
}

// byPath returns the device whose node a path is, by name or by mount.
func (h *Host) byPath(path string) *device {
	e, mounted := h.table.At(path)
	for _, d := range h.devices {
		if !d.gone && (d.Path == path || mounted && e.Node == d.Number) {
			return d
		}
	}
	return nil
}

// add mounts; the path must be there.
func (h *Host) add(e mount.Entry) error {
	if _, err := os.Lstat(e.Point); err != nil {
		return fmt.Errorf("%w: mount at %s: %w", block.ErrNotFound, e.Point, err)
	}
	h.nextID++
	e.ID, e.Parent = h.nextID, 1
	if below, ok := h.table.At(e.Point); ok {
		e.Parent = below.ID
	}
	h.table = append(h.table, e)
	return nil
}
