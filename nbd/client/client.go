package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

// Config is how a Client behaves. Zero values mean the defaults.
type Config struct {
	Connections int           // default 1; more are used only if the export offers multi-conn
	Depth       int           // requests in flight per connection, default 64
	Timeout     time.Duration // without any reply while one is due, default 60 s; negative: none
	Simple      bool          // do not ask for structured replies; BlockStatus is not to be had then
}

// Client is an open export over one or more connections. Safe for concurrent
// use. It does not reconnect: once a connection has ended, calls that go over
// it fail, and Dial opens anew.
type Client struct {
	target Target
	export Export
	links  []*link
	next   chan int // the link whose turn it is; capacity 1
}

// Dial opens a target. ctx bounds the dialling and the handshakes.
func Dial(ctx context.Context, t Target, cfg Config) (*Client, error) {
	cfg.Connections = max(1, cfg.Connections)
	cfg.Depth = max(1, cmp.Or(cfg.Depth, 64))
	cfg.Timeout = cmp.Or(cfg.Timeout, 60*time.Second)
	c := &Client{target: t, next: make(chan int, 1)}
	c.next <- 0
	for i := range cfg.Connections {
		nc, export, err := open(ctx, t, !cfg.Simple)
		if err == nil && i > 0 && export != c.export {
			_ = nc.Close()
			err = fmt.Errorf("nbd: %s: %w: it describes one export in two ways", t, ErrProtocol)
		}
		if err != nil {
			c.Abort()
			return nil, err
		}
		c.export = export
		c.links = append(c.links, newLink(nc, export, cfg))
		if !export.MultiConn() {
			break
		}
	}
	return c, nil
}

func open(ctx context.Context, t Target, structured bool) (net.Conn, Export, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, t.Network, t.Address)
	if err != nil {
		return nil, Export{}, fmt.Errorf("nbd: %w: %w", block.ErrUnavailable, err)
	}
	export, err := Handshake(ctx, nc, t, structured)
	if err != nil {
		_ = nc.Close()
		return nil, Export{}, err
	}
	return nc, export, nil
}

// Export is what the handshake agreed on.
func (c *Client) Export() Export { return c.export }

// Call is one request. The caller sets the first part and keeps its hands off
// Data until the call is done.
type Call struct {
	Op     block.Op
	FUA    bool
	NoHole bool
	Offset int64
	Length int64      // of OpTrim and OpZero, at most 2³²−512; for the others len(Data)
	Data   []byte     // of OpRead and OpWrite, at most Export.MaxPayload bytes
	Done   chan *Call // gets the call when it is done; must have room for it

	Err error // when done

	status  []block.Status // of a block status query
	isQuery bool
}

// Start sends a call and does not wait for its reply. It waits while as many
// are in flight on a connection as may be. An error comes with the call.
func (c *Client) Start(call *Call) {
	i := <-c.next
	c.next <- (i + 1) % len(c.links)
	c.links[i].start(call)
}

// do runs calls and returns the first error.
func (c *Client) do(calls ...*Call) error {
	done := make(chan *Call, len(calls))
	for _, call := range calls {
		call.Done = done
		c.Start(call)
	}
	var err error
	for range calls {
		if call := <-done; call.Err != nil && err == nil {
			err = fmt.Errorf("nbd: %s %s at %d: %w", c.target.public(), call.name(), call.Offset, call.Err)
		}
	}
	return err
}

func (call *Call) name() string {
	if call.isQuery {
		return "block status"
	}
	return call.Op.String()
}

// ReadAt implements io.ReaderAt. Offsets and lengths are multiples of Export.MinBlock.
func (c *Client) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("nbd: %w: offset %d", block.ErrInvalid, off)
	}
	whole := p
	p = p[:min(int64(len(p)), max(0, c.export.Size-off))]
	n := len(p)
	if err := c.transfer(block.OpRead, p, off, false); err != nil {
		return 0, err
	}
	if n < len(whole) {
		return n, io.EOF
	}
	return n, nil
}

// WriteAt implements io.WriterAt. What it wrote is durable after Flush.
func (c *Client) WriteAt(p []byte, off int64) (int, error) {
	if err := c.transfer(block.OpWrite, p, off, false); err != nil {
		return 0, err
	}
	return len(p), nil
}

// WriteDurable writes p and returns when it is durable (FUA).
func (c *Client) WriteDurable(p []byte, off int64) error {
	return c.transfer(block.OpWrite, p, off, true)
}

// transfer splits what is longer than one payload.
func (c *Client) transfer(op block.Op, p []byte, off int64, fua bool) error {
	longest := int(c.export.MaxPayload &^ (c.export.PreferredBlock - 1))
	if longest == 0 {
		longest = int(c.export.MaxPayload)
	}
	var calls []*Call
	for len(p) > 0 {
		n := min(len(p), longest)
		calls = append(calls, &Call{Op: op, FUA: fua, Offset: off, Data: p[:n]})
		p, off = p[n:], off+int64(n)
	}
	return c.do(calls...)
}

// maxRange is the longest TRIM, WRITE_ZEROES or BLOCK_STATUS: a multiple of every block.
const maxRange = 1<<32 - 1<<16

// Trim gives a range's space back; it reads as zeros.
func (c *Client) Trim(off, length int64) error { return c.ranged(block.OpTrim, off, length, false) }

// Zero makes a range read as zeros; with noHole it keeps its space.
func (c *Client) Zero(off, length int64, noHole bool) error {
	return c.ranged(block.OpZero, off, length, noHole)
}

func (c *Client) ranged(op block.Op, off, length int64, noHole bool) error {
	var calls []*Call
	for length > 0 {
		n := min(length, maxRange)
		calls = append(calls, &Call{Op: op, NoHole: noHole, Offset: off, Length: n})
		off, length = off+n, length-n
	}
	return c.do(calls...)
}

// Flush makes everything durable that was acknowledged before.
func (c *Client) Flush() error { return c.do(&Call{Op: block.OpFlush}) }

// BlockStatus describes [off, off+length) completely; neighbours differ.
// ErrUnsupported: the export does not offer it.
func (c *Client) BlockStatus(off, length int64) ([]block.Status, error) {
	if !c.export.Allocation {
		return nil, fmt.Errorf("nbd: block status of %s: %w", c.target, block.ErrUnsupported)
	}
	var all []block.Status
	for length > 0 {
		call := &Call{isQuery: true, Offset: off, Length: min(length, maxRange)}
		if err := c.do(call); err != nil {
			return nil, err
		}
		for _, s := range call.status {
			if n := len(all); n > 0 && all[n-1].Hole == s.Hole && all[n-1].Zero == s.Zero {
				all[n-1].Length += s.Length
			} else {
				all = append(all, s)
			}
			off, length = off+s.Length, length-s.Length
		}
	}
	return all, nil
}

// Close waits for the calls in flight, tells the server and closes. Calls that
// come later fail.
func (c *Client) Close() error {
	var err error
	for _, l := range c.links {
		err = errors.Join(err, l.close())
	}
	return err
}

// Abort closes at once, as a client does that dies. Calls in flight fail.
func (c *Client) Abort() {
	for _, l := range c.links {
		l.fail(fmt.Errorf("nbd: aborted: %w", block.ErrShutdown))
		<-l.ended
	}
}
