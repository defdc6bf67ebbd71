package lab

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// textSize is the length of what Write writes.
const textSize = 1 << 20

// content repeats a text.
func content(text string) []byte {
	return bytes.Repeat([]byte(text+"\n"), textSize/(len(text)+1)+1)[:textSize]
}

// Write writes a recognisable content to a file, made if absent, or to the beginning of a device, and syncs it.
func (t *T) Write(path, text string) { t.Check(TryWrite(path, text), "writing %s", path) }

// TryWrite is Write for what may fail.
func TryWrite(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content(text))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Expect reads back what Write wrote, from the device rather than from the page cache.
func (t *T) Expect(path, text string) {
	got, err := ReadDirect(path, 0, textSize)
	t.Check(err, "reading %s", path)
	if !bytes.Equal(got, content(text)) {
		t.Fatalf("%s does not hold %q but begins with %.60q", path, text, got)
	}
}

// ReadDirect reads past the page cache; offset and length are whole blocks.
func ReadDirect(path string, off int64, length int) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	block := AlignedBlock()
	var all []byte
	for len(all) < length {
		n, err := f.ReadAt(block, off+int64(len(all)))
		all = append(all, block[:n]...)
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

// Exists tells whether there is a file.
func Exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// ReadText reads a small file, such as sysfs has; "" if there is none.
func ReadText(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

// Queue reads a property of the volume's device, such as "queue/write_cache".
func (v *Volume) Queue(name string) string {
	return ReadText(filepath.Join("/sys/block", v.Device(), name))
}

// Image is the volume's image on the server's disk: a complete raw file.
func (s *Server) Image(v *Volume) string {
	return filepath.Join(s.Disk, "volumes", v.ID, "head.img")
}

// CheckImage checks the volume's file system in its image, changing nothing. The volume is not staged.
func (s *Server) CheckImage(v *Volume) {
	if v.Block {
		return
	}
	if v.FS == "xfs" {
		s.t.Sh("xfs_repair", "-n", "-f", s.Image(v))
	} else {
		s.t.Sh("e2fsck", "-fn", s.Image(v))
	}
}
