package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/gabion-storage/gabion/server/block"
)

// patternSize is what the tour writes: less than wanted where a small disk cannot spare that.
func patternSize(dir string, wanted int64) (int64, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return 0, fmt.Errorf("%w: free space of %s: %w", block.ErrUnavailable, dir, err)
	}
	spare := int64(s.Bavail) * s.Bsize / 4
	if spare < 16*chunk {
		return 0, fmt.Errorf("%w: %s has too little free space: set TMPDIR to a directory with some more", block.ErrNoSpace, dir)
	}
	return min(wanted, spare) / chunk * chunk, nil
}

// chunks calls f for every chunk below size, from several goroutines.
func chunks(ctx context.Context, size int64, f func(off int64, buf []byte) error) error {
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range streams {
		g.Go(func() error {
			buf := make([]byte, chunk)
			for ctx.Err() == nil {
				off := next.Add(chunk) - chunk
				if off >= size {
					return nil
				}
				if err := f(off, buf); err != nil {
					return err
				}
			}
			return ctx.Err()
		})
	}
	return g.Wait()
}

// pattern fills buf with what belongs at off in a round: no two words of the volume are alike.
func (t *tour) pattern(buf []byte, off int64, round uint64) {
	for i := 0; i < len(buf); i += 8 {
		x := t.seed + round<<56 + uint64(off+int64(i))
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		binary.LittleEndian.PutUint64(buf[i:], x^x>>31)
	}
}

func (t *tour) compare(got []byte, off int64, round uint64) error {
	want := make([]byte, len(got))
	t.pattern(want, off, round)
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%w: what was read at offset %d is not what was written", block.ErrCorrupt, off)
	}
	return nil
}
