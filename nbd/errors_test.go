package nbd_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/gabion-storage/gabion/server/block"
)

// Every sentinel that block declares has a row in the table, and the rows that clients act on are right.
func TestEverySentinelHasARow(t *testing.T) {
	rows := map[string]bool{}
	for err := range nbd.Errnos() {
		rows[err.Error()] = true
	}
	file, err := parser.ParseFile(token.NewFileSet(), "../server/block/errors.go", nil, 0)
	must(t, err)
	found := 0
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			text, err := strconv.Unquote(call.Args[0].(*ast.BasicLit).Value)
			must(t, err)
			if found++; !rows[text] {
				t.Errorf("the sentinel %q has no row", text)
			}
		}
		return true
	})
	if found != len(rows) {
		t.Errorf("%d sentinels, %d rows", found, len(rows))
	}
	for err, want := range map[error]uint32{
		block.ErrNoSpace: wire.ENOSPC, block.ErrReadOnly: wire.EPERM, block.ErrPermission: wire.EPERM,
		block.ErrInvalid: wire.EINVAL, block.ErrShutdown: wire.ESHUTDOWN, block.ErrIO: wire.EIO, block.ErrCorrupt: wire.EIO,
	} {
		if got := nbd.Errnos()[err]; got != want {
			t.Errorf("%v is errno %d, want %d", err, got, want)
		}
	}
}

// A Device's error reaches the client as its errno, simple and structured.
func TestDeviceErrors(t *testing.T) {
	for _, c := range []struct {
		err   error
		errno uint32
	}{
		{fmt.Errorf("wrapped: %w", block.ErrNoSpace), wire.ENOSPC},
		{fmt.Errorf("wrapped: %w", block.ErrIO), wire.EIO},
		{fmt.Errorf("no sentinel"), wire.EIO},
	} {
		s := serve(t, func(_ *nbd.Config, s *served) {
			s.volume.Fail = func(*block.Request) error { return c.err }
		})
		for _, structured := range []bool{false, true} {
			p := s.enter(t, structured)
			for _, command := range []uint16{0, 1, wire.CmdFlush, wire.CmdTrim} {
				var payload []byte
				length := uint32(512)
				switch command {
				case 1:
					payload = make([]byte, 512)
				case wire.CmdFlush:
					length = 0
				}
				p.send(wire.Request{Command: command, Cookie: 1, Length: length}, payload)
				if got := p.reply().errno; got != c.errno {
					t.Errorf("%v for command %d is errno %d, want %d", c.err, command, got, c.errno)
				}
			}
			p.close()
		}
	}
}
