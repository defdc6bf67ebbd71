package vfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// statxMntIDUnique asks for a mount id that is never reused (Linux 6.8).
const statxMntIDUnique = 0x4000

var fsTypes = map[uint32]string{
	0x58465342: "xfs",
	0xEF53:     "ext4",
	0x9123683E: "btrfs",
	0x01021994: "tmpfs",
	0x794C7630: "overlay",
}

// Identity tells mountings apart. The best witness is the kernfs inode of the
// superblock's directory in /sys/fs: it is the same seen through every bind
// mount and container, and a new one each time the file system is mounted.
// Where there is none, the unique mount id is next best (it also changes when
// only the mount point does, which is the safe direction); before Linux 6.8
// the plain mount id, which the kernel reuses.
func (d *osDir) Identity() (Identity, error) {
	var stx unix.Statx_t
	mask := unix.STATX_INO | unix.STATX_MNT_ID | statxMntIDUnique
	if err := unix.Statx(d.fd, "", unix.AT_EMPTY_PATH, mask, &stx); err != nil {
		return Identity{}, wrap("stat", d.name, err)
	}
	var sfs unix.Statfs_t
	if err := unix.Fstatfs(d.fd, &sfs); err != nil {
		return Identity{}, wrap("statfs", d.name, err)
	}
	id := Identity{
		Device: unix.Mkdev(stx.Dev_major, stx.Dev_minor),
		Inode:  stx.Ino,
		Type:   fsTypes[uint32(sfs.Type)],
	}
	if id.Type == "" {
		id.Type = "0x" + strconv.FormatUint(uint64(uint32(sfs.Type)), 16)
	}
	id.Mount = superblock(id.Type, stx.Dev_major, stx.Dev_minor)
	if id.Mount == "" {
		kind := "mount"
		if stx.Mask&statxMntIDUnique != 0 {
			kind = "unique-mount"
		}
		id.Mount = fmt.Sprintf("%s/%d", kind, stx.Mnt_id)
	}
	return id, nil
}

// superblock is "" if the file system shows itself nowhere in /sys/fs.
func superblock(fsType string, major, minor uint32) string {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", major, minor))
	if err != nil {
		return ""
	}
	device := filepath.Base(link)
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join("/sys/fs", fsType, device), &st); err != nil {
		return ""
	}
	return fmt.Sprintf("%s/%s/%d", fsType, device, st.Ino)
}
