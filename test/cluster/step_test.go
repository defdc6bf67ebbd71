package cluster_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// The server is held at each named step of a volume's life and killed there.
// Whatever had been done, the same life can be led again from the beginning,
// what was acknowledged is there, and nothing is left behind at its end.
func TestKillAtEveryStep(t *testing.T) {
	for _, point := range []string{
		"metadata.create", "metadata.read", "metadata.commit",
		"primary.open", "primary.seal", "primary.birth", "primary.birth-committed", "primary.write", "primary.flush",
		"primary.grow", "primary.detach",
		"disk.space", "disk.record", "disk.write", "disk.sync", "disk.read",
		"nbd.handshake", "nbd.parse", "nbd.reply",
		"collect.unlink",
	} {
		t.Run(point, func(t *testing.T) {
			s := start(t, "--fault-injection")
			arm(t, s, fmt.Sprintf(`{"point":%q,"hold":true,"count":1}`, point))
			l := life{s: s}
			ended := make(chan error, 1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() { ended <- l.lead(ctx) }()
			over := false
			eventually(t, 20*time.Second, point+" was reached", func() bool {
				select {
				case err := <-ended:
					over = true
					if err != nil {
						t.Fatalf("before %s was reached: %v", point, err)
					}
				default:
				}
				return hits(t, s) > 0
			})
			s.Kill()
			cancel() // a command would ask again until its time is over
			if !over {
				<-ended
			}
			ready(t, s)
			if err := l.lead(t.Context()); err != nil {
				t.Fatalf("after a kill at %s: %v", point, err)
			}
			eventually(t, 30*time.Second, "nothing is left on the disk", func() bool {
				return entries(t, s, "volumes")+entries(t, s, "quarantine") == 0
			})
		})
	}
}

// life is a volume's, and what of it was acknowledged so far.
type life struct {
	s       *cluster.Server
	written bool // the first block
}

var lifeContent = bytes.Repeat([]byte("alive. !"), 512)

func (l *life) lead(ctx context.Context) error {
	// A repeat meets the volume at either size, or not at all.
	_, err := l.s.CLI(ctx, "volume", "show", "v")
	if err != nil {
		if err := l.s.CreateVolume(ctx, "v", "64MiB", "--durability", "flush"); err != nil {
			return err
		}
		l.written = false
	}
	u, err := l.s.Attach(ctx, "v")
	if err != nil {
		return err
	}
	r, err := open(l.s, u)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := l.use(r); err != nil {
		return err
	}
	for _, args := range [][]string{{"volume", "resize", "v", "--size", "128MiB"}, {"detach", "v"}, {"volume", "delete", "v"}} {
		if _, err := l.s.CLI(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

func (l *life) use(r *raw) error {
	p := make([]byte, len(lifeContent))
	if err := r.read(0, p); err != nil {
		return err
	}
	switch zero := bytes.Equal(p, make([]byte, len(p))); {
	case l.written && !bytes.Equal(p, lifeContent):
		return fmt.Errorf("what was acknowledged is not there: %.16q", p)
	case !l.written && !zero && !bytes.Equal(p, lifeContent):
		return fmt.Errorf("a block that was being written is neither old nor new: %.16q", p)
	}
	if err := r.write(0, lifeContent); err != nil {
		return err
	}
	l.written = true
	if err := r.flush(); err != nil {
		return err
	}
	return r.read(0, p)
}

func arm(t *testing.T, s *cluster.Server, rule string) {
	t.Helper()
	if status, body, err := s.HTTP(t.Context(), "POST", "/faults", rule); err != nil || status/100 != 2 {
		t.Fatalf("arming %s: %d %s %v", rule, status, body, err)
	}
}

// hits is how often the armed rules were met.
func hits(t *testing.T, s *cluster.Server) (n int) {
	t.Helper()
	_, body, err := s.Get(t.Context(), "/faults")
	if err != nil {
		t.Fatal(err)
	}
	var rules []struct{ Hits int }
	if err := json.Unmarshal([]byte(body), &rules); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	for _, r := range rules {
		n += r.Hits
	}
	return n
}

func entries(t *testing.T, s *cluster.Server, dir string) int {
	t.Helper()
	list, err := os.ReadDir(filepath.Join(s.Disks[0], dir))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
