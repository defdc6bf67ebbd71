// Package scenario is the list of what must hold on a real kernel, each a few lines of the vocabulary of package lab.
package scenario

import (
	"slices"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

// All is every scenario, in the order in which they run. Names are unique.
func All() []lab.Scenario {
	return slices.Concat(basic(), lifecycle(), space(), outage(), failover(), refusals(), device(), filesystem(), filesystem2(), limits())
}
