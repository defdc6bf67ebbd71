package scenario

import (
	"github.com/gabion-storage/gabion/test/vm/lab"
)

const (
	mib = 1 << 20
	gib = 1 << 30
	tib = 1 << 40
)

// cell starts a server, and a plugin of all services on the consumer node.
func cell(t *lab.T) (*lab.Server, *lab.Plugin) {
	t.LoadDriver()
	s := t.Server()
	return s, t.Plugin()
}
