package metadata

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/raft/placement"
	"github.com/gabion-storage/gabion/server/block"
)

// Bounds of what a command may carry, so that a state stays encodable.
const (
	maxName     = 128  // bytes of a volume's or a rack's name
	maxNodeName = 253  // bytes of a node's name: a DNS name
	maxText     = 1024 // bytes of an address, a path, a problem
	minToken    = 16
	maxToken    = 64
	maxDisks    = 1024 // in one command
	maxRuns     = 256  // in one command
)

// ValidateName returns ErrInvalid unless a volume can have the name: valid
// UTF-8 of 1 to 128 bytes without control characters other than tabs and line
// ends, just as CSI has it. Names are compared byte by byte, never normalised.
func ValidateName(name string) error {
	return checkName("volume name", name, maxName, func(r rune) bool { return control(r) && !strings.ContainsRune(space, r) })
}

// ValidateNodeName returns ErrInvalid unless a node or a consumer can have the name.
func ValidateNodeName(name string) error { return checkName("node name", name, maxNodeName, control) }

// ValidateRack returns ErrInvalid unless a rack can have the name.
func ValidateRack(name string) error { return checkName("rack name", name, maxName, control) }

func checkName(what, name string, limit int, banned func(rune) bool) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: the %s is empty", block.ErrInvalid, what)
	case len(name) > limit:
		return fmt.Errorf("%w: the %s %.40q... has %d bytes; at most %d are allowed", block.ErrInvalid, what, name, len(name), limit)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: the %s %q is not valid UTF-8", block.ErrInvalid, what, name)
	case strings.ContainsFunc(name, banned):
		return fmt.Errorf("%w: the %s %q has a control character", block.ErrInvalid, what, name)
	}
	return nil
}

func control(r rune) bool { return r < 0x20 || r >= 0x7f && r <= 0x9f }

// space are the control characters that a volume's name may have since LevelTerms.
const space = "\t\n\r"

// ValidatePolicy returns ErrInvalid, naming the field and what it takes, unless every field of the policy is filled in.
func ValidatePolicy(p *metapb.Policy) error {
	var field, takes string
	switch {
	case p.GetReplicas() < 1 || p.GetReplicas() > placement.MaxReplicas:
		field, takes = fmt.Sprintf("replicas %d", p.GetReplicas()), fmt.Sprintf("1 to %d", placement.MaxReplicas)
	case p.GetSpread() == metapb.Policy_SPREAD_UNSPECIFIED:
		field, takes = "spread", "rack or node"
	case p.GetAccess() == metapb.Policy_ACCESS_UNSPECIFIED:
		field, takes = "access", "cluster or rack"
	case p.GetDurability() == metapb.Policy_DURABILITY_UNSPECIFIED:
		field, takes = "durability", "flush or write-through"
	case p.GetOnFull() == metapb.Policy_ON_FULL_UNSPECIFIED:
		field, takes = "on-full", "wait or error"
	case p.GetBlockSize() != 512 && p.GetBlockSize() != 4096:
		field, takes = fmt.Sprintf("block size %d", p.GetBlockSize()), "512 or 4096"
	case p.GetFsType() != "" && p.GetFsType() != "ext4" && p.GetFsType() != "xfs":
		field, takes = fmt.Sprintf("file system %.20q", p.GetFsType()), "ext4, xfs or empty"
	default:
		return nil
	}
	return fmt.Errorf("%w: the policy's %s must be %s", block.ErrInvalid, field, takes)
}

func checkText(what string, texts ...string) error {
	for _, s := range texts {
		if len(s) > maxText {
			return fmt.Errorf("%w: an address or text of %s has %d bytes; at most %d are allowed",
				block.ErrInvalid, what, len(s), maxText)
		}
	}
	return nil
}

func parseVolume(s string) (block.VolumeID, error) {
	u, err := parseID("volume", s)
	return block.VolumeID{UUID: u}, err
}

func parseDisk(s string) (block.DiskID, error) {
	u, err := parseID("disk", s)
	return block.DiskID{UUID: u}, err
}

func parseID(what, s string) (block.UUID, error) {
	u, err := block.ParseUUID(s)
	switch {
	case err != nil:
		return u, fmt.Errorf("%s id: %w", what, err)
	case u.IsZero():
		return u, fmt.Errorf("%w: the %s id is all zeros", block.ErrInvalid, what)
	}
	return u, nil
}

// checkIncarnation refuses an incarnation that leaves open which run of which
// server opened the disk: one that no reader could compare.
func checkIncarnation(i *metapb.Incarnation) error {
	for _, part := range []struct{ what, id string }{{"boot", i.Boot}, {"process", i.Process}, {"instance", i.Instance}} {
		if _, err := parseID("incarnation's "+part.what, part.id); err != nil {
			return err
		}
	}
	return nil
}
