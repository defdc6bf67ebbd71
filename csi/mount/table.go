package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/gabion-storage/gabion/server/block"
)

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
	SuperReadOnly bool   // of the file system as a whole, also after an error
	StopsOnError  bool   // ext4: takes no changes any more after its first error, which not all kernels show as SuperReadOnly
}

// deleted is what the kernel appends to the root of a mount whose file is gone.
const deleted = "//deleted"

// Orphaned reports whether what is mounted has been deleted: for a device node that the device is gone.
func (e Entry) Orphaned() bool { return strings.HasSuffix(e.Root, deleted) }

// Table is a mount table.
type Table []Entry

// At returns the topmost mount at a path: the one that no other there stands on.
func (t Table) At(point string) (Entry, bool) {
	for _, e := range t {
		covered := func(o Entry) bool { return o.Point == point && o.Parent == e.ID && o.ID != e.ID }
		if e.Point == point && !slices.ContainsFunc(t, covered) {
			return e, true
		}
	}
	return Entry{}, false
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

// NodesOf returns the mounts of a device's node. Those whose device has gone
// are left out: another one may have its number now.
func (t Table) NodesOf(n Number) (list Table) {
	for _, e := range t {
		if e.Node == n && !e.Orphaned() {
			list = append(list, e)
		}
	}
	return list
}

// Points are where the mounts are.
func (t Table) Points() (list []string) {
	for _, e := range t {
		list = append(list, e.Point)
	}
	return list
}

// Table reads the mount table of the calling thread's mount namespace. It looks
// up no path except of what stands for a device node.
func (l *Linux) Table() (Table, error) {
	infos, err := mountutils.ParseMountInfo("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("%w: mount table: %w", block.ErrIO, err)
	}
	table := make(Table, 0, len(infos))
	for _, i := range infos {
		table = append(table, entry(i))
	}
	return table, nil
}

func entry(i mountutils.MountInfo) Entry {
	e := Entry{
		ID: i.ID, Parent: i.ParentID,
		Number: Number{Major: uint32(i.Major), Minor: uint32(i.Minor)},
		Root:   unescape(i.Root), Point: unescape(i.MountPoint), Type: i.FsType, Source: unescape(i.Source),
		ReadOnly:      slices.Contains(i.MountOptions, "ro"),
		SuperReadOnly: slices.ContainsFunc(i.SuperOptions, takesNone),
		StopsOnError:  slices.Contains(i.SuperOptions, "errors=remount-ro"),
	}
	// Device nodes are in file systems that live in memory: to look there never waits.
	if e.Root != "/" && (e.Type == "devtmpfs" || e.Type == "tmpfs") {
		var st unix.Stat_t
		if unix.Lstat(e.Point, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
			e.Node = number(st.Rdev)
		}
	}
	return e
}

// escapes are how the kernel writes what would break a line of its table into fields.
var escapes = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)

func unescape(field string) string { return escapes.Replace(field) }

// takesNone reports whether an option says that a file system takes no changes.
// ext4 of newer kernels stays "rw" after an error and says it in words of its own.
func takesNone(option string) bool {
	return option == "ro" || option == "emergency_ro" || option == "shutdown"
}

func number(dev uint64) Number { return Number{Major: unix.Major(dev), Minor: unix.Minor(dev)} }

// Resolve returns path as the mount table spells it: the links of its parent
// resolved, the last part left as it is, for that may be a mount whose device is gone.
func (l *Linux) Resolve(path string) (string, error) {
	if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) {
		return "", fmt.Errorf("%w: path %.200q: it must be absolute", block.ErrInvalid, path)
	}
	path = filepath.Clean(path)
	if path == "/" {
		return "", fmt.Errorf("%w: path /: nothing is mounted there", block.ErrInvalid)
	}
	parent, err := filepath.EvalSymlinks(filepath.Dir(path))
	switch {
	case os.IsNotExist(err):
		return "", fmt.Errorf("%w: directory %s", block.ErrNotFound, filepath.Dir(path))
	case err != nil:
		return "", fmt.Errorf("%w: directory %s: %w", block.ErrIO, filepath.Dir(path), err)
	}
	return filepath.Join(parent, filepath.Base(path)), nil
}
