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
)

const (
	sectorSize   = 512 // of sysfs, whatever the device's blocks are
	wantedKiB    = 1280
	devicePrefix = "nbd"
)

// Nodes implements Kernel.
func (l *Linux) Nodes() ([]Node, error) {
	entries, err := os.ReadDir(filepath.Join(l.sys, "block"))
	if err != nil {
		return nil, fmt.Errorf("listing devices: %w", refused(err))
	}
	var nodes []Node
	for _, e := range entries {
		index, ok := deviceIndex(e.Name())
		if !ok {
			continue
		}
		n, err := l.Node(index)
		if errors.Is(err, block.ErrNotFound) { // gone meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, n)
	}
	slices.SortFunc(nodes, func(a, b Node) int { return a.Index - b.Index })
	return nodes, nil
}

// deviceIndex is N of nbdN.
func deviceIndex(name string) (int, bool) {
	digits, ok := strings.CutPrefix(name, devicePrefix)
	n, err := strconv.Atoi(digits)
	return n, ok && err == nil && n >= 0 && strconv.Itoa(n) == digits
}

// Node implements Kernel.
func (l *Linux) Node(index int) (Node, error) {
	d := sysDir(filepath.Join(l.sys, "block", devicePrefix+strconv.Itoa(index)))
	n := Node{Index: index}
	numbers, err := d.read("dev")
	if err != nil {
		return Node{}, fmt.Errorf("%w: nbd%d", block.ErrNotFound, index)
	}
	if _, err := fmt.Sscanf(numbers, "%d:%d", &n.Major, &n.Minor); err != nil {
		return Node{}, fmt.Errorf("%w: nbd%d has the number %q", block.ErrUnavailable, index, numbers)
	}
	_, err = os.Stat(filepath.Join(string(d), "pid"))
	n.Configured = err == nil
	n.Backend, _ = d.read("backend")
	n.Size = d.number("size") * sectorSize
	n.BlockSize = d.number("queue/logical_block_size")
	n.ReadOnly = d.number("ro") == 1
	n.Queues = len(d.list("mq"))
	n.InFlight = d.inFlight()
	return n, nil
}

// InFlight implements Kernel.
func (l *Linux) InFlight(index int) int {
	return sysDir(filepath.Join(l.sys, "block", devicePrefix+strconv.Itoa(index))).inFlight()
}

func (d sysDir) inFlight() int {
	sum := 0
	numbers, _ := d.read("inflight") // reads and writes
	for f := range strings.FieldsSeq(numbers) {
		n, _ := strconv.Atoi(f)
		sum += n
	}
	return sum
}

// Tune implements Kernel. Linux 6.1 limits requests of nbd to 128 KiB, where
// later kernels take 1280.
func (l *Linux) Tune(index int) error {
	d := sysDir(filepath.Join(l.sys, "block", devicePrefix+strconv.Itoa(index), "queue"))
	kib := min(wantedKiB, d.number("max_hw_sectors_kb"))
	if d.number("max_sectors_kb") >= kib {
		return nil
	}
	if err := os.WriteFile(filepath.Join(string(d), "max_sectors_kb"), strconv.AppendInt(nil, kib, 10), 0); err != nil {
		return fmt.Errorf("nbd%d: raising the size of its requests: %w", index, refused(err))
	}
	return nil
}

// sysDir is a directory of sysfs.
type sysDir string

func (d sysDir) read(name string) (string, error) {
	p, err := os.ReadFile(filepath.Join(string(d), name))
	return strings.TrimSpace(string(p)), err
}

// number is 0 if there is none.
func (d sysDir) number(name string) int64 {
	s, _ := d.read(name)
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}

func (d sysDir) list(name string) []string {
	entries, _ := os.ReadDir(filepath.Join(string(d), name))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
