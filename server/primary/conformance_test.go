package primary

import (
	"fmt"
	"testing"

	"github.com/gabion-storage/gabion/nbd/nbdtest"
	"github.com/gabion-storage/gabion/server/block"
)

func TestConformance(t *testing.T) {
	for _, slow := range []bool{false, true} {
		for _, writeThrough := range []bool{false, true} {
			t.Run(fmt.Sprintf("slow=%v,write-through=%v", slow, writeThrough), func(t *testing.T) {
				nbdtest.Conformance(t, func(t *testing.T, s block.Stream) block.Device {
					r := newRig(t, func(m *Map) { m.Volume.WriteThrough = writeThrough })
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
}
