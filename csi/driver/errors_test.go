package driver

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gabion-storage/gabion/server/block"
)

// TestEverySentinelHasARow reads the declarations of block, so that a sentinel
// added there fails here until it has a row.
func TestEverySentinelHasARow(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "../../server/block/errors.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	texts := map[string]bool{}
	for _, row := range table {
		texts[row.sentinel.Error()] = true
		if row.code == codes.OK || row.code == codes.Unknown {
			t.Errorf("%v has code %v", row.sentinel, row.code)
		}
	}
	n := 0
	ast.Inspect(f, func(node ast.Node) bool {
		spec, ok := node.(*ast.ValueSpec)
		if !ok {
			return true
		}
		for i, name := range spec.Names {
			lit := spec.Values[i].(*ast.CallExpr).Args[0].(*ast.BasicLit)
			if n++; !texts[strings.Trim(lit.Value, `"`)] {
				t.Errorf("block.%s has no row", name.Name)
			}
		}
		return true
	})
	if n < 18 {
		t.Fatalf("found only %d sentinels", n)
	}
}

func TestCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{nil, codes.OK},
		{fmt.Errorf("%w: x", block.ErrInUse), codes.FailedPrecondition},
		{errors.New("a defect"), codes.Internal},
		{errPanic, codes.Internal},
		{status.Error(codes.Unimplemented, "no such method"), codes.Unimplemented},
		// An unknown outcome restricts what may be concluded more than anything else that is said with it.
		{fmt.Errorf("%w: %w: %w", block.ErrUnknown, block.ErrNotFound, context.DeadlineExceeded), codes.Aborted},
		{fmt.Errorf("%w: %w", block.ErrUnavailable, context.DeadlineExceeded), codes.Unavailable},
		{fmt.Errorf("stage: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		{fmt.Errorf("stage: %w", context.Canceled), codes.Canceled},
	} {
		if got := code(c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}

func TestSentence(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("%w: line\n\tline\x00", block.ErrIO), "input/output error: line  line "},
		{status.Error(codes.Internal, "inner"), "inner"},
		{errors.New("bad \xff text"), "bad ? text"},
	} {
		if got := sentence(c.err); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	long := sentence(errors.New(strings.Repeat("é", 5000)))
	if len(long) > maxSentence+40 || !utf8.ValidString(long) || !strings.Contains(long, "bytes more") {
		t.Errorf("%d bytes: %.40q", len(long), long)
	}
}

func TestParseEndpoint(t *testing.T) {
	for in, want := range map[string]string{
		"unix:///csi/csi.sock": "/csi/csi.sock", "unix:/csi.sock": "/csi.sock",
		"": "", "/csi.sock": "", "tcp://127.0.0.1:1": "", "unix://": "", "unix:///": "", "unix://relative": "", "unix:csi.sock": "",
		"unix:///a/../csi.sock": "", "unix:///a//b": "", "unix:///a\x00b": "", "UNIX:///a": "", "unix:///a/": "",
	} {
		got, err := ParseEndpoint(in)
		if got != want || (err == nil) != (want != "") || err != nil && !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
}
