package metadata

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Level is the highest feature level this binary can apply. A proposer uses
// View.Level: a level above 1 starts only when all nodes have announced it.
const Level = LevelServers

// The levels, each with what it added.
const (
	levelFirst = 1
	// SetFormat, PutConsumer, racks and file systems of volumes; several nodes may hold a volume
	// that all of them only read; a consumer takes a limited number of volumes.
	levelConsumers = 2
	// LevelTerms: attachments know on which terms they were given: see Attachment.foreign and alone.
	// Names of volumes may have tabs and line ends.
	LevelTerms = 3
	// LevelServers: several servers to a cell. Nodes can be removed, and have a data directory that is theirs.
	LevelServers = 4
)

// ErrNewer says that a command or a snapshot comes from a newer feature level.
// It wraps block.ErrFormat. Nothing was applied, nothing may be skipped: whoever
// hosts the state machine halts and says so.
var ErrNewer = fmt.Errorf("%w: from a newer release", block.ErrFormat)

// Validate returns ErrNewer for a command that Apply could not apply wholly: of
// a higher level, of no known kind, or with a field or enum value that this
// binary does not know. A proposer calls it first, so that nothing that would
// halt every voter reaches the log.
func Validate(c *metapb.Command) error {
	if c.GetLevel() > Level {
		return fmt.Errorf("%w: the command needs feature level %d, this binary has %d: upgrade this server",
			ErrNewer, c.GetLevel(), Level)
	}
	if name := unknownIn(c.ProtoReflect()); name != "" {
		return fmt.Errorf("%w: the command has something unknown in %s: upgrade this server", ErrNewer, name)
	}
	if c.GetKind() == nil {
		return fmt.Errorf("%w: the command is of an unknown kind: upgrade this server", ErrNewer)
	}
	if f := c.GetFenced(); f != nil && f.GetKind() == nil {
		return fmt.Errorf("%w: the fenced command is of an unknown kind: upgrade this server", ErrNewer)
	}
	return nil
}

// needs is the lowest level at which a command can be applied wholly. At a lower
// one an older voter would halt at it.
func needs(c *metapb.Command) uint32 {
	if n := c.GetPutNode().GetNode(); c.GetRemoveNode() != nil || n.GetDirectory() != "" || n.GetRole() != metapb.Node_ROLE_UNSPECIFIED {
		return LevelServers
	}
	if a := c.GetAttachVolume().GetAttachment(); a.GetForeign() || a.GetAlone() || strings.ContainsAny(c.GetCreateVolume().GetName(), space) {
		return LevelTerms
	}
	if c.GetSetFormat() != nil || c.GetPutConsumer() != nil || c.GetCreateVolume().GetRack() != "" || c.GetCreateVolume().GetPolicy().GetFsType() != "" {
		return levelConsumers
	}
	return 0
}

// checkLevel refuses a command that claims a lower level than it needs.
func checkLevel(c *metapb.Command) error {
	if n := needs(c); c.GetLevel() < n {
		return fmt.Errorf("%w: this needs feature level %d, and the cluster is at %d: upgrade the servers that `gabion node list -o json` shows at a lower feature level",
			block.ErrUnavailable, n, c.GetLevel())
	}
	return nil
}

// unknownIn names the first message that has a field, or the first field that
// has an enum value, that this binary does not know; empty if there is none.
func unknownIn(m protoreflect.Message) protoreflect.FullName {
	if len(m.GetUnknown()) > 0 {
		return m.Descriptor().FullName()
	}
	var found protoreflect.FullName
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Kind() == protoreflect.EnumKind:
			if f.Enum().Values().ByNumber(v.Enum()) == nil {
				found = f.FullName()
			}
		case f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				if found = unknownIn(v.List().Get(i).Message()); found != "" {
					break
				}
			}
		default:
			found = unknownIn(v.Message())
		}
		return found == ""
	})
	return found
}
