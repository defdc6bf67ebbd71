package lab

import (
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Disk is a file system of its own under a server's disk, which can be small, and can lose what was not synced.
type Disk struct {
	t     *T
	s     *Server
	image string
}

// DiskOf gives a server that has not been started yet a disk of a size in MiB.
func (t *T) DiskOf(s *Server, mib int) *Disk {
	t.Sh("modprobe", "loop")
	d := &Disk{t: t, s: s, image: filepath.Join(s.dir, "disk.img")}
	t.Sh("truncate", "--size", strconv.Itoa(mib)+"M", d.image)
	t.Sh("mkfs.xfs", "-q", "-f", d.image)
	d.mount()
	t.Cleanup(func() {
		if s.proc != nil {
			s.Kill()
		}
		t.Sh("umount", s.Disk)
	})
	return d
}

func (d *Disk) mount() { d.t.Sh("mount", "-o", "loop", d.image, d.s.Disk) }

// LoseUnsynced kills the server and makes its disk what it would be after a power cut: all that was not synced is gone.
// The server is not started again.
func (d *Disk) LoseUnsynced() {
	d.s.Kill()
	d.t.Sh("xfs_io", "-x", "-c", "shutdown", d.s.Disk)
	d.t.Sh("umount", d.s.Disk)
	d.mount()
}

// ballast is the file that fills a disk.
func (d *Disk) ballast() string { return filepath.Join(d.s.Disk, "ballast") }

// Fill leaves so many MiB of the disk free, the server's own reserve not counted.
func (d *Disk) Fill(mib int) {
	var st unix.Statfs_t
	d.t.Check(unix.Statfs(d.s.Disk, &st), "the disk")
	block := st.Bsize
	reserve := int64(st.Blocks) * block / 50
	size := int64(st.Bavail)*block - reserve - int64(mib)<<20
	d.t.Sh("fallocate", "--length", strconv.FormatInt(size, 10), d.ballast())
}

// Free undoes Fill.
func (d *Disk) Free() { d.t.Check(os.Remove(d.ballast()), "freeing the disk") }
