package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/pojntfx/go-nbd/pkg/protocol"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var be = binary.BigEndian

// fake is a server of one connection that says what a test wants.
type fake struct {
	structured bool
	size       uint64
	blocks     [3]uint32
	reply      []byte // sent in place of the replies to GO, if set
	talk       func(t *testing.T, nc net.Conn)
}

// serve answers the handshake and lets talk have the transmission phase. It returns a target.
func (f fake) serve(t *testing.T) client.Target {
	t.Helper()
	dir, err := os.MkdirTemp("", "nbd")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		f.handshake(t, nc)
		if f.talk != nil {
			f.talk(t, nc)
		}
		_, _ = io.Copy(io.Discard, nc) // until the client leaves
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
		_ = os.RemoveAll(dir)
	})
	return client.Target{Network: "unix", Address: ln.Addr().String(), Export: "v/secret-secret"}
}

func optionReply(id, kind uint32, data []byte) []byte {
	p := be.AppendUint64(nil, protocol.NEGOTIATION_MAGIC_REPLY)
	p = be.AppendUint32(be.AppendUint32(be.AppendUint32(p, id), kind), uint32(len(data)))
	return append(p, data...)
}

func (f fake) handshake(t *testing.T, nc net.Conn) {
	p := be.AppendUint64(nil, protocol.NEGOTIATION_MAGIC_OLDSTYLE)
	p = be.AppendUint64(p, protocol.NEGOTIATION_MAGIC_OPTION)
	_, _ = nc.Write(be.AppendUint16(p, 3))
	_, _ = io.CopyN(io.Discard, nc, 4)
	for {
		var h [16]byte
		if _, err := io.ReadFull(nc, h[:]); err != nil {
			return
		}
		id := be.Uint32(h[8:])
		_, _ = io.CopyN(io.Discard, nc, int64(be.Uint32(h[12:])))
		switch {
		case id == wire.OptStructuredReply && f.structured:
			_, _ = nc.Write(optionReply(id, protocol.NEGOTIATION_TYPE_REPLY_ACK, nil))
		case id == wire.OptSetMetaContext:
			_, _ = nc.Write(optionReply(id, wire.RepMetaContext, append(be.AppendUint32(nil, 5), wire.Allocation...)))
			_, _ = nc.Write(optionReply(id, protocol.NEGOTIATION_TYPE_REPLY_ACK, nil))
		case id == protocol.NEGOTIATION_ID_OPTION_GO && f.reply != nil:
			_, _ = nc.Write(f.reply)
			return
		case id == protocol.NEGOTIATION_ID_OPTION_GO:
			info := be.AppendUint16(be.AppendUint64(be.AppendUint16(nil, 0), f.size), 0x1ff)
			_, _ = nc.Write(optionReply(id, protocol.NEGOTIATION_TYPE_REPLY_INFO, info))
			sizes := be.AppendUint16(nil, 3)
			for _, b := range f.blocks {
				sizes = be.AppendUint32(sizes, b)
			}
			_, _ = nc.Write(optionReply(id, protocol.NEGOTIATION_TYPE_REPLY_INFO, sizes))
			_, _ = nc.Write(optionReply(id, protocol.NEGOTIATION_TYPE_REPLY_ACK, nil))
			return
		default:
			_, _ = nc.Write(optionReply(id, protocol.NEGOTIATION_TYPE_REPLY_ERR_UNSUPPORTED, nil))
		}
	}
}

var sane = [3]uint32{512, 4096, 32 << 20}

// B170, the handshake: numbers that cannot be are refused with a clear error.
func TestB170HostileHandshake(t *testing.T) {
	giant := be.AppendUint32(optionReply(protocol.NEGOTIATION_ID_OPTION_GO, 3, nil)[:16], 0xffffffff)
	var endless []byte
	for range 2000 {
		endless = append(endless, optionReply(protocol.NEGOTIATION_ID_OPTION_GO, 3, be.AppendUint16(nil, 99))...)
	}
	for name, f := range map[string]fake{
		"size 0":              {blocks: sane},
		"size 2^63":           {size: 1 << 63, blocks: sane},
		"size off the grid":   {size: 1000, blocks: sane},
		"block size 0":        {size: 1 << 20, blocks: [3]uint32{0, 4096, 1 << 20}},
		"block size 3":        {size: 3 << 20, blocks: [3]uint32{3, 4096, 1 << 20}},
		"preferred below min": {size: 1 << 20, blocks: [3]uint32{4096, 512, 1 << 20}},
		"giant reply":         {reply: giant},
		"endless replies":     {reply: endless},
		"another option":      {reply: optionReply(99, protocol.NEGOTIATION_TYPE_REPLY_ACK, nil)},
		"ack without export":  {reply: optionReply(protocol.NEGOTIATION_ID_OPTION_GO, protocol.NEGOTIATION_TYPE_REPLY_ACK, nil)},
		"short export":        {reply: optionReply(protocol.NEGOTIATION_ID_OPTION_GO, 3, []byte{0, 0, 1})},
		"no magic":            {reply: make([]byte, 64)},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			c, err := client.Dial(ctx, f.serve(t), client.Config{})
			if !errors.Is(err, client.ErrProtocol) {
				if err == nil {
					c.Abort()
				}
				t.Errorf("Dial: %v", err)
			}
		})
	}
}

// A server that falls silent in the handshake is left when ctx ends.
func TestB170SilentHandshake(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err := client.Dial(ctx, fake{reply: []byte{}}.serve(t), client.Config{})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial: %v", err)
	}
}

// asked reads one request without payload.
func asked(t *testing.T, nc net.Conn) wire.Request {
	var p [wire.RequestSize]byte
	if _, err := io.ReadFull(nc, p[:]); err != nil {
		t.Errorf("the fake server: %v", err)
	}
	r, ok := wire.ParseRequest(p[:])
	if !ok {
		t.Error("not a request")
	}
	return r
}

func simple(errno uint32, cookie uint64, data int) []byte {
	p := make([]byte, 16+data)
	wire.PutSimpleReply(p, errno, cookie)
	return p
}

func chunk(flags, kind uint16, cookie uint64, body []byte) []byte {
	p := make([]byte, wire.ChunkHeaderSize)
	wire.PutChunk(p, kind, cookie, len(body))
	be.PutUint16(p[4:], flags)
	return append(p, body...)
}

// offsetData is the body of a data chunk.
func offsetData(off uint64, n int) []byte {
	return append(be.AppendUint64(nil, off), make([]byte, n)...)
}

// B170, transmission: each answer is for a READ of 4 KiB at 8192.
func TestB170HostileReplies(t *testing.T) {
	type answer func(r wire.Request) []byte
	protocolError := func(err error) bool {
		return errors.Is(err, client.ErrProtocol) && errors.Is(err, block.ErrUnavailable)
	}
	for _, c := range []struct {
		name       string
		structured bool
		answer     answer
		is         func(error) bool
	}{
		{"ok", false, func(r wire.Request) []byte { return simple(0, r.Cookie, 4096) }, func(err error) bool { return err == nil }},
		{"errno", false, func(r wire.Request) []byte { return simple(28, r.Cookie, 0) }, func(err error) bool { return errors.Is(err, block.ErrNoSpace) }},
		{"unknown cookie", false, func(r wire.Request) []byte { return simple(0, r.Cookie+1, 4096) }, protocolError},
		{"giant cookie", false, func(wire.Request) []byte { return simple(0, 1<<64-1, 4096) }, protocolError},
		{"no magic", false, func(wire.Request) []byte { return make([]byte, 16) }, protocolError},
		{"structured without being asked", false, func(r wire.Request) []byte { return chunk(1, 1, r.Cookie, offsetData(8192, 4096)) }, protocolError},
		{"hang in mid-payload", false, func(r wire.Request) []byte { return simple(0, r.Cookie, 100) },
			func(err error) bool {
				return errors.Is(err, os.ErrDeadlineExceeded) && errors.Is(err, block.ErrUnavailable)
			}},
		{"structured", true, func(r wire.Request) []byte { return chunk(1, 1, r.Cookie, offsetData(8192, 4096)) }, func(err error) bool { return err == nil }},
		{"hole and data", true, func(r wire.Request) []byte {
			return append(chunk(0, 2, r.Cookie, be.AppendUint32(be.AppendUint64(nil, 8192), 512)), chunk(1, 1, r.Cookie, offsetData(8704, 3584))...)
		}, func(err error) bool { return err == nil }},
		{"error and data", true, func(r wire.Request) []byte {
			return append(chunk(0, wire.ChunkError, r.Cookie, []byte{0, 0, 0, 5, 0, 2, 'n', 'o'}), chunk(1, 1, r.Cookie, offsetData(8192, 4096))...)
		}, func(err error) bool { return errors.Is(err, block.ErrIO) }},
		{"simple to a structured read", true, func(r wire.Request) []byte { return simple(0, r.Cookie, 4096) }, protocolError},
		{"too little", true, func(r wire.Request) []byte { return chunk(1, 1, r.Cookie, offsetData(8192, 512)) }, protocolError},
		{"too much", true, func(r wire.Request) []byte { return chunk(1, 1, r.Cookie, offsetData(8192, 8192)) }, protocolError},
		{"twice", true, func(r wire.Request) []byte {
			return append(chunk(0, 1, r.Cookie, offsetData(8192, 4096)), chunk(1, 1, r.Cookie, offsetData(8192, 4096))...)
		}, protocolError},
		{"before", true, func(r wire.Request) []byte { return chunk(1, 1, r.Cookie, offsetData(0, 4096)) }, protocolError},
		{"length 0xffffffff", true, func(r wire.Request) []byte {
			p := chunk(1, 1, r.Cookie, nil)
			be.PutUint32(p[16:], 0xffffffff)
			return append(p, offsetData(8192, 4096)...)
		}, protocolError},
		{"giant hole", true, func(r wire.Request) []byte {
			return chunk(1, 2, r.Cookie, be.AppendUint32(be.AppendUint64(nil, 8192), 0xffffffff))
		}, protocolError},
		{"giant message", true, func(r wire.Request) []byte {
			return chunk(1, wire.ChunkError, r.Cookie, []byte{0, 0, 0, 5, 0xff, 0xff})
		}, protocolError},
		{"error 0", true, func(r wire.Request) []byte { return chunk(1, wire.ChunkError, r.Cookie, make([]byte, 6)) }, protocolError},
		{"status to a read", true, func(r wire.Request) []byte { return chunk(1, 5, r.Cookie, make([]byte, 12)) }, protocolError},
		{"nothing", true, func(r wire.Request) []byte { return chunk(1, 0, r.Cookie, nil) }, protocolError},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := fake{structured: c.structured, size: 1 << 20, blocks: sane, talk: func(t *testing.T, nc net.Conn) {
				_, _ = nc.Write(c.answer(asked(t, nc)))
			}}
			cl, err := client.Dial(context.Background(), f.serve(t), client.Config{Timeout: 100 * time.Millisecond, Simple: !c.structured})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := cl.ReadAt(make([]byte, 4096), 8192); !c.is(err) {
				t.Errorf("ReadAt: %v", err)
			}
			cl.Abort()
		})
	}
}

// A second reply to one request ends the connection.
func TestB170DuplicateReply(t *testing.T) {
	f := fake{size: 1 << 20, blocks: sane, talk: func(t *testing.T, nc net.Conn) {
		r := asked(t, nc)
		_, _ = nc.Write(append(simple(0, r.Cookie, 4096), simple(0, r.Cookie, 4096)...))
	}}
	cl, err := client.Dial(context.Background(), f.serve(t), client.Config{Simple: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Abort()
	p := make([]byte, 4096)
	if _, err := cl.ReadAt(p, 0); err != nil {
		t.Errorf("the first reply: %v", err)
	}
	if _, err := cl.ReadAt(p, 0); !errors.Is(err, client.ErrProtocol) {
		t.Errorf("after the second reply: %v", err)
	}
}

// A late second reply is found out although another request has the first one's place.
func TestB170LateDuplicate(t *testing.T) {
	f := fake{size: 1 << 20, blocks: sane, talk: func(t *testing.T, nc net.Conn) {
		r := asked(t, nc)
		_, _ = nc.Write(simple(0, r.Cookie, 4096))
		asked(t, nc)
		_, _ = nc.Write(simple(0, r.Cookie, 4096))
	}}
	cl, err := client.Dial(context.Background(), f.serve(t), client.Config{Simple: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Abort()
	p := make([]byte, 4096)
	if _, err := cl.ReadAt(p, 0); err != nil {
		t.Errorf("the first reply: %v", err)
	}
	if _, err := cl.ReadAt(p, 0); !errors.Is(err, client.ErrProtocol) {
		t.Errorf("its second one, for another request: %v", err)
	}
}

// Block status that does not progress, or describes more than was asked, is refused; a last descriptor may reach further.
func TestB170HostileStatus(t *testing.T) {
	describe := func(pairs ...uint32) []byte {
		p := be.AppendUint32(nil, 5)
		for _, v := range pairs {
			p = be.AppendUint32(p, v)
		}
		return p
	}
	for _, c := range []struct {
		name string
		body []byte
		ok   bool
	}{
		{"reaches further", describe(512, 0, 1<<20, 3), true},
		{"length 0", describe(0, 0), false},
		{"goes on after the end", describe(4096, 0, 512, 3), false},
		{"other context", append([]byte{0, 0, 0, 6}, describe(512, 0)[4:]...), false},
	} {
		f := fake{structured: true, size: 1 << 20, blocks: sane, talk: func(t *testing.T, nc net.Conn) {
			_, _ = nc.Write(chunk(1, 5, asked(t, nc).Cookie, c.body))
		}}
		cl, err := client.Dial(context.Background(), f.serve(t), client.Config{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := cl.BlockStatus(0, 4096)
		if c.ok != (err == nil) || !c.ok && !errors.Is(err, client.ErrProtocol) {
			t.Errorf("%s: %v, %v", c.name, got, err)
		}
		cl.Abort()
	}
}

// A refusal keeps the server's words, without the secret and without what a terminal would obey.
func TestRefusal(t *testing.T) {
	text := []byte("no \x1b[31m export v/secret-secret")
	f := fake{reply: optionReply(protocol.NEGOTIATION_ID_OPTION_GO, wire.RepErrPolicy, text)}
	_, err := client.Dial(context.Background(), f.serve(t), client.Config{})
	var refused *client.RefusedError
	if !errors.As(err, &refused) || !errors.Is(err, block.ErrCacheLost) || refused.Text != "no ?[31m export v/…" {
		t.Errorf("Dial: %v", err)
	}
}

func TestParseURI(t *testing.T) {
	for uri, want := range map[string]client.Target{
		"nbd://h:1/a/b":                {Network: "tcp", Address: "h:1", Export: "a/b"},
		"nbd://h/a":                    {Network: "tcp", Address: "h:10809", Export: "a"},
		"nbd://[::1]/a":                {Network: "tcp", Address: "[::1]:10809", Export: "a"},
		"nbd+unix:///a/b?socket=/s%20": {Network: "unix", Address: "/s ", Export: "a/b"},
		"nbd://h":                      {Network: "tcp", Address: "h:10809"},
	} {
		if got, err := client.ParseURI(uri); err != nil || got != want {
			t.Errorf("%s: %+v, %v", uri, got, err)
		}
	}
	for uri, want := range map[string]error{
		"nbds://h/a": block.ErrUnsupported, "http://h/a": block.ErrInvalid, "nbd+unix:///a": block.ErrInvalid,
		"nbd:///a": block.ErrInvalid, "%zz": block.ErrInvalid, "": block.ErrInvalid,
	} {
		if _, err := client.ParseURI(uri); !errors.Is(err, want) {
			t.Errorf("%s: %v", uri, err)
		}
	}
}

// TestHandshakeCutOff: a server that ends in the middle of a handshake, or was stopped for so long that it drops the connection,
// is one that is not there now, whatever was said before.
func TestHandshakeCutOff(t *testing.T) {
	greeting := be.AppendUint64(nil, protocol.NEGOTIATION_MAGIC_OLDSTYLE)
	greeting = be.AppendUint64(greeting, protocol.NEGOTIATION_MAGIC_OPTION)
	greeting = be.AppendUint16(greeting, protocol.NEGOTIATION_HANDSHAKE_FLAG_FIXED_NEWSTYLE)
	for _, said := range []int{0, 5, len(greeting)} {
		ours, theirs := net.Pipe()
		go func() {
			_, _ = theirs.Write(greeting[:said])
			_, _ = io.ReadFull(theirs, make([]byte, 4))
			_ = theirs.Close()
		}()
		if said < len(greeting) {
			_ = theirs.SetReadDeadline(time.Unix(1, 0))
		}
		_, err := client.Handshake(t.Context(), ours, client.Target{Export: "e"}, false)
		if !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("after %d bytes: %v", said, err)
		}
		_ = ours.Close()
	}
}
