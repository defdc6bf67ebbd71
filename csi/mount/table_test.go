package mount

import (
	"testing"

	mountutils "k8s.io/mount-utils"
)

// The kernel escapes what would break its lines into fields; paths are compared as they are.
func TestEntryOfAnOddPath(t *testing.T) {
	e := entry(mountutils.MountInfo{ID: 7, ParentID: 3, Major: 43, Minor: 2, Root: `/a\040b`, MountPoint: `/pods/x\040y\134040`, Source: `/dev/nbd2`,
		FsType: "ext4", MountOptions: []string{"ro", "noatime"}, SuperOptions: []string{"rw", "emergency_ro", "errors=remount-ro"}})
	want := Entry{ID: 7, Parent: 3, Number: Number{43, 2}, Root: "/a b", Point: `/pods/x y\040`, Type: "ext4", Source: "/dev/nbd2", ReadOnly: true, SuperReadOnly: true, StopsOnError: true}
	if e != want {
		t.Errorf("%+v, want %+v", e, want)
	}
}
