package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"unsafe"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Layout of <linux/inet_diag.h>.
const (
	diagRequestSize = 56 // inet_diag_req_v2
	diagReplySize   = 72 // inet_diag_msg
	diagIDSize      = 48 // inet_diag_sockid, 8 bytes into the request and 4 into the reply
	diagInfo        = 2  // INET_DIAG_INFO, an attribute; 1<<(n-1) asks for it

	tcpEstablished = 1
)

// sockDiag looks TCP sockets up by their addresses: one message each, no walk
// over all sockets of the machine. It does not share a lock with generic
// netlink, so it works while a call there hangs.
type sockDiag struct {
	mu   sync.Mutex
	conn *netlink.Conn // opened when it is needed
}

func (d *sockDiag) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn == nil {
		return nil
	}
	err := d.conn.Close()
	d.conn = nil
	return err
}

func (d *sockDiag) execute(kind netlink.HeaderType, flags netlink.HeaderFlags, id SocketID) ([]netlink.Message, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn == nil {
		c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
		if err != nil {
			return nil, err
		}
		d.conn = c
	}
	reply, err := d.conn.Execute(netlink.Message{
		Header: netlink.Header{Type: kind, Flags: netlink.Request | flags}, Data: diagRequest(id),
	})
	var refusal unix.Errno
	if err != nil && !errors.As(err, &refusal) { // not the kernel's answer: what comes next may belong to this one
		_ = d.conn.Close()
		d.conn = nil
	}
	return reply, err
}

// Socket implements Kernel.
func (l *Linux) Socket(id SocketID) (SocketInfo, error) {
	reply, err := l.diag.execute(unix.SOCK_DIAG_BY_FAMILY, 0, id)
	if err != nil {
		return SocketInfo{}, fmt.Errorf("looking for a socket: %w", refused(err))
	}
	for _, m := range reply {
		if len(m.Data) >= diagReplySize {
			return diagReply(m.Data)
		}
	}
	return SocketInfo{}, fmt.Errorf("%w: the kernel gave no answer about a socket", block.ErrUnavailable)
}

// Destroy implements Kernel.
func (l *Linux) Destroy(id SocketID) error {
	_, err := l.diag.execute(unix.SOCK_DESTROY, netlink.Acknowledge, id)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%w: this kernel cannot end a socket that another holds: it was built without CONFIG_INET_DIAG_DESTROY", block.ErrPrecondition)
	}
	if err != nil {
		return fmt.Errorf("ending a socket: %w", refused(err))
	}
	return nil
}

// diagRequest is an inet_diag_req_v2 for one socket.
func diagRequest(id SocketID) []byte {
	p := make([]byte, diagRequestSize)
	p[0], p[1], p[2] = unix.AF_INET6, unix.IPPROTO_TCP, 1<<(diagInfo-1)
	local, remote := id.Local.Addr(), id.Remote.Addr()
	if local.Is4() {
		p[0] = unix.AF_INET
	}
	binary.NativeEndian.PutUint32(p[4:], ^uint32(0)) // in any state
	binary.BigEndian.PutUint16(p[8:], id.Local.Port())
	binary.BigEndian.PutUint16(p[10:], id.Remote.Port())
	copy(p[12:28], local.AsSlice())
	copy(p[28:44], remote.AsSlice())
	binary.NativeEndian.PutUint32(p[48:], uint32(id.Cookie))
	binary.NativeEndian.PutUint32(p[52:], uint32(id.Cookie>>32))
	return p
}

// diagReply reads an inet_diag_msg with its attributes.
func diagReply(p []byte) (SocketInfo, error) {
	info := SocketInfo{
		Established: p[1] == tcpEstablished,
		Untaken:     binary.NativeEndian.Uint32(p[4+diagIDSize+4:]),
		Unsent:      binary.NativeEndian.Uint32(p[4+diagIDSize+8:]),
	}
	d, err := netlink.NewAttributeDecoder(p[diagReplySize:])
	if err != nil {
		return info, fmt.Errorf("%w: the kernel's answer about a socket: %w", block.ErrUnavailable, err)
	}
	for d.Next() {
		const received = unsafe.Offsetof(unix.TCPInfo{}.Bytes_received)
		if b := d.Bytes(); d.Type() == diagInfo && len(b) >= int(received)+8 {
			info.Taken = binary.NativeEndian.Uint64(b[received:]) - uint64(info.Untaken)
		}
	}
	return info, nil
}

// unmapped is an address as the socket's family knows it.
func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}
