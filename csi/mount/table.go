package mount

import "strings"

// Entry is one mount.
type Entry struct {
	ID, Parent    int
	Number        Number // of the file system: of a device node's mount, the file system that has the node
	Node          Number // of the device, if a device node is what is mounted; else zero
	Root          string // path within the file system
	Point         string
	Type          string // of the file system
	Source        string // what somebody called the device: told to people, never compared
	ReadOnly      bool   // of this mount
	SuperReadOnly bool   // of the file system as a whole
}

// deleted is what the kernel appends to the root of a mount whose file is gone.
const deleted = "//deleted"

// Orphaned reports whether what is mounted has been deleted: for a device node that the device is gone.
func (e Entry) Orphaned() bool { return strings.HasSuffix(e.Root, deleted) }

// Table is a mount table in the order of mounting.
type Table []Entry

// At returns the topmost mount at a path: the one that no other stands on.
func (t Table) At(point string) (Entry, bool) {
	var top Entry
	var found bool
	for _, e := range t {
		if e.Point == point && (!found || e.Parent == top.ID || top.Parent != e.ID) {
			top, found = e, true
		}
	}
	return top, found
}

// FileSystemOf returns the mounts of the file system on a device.
func (t Table) FileSystemOf(n Number) (list Table) {
	for _, e := range t {
		if e.Number == n && e.Node == (Number{}) {
			list = append(list, e)
		}
	}
	return list
}

// NodesOf returns the mounts of a device's node.
func (t Table) NodesOf(n Number) (list Table) {
	for _, e := range t {
		if e.Node == n && !e.Orphaned() {
			list = append(list, e)
		}
	}
	return list
}
