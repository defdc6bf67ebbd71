package controller

import (
	"errors"
	"math"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/server/block"
)

// FuzzSizes: whatever range is asked for, the size lies in it and is one that a volume can have, or it is out of range.
func FuzzSizes(f *testing.F) {
	for _, n := range []int64{0, 1, 4095, 4096, minXFS, defaultSize, block.MaxVolumeSize, math.MaxInt64, math.MinInt64} {
		f.Add(n, int64(0), true)
		f.Add(int64(0), n, false)
		f.Add(n, n, false)
	}
	f.Fuzz(func(t *testing.T, required, limit int64, xfs bool) {
		least := int64(minRaw)
		if xfs {
			least = minXFS
		}
		s, err := spanOf(&csispec.CapacityRange{RequiredBytes: required, LimitBytes: limit})
		var size int64
		if err == nil {
			size, err = s.pick(least)
		}
		switch {
		case err != nil && !errors.Is(err, block.ErrTooLarge):
			t.Errorf("%d to %d: %v", required, limit, err)
		case err == nil && (block.ValidateSize(size) != nil || size < required || limit > 0 && size > limit || size < least):
			t.Errorf("%d to %d: %d", required, limit, size)
		case err != nil && required >= 0 && required <= least && limit == 0:
			t.Errorf("%d without a limit: %v", required, err)
		}
	})
}
