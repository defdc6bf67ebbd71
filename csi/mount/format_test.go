package mount

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

// A tool that lacks an option is asked without it; one that was killed is not
// run again behind its killer's back (B068).
func TestB068KilledFormatIsNotRepeated(t *testing.T) {
	lacks := fmt.Errorf("%w: mkfs.ext4: bad option", block.ErrIO)
	killed := fmt.Errorf("%w: mkfs.ext4 did not end by itself", block.ErrUnavailable)
	for _, c := range []struct {
		name  string
		blank bool
		first error
		runs  int
		fails bool
	}{
		{"blank", true, nil, 1, false},
		{"not blank", false, nil, 1, false},
		{"blank, without the option", true, lacks, 2, false},
		{"blank, killed", true, killed, 1, true},
	} {
		var runs [][]string
		err := formatExt4(c.blank, func(tool string, args ...string) error {
			runs = append(runs, slices.Clone(args))
			if len(runs) == 1 {
				return c.first
			}
			return nil
		})
		if len(runs) != c.runs || (err != nil) != c.fails {
			t.Errorf("%s: %d runs, %v", c.name, len(runs), err)
		}
		last := strings.Join(runs[len(runs)-1], " ")
		if strings.Contains(last, "prezeroed") != (c.blank && c.runs == 1) {
			t.Errorf("%s: %s", c.name, last)
		}
	}
}
