package mount_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/mount/mounttest"
	"github.com/gabion-storage/gabion/server/block"
)

// B069: whatever a device holds is named.
func TestB069ForeignContentIsNamed(t *testing.T) {
	l := needHost(t, "mkswap")
	tests := []struct {
		name  string
		write func(t *testing.T, d mounttest.Disk)
		want  string
	}{
		{"luks1", func(t *testing.T, d mounttest.Disk) { d.Write(t, 0, luks(1)) }, "crypto_LUKS"},
		{"luks2", func(t *testing.T, d mounttest.Disk) { d.Write(t, 0, luks(2)) }, "crypto_LUKS"},
		{"gpt", func(t *testing.T, d mounttest.Disk) { gpt(t, d, 64*MiB) }, "partition table gpt"},
		{"mbr", func(t *testing.T, d mounttest.Disk) { d.Write(t, 440, mbr()) }, "partition table dos"},
		{"lvm", func(t *testing.T, d mounttest.Disk) { d.Write(t, 512, lvm()) }, "LVM2_member"},
		{"swap", func(t *testing.T, d mounttest.Disk) { mounttest.Sh(t, "mkswap", d.Path) }, "swap"},
		{"btrfs", func(t *testing.T, d mounttest.Disk) { d.Write(t, 64<<10, btrfs()) }, "btrfs"},
		{"ext4", func(t *testing.T, d mounttest.Disk) { mounttest.Sh(t, "mkfs.ext4", "-q", d.Path) }, "ext4"},
		{"ext3", func(t *testing.T, d mounttest.Disk) { mounttest.Sh(t, "mkfs.ext4", "-q", "-t", "ext3", d.Path) }, "ext3"},
		{"two at once", func(t *testing.T, d mounttest.Disk) {
			mounttest.Sh(t, "mkfs.ext4", "-q", "-b", "4096", d.Path)
			d.Write(t, 64<<10, btrfs())
		}, "several signatures"},
		// A wipe that stopped half-way, and content that has no signature: nothing is found, which proves nothing.
		{"zeros over an ext4 signature", func(t *testing.T, d mounttest.Disk) {
			mounttest.Sh(t, "mkfs.ext4", "-q", d.Path)
			d.Write(t, 0x438, []byte{0, 0})
		}, ""},
		{"random data in MiB 2", func(t *testing.T, d mounttest.Disk) {
			b := make([]byte, MiB)
			r := rand.NewChaCha8([32]byte{2})
			_, _ = r.Read(b)
			d.Write(t, 2*MiB, b)
		}, ""},
		{"zeros", func(*testing.T, mounttest.Disk) {}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := mounttest.NewDisk(t, 64*MiB)
			tt.write(t, d)
			c, err := l.Probe(d.Path)
			must(t, err)
			if c.Type != tt.want {
				t.Fatalf("got %q, want %q", c.Type, tt.want)
			}
		})
	}
}

// The smallest headers that blkid takes for what they are.

func luks(version uint16) []byte {
	b := make([]byte, 4096)
	copy(b, "LUKS\xba\xbe")
	binary.BigEndian.PutUint16(b[6:], version)
	binary.BigEndian.PutUint64(b[8:], 16384)
	copy(b[168:], "8a8f2e58-0f2e-4b39-9c0e-6d1e3b0f7c11")
	return b
}

func lvm() []byte {
	b := make([]byte, 512)
	copy(b, "LABELONE")
	binary.LittleEndian.PutUint64(b[8:], 1)
	binary.LittleEndian.PutUint32(b[20:], 32)
	copy(b[24:], "LVM2 001")
	copy(b[32:], bytes.Repeat([]byte("a"), 32))
	crc := uint32(0xf597a6cf) // LVM's own start value
	table := crc32.MakeTable(crc32.IEEE)
	for _, c := range b[20:] {
		crc = table[byte(crc)^c] ^ crc>>8
	}
	binary.LittleEndian.PutUint32(b[16:], crc)
	return b
}

func mbr() []byte {
	b := make([]byte, 72) // from byte 440
	copy(b, []byte{1, 2, 3, 4})
	b[6+4] = 0x83
	binary.LittleEndian.PutUint32(b[6+8:], 2048)
	binary.LittleEndian.PutUint32(b[6+12:], 4096)
	b[70], b[71] = 0x55, 0xaa
	return b
}

func gpt(t *testing.T, d mounttest.Disk, size int64) {
	sectors := uint64(size / 512)
	entries := make([]byte, 128*128)
	h := make([]byte, 512)
	copy(h, "EFI PART")
	binary.LittleEndian.PutUint32(h[8:], 0x10000)
	binary.LittleEndian.PutUint32(h[12:], 92)
	binary.LittleEndian.PutUint64(h[24:], 1)
	binary.LittleEndian.PutUint64(h[32:], sectors-1)
	binary.LittleEndian.PutUint64(h[40:], 34)
	binary.LittleEndian.PutUint64(h[48:], sectors-34)
	copy(h[56:], "0123456789abcdef")
	binary.LittleEndian.PutUint64(h[72:], 2)
	binary.LittleEndian.PutUint32(h[80:], 128)
	binary.LittleEndian.PutUint32(h[84:], 128)
	binary.LittleEndian.PutUint32(h[88:], crc32.ChecksumIEEE(entries))
	binary.LittleEndian.PutUint32(h[16:], crc32.ChecksumIEEE(h[:92]))
	protective := mbr()
	protective[6+4] = 0xee
	binary.LittleEndian.PutUint32(protective[6+8:], 1)
	d.Write(t, 440, protective)
	d.Write(t, 512, h)
	d.Write(t, 1024, entries)
}

func btrfs() []byte {
	b := make([]byte, 4096)
	copy(b[0x20:], "0123456789abcdef")
	binary.LittleEndian.PutUint64(b[0x30:], 64<<10)
	copy(b[0x40:], "_BHRfS_M")
	return b
}

// What cannot be read, or ends early, is not taken for blank.
func TestUnreadableIsNotBlank(t *testing.T) {
	l := needHost(t)
	t.Run("input/output error", func(t *testing.T) {
		d := mounttest.NewDisk(t, 64*MiB)
		must(t, os.Truncate(d.File, 4096)) // what lies beyond now fails, though the device keeps its size
		if _, err := os.ReadFile(d.Path); err == nil {
			t.Skip("loop devices of this kernel fill up what their file lacks")
		}
		_, err := l.Probe(d.Path)
		refused(t, err, block.ErrIO, d.Path)
	})
	t.Run("no size", func(t *testing.T) {
		d := mounttest.NewDisk(t, 64*MiB)
		d.Grow(t, 0)
		_, err := l.Probe(d.Path)
		refused(t, err, block.ErrIO, d.Path)
	})
	t.Run("not there", func(t *testing.T) {
		_, err := l.Probe("/dev/no-such-device")
		refused(t, err, block.ErrIO)
	})
}

// B071: what is not a block device is told, whatever it is.
func TestB071InspectTakesBlockDevicesOnly(t *testing.T) {
	l := needHost(t)
	d := mounttest.NewDisk(t, 64*MiB)
	b, err := l.Inspect(d.Path)
	if err != nil || b.Size != 64*MiB || b.ReadOnly || b.Number.Major != 7 {
		t.Fatalf("%+v, %v", b, err)
	}
	ro := d.ReadOnly(t)
	if b, err := l.Inspect(ro.Path); err != nil || !b.ReadOnly {
		t.Fatalf("%+v, %v", b, err)
	}
	file := filepath.Join(t.TempDir(), "regular")
	must(t, os.WriteFile(file, []byte("x"), 0o600))
	_, err = l.Inspect(file)
	refused(t, err, block.ErrPrecondition, file)
	link := file + ".link"
	must(t, os.Symlink(d.Path, link))
	_, err = l.Inspect(link)
	refused(t, err, block.ErrPrecondition, link)
	_, err = l.Inspect(file + ".none")
	refused(t, err, block.ErrNotFound)
}

// A tool of another process works on the device: it is told, and nothing is done.
func TestClaimedDeviceIsLeftAlone(t *testing.T) {
	l := needHost(t)
	d := mounttest.NewDisk(t, 512*MiB)
	other, err := os.OpenFile(d.Path, os.O_RDWR|os.O_EXCL, 0)
	must(t, err)
	_, err = l.Probe(d.Path)
	refused(t, err, block.ErrInUse, d.Path)
	for _, fs := range []mount.FS{mount.Ext4, mount.XFS} {
		refused(t, l.Format(mount.Format{Device: d.Path, Type: fs, Blank: true}), block.ErrIO, d.Path)
	}
	must(t, other.Close())
	if c, err := l.Probe(d.Path); err != nil || c.Type != "" {
		t.Fatalf("%+v, %v: something was written", c, err)
	}
}
