package controller

import (
	"fmt"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/server/block"
)

// Sizes in bytes, multiples of block.SizeQuantum.
const (
	// defaultSize is that of a volume for which nobody names one.
	defaultSize = 10 << 30
	// The smallest volumes: what mkfs makes a file system on.
	minRaw  = 1 << 20
	minExt4 = 16 << 20
	minXFS  = 300 << 20
)

// rangeError is a size that cannot be had. It stands for block.ErrTooLarge,
// beyond a limit, and says which.
type rangeError string

func (e rangeError) Error() string { return string(e) }
func (rangeError) Unwrap() error   { return block.ErrTooLarge }

func outOfRange(format string, args ...any) error { return rangeError(fmt.Sprintf(format, args...)) }

// span is a capacity range that was checked; limit 0 is none.
type span struct{ required, limit int64 }

func spanOf(r *csispec.CapacityRange) (span, error) {
	s := span{r.GetRequiredBytes(), r.GetLimitBytes()}
	switch {
	case s.required < 0 || s.limit < 0:
		return s, outOfRange("the capacity range has a negative size: required %d, limit %d", s.required, s.limit)
	case s.limit > 0 && s.limit < s.required:
		return s, outOfRange("the capacity range is empty: required %d bytes, limit %d", s.required, s.limit)
	case s.required > block.MaxVolumeSize:
		return s, outOfRange("%d bytes are required; the largest volume is 64TiB (%d bytes)", s.required, int64(block.MaxVolumeSize))
	}
	return s, nil
}

// has reports whether a volume of size bytes is what the range asks for.
func (s span) has(size int64) bool { return size >= s.required && (s.limit == 0 || size <= s.limit) }

// pick is the size of a new volume that is not below minimum.
func (s span) pick(minimum int64) (int64, error) {
	size := max(s.required, minimum)
	if s.required == 0 {
		size = defaultSize
		if s.limit > 0 {
			size = min(size, s.limit-s.limit%block.SizeQuantum)
		}
		size = max(size, minimum)
	}
	size = roundUp(size)
	if !s.has(size) {
		return 0, outOfRange("at most %d bytes are wanted, and the next size that a volume can have is %d: at least %d, in steps of %d",
			s.limit, size, minimum, block.SizeQuantum)
	}
	return size, nil
}

// roundUp rounds a size of at most block.MaxVolumeSize up to one that a volume can have.
func roundUp(n int64) int64 {
	return (n + block.SizeQuantum - 1) / block.SizeQuantum * block.SizeQuantum
}
