package nbdtest_test

import (
	"testing"

	"github.com/gabion-storage/gabion/nbd/nbdtest"
	"github.com/gabion-storage/gabion/server/block"
)

func TestMemoryConforms(t *testing.T) {
	for name, async := range map[string]bool{"in line": false, "async": true} {
		t.Run(name, func(t *testing.T) {
			nbdtest.Conformance(t, func(_ *testing.T, s block.Stream) block.Device {
				m := nbdtest.NewMemory(48 << 20)
				m.Async = async
				return m.Open(s)
			})
		})
	}
}
