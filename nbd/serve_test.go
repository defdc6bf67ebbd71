package nbd_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd"
	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/nbdtest"
	"go.uber.org/goleak"
)

const size = 64 << 20

func TestMain(m *testing.M) {
	if run := helpers[os.Getenv("NBD_TEST_HELPER")]; run != nil {
		run()
		return
	}
	goleak.VerifyTestMain(m)
}

// helpers are what the test binary does when a test starts it again as another process.
var helpers = map[string]func(){}

// served is a server under test with one volume, "v".
type served struct {
	*nbd.Server
	volume  *nbdtest.Memory
	exports *nbdtest.Exports
	tcp     string
	unix    string
	log     *syncBuffer
}

type syncBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// serve starts a server; the test's end shuts it down and checks that no stream is left.
func serve(t testing.TB, change func(*nbd.Config, *served)) *served {
	t.Helper()
	s := &served{volume: nbdtest.NewMemory(size), log: new(syncBuffer)}
	s.exports = &nbdtest.Exports{Volumes: map[string]*nbdtest.Memory{"v": s.volume}, Refuse: map[string]error{}}
	cfg := nbd.Config{Exports: s.exports, Log: slog.New(slog.NewTextHandler(s.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	// Both clocks stand still unless a test moves them: a busy machine must not look like a stopped process.
	cfg.BootTime = func() time.Duration { return 0 }
	if change != nil {
		change(&cfg, s)
	}
	var err error
	if s.Server, err = nbd.New(cfg); err != nil {
		t.Fatal(err)
	}
	s.SetClock(cfg.BootTime)
	dir, err := os.MkdirTemp("", "nbd") // t.TempDir is too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	s.unix = filepath.Join(dir, "s")
	var serving sync.WaitGroup
	for _, at := range [][2]string{{"tcp", "127.0.0.1:0"}, {"unix", s.unix}} {
		ln, err := net.Listen(at[0], at[1])
		if err != nil {
			t.Fatal(err)
		}
		if at[0] == "tcp" {
			s.tcp = ln.Addr().String()
		}
		serving.Go(func() {
			if err := s.Serve(context.Background(), ln); err != nil {
				t.Errorf("Serve: %v", err)
			}
		})
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		serving.Wait()
		if n := s.volume.Streams(); n != 0 {
			t.Errorf("%d streams were not disconnected", n)
		}
		if st := s.Stats(); st.Connections != 0 || st.PayloadBytes != 0 || st.ReplyBytes != 0 {
			t.Errorf("after the end something is left: %+v", st)
		}
		_ = os.RemoveAll(dir)
		if t.Failed() {
			t.Logf("the server's log:\n%s", s.log.String())
		}
	})
	return s
}

// dial opens volume v with the project's own client.
func (s *served) dial(t testing.TB, cfg client.Config) *client.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := client.Dial(ctx, client.Target{Network: "unix", Address: s.unix, Export: "v"}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
