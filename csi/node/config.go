package node

import (
	"log/slog"
)

// MaxVolumes is how many volumes a node takes: a constant, whatever is in use.
// It is far below the number of devices that the kernel's nbd can make.
const MaxVolumes = 250

// Config is a Node service's surroundings. All but StateDir are needed.
type Config struct {
	Name     string // of the node, as volumes are published to it
	Rack     string
	Attacher Attacher
	Volumes  Volumes
	Mounter  Mounter
	// StateDir remembers with which options volumes were staged, so that a call
	// with others can be told apart; on a file system that a reboot empties. What
	// is lost there is not missed. "": nothing is remembered.
	StateDir string
	Log      *slog.Logger
}
