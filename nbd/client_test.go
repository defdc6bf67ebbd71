package nbd_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/client"
)

// The whole path with the project's own client: every operation, all sizes, in
// line and from other goroutines, simple and structured, one and four connections.
func TestOwnClient(t *testing.T) {
	for _, c := range []struct {
		name  string
		async bool
		cfg   client.Config
	}{
		{"in line", false, client.Config{}},
		{"async", true, client.Config{}},
		{"simple", false, client.Config{Simple: true}},
		{"four connections", false, client.Config{Connections: 4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t, func(_ *nbd.Config, s *served) { s.volume.Async = c.async })
			cl := s.dial(t, c.cfg)
			defer func() {
				if err := cl.Close(); err != nil {
					t.Errorf("Close: %v", err)
				}
			}()
			exercise(t, cl)
		})
	}
}

func exercise(t *testing.T, c *client.Client) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	noise := rand.NewChaCha8([32]byte{byte(seed)})
	model := make([]byte, size)
	for range 30 {
		n := 512 << rnd.IntN(15) // to 8 MiB
		off := rnd.IntN((size-n)/512) * 512
		switch rnd.IntN(6) {
		case 0:
			must(t, c.Trim(int64(off), int64(n)))
			clear(model[off : off+n])
		case 1:
			must(t, c.Zero(int64(off), int64(n), rnd.IntN(2) == 0))
			clear(model[off : off+n])
		case 2:
			must(t, c.Flush())
		default:
			p := make([]byte, n)
			_, _ = noise.Read(p)
			copy(model[off:], p)
			_, err := c.WriteAt(p, int64(off))
			must(t, err)
		}
	}
	got := make([]byte, size)
	_, err := c.ReadAt(got, 0)
	must(t, err)
	if !bytes.Equal(got, model) {
		t.Fatal("the volume differs from the model")
	}
	if c.Export().Allocation {
		all, err := c.BlockStatus(0, size)
		must(t, err)
		at := int64(0)
		for _, s := range all {
			if s.Zero && !bytes.Equal(model[at:at+s.Length], make([]byte, s.Length)) {
				t.Errorf("%d bytes at %d are said to be zero", s.Length, at)
			}
			at += s.Length
		}
		if at != size {
			t.Errorf("block status covers %d bytes of %d", at, size)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
