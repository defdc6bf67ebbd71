package mount

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

// Inspect looks at a device's node and at what sysfs says of its number. It
// does not open the device.
func (l *Linux) Inspect(device string) (Block, error) {
	var st unix.Stat_t
	if err := unix.Lstat(device, &st); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return Block{}, fmt.Errorf("%w: device node %s: the host's /dev must be visible here", block.ErrNotFound, device)
		}
		return Block{}, fmt.Errorf("%w: device node %s: %w", block.ErrIO, device, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return Block{}, fmt.Errorf("%w: %s is not a block device", block.ErrPrecondition, device)
	}
	n := number(st.Rdev)
	sectors, err := attribute(n, "size")
	if err != nil {
		return Block{}, err
	}
	readOnly, err := attribute(n, "ro")
	if err != nil {
		return Block{}, err
	}
	return Block{Number: n, Size: sectors << 9, ReadOnly: readOnly != 0}, nil
}

func attribute(n Number, name string) (int64, error) {
	path := fmt.Sprintf("/sys/dev/block/%s/%s", n, name)
	b, err := os.ReadFile(path)
	if err == nil {
		var v int64
		if v, err = strconv.ParseInt(strings.TrimSpace(string(b)), 10, 54); err == nil {
			return v, nil
		}
	}
	if errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("%w: the kernel has no device %s", block.ErrNotFound, n)
	}
	return 0, fmt.Errorf("%w: device %s: %w", block.ErrIO, n, err)
}

const (
	// head and foot are how much of a device's ends must be readable before its signatures are looked for there.
	head = 1 << 20
	foot = 64 << 10
)

// Probe says what a device holds. It claims the device meanwhile, so that it
// tells a device that a mount, or a tool of an earlier process, works on.
func (l *Linux) Probe(device string) (Content, error) {
	return apart(task{Do: doProbe, Device: device})
}

func probe(device string) (Content, error) {
	f, err := claim(device)
	if err != nil {
		return Content{}, err
	}
	defer f.Close()
	if err := readEnds(f); err != nil {
		return Content{}, fmt.Errorf("%w: device %s cannot be read, so what it holds is not known and nothing was changed: %w", block.ErrIO, device, err)
	}
	o, err := run("blkid", "-p", "-o", "export", device)
	switch {
	case err != nil:
		return Content{}, err
	case o.code == 0:
		return Content{Type: contentType(o.text)}, nil
	case o.code == 2: // and everything that is looked at could be read
		return Content{}, nil
	case o.code == 8:
		return Content{Type: "several signatures"}, nil
	}
	return Content{}, fmt.Errorf("%w: blkid %s: %s (exit code %d)", block.ErrIO, device, o.text, o.code)
}

func claim(device string) (*os.File, error) {
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("%w: device %s is mounted, or a program works on it: it is tried again", block.ErrInUse, device)
	case err != nil:
		return nil, fmt.Errorf("%w: device %s: %w", block.ErrIO, device, err)
	}
	return f, nil
}

// readEnds reads where signatures are. A device that cannot be read, or ends early, holds nobody knows what.
func readEnds(f *os.File) error {
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if size == 0 {
		return errors.New("it has no size")
	}
	buf := make([]byte, min(head, size))
	if _, err := f.ReadAt(buf, 0); err != nil {
		return err
	}
	buf = buf[:min(foot, size)]
	_, err = f.ReadAt(buf, size-int64(len(buf)))
	return err
}

// contentType reads the KEY=value pairs of blkid. A type it knows but does not
// name is something all the same.
func contentType(pairs string) string {
	fields := map[string]string{}
	for _, word := range strings.Fields(pairs) {
		if k, v, ok := strings.Cut(word, "="); ok {
			fields[k] = v
		}
	}
	switch {
	case fields["TYPE"] != "" && fields["PTTYPE"] != "":
		return fields["TYPE"] + " and partition table " + fields["PTTYPE"]
	case fields["TYPE"] != "":
		return fields["TYPE"]
	case fields["PTTYPE"] != "":
		return "partition table " + fields["PTTYPE"]
	}
	return "something that blkid does not name"
}
