package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/gabion-storage/gabion/raft/metadata"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Machine is the metadata state machine as consensus drives it. Make one, give
// it to consensus.Open, and then both to New.
type Machine struct {
	state *metadata.State

	mu      sync.Mutex
	changed chan struct{} // closed at the next change
}

// NewMachine returns an empty machine.
func NewMachine() *Machine {
	return &Machine{state: metadata.New(), changed: make(chan struct{})}
}

// View is the state as this node knows it now, not linearizably.
func (m *Machine) View() *metadata.View { return m.state.View() }

// Apply implements consensus.Machine. Its response is a metadata.Result.
func (m *Machine) Apply(index uint64, command []byte) (any, error) {
	c := new(metapb.Command)
	if err := proto.Unmarshal(command, c); err != nil {
		return nil, fmt.Errorf("%w: log entry %d is not a command: %w", block.ErrCorrupt, index, err)
	}
	r := m.state.Apply(index, c)
	if errors.Is(r.Err, metadata.ErrNewer) {
		return nil, fmt.Errorf("log entry %d: %w", index, r.Err)
	}
	if r.Err == nil {
		m.wake()
	}
	return r, nil
}

// Snapshot implements consensus.Machine.
func (m *Machine) Snapshot() func(io.Writer) error {
	v := m.state.View()
	return func(w io.Writer) error { return metadata.Encode(w, v) }
}

// Restore implements consensus.Machine.
func (m *Machine) Restore(r io.Reader) error {
	v, err := metadata.Decode(r)
	if err != nil {
		return err
	}
	m.state.Restore(v)
	m.wake()
	return nil
}

func (m *Machine) wake() {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.changed)
	m.changed = make(chan struct{})
}

// watch returns the state and a channel that is closed when there is a newer one.
func (m *Machine) watch() (*metadata.View, <-chan struct{}) {
	m.mu.Lock()
	changed := m.changed
	m.mu.Unlock()
	return m.state.View(), changed // in this order: a change in between closes changed
}

// until waits for a state of which ok holds. It returns the newest state, and
// ctx's error if ctx ended before.
func (m *Machine) until(ctx context.Context, ok func(*metadata.View) bool) (*metadata.View, error) {
	for {
		v, changed := m.watch()
		if ok(v) {
			return v, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return v, ctx.Err()
		}
	}
}
