package kernel

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// Device is a volume's device as the kernel shows it.
type Device struct {
	Identity
	Index        int    // N of /dev/nbdN; may be another after the next attach
	Path         string // /dev/nbdN
	Major, Minor uint32
	Size         int64 // bytes
	BlockSize    int64 // bytes
	ReadOnly     bool
	Condition    Condition
}

// Identity is what a device stands for, all its life. It is never joined to
// another attachment or cache epoch.
type Identity struct {
	Volume     block.VolumeID
	Attachment block.AttachmentID
	Epoch      block.CacheEpoch
}

func devicePath(index int) string { return "/dev/nbd" + strconv.Itoa(index) }

const backendPrefix = "gabion/"

// Backend is the identity as sysfs shows it.
func (i Identity) Backend() string {
	return fmt.Sprintf("%s%s/%s/%d", backendPrefix, i.Volume, i.Attachment, i.Epoch)
}

// ParseBackend reads a backend identifier; false: it is not one of Gabion's.
func ParseBackend(s string) (Identity, bool) {
	rest, ours := strings.CutPrefix(s, backendPrefix)
	parts := strings.Split(rest, "/")
	if !ours || len(parts) != 3 {
		return Identity{}, false
	}
	volume, err1 := block.ParseUUID(parts[0])
	attachment, err2 := block.ParseUUID(parts[1])
	epoch, err3 := strconv.ParseUint(parts[2], 10, 64)
	i := Identity{block.VolumeID{UUID: volume}, block.AttachmentID{UUID: attachment}, block.CacheEpoch(epoch)}
	return i, err1 == nil && err2 == nil && err3 == nil && i.Backend() == s
}

// Health is how a device is, from best to worst.
type Health uint8

const (
	// Connected: its sockets are alive.
	Connected Health = iota + 1
	// Waiting: requests wait, without error, until a server takes the device's session.
	Waiting
	// Refused: permanent. All requests fail; it is to be unmounted and made anew.
	Refused
	// Zombie: it was ended and somebody still has it open.
	Zombie
)

func (h Health) String() string {
	switch h {
	case Connected:
		return "connected"
	case Waiting:
		return "waiting"
	case Refused:
		return "refused"
	case Zombie:
		return "zombie"
	}
	return fmt.Sprintf("health(%d)", uint8(h))
}

// Condition is a device's health with a sentence for an operator.
type Condition struct {
	Health Health
	Reason string    // empty if connected
	Since  time.Time // of this health, as far as this process knows
}

// Lost reports whether the device was refused because data was lost that was
// acknowledged and not flushed.
func (c Condition) Lost() bool { return c.Health == Refused && c.Reason == lostReason }
