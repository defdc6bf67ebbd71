package kernel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Numbers of <linux/nbd-netlink.h>.
const (
	genlFamily  = "nbd"
	genlVersion = 1
	genlGroup   = "nbd_mc_group"

	cmdConnect     = 1
	cmdDisconnect  = 2
	cmdReconfigure = 3
	cmdLinkDead    = 4

	attrIndex       = 1
	attrSize        = 2
	attrBlockSize   = 3
	attrTimeout     = 4 // seconds
	attrServerFlags = 5
	attrClientFlags = 6
	attrSockets     = 7
	attrDeadTimeout = 8 // seconds
	attrBackend     = 10

	sockItem = 1
	sockFD   = 1

	destroyOnDisconnect = 1 << 0 // so that the next user of the index finds nothing of this one
)

// errNoFamily: the driver is not there, or not to be seen from here.
var errNoFamily = fmt.Errorf("%w: the nbd driver does not answer: load it (modprobe nbd nbds_max=0 max_part=0) and use the host's network namespace",
	block.ErrPrecondition)

// Connect implements Kernel.
func (l *Linux) Connect(c Connect) error {
	if err := checkBackends(uname()); err != nil {
		return err
	}
	err := withFDs(c.Sockets, nil, func(fds []int) error {
		return execute(cmdConnect, func(e *netlink.AttributeEncoder) {
			e.Uint32(attrIndex, uint32(c.Index))
			e.Uint64(attrSize, uint64(c.Size))
			e.Uint64(attrBlockSize, uint64(c.BlockSize))
			e.Uint64(attrTimeout, seconds(c.Timeout))
			e.Uint64(attrDeadTimeout, seconds(c.DeadTimeout))
			e.Uint64(attrServerFlags, uint64(c.Flags))
			e.Uint64(attrClientFlags, destroyOnDisconnect)
			e.String(attrBackend, c.Backend)
			encodeSockets(e, fds)
		})
	})
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: connecting nbd%d: %w", block.ErrInUse, c.Index, err)
	}
	if err != nil {
		return fmt.Errorf("connecting nbd%d: %w", c.Index, refused(err))
	}
	return nil
}

// Reconfigure implements Kernel.
func (l *Linux) Reconfigure(index int, backend string, c Change) error {
	if c.Size > 0 && len(c.Sockets) > 0 {
		panic("kernel: a size and sockets in one call would wait for each other")
	}
	err := withFDs(c.Sockets, nil, func(fds []int) error {
		return execute(cmdReconfigure, func(e *netlink.AttributeEncoder) {
			e.Uint32(attrIndex, uint32(index))
			e.String(attrBackend, backend)
			if c.Size > 0 {
				e.Uint64(attrSize, uint64(c.Size))
			}
			if c.DeadTimeout > 0 {
				e.Uint64(attrDeadTimeout, seconds(c.DeadTimeout))
			}
			encodeSockets(e, fds)
		})
	})
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: nbd%d is not connected to %s: %w", block.ErrNotFound, index, backend, err)
	}
	if err != nil {
		return fmt.Errorf("reconfiguring nbd%d: %w", index, refused(err))
	}
	return nil
}

// Disconnect implements Kernel.
func (l *Linux) Disconnect(index int) error {
	err := execute(cmdDisconnect, func(e *netlink.AttributeEncoder) { e.Uint32(attrIndex, uint32(index)) })
	if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: there is no such device
		return fmt.Errorf("disconnecting nbd%d: %w", index, refused(err))
	}
	return nil
}

// Watch implements Kernel.
func (l *Linux) Watch(ctx context.Context, dead func(index int)) error {
	c, family, err := openFamily()
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	defer c.Close()
	for _, g := range family.Groups {
		if g.Name == genlGroup {
			if err := c.JoinGroup(g.ID); err != nil {
				return fmt.Errorf("the nbd driver's events: %w", refused(err))
			}
		}
	}
	dead(-1) // whatever died before
	for {
		messages, _, err := c.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			dead(-1)
			continue
		case err != nil:
			return fmt.Errorf("the nbd driver's events: %w", refused(err))
		}
		for _, m := range messages {
			if m.Header.Command == cmdLinkDead {
				dead(eventIndex(m.Data))
			}
		}
	}
}

// eventIndex is the index that an event names, -1 if it names none.
func eventIndex(data []byte) int {
	d, err := netlink.NewAttributeDecoder(data)
	if err != nil {
		return -1
	}
	for d.Next() {
		if d.Type() == attrIndex {
			return int(d.Uint32())
		}
	}
	return -1
}

// execute makes one call of the family and returns when the kernel has done it.
// Each has a socket of its own: the answer to Connect comes in two parts, of
// which the second is of no interest, and the family's number changes when the
// module is loaded again.
func execute(cmd uint8, encode func(*netlink.AttributeEncoder)) error {
	e := netlink.NewAttributeEncoder()
	encode(e)
	data, err := e.Encode()
	if err != nil {
		return err
	}
	c, family, err := openFamily()
	if err != nil {
		return err
	}
	defer c.Close()
	m := genetlink.Message{Header: genetlink.Header{Command: cmd, Version: genlVersion}, Data: data}
	_, err = c.Execute(m, family.ID, netlink.Request|netlink.Acknowledge)
	return err
}

func openFamily() (*genetlink.Conn, genetlink.Family, error) {
	c, err := genetlink.Dial(nil)
	if err != nil {
		return nil, genetlink.Family{}, fmt.Errorf("generic netlink: %w", refused(err))
	}
	family, err := c.GetFamily(genlFamily)
	if err != nil {
		_ = c.Close()
		if errors.Is(err, unix.ENOENT) {
			return nil, genetlink.Family{}, errNoFamily
		}
		return nil, genetlink.Family{}, fmt.Errorf("generic netlink: %w", refused(err))
	}
	return c, family, nil
}

func encodeSockets(e *netlink.AttributeEncoder, fds []int) {
	if len(fds) == 0 {
		return
	}
	e.Nested(attrSockets, func(list *netlink.AttributeEncoder) error {
		for _, fd := range fds {
			list.Nested(sockItem, func(item *netlink.AttributeEncoder) error {
				item.Uint32(sockFD, uint32(fd))
				return nil
			})
		}
		return nil
	})
}

// withFDs calls f with the descriptors of all sockets, which stay open meanwhile.
func withFDs(sockets []Socket, fds []int, f func([]int) error) error {
	if len(fds) == len(sockets) {
		return f(fds)
	}
	raw, err := sockets[len(fds)].SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = withFDs(sockets, append(fds, int(fd)), f) }); err != nil {
		return err
	}
	return inner
}

func seconds(d time.Duration) uint64 { return uint64((d + time.Second - 1) / time.Second) }
