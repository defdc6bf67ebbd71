package kernel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// found is a device of ours as an operation on its volume finds it.
type found struct {
	Node
	rec    *record
	lost   bool // there was no record: rec says no more than the kernel does
	zombie bool
}

// find looks for a volume's devices: the connected one, if there is one, and
// others that are zombies or of other attachments. The volume's turn is held.
func (m *Manager) find(ctx context.Context, id block.VolumeID) ([]found, error) {
	if err := m.settle(ctx, id); err != nil {
		return nil, err
	}
	places, err := m.cfg.Kernel.Places()
	if err != nil {
		return nil, err
	}
	var all []found
	for _, p := range places {
		i, ours := ParseBackend(p.Backend)
		if !ours || !p.Configured || i.Volume != id {
			continue
		}
		d, err := m.recognise(ctx, p, i)
		if errors.Is(err, block.ErrNotFound) { // gone meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

// settle returns when no CONNECT of the volume is under way any more. Whoever made
// it may have left, or have been killed, and the driver makes the device all the
// same. It does one thing at a time: when it answers a probe, it has.
func (m *Manager) settle(ctx context.Context, id block.VolumeID) error {
	kept, err := m.state.of(id)
	if err != nil {
		return err
	}
	for _, r := range kept {
		if r.Phase != phaseConnecting || r.Index < 0 {
			continue
		}
		if err := m.probe(ctx, r.Index, r.Backend()); err != nil && !errors.Is(err, block.ErrNotFound) {
			return err
		}
	}
	return nil
}

// probe asks the driver whether a device is connected. ErrNotFound: it is not.
func (m *Manager) probe(ctx context.Context, index int, backend string) error {
	return m.calls.do(ctx, call{name: "asking for " + devicePath(index), do: func() error {
		return m.cfg.Kernel.Reconfigure(index, backend, Change{})
	}})
}

// recognise joins a device with its record. Where that is not enough the kernel
// is asked whether it is a zombie.
func (m *Manager) recognise(ctx context.Context, p Place, i Identity) (found, error) {
	n, err := m.cfg.Kernel.Node(p.Index)
	if err == nil && n.Place != p {
		err = fmt.Errorf("%w: %s is another's now", block.ErrNotFound, devicePath(p.Index))
	}
	d := found{Node: n}
	if err != nil {
		return d, err
	}
	r, err := m.state.load(i)
	if err != nil && !errors.Is(err, block.ErrCorrupt) {
		return d, err
	}
	if err != nil {
		m.cfg.Log.Warn("a device's state is not readable and is made anew", "volume_id", i.Volume, "device", devicePath(n.Index), "err", err)
	}
	if r != nil && r.Index == n.Index {
		d.rec, r.Size = r, n.Size
		if r.Phase == phaseConnected {
			return d, nil
		}
	} else {
		d.rec, d.lost = m.rebuilt(n, i), true
	}
	err = m.probe(ctx, n.Index, n.Backend)
	d.zombie = errors.Is(err, block.ErrNotFound)
	if err != nil && !d.zombie {
		return d, err
	}
	there, err := m.there(d.rec)
	if err == nil && !there {
		err = fmt.Errorf("%w: %s is gone", block.ErrNotFound, d.rec.path())
	}
	return d, err
}

// rebuilt is a record of what the kernel shows of a device.
func (m *Manager) rebuilt(n Node, i Identity) *record {
	r := m.newRecord(i)
	r.Index, r.Phase, r.Size, r.BlockSize = n.Index, phaseConnected, n.Size, n.BlockSize
	if n.Queues > 0 {
		r.Connections = n.Queues
	}
	return r
}

func (m *Manager) newRecord(i Identity) *record {
	return &record{
		Version: recordVersion, Identity: i, Index: -1,
		Connections: m.cfg.Connections, Timeout: m.cfg.Timeout, DeadTimeout: m.cfg.DeadTimeout,
	}
}

// adopt takes over a device that was found without a record, or whose making was
// cut off: from now on its record says so, and it has the patience it should have.
func (m *Manager) adopt(ctx context.Context, d found) error {
	r := d.rec
	r.Refused = ""
	if err := m.calm(ctx, r); err != nil {
		return err
	}
	m.cfg.Log.Info("adopted", "volume_id", r.Volume, "device", r.path())
	return nil
}

// attachment asks metadata. A service of another cell than that of the volume's
// devices knows nothing of them: its answer is an error, and no verdict.
func (m *Manager) attachment(ctx context.Context, id block.VolumeID) (Attachment, error) {
	a, err := m.cfg.Metadata.Attachment(ctx, id)
	if err != nil && !errors.Is(err, block.ErrNotFound) {
		return a, err
	}
	kept, stateErr := m.state.of(id)
	if stateErr != nil {
		return Attachment{}, stateErr
	}
	for _, r := range kept {
		if wrong := r.foreign(a, err); wrong != nil {
			return Attachment{}, wrong
		}
	}
	return a, err
}

// foreign is an error if an answer of metadata is not of the record's cell.
func (r *record) foreign(a Attachment, err error) error {
	switch {
	case r.Cluster.IsZero() || a.Cluster == r.Cluster || a.Cluster.IsZero() && err == nil:
		return nil
	case a.Cluster.IsZero():
		return fmt.Errorf("%w: the metadata service does not say that it is cluster %s, to which %s belongs: %v", block.ErrUnavailable, r.Cluster, r.path(), err)
	}
	return fmt.Errorf("%w: %s belongs to cluster %s, and the metadata service is of %s: name the right servers, or give the device up if its cell is no more",
		block.ErrPrecondition, r.path(), r.Cluster, a.Cluster)
}

// learn takes what metadata says into the record.
func (r *record) learn(a Attachment) {
	r.Token, r.Addresses = a.Token, a.Addresses
	if !a.Cluster.IsZero() {
		r.Cluster = a.Cluster
	}
}

// knows reports whether there is nothing to learn.
func (r *record) knows(a Attachment) bool {
	return r.Token == a.Token && slices.Equal(r.Addresses, a.Addresses) && (a.Cluster.IsZero() || r.Cluster == a.Cluster)
}

// verdict is the reason for which a device is refused for good by what metadata
// says, or "".
func (r *record) verdict(a Attachment, err error) string {
	switch {
	case errors.Is(err, block.ErrNotFound):
		return "the volume is not attached to this node any more, or was deleted"
	case err != nil:
		return ""
	case a.ID != r.Attachment:
		return "the attachment it was made for has ended; the volume is attached anew"
	case a.Epoch > r.Epoch:
		return lostReason
	}
	return ""
}

const lostReason = "the servers lost data that was acknowledged and not flushed"

// inquiry is a question to metadata that goes on beside other work.
type inquiry struct {
	m      *Manager
	id     block.VolumeID
	answer chan answer   // of the question under way; nil: none
	next   time.Time     // no question before
	pause  time.Duration // the last one
}

type answer struct {
	Attachment
	err error
}

const (
	inquiryTimeout = 5 * time.Second
	inquiryGlance  = 100 * time.Millisecond

	inquiryPauseFirst = 200 * time.Millisecond // between one answer and the next question; it doubles
	inquiryPauseLast  = 30 * time.Second
)

var errNoAnswer = fmt.Errorf("%w: the metadata service has not answered yet", block.ErrUnavailable)

// errAsked: metadata has answered a moment ago, and said nothing that helps.
var errAsked = fmt.Errorf("%w: the metadata service was asked a moment ago", block.ErrUnavailable)

// glance is get for who can go on without the answer: it waits, a little, only for a question that it asks itself.
func (q *inquiry) glance(ctx context.Context) (Attachment, error) {
	if q.answer != nil {
		return q.get(ctx, 0)
	}
	return q.get(ctx, inquiryGlance)
}

// get waits at most for patience. ErrUnavailable: no answer yet; the question
// stands. While a trouble lasts it is asked less and less often.
func (q *inquiry) get(ctx context.Context, patience time.Duration) (Attachment, error) {
	if q.answer == nil && time.Now().Before(q.next) {
		return Attachment{}, errAsked
	}
	if q.answer == nil {
		said := make(chan answer, 1)
		q.answer = said
		q.m.running.Go(func() {
			ctx, cancel := context.WithTimeout(q.m.life, inquiryTimeout)
			defer cancel()
			a, err := q.m.attachment(ctx, q.id)
			said <- answer{a, err}
		})
	}
	t := time.NewTimer(patience)
	defer t.Stop()
	if patience == 0 && len(q.answer) == 0 {
		return Attachment{}, errNoAnswer
	}
	select {
	case a := <-q.answer:
		q.answer = nil
		q.pause = min(max(2*q.pause, inquiryPauseFirst), inquiryPauseLast)
		q.next = time.Now().Add(q.pause)
		return a.Attachment, a.err
	case <-t.C:
	case <-ctx.Done():
	}
	return Attachment{}, errNoAnswer
}
