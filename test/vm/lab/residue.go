package lab

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Residue is what a scenario could leave behind on a node.
type Residue struct {
	Devices   []string // nbd devices that exist
	Mounts    []string // mount points
	Sockets   []string // TCP connections of the guest
	Processes []string // ids and names of gabion's processes and of file system tools
	State     []string // files in which a node remembers devices and stages
}

// stateDir is where a node keeps what it knows of its attachments.
const stateDir = "/run/gabion"

// TakeResidue looks at the guest.
func TakeResidue() Residue {
	var r Residue
	devices, _ := filepath.Glob("/sys/block/nbd*")
	for _, d := range devices {
		r.Devices = append(r.Devices, filepath.Base(d)+" "+backend(d))
	}
	info, _ := os.ReadFile("/proc/self/mountinfo")
	for _, l := range lines(string(info)) {
		if f := strings.Fields(l); len(f) > 4 && !strings.HasPrefix(f[4], "/run/netns") {
			r.Mounts = append(r.Mounts, f[4])
		}
	}
	r.Sockets = tcpConnections()
	r.Processes = processes("gabion", "mkfs", "fsck", "e2fsck", "xfs_repair", "mount", "umount", "resize2fs", "xfs_growfs")
	_ = filepath.WalkDir(stateDir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(path, ".json") {
			r.State = append(r.State, path)
		}
		return nil
	})
	return r
}

func backend(device string) string {
	b, err := os.ReadFile(device + "/backend")
	if err != nil {
		return "(no backend)"
	}
	return strings.TrimSpace(string(b))
}

// tcpConnections lists the established connections of the guest's namespace, nbd's own included.
func tcpConnections() []string {
	var found []string
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		b, _ := os.ReadFile(file)
		for _, l := range lines(string(b)) {
			const established = "01"
			if f := strings.Fields(l); len(f) > 3 && f[3] == established {
				found = append(found, f[1]+"-"+f[2])
			}
		}
	}
	return found
}

// processes lists those whose name begins with one of the names.
func processes(names ...string) []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		comm, err := os.ReadFile(dir + "/comm")
		if err != nil {
			continue
		}
		name := strings.TrimSpace(string(comm))
		if exe, err := os.Readlink(dir + "/exe"); err == nil && name == "exe" { // one that has executed itself anew
			name = filepath.Base(exe)
		}
		if slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(name, n) }) {
			found = append(found, filepath.Base(dir)+" "+name)
		}
	}
	return found
}

// Beyond is what r has that before had not, one line each.
func (r Residue) Beyond(before Residue) []string {
	var more []string
	for _, kind := range []struct {
		name        string
		now, before []string
	}{
		{"device", r.Devices, before.Devices}, {"mount", r.Mounts, before.Mounts}, {"connection", r.Sockets, before.Sockets},
		{"process", r.Processes, before.Processes}, {"state file", r.State, before.State},
	} {
		old := slices.Clone(kind.before)
		for _, x := range kind.now {
			if i := slices.Index(old, x); i >= 0 {
				old = slices.Delete(old, i, i+1)
				continue
			}
			more = append(more, kind.name+" "+x)
		}
	}
	return more
}

// checkResidue fails the scenario if it left something behind. What is on its way out gets a moment.
func (t *T) checkResidue(before Residue) {
	var left []string
	for range 250 {
		if left = TakeResidue().Beyond(before); len(left) == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	for _, l := range left {
		t.Errorf("left behind: %s", l)
	}
}
