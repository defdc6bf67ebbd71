package metadata

import (
	"fmt"
	"slices"
	"sort"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// The types of events that commands make.
const (
	NodeRegistered        = "NodeRegistered"
	NodeRackChanged       = "NodeRackChanged"
	NodeRemoved           = "NodeRemoved"
	DiskOnline            = "DiskOnline"
	DiskFailed            = "DiskFailed"
	DiskFull              = "DiskFull"
	VolumeCreated         = "VolumeCreated"
	VolumeResizeRequested = "VolumeResizeRequested"
	VolumeGrown           = "VolumeGrown"
	VolumeDeleted         = "VolumeDeleted"
	Attached              = "Attached"
	DetachRequested       = "DetachRequested"
	Detached              = "Detached"
	PrimaryGranted        = "PrimaryGranted"
	PrimaryOpened         = "PrimaryOpened"
	PrimaryRemoved        = "PrimaryRemoved"
	CacheEpochRaised      = "CacheEpochRaised"
	FormatStarted         = "FormatStarted"
	FormatDone            = "FormatDone"
	ConsumerRegistered    = "ConsumerRegistered"
)

// EventsKept is how many events the state remembers.
const EventsKept = 1000

// maxMessage bounds an event's sentence, in bytes.
const maxMessage = 1024

// ring is the newest events in order of (index, ordinal).
//
// Successive Views share one array: each sees a window of it, and only the one
// goroutine that applies appends, behind every window. That is why a restored
// View gets an array of its own.
type ring struct {
	kept      []*metapb.Event
	forgotten uint64 // index of the newest event no longer kept
}

func (r ring) with(e *metapb.Event) ring {
	r.kept = append(r.kept, e)
	if len(r.kept) > EventsKept {
		r.forgotten = r.kept[0].Index
		r.kept = r.kept[1:]
	}
	return r
}

func (r ring) after(index uint64) ([]*metapb.Event, bool) {
	if index < r.forgotten {
		return nil, false
	}
	i := sort.Search(len(r.kept), func(i int) bool { return r.kept[i].Index > index })
	return r.kept[i:len(r.kept):len(r.kept)], true
}

// own returns a View that shares no growing array with v.
func (v *View) own() *View {
	w := *v
	w.events.kept = slices.Clip(slices.Clone(v.events.kept))
	w.numbered = slices.Clip(slices.Clone(v.numbered))
	return &w
}

// emit records an event of the command that is being applied.
func (d *draft) emit(e *metapb.Event, format string, args ...any) {
	e.Index, e.Time, e.Ordinal = d.index, d.time, uint32(len(d.emitted))
	if format != "" {
		e.Message = fmt.Sprintf(format, args...)
	}
	d.emitted = append(d.emitted, e)
	d.events = d.events.with(e)
}

// emitVolume records an event about a volume.
func (d *draft) emitVolume(kind string, v *volume, node, format string, args ...any) {
	d.emit(&metapb.Event{Type: kind, VolumeId: v.Id, VolumeName: v.Name, Node: node}, format, args...)
}

func (d *draft) recordEvent(c *metapb.RecordEvent) error {
	e, ok := proto.Clone(c.GetEvent()).(*metapb.Event)
	if !ok || e == nil {
		return fmt.Errorf("%w: no event to record", block.ErrInvalid)
	}
	if !eventType(e.Type) {
		return fmt.Errorf("%w: event type %.80q is not a CamelCase word of at most 64 letters", block.ErrInvalid, e.Type)
	}
	if len(e.Message) > maxMessage {
		return fmt.Errorf("%w: the message of event %s has %d bytes; at most %d are kept",
			block.ErrInvalid, e.Type, len(e.Message), maxMessage)
	}
	for _, s := range []string{e.VolumeId, e.VolumeName, e.Node, e.DiskId} {
		if len(s) > maxNodeName {
			return fmt.Errorf("%w: event %s names something longer than %d bytes", block.ErrInvalid, e.Type, maxNodeName)
		}
	}
	if id, err := parseVolume(e.VolumeId); err == nil && e.VolumeName == "" {
		e.VolumeName = d.Volume(id).GetName()
	}
	d.emit(e, "")
	return nil
}

func eventType(s string) bool {
	for i := range len(s) {
		upper, lower := s[i] >= 'A' && s[i] <= 'Z', s[i] >= 'a' && s[i] <= 'z'
		if !upper && (i == 0 || !lower) {
			return false
		}
	}
	return s != "" && len(s) <= 64
}
