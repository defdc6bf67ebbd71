package metadata

import (
	"fmt"
	"slices"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// State is the state machine. Apply and Restore are called by one goroutine at
// a time; View by anyone at any time.
type State struct{ view atomic.Pointer[View] }

// New returns the empty state, before InitCluster.
func New() *State {
	s := &State{}
	s.view.Store(emptyView())
	return s
}

// View returns the state as of now, in constant time and without a lock.
func (s *State) View() *View { return s.view.Load() }

// Restore replaces the state, after Decode.
func (s *State) Restore(v *View) { s.view.Store(v.own()) }

// Result is what became of a command.
type Result struct {
	// Err is the refusal, wrapping a block sentinel and naming the thing; the command then changed nothing. It is part
	// of the answer, not of the log: a caller that looks at the log's error only takes a refusal for a success.
	// If it wraps ErrNewer the command was not applied and nothing may be applied after it: the host must halt.
	Err error
	// Value is the object the command was about, after it: *metapb.Volume (CreateVolume, ResizeVolume, SetFormat and all fenced
	// commands), *metapb.Attachment (AttachVolume with its token, DetachVolume while revoking), *metapb.Grant, else nil.
	Value proto.Message
	// Events are what happened, in order; they are in the View too.
	Events []*metapb.Event
	// Changed is false if the command was refused, or found all done already.
	Changed bool
}

// Apply applies the command of a log entry. index is the entry's and must be
// above that of every command before; anything else is a broken log and
// panics.
func (s *State) Apply(index uint64, c *metapb.Command) Result {
	next, r := s.View().step(index, c)
	s.view.Store(next)
	return r
}

// Try says what Apply would, were c the next command, and changes nothing. A
// caller that has read linearizably may answer with a refusal, or with a
// success that changed nothing, and spare the log an entry.
func (v *View) Try(c *metapb.Command) Result {
	w := *v
	w.events.kept, w.numbered = slices.Clip(v.events.kept), slices.Clip(v.numbered) // not ours to append to
	_, r := w.step(v.index+1, c)
	return r
}

// step returns the View after a command, which is v itself if the command is newer.
func (v *View) step(index uint64, c *metapb.Command) (*View, Result) {
	if err := Validate(c); err != nil {
		return v, Result{Err: err}
	}
	if index <= v.index {
		panic(fmt.Sprintf("metadata: entry %d applied after entry %d", index, v.index))
	}
	d := &draft{View: *v, time: c.GetTime(), at: c.GetLevel()}
	d.index = index
	value, err := d.apply(c)
	if err != nil {
		refused := *v
		refused.index = index
		return &refused, Result{Err: err}
	}
	changed := d.changes(v)
	if changed {
		d.level = max(d.level, c.GetLevel())
	}
	return &d.View, Result{Value: value, Events: d.emitted, Changed: changed}
}

// draft is the next View while a command is applied to it. What it shares with
// the View before is replaced, never modified; on a refusal it is dropped.
type draft struct {
	View
	time    int64
	at      uint32 // the command's feature level: what an older voter applies too must come out as it does there
	emitted []*metapb.Event
}

// changes reports whether anything but the index differs from the View before.
// What a command leaves alone stays the same object, so this looks at pointers only.
func (d *draft) changes(from *View) bool {
	return d.cluster != from.cluster || d.nodes != from.nodes || d.disks != from.disks || d.volumes != from.volumes ||
		d.names != from.names || d.tombstones != from.tombstones || d.consumers != from.consumers || len(d.emitted) > 0
}

func (d *draft) apply(c *metapb.Command) (proto.Message, error) {
	if init := c.GetInitCluster(); init != nil {
		return nil, d.initCluster(init)
	}
	if d.cluster == nil {
		return nil, fmt.Errorf("%w: the cluster is not initialised: start a server with --bootstrap", block.ErrPrecondition)
	}
	if err := checkLevel(c); err != nil {
		return nil, err
	}
	switch k := c.GetKind().(type) {
	case *metapb.Command_PutNode:
		return nil, d.putNode(k.PutNode)
	case *metapb.Command_PutDisks:
		return nil, d.putDisks(k.PutDisks)
	case *metapb.Command_CreateVolume:
		return result(d.createVolume(k.CreateVolume))
	case *metapb.Command_ResizeVolume:
		return result(d.resizeVolume(k.ResizeVolume))
	case *metapb.Command_DeleteVolume:
		return nil, d.deleteVolume(k.DeleteVolume)
	case *metapb.Command_AttachVolume:
		return result(d.attachVolume(k.AttachVolume))
	case *metapb.Command_DetachVolume:
		return result(d.detachVolume(k.DetachVolume))
	case *metapb.Command_GrantPrimary:
		return result(d.grantPrimary(k.GrantPrimary))
	case *metapb.Command_Fenced:
		return result(d.applyFenced(k.Fenced))
	case *metapb.Command_RecordEvent:
		return nil, d.recordEvent(k.RecordEvent)
	case *metapb.Command_SetFormat:
		return result(d.setFormat(k.SetFormat))
	case *metapb.Command_PutConsumer:
		return nil, d.putConsumer(k.PutConsumer)
	case *metapb.Command_RemoveNode:
		return nil, d.removeNode(k.RemoveNode)
	}
	panic(fmt.Sprintf("metadata: Validate let %T pass", c.GetKind()))
}

// result keeps a typed nil from becoming a non-nil Value.
func result[T interface {
	comparable
	proto.Message
}](value T, err error) (proto.Message, error) {
	var none T
	if err != nil || value == none {
		return nil, err
	}
	return value, nil
}
