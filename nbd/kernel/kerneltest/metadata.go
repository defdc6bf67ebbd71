package kerneltest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/server/block"
)

// Metadata is a kernel.Metadata.
type Metadata struct {
	// Cluster is whose it says to be, if at all. Set before use.
	Cluster block.ClusterID

	mu   sync.Mutex
	of   map[block.VolumeID]kernel.Attachment
	away error
	hang bool
	asks int
	slow time.Duration
}

// Set makes an attachment, or changes it.
func (m *Metadata) Set(id block.VolumeID, a kernel.Attachment) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.of == nil {
		m.of = make(map[block.VolumeID]kernel.Attachment)
	}
	m.of[id] = a
}

// Remove ends an attachment.
func (m *Metadata) Remove(id block.VolumeID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.of, id)
}

// Away makes the service fail, or answer nothing at all, or (false, false) work again.
func (m *Metadata) Away(fail, hang bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.away, m.hang = nil, hang
	if fail {
		m.away = fmt.Errorf("%w: the metadata service", block.ErrUnavailable)
	}
}

// Slow makes each answer take a time.
func (m *Metadata) Slow(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.slow = d
}

// Asks counts the questions.
func (m *Metadata) Asks() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.asks
}

// Attachment implements kernel.Metadata.
func (m *Metadata) Attachment(ctx context.Context, id block.VolumeID) (kernel.Attachment, error) {
	m.mu.Lock()
	m.asks++
	a, ok := m.of[id]
	away, hang, slow := m.away, m.hang, m.slow
	m.mu.Unlock()
	time.Sleep(slow)
	switch {
	case hang:
		<-ctx.Done()
		return kernel.Attachment{}, fmt.Errorf("%w: %w", block.ErrUnavailable, ctx.Err())
	case away != nil:
		return kernel.Attachment{}, away
	case !ok:
		return kernel.Attachment{Cluster: m.Cluster}, fmt.Errorf("%w: volume %s is not attached to this node", block.ErrNotFound, id)
	}
	a.Cluster, a.Addresses = m.Cluster, slices.Clone(a.Addresses)
	return a, nil
}
