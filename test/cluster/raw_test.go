package cluster_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// raw is an NBD client of a few lines that does what it is told, also what a
// proper client never would. One goroutine uses it.
type raw struct {
	net.Conn
	size   uint64
	flags  uint16
	cookie uint64
	// again connects anew, as every lasting client does: a server that was held up for a second, which a busy machine
	// may do to it, closes its connections. nil: this one does not.
	again func() (*raw, error)
}

const (
	magicHello   = 0x4e42444d41474943
	magicOption  = 0x49484156454f5054
	magicReply   = 0x3e889045565a9
	magicRequest = 0x25609513
	magicSimple  = 0x67446698

	optGo      = 7
	repAck     = 1
	repInfo    = 3
	infoExport = 0

	cmdRead, cmdWrite, cmdDisc, cmdFlush, cmdTrim, cmdZeroes = 0, 1, 2, 3, 4, 6

	flagFUA = 1
)

// dial connects to a server's NBD port or socket and shakes hands up to the options.
func dial(ctx context.Context, network, address string) (*raw, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	r := &raw{Conn: c}
	if err := r.hello(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return r, nil
}

func (r *raw) hello() error {
	_ = r.SetDeadline(time.Now().Add(30 * time.Second))
	var greeting [18]byte
	if _, err := io.ReadFull(r, greeting[:]); err != nil {
		return fmt.Errorf("greeting: %w", err)
	}
	if binary.BigEndian.Uint64(greeting[:]) != magicHello || binary.BigEndian.Uint64(greeting[8:]) != magicOption {
		return fmt.Errorf("greeting %x", greeting)
	}
	_, err := r.Write([]byte{0, 0, 0, 3}) // fixed newstyle, no zeroes
	return err
}

// option sends one option with its data.
func (r *raw) option(option uint32, data []byte) error {
	b := binary.BigEndian.AppendUint64(nil, magicOption)
	b = binary.BigEndian.AppendUint32(b, option)
	b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
	_, err := r.Write(append(b, data...))
	return err
}

// errRefused is the server's answer to an option, in contrast to a connection that broke.
var errRefused = errors.New("refused")

// goTo enters an export by OPT_GO. A refusal is an error with the server's sentence.
func (r *raw) goTo(export string) error {
	data := binary.BigEndian.AppendUint32(nil, uint32(len(export)))
	data = append(append(data, export...), 0, 0)
	if err := r.option(optGo, data); err != nil {
		return err
	}
	for {
		var h [20]byte
		if _, err := io.ReadFull(r, h[:]); err != nil {
			return fmt.Errorf("reply to GO: %w", err)
		}
		kind, length := binary.BigEndian.Uint32(h[12:]), binary.BigEndian.Uint32(h[16:])
		if binary.BigEndian.Uint64(h[:]) != magicReply || length > 4096 {
			return fmt.Errorf("reply to GO: %x", h)
		}
		body := make([]byte, length)
		if _, err := io.ReadFull(r, body); err != nil {
			return err
		}
		switch {
		case kind == repAck:
			return nil
		case kind == repInfo && length == 12 && binary.BigEndian.Uint16(body) == infoExport:
			r.size, r.flags = binary.BigEndian.Uint64(body[2:]), binary.BigEndian.Uint16(body[10:])
		case kind&(1<<31) != 0:
			return fmt.Errorf("%w with %#x: %s", errRefused, kind, body)
		}
	}
}

// send sends one request and returns its cookie.
func (r *raw) send(command, flags uint16, off int64, length int, payload []byte) (uint64, error) {
	r.cookie++
	b := make([]byte, 0, 28+len(payload))
	b = binary.BigEndian.AppendUint32(b, magicRequest)
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint16(b, command)
	b = binary.BigEndian.AppendUint64(b, r.cookie)
	b = binary.BigEndian.AppendUint64(b, uint64(off))
	b = binary.BigEndian.AppendUint32(b, uint32(length))
	_, err := r.Write(append(b, payload...))
	return r.cookie, err
}

// errno is an error that the server answered a request with.
type errno uint32

func (e errno) Error() string { return fmt.Sprintf("errno %d", uint32(e)) }

const (
	eNoSpace  errno = 28
	eShutdown errno = 108
)

// receive reads one reply; data is where a read's content goes.
func (r *raw) receive(data []byte) (cookie uint64, err error) {
	return r.receiveAny(func(uint64) []byte { return data })
}

// receiveAny reads the reply that comes next; data says where a request's content goes.
func (r *raw) receiveAny(data func(cookie uint64) []byte) (cookie uint64, err error) {
	var h [16]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, err
	}
	if binary.BigEndian.Uint32(h[:]) != magicSimple {
		return 0, fmt.Errorf("reply %x", h)
	}
	cookie = binary.BigEndian.Uint64(h[8:])
	if e := binary.BigEndian.Uint32(h[4:]); e != 0 {
		return cookie, errno(e)
	}
	_, err = io.ReadFull(r, data(cookie))
	return cookie, err
}

// do sends one request and waits for its reply. If the connection breaks it is sent again over a new one.
func (r *raw) do(command, flags uint16, off int64, length int, payload, data []byte) error {
	err := r.once(command, flags, off, length, payload, data)
	for range 5 {
		var answered errno
		if err == nil || errors.As(err, &answered) || r.again == nil {
			return err
		}
		_ = r.Close()
		next, dialErr := r.again()
		if dialErr != nil {
			return errors.Join(err, dialErr)
		}
		r.Conn, r.size, r.flags = next.Conn, next.size, next.flags
		err = r.once(command, flags, off, length, payload, data)
	}
	return err
}

func (r *raw) once(command, flags uint16, off int64, length int, payload, data []byte) error {
	_ = r.SetDeadline(time.Now().Add(60 * time.Second))
	if _, err := r.send(command, flags, off, length, payload); err != nil {
		return err
	}
	_, err := r.receive(data)
	return err
}

func (r *raw) write(off int64, p []byte) error { return r.do(cmdWrite, 0, off, len(p), p, nil) }
func (r *raw) writeFUA(off int64, p []byte) error {
	return r.do(cmdWrite, flagFUA, off, len(p), p, nil)
}
func (r *raw) read(off int64, p []byte) error   { return r.do(cmdRead, 0, off, len(p), nil, p) }
func (r *raw) flush() error                     { return r.do(cmdFlush, 0, 0, 0, nil, nil) }
func (r *raw) trim(off int64, length int) error { return r.do(cmdTrim, 0, off, length, nil, nil) }

// ReadAt makes an export an io.ReaderAt.
func (r *raw) ReadAt(p []byte, off int64) (int, error) {
	if err := r.read(off, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// disconnect is the orderly end.
func (r *raw) disconnect() error {
	_, err := r.send(cmdDisc, 0, 0, 0, nil)
	return errors.Join(err, r.Close())
}

// open connects to a volume through the server's socket.
func open(s *cluster.Server, u cluster.URIs) (*raw, error) {
	return openAt("unix", s.Socket, u)
}

func openTCP(s *cluster.Server, u cluster.URIs) (*raw, error) {
	return openAt("tcp", fmt.Sprintf("127.0.0.1:%d", s.Ports.NBD), u)
}

func openAt(network, address string, u cluster.URIs) (*raw, error) {
	var err error
	for range 5 {
		var r *raw
		if r, err = dial(context.Background(), network, address); err == nil {
			if err = r.goTo(u.Export()); err == nil {
				return r, nil
			}
			_ = r.Close()
		}
		if errors.Is(err, errRefused) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	return nil, err
}

// connect is open for a test that cannot go on without. It connects again when the connection breaks.
func connect(t *testing.T, s *cluster.Server, u cluster.URIs) *raw {
	t.Helper()
	r, err := open(s, u)
	if err != nil {
		t.Fatal(err)
	}
	r.again = func() (*raw, error) { return open(s, u) }
	t.Cleanup(func() { _ = r.Close() })
	return r
}
