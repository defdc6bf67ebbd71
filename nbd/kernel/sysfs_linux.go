package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

const (
	sectorSize   = 512 // of sysfs, whatever the device's blocks are
	wantedKiB    = 1280
	devicePrefix = "nbd"
)

// Places implements Kernel.
func (l *Linux) Places() ([]Place, error) {
	entries, err := os.ReadDir(filepath.Join(l.sys, "block"))
	if err != nil {
		return nil, fmt.Errorf("%w: listing devices: %w", block.ErrUnavailable, err)
	}
	var all []Place
	for _, e := range entries {
		index, ok := deviceIndex(e.Name())
		if !ok {
			continue
		}
		d := l.device(index)
		p := d.place(index)
		if d.err != nil {
			return nil, d.unreadable(index)
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b Place) int { return a.Index - b.Index })
	return all, nil
}

func (d *sysDir) place(index int) Place {
	return Place{Index: index, Configured: d.has("pid"), Backend: d.text("backend")}
}

func (d *sysDir) unreadable(index int) error {
	return fmt.Errorf("%w: nbd%d: %w", block.ErrUnavailable, index, d.err)
}

// deviceIndex is N of nbdN.
func deviceIndex(name string) (int, bool) {
	digits, ok := strings.CutPrefix(name, devicePrefix)
	n, err := strconv.Atoi(digits)
	return n, ok && err == nil && n >= 0 && strconv.Itoa(n) == digits
}

// Node implements Kernel. A device that cannot be read, for want of descriptors
// or memory, is neither gone nor another's: that is an error.
func (l *Linux) Node(index int) (Node, error) {
	d := l.device(index)
	numbers := d.text("dev")
	n := Node{
		Place: d.place(index),
		Size:  d.number("size") * sectorSize, BlockSize: d.number("queue/logical_block_size"), ReadOnly: d.number("ro") == 1,
		Queues: len(d.list("mq")), InFlight: d.inFlight(),
	}
	if d.err != nil {
		return Node{}, d.unreadable(index)
	}
	if numbers == "" {
		return Node{}, fmt.Errorf("%w: nbd%d", block.ErrNotFound, index)
	}
	if _, err := fmt.Sscanf(numbers, "%d:%d", &n.Major, &n.Minor); err != nil {
		return Node{}, fmt.Errorf("%w: nbd%d has the number %q", block.ErrUnavailable, index, numbers)
	}
	return n, nil
}

func (l *Linux) device(index int) *sysDir {
	return &sysDir{path: filepath.Join(l.sys, "block", devicePrefix+strconv.Itoa(index))}
}

// InFlight implements Kernel.
func (l *Linux) InFlight(index int) int {
	return l.device(index).inFlight()
}

func (d *sysDir) inFlight() int {
	sum := 0
	for f := range strings.FieldsSeq(d.text("inflight")) { // reads and writes
		n, _ := strconv.Atoi(f)
		sum += n
	}
	return sum
}

// Tune implements Kernel. Linux 6.1 limits requests of nbd to 128 KiB, where
// later kernels take 1280.
func (l *Linux) Tune(index int) error {
	d := l.device(index)
	kib := min(wantedKiB, d.number("queue/max_hw_sectors_kb"))
	if d.number("queue/max_sectors_kb") >= kib {
		return nil
	}
	if err := os.WriteFile(filepath.Join(d.path, "queue/max_sectors_kb"), strconv.AppendInt(nil, kib, 10), 0); err != nil {
		return fmt.Errorf("nbd%d: raising the size of its requests: %w", index, refused(err))
	}
	return nil
}

// sysDir is a directory of sysfs. What is not there reads as nothing; any other failure is kept.
type sysDir struct {
	path string
	err  error
}

// fail keeps an error, unless it is that of a file that is not there or of a device that goes while it is read.
func (d *sysDir) fail(err error) {
	if d.err == nil && err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		d.err = err
	}
}

func (d *sysDir) text(name string) string {
	text, err := attribute(filepath.Join(d.path, name))
	d.fail(err)
	return strings.TrimSpace(text)
}

// attribute reads a file of sysfs, which gives all it has, at most a page, at the first read: three calls of the
// kernel, of which os.ReadFile makes seven. Each device is asked several times a second.
func attribute(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	var page [4096]byte
	n, err := unix.Read(fd, page[:])
	return string(page[:max(n, 0)]), err
}

func (d *sysDir) number(name string) int64 {
	n, _ := strconv.ParseInt(d.text(name), 10, 64)
	return n
}

func (d *sysDir) has(name string) bool {
	_, err := os.Stat(filepath.Join(d.path, name))
	d.fail(err)
	return err == nil
}

func (d *sysDir) list(name string) []string {
	entries, err := os.ReadDir(filepath.Join(d.path, name))
	d.fail(err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
