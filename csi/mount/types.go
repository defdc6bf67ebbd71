package mount

import "fmt"

// FS is a file system that volumes are formatted with.
type FS string

// The file systems that there are.
const (
	Ext4 FS = "ext4"
	XFS  FS = "xfs"
)

// Number is a device number as the kernel prints it.
type Number struct{ Major, Minor uint32 }

func (n Number) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// Block is what the kernel says of a block device's node.
type Block struct {
	Number   Number
	Size     int64 // bytes
	ReadOnly bool
}

// Content is what a device holds, as far as signatures tell.
type Content struct {
	// Type is the name blkid has for it (ext4, crypto_LUKS, LVM2_member, …), a
	// partition table as "partition table gpt", "several signatures" if they
	// contradict each other, and "" if there is none: which proves nothing.
	Type string
}

// FileSystem is a mount to be made.
type FileSystem struct {
	Device   string // path of its node
	Type     FS
	Options  Options
	ReadOnly bool // mounts it as it is: no journal is replayed
}

// Format is a file system to be made.
type Format struct {
	Device string
	Type   FS
	Blank  bool // no extent of the volume was ever born: everything reads as zeros
}

// Usage is how full a file system is, in bytes and inodes.
type Usage struct {
	Total, Used, Available          int64
	Inodes, InodesUsed, InodesAvail int64 // 0, 0, 0 where the file system makes them as needed
	Errors                          int64 // that ext4 has met since it was checked
}
