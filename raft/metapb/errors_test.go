package metapb

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

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

func TestRowsAreDistinct(t *testing.T) {
	reasons := map[string]bool{}
	for _, row := range table {
		if reasons[row.reason] {
			t.Errorf("reason %s twice", row.reason)
		}
		reasons[row.reason] = true
		if row.code == codes.OK || row.code == codes.Unknown {
			t.Errorf("%s: code %v", row.reason, row.code)
		}
	}
}

func TestBothDirections(t *testing.T) {
	for _, row := range table {
		sent := fmt.Errorf("volume %q: %w: what to do", "v", row.sentinel)
		st := ToStatus(fmt.Errorf("create: %w", sent))
		if status.Code(st) != row.code {
			t.Errorf("%s: code %v, want %v", row.reason, status.Code(st), row.code)
		}
		got := FromStatus(st)
		if !errors.Is(got, row.sentinel) {
			t.Errorf("%s: came back as %v", row.reason, got)
		}
		for _, other := range table {
			if other.sentinel != row.sentinel && errors.Is(got, other.sentinel) {
				t.Errorf("%s: is also %s", row.reason, other.reason)
			}
		}
		if want := "create: " + sent.Error(); got.Error() != want {
			t.Errorf("message %q, want %q", got, want)
		}
		var e *Error
		if !errors.As(got, &e) || !e.Answered() || e.Code() != row.code {
			t.Errorf("%s: %+v", row.reason, e)
		}
	}
}

func TestUnknownOutcomeWins(t *testing.T) {
	err := fmt.Errorf("%w: %w", block.ErrUnavailable, block.ErrUnknown)
	if got := FromStatus(ToStatus(err)); !errors.Is(got, block.ErrUnknown) || errors.Is(got, block.ErrUnavailable) {
		t.Errorf("got %v", got)
	}
}

func TestForeignStatus(t *testing.T) {
	for code, want := range foreign {
		err := FromStatus(status.Error(code, "x"))
		var e *Error
		if !errors.Is(err, want) || !errors.As(err, &e) || e.Answered() {
			t.Errorf("%v: %v", code, err)
		}
	}
	if err := FromStatus(status.Error(codes.Unknown, "")); err.Error() != "Unknown" {
		t.Errorf("got %q", err)
	}
}

func TestPlainErrors(t *testing.T) {
	for _, c := range []struct {
		err  error
		code codes.Code
	}{
		{errors.New("boom"), codes.Internal},
		{fmt.Errorf("wait: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		{context.Canceled, codes.Canceled},
		{status.Error(codes.NotFound, "kept"), codes.NotFound},
	} {
		if got := status.Code(ToStatus(c.err)); got != c.code {
			t.Errorf("%v: %v, want %v", c.err, got, c.code)
		}
	}
	if ToStatus(nil) != nil || FromStatus(nil) != nil {
		t.Error("nil must stay nil")
	}
}

func TestDetailsTravel(t *testing.T) {
	err := WithDetail(fmt.Errorf("read: %w", WithDetail(fmt.Errorf("%w: deleted", block.ErrNotFound), "tombstone", "id")), DetailCluster, "c")
	var e *Error
	if got := FromStatus(ToStatus(err)); !errors.As(got, &e) || e.Detail("tombstone") != "id" || e.Detail(DetailCluster) != "c" || !errors.Is(got, block.ErrNotFound) {
		t.Errorf("got %+v", e)
	}
}
