package kernel

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

const (
	// sessionTimeout bounds one try at one server, which may have to drain older sessions or take the volume over first.
	sessionTimeout = 15 * time.Second
	maxDoublings   = 24 // from any clock's milliseconds beyond any other's
)

// session is the connections of one session at one server, not yet the kernel's.
type session struct {
	sockets []Socket
	export  client.Export
	server  string
}

func (s *session) ids() []SocketID {
	var ids []SocketID
	for _, k := range s.sockets {
		ids = append(ids, k.ID())
	}
	return ids
}

func (s *session) close() {
	for _, k := range s.sockets {
		_ = k.Close()
	}
}

// openSession opens a session at the first server that takes it. The record
// names each number before it is used, so that none is used twice.
func (m *Manager) openSession(ctx context.Context, r *record) (*session, error) {
	if len(r.Addresses) == 0 {
		return nil, fmt.Errorf("%w: no server of volume %s is known", block.ErrUnavailable, r.Volume)
	}
	if err := m.cfg.Faults.Hit("kernel.dial", r.Volume.String()); err != nil {
		return nil, err
	}
	var failure error
	for _, address := range r.Addresses {
		s, err := m.openAt(ctx, r, address)
		if err == nil || ctx.Err() != nil {
			return s, err
		}
		if failure == nil {
			failure = err
		} else {
			failure = fmt.Errorf("%w; %w", failure, err)
		}
	}
	return nil, failure
}

// errNoAccess is a server's word that it knows no such attachment, or that what was
// not flushed in its cache epoch is lost. Anybody may listen at the address: only
// metadata can say that it is so.
var errNoAccess = fmt.Errorf("%w: the server grants no access", block.ErrUnavailable)

func denied(err error) bool {
	return errors.Is(err, block.ErrNotFound) || errors.Is(err, block.ErrCacheLost)
}

func (m *Manager) openAt(ctx context.Context, r *record, address string) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, sessionTimeout)
	defer cancel()
	number := max(r.Session+1, block.SessionNumber(time.Now().UnixMilli()))
	for doubled := 0; ; doubled++ {
		r.Session = number
		if err := m.state.save(r); err != nil && r.Phase == phaseConnecting {
			return nil, err
		}
		s, err := m.dialSession(ctx, r, address)
		if denied(err) {
			return nil, fmt.Errorf("%w: %v", errNoAccess, err)
		}
		// Invalid is a server's word for a number that is older than one it knows.
		if !errors.Is(err, block.ErrInvalid) || doubled == maxDoublings || number > math.MaxUint64/2 {
			return s, err
		}
		number *= 2
	}
}

// dialSession opens the connections of one session number, all at once.
func (m *Manager) dialSession(ctx context.Context, r *record, address string) (*session, error) {
	target := client.Target{Network: "tcp", Address: address, Export: r.export()}
	sockets := make([]Socket, r.Connections)
	exports := make([]client.Export, r.Connections)
	errs := make([]error, r.Connections)
	var wg sync.WaitGroup
	for i := range sockets {
		wg.Go(func() { sockets[i], exports[i], errs[i] = m.cfg.Dialer.Dial(ctx, target) })
	}
	wg.Wait()
	s := &session{sockets: slices.DeleteFunc(sockets, func(k Socket) bool { return k == nil }), export: exports[0], server: address}
	err := firstError(errs)
	if err == nil {
		err = r.suits(exports)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// firstError is the one that says most: what metadata is to be asked about, else the first.
func firstError(errs []error) error {
	i := max(0, slices.IndexFunc(errs, denied))
	for _, err := range errs[i:] {
		if err != nil {
			return err
		}
	}
	return nil
}

// export is the name that opens the record's newest session.
func (r *record) export() string {
	return fmt.Sprintf("%s/%s/%d/%d", r.Volume, r.Token.secret(), r.Epoch, r.Session)
}

const (
	flagHas   = uint16(1)
	flagMulti = protocol.NEGOTIATION_REPLY_FLAGS_CAN_MULTI_CONN
	// neededFlags make the device keep what it promises to a file system.
	neededFlags = flagHas | wire.TransFlush | wire.TransFUA | flagMulti
	// knownFlags are those that the driver may see.
	knownFlags = neededFlags | wire.TransReadOnly | wire.TransTrim | wire.TransWriteZeroes
)

// suits tells whether an export, as each connection was told of it, can be, or go
// on as, the record's device. A device learns of nothing but a larger size, and
// of that only by Resize.
func (r *record) suits(told []client.Export) error {
	e := told[0]
	switch {
	case slices.ContainsFunc(told, func(o client.Export) bool { return o != e }):
		return fmt.Errorf("%w: the server describes volume %s in several ways", block.ErrCorrupt, r.Volume)
	case e.Flags&neededFlags != neededFlags:
		return fmt.Errorf("%w: the export's flags %#x lack some of %#x (flush, FUA, multi-conn)", block.ErrUnsupported, e.Flags, neededFlags)
	case e.MinBlock > r.BlockSize || e.Size%r.BlockSize != 0:
		return fmt.Errorf("%w: an export of %d bytes in blocks of %d cannot be a device with blocks of %d", block.ErrCorrupt, e.Size, e.MinBlock, r.BlockSize)
	case r.Phase == phaseConnecting && e.Size != r.Size:
		return fmt.Errorf("%w: the server says the volume has %d bytes, the metadata service says %d", block.ErrCorrupt, e.Size, r.Size)
	case e.Size < r.Size:
		return fmt.Errorf("%w: the server says the volume has %d bytes, the device has %d", block.ErrCorrupt, e.Size, r.Size)
	case r.Flags != 0 && (e.Flags^r.Flags)&knownFlags != 0:
		return fmt.Errorf("%w: the export's flags are %#x, the device was made with %#x", block.ErrUnsupported, e.Flags, r.Flags)
	}
	return nil
}
