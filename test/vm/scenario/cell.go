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

// splitCell is cell with a controller plugin beside the server and a node plugin on the consumer node, as Kubernetes has
// them: a controller is not ready without the metadata service, a node plugin is.
func splitCell(t *lab.T) (s *lab.Server, controller, node *lab.Plugin) {
	t.LoadDriver()
	s = t.Server()
	return s, t.ControllerPlugin(), t.NodePlugin()
}
