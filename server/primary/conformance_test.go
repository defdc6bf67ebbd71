package primary

import (
	"fmt"
	"testing"

	"github.com/gabion-storage/gabion/nbd/nbdtest"
	"github.com/gabion-storage/gabion/server/block"
)

// TestConformance: a disk that does all in line under a flush volume, and one that does nothing in line under a write-through volume.
func TestConformance(t *testing.T) {
	for _, slow := range []bool{false, true} {
		t.Run(fmt.Sprintf("slow=%v", slow), func(t *testing.T) {
			nbdtest.Conformance(t, func(t *testing.T, s block.Stream) block.Device {
				r := newRig(t, func(m *Map) { m.Volume.WriteThrough = slow })
				r.disk.slow = slow
				d, err := r.m.Open(t.Context(), r.name("/1/1"), s)
				if err != nil {
					t.Fatal(err)
				}
				return d
			})
		})
	}
}
