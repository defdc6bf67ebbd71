package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

const (
	pokeSize  = 4096
	pokeTries = 8
	pokeLook  = 5 * time.Millisecond
)

// Poke implements Kernel.
//
// The page is read ahead and looked for in the cache, not read: a process that
// waits for a device's read cannot be killed, and a node plugin that cannot be
// killed cannot be replaced by one that would bring the device's server back.
func (l *Linux) Poke(ctx context.Context, index int, size int64) error {
	fd, err := l.open(ctx, index, 0)
	if err != nil {
		return fmt.Errorf("opening nbd%d: %w", index, refused(err))
	}
	// Closing waits for the page if nobody else has the device open.
	done := make(chan error, 1)
	go func() {
		defer unix.Close(fd)
		done <- l.poke(ctx, fd, index, size)
	}()
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("%w: nbd%d does not answer: %w", block.ErrUnavailable, index, err)
	}
	return nil
}

// poke asks for a page from each queue, and then waits for all of them.
func (l *Linux) poke(ctx context.Context, fd, index int, size int64) error {
	var pages []int64
	var failure error
	for _, cpus := range l.queues(index) {
		var off int64
		var err error
		onCPUs(cpus, func() { off, err = askPage(fd, size) })
		if err != nil {
			failure = err
		}
		if err != nil || slices.Contains(pages, off) {
			continue
		}
		pages = append(pages, off)
	}
	if len(pages) == 0 {
		return failure
	}
	t := time.NewTicker(pokeLook)
	defer t.Stop()
	for len(pages) > 0 {
		switch err := cached(fd, pages[0]); {
		case err == nil:
			_ = unix.Fadvise(fd, pages[0], pokeSize, unix.FADV_DONTNEED)
			pages = pages[1:]
			continue
		case !errors.Is(err, unix.EAGAIN):
			return err
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// queues are the CPUs of each of a device's hardware queues; an empty set stands for any.
func (l *Linux) queues(index int) (all []unix.CPUSet) {
	d := l.device(index)
	for _, q := range d.list("mq") {
		var cpus unix.CPUSet
		for _, c := range strings.Split(d.text("mq/"+q+"/cpu_list"), ",") {
			if n, err := strconv.Atoi(strings.TrimSpace(c)); err == nil {
				cpus.Set(n)
			}
		}
		all = append(all, cpus)
	}
	if len(all) == 0 {
		all = append(all, unix.CPUSet{})
	}
	return all
}

// onCPUs runs f on one of the CPUs, if this process may; else wherever it is.
func onCPUs(cpus unix.CPUSet, f func()) {
	runtime.LockOSThread()
	var before unix.CPUSet
	pinned := cpus.Count() > 0 && unix.SchedGetaffinity(0, &before) == nil && unix.SchedSetaffinity(0, &cpus) == nil
	f()
	if !pinned || unix.SchedSetaffinity(0, &before) == nil { // else the thread ends with this goroutine
		runtime.UnlockOSThread()
	}
}

// askPage has a page read that was not in the cache, and returns its offset.
func askPage(fd int, size int64) (int64, error) {
	pages := size / pokeSize
	if pages == 0 {
		return 0, fmt.Errorf("%w: a device of %d bytes", block.ErrUnsupported, size)
	}
	for range pokeTries {
		off := rand.Int64N(pages) * pokeSize
		_ = unix.Fadvise(fd, off, pokeSize, unix.FADV_DONTNEED)
		if cached(fd, off) == nil { // in use
			continue
		}
		return off, unix.Fadvise(fd, off, pokeSize, unix.FADV_WILLNEED)
	}
	return 0, fmt.Errorf("%w: all pages are in use", block.ErrUnsupported)
}

// cached reads a byte if that needs no I/O; EAGAIN if it does.
func cached(fd int, off int64) error {
	var p [1]byte
	_, err := unix.Preadv2(fd, [][]byte{p[:]}, off, unix.RWF_NOWAIT)
	return err
}
