package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/goleak"

	nbd "github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/image"
)

// running is a server inside the test process.
type running struct {
	*server
	log  logBuffer
	end  context.CancelFunc
	done chan error
}

// logBuffer is a log that many goroutines write and the test reads.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// start runs a server in dir until stop; it is ready when start returns.
func start(t *testing.T, dir string, ports []int) *running {
	t.Helper()
	c := serverConfig{
		node: "n1", rack: "r1", data: filepath.Join(dir, "data"), disks: []string{filepath.Join(dir, "disk")}, listen: "127.0.0.1",
		ports:     portConfig{metadata: ports[0], raft: ports[1], replica: ports[2], nbd: ports[3], http: ports[4]},
		nbdSocket: filepath.Join(dir, "nbd.sock"), bootstrap: true, extentSize: 1 << 20, replicas: 1,
		faults: true, logLevel: "debug", logFormat: "json", grace: 5 * time.Second,
	}
	if err := c.complete(); err != nil {
		t.Fatal(err)
	}
	r := &running{done: make(chan error, 1)}
	var err error
	if r.server, err = newServer(c, &r.log); err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	r.end = end
	r.waitFor("it was not started")
	go func() { r.done <- r.run(ctx) }()
	for r.readiness() != nil {
		select {
		case err := <-r.done:
			t.Fatalf("the server ended: %v\n%s", err, r.log.String())
		case <-time.After(time.Millisecond):
		}
	}
	return r
}

func (r *running) stop(t *testing.T) {
	t.Helper()
	r.end()
	select {
	case err := <-r.done:
		if err != nil {
			t.Errorf("the server's end: %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("the server does not end\n%s", r.log.String())
	}
}

func (r *running) url(path string) string {
	return fmt.Sprintf("http://127.0.0.1:%d%s", r.ports.http, path)
}

func (r *running) get(t *testing.T, path string) (int, string) {
	t.Helper()
	answer, err := http.Get(r.url(path))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(b)
}

// gabion runs a command line that must succeed and returns what it printed.
func (r *running) gabion(t *testing.T, args ...string) string {
	t.Helper()
	var out, errs bytes.Buffer
	if code := newApp(&out, &errs).run(t.Context(), append([]string{"--server", fmt.Sprintf("127.0.0.1:%d", r.ports.metadata)}, args...)); code != 0 {
		t.Fatalf("gabion %s: exit %d, %s", strings.Join(args, " "), code, errs.String())
	}
	return out.String()
}

// connect opens the first URI that attach prints.
func (r *running) connect(t *testing.T, attached string) *nbd.Client {
	t.Helper()
	uri, _, _ := strings.Cut(attached, "\n")
	target, err := nbd.ParseURI(uri)
	if err != nil {
		t.Fatal(err)
	}
	c, err := nbd.Dial(t.Context(), target, nbd.Config{})
	if err != nil {
		t.Fatalf("%v\n%s", err, r.log.String())
	}
	return c
}

// The whole server starts, serves, ends in order and starts again, with nothing left behind.
func TestServer(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	defer http.DefaultClient.CloseIdleConnections()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "disk"), 0o700); err != nil {
		t.Fatal(err)
	}
	ports, err := daemon.FreePorts(len(portNames))
	if err != nil {
		t.Fatal(err)
	}

	r := start(t, dir, ports)
	r.gabion(t, "volume", "create", "v", "--size", "64MiB", "--durability", "flush")
	uri := r.gabion(t, "attach", "v", "--node", "here")
	c := r.connect(t, uri)
	data := bytes.Repeat([]byte{7}, 4096)
	if _, err := c.WriteAt(data, 8192); err != nil {
		t.Fatal(err)
	}
	r.gabion(t, "volume", "resize", "v", "--size", "128MiB")
	checkHTTP(t, r)
	started := r.log.String()
	if _, err := c.WriteAt(data, 1<<20); err != nil {
		t.Fatal(err)
	}
	r.stop(t) // with the client connected, and data that nobody flushed
	if _, err := c.WriteAt(data, 0); err == nil {
		t.Error("a stopped server took a write")
	}
	c.Abort()
	checkOrder(t, started, strings.TrimPrefix(r.log.String(), started))

	r = start(t, dir, ports)
	c = r.connect(t, uri)
	if c.Export().Size != 128<<20 {
		t.Errorf("size %d after the restart", c.Export().Size)
	}
	got := make([]byte, 4096)
	for _, off := range []int64{8192, 1 << 20} {
		if _, err := c.ReadAt(got, off); err != nil || !bytes.Equal(got, data) {
			t.Errorf("what was written at %d is gone: %v", off, err)
		}
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	r.gabion(t, "detach", "v", "--node", "here")
	r.gabion(t, "volume", "delete", "v")
	for _, m := range tokenOf.FindAllStringSubmatch(uri, -1) { // B166, at the highest log level
		if strings.Contains(r.log.String()+started, m[1]) {
			t.Error("a token is in the log")
		}
	}
	r.stop(t)
}

func checkHTTP(t *testing.T, r *running) {
	t.Helper()
	for _, path := range []string{"/healthz", "/readyz", "/debug/pprof/goroutine?debug=1"} {
		if code, body := r.get(t, path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	_, metrics := r.get(t, "/metrics")
	for _, m := range []string{
		`gabion_volume_bytes_total{op="write",volume_id=`, `gabion_volume_request_seconds_count{op="write",volume_id=`,
		`gabion_volume_in_flight{volume_id=`, `gabion_volume_size_bytes{volume_id=`, `gabion_volume_info{volume="v",volume_id=`,
		`gabion_volume_requests{state="space",volume_id=`, `gabion_disk_available_bytes{disk_id=`, `gabion_disk_online{disk_id=`,
		"gabion_raft_leader 1", "gabion_raft_applied_index ", "gabion_nbd_connections 1", "gabion_build_info{", "go_goroutines ", "process_resident_memory_bytes ",
	} {
		if !strings.Contains(metrics, m) {
			t.Errorf("no metric %s", m)
		}
	}
}

// checkOrder compares what the log says of the steps with the list itself.
func checkOrder(t *testing.T, started, stopped string) {
	t.Helper()
	at := -1
	for _, s := range (&server{}).steps() {
		next := strings.Index(started, `"started","step":"`+s.Name+`"`)
		if s.Start != nil && next <= at {
			t.Errorf("step %s did not start in its turn", s.Name)
		}
		at = next
	}
	at = len(stopped)
	for _, s := range (&server{}).steps() {
		if s.Stop == nil {
			continue
		}
		next := strings.Index(stopped, `"stopped","step":"`+s.Name+`"`)
		if next < 0 || next >= at {
			t.Errorf("step %s did not stop in its turn", s.Name)
		}
		at = next
	}
}

// What must start before what; it stops after it.
func TestStepOrder(t *testing.T) {
	place := map[string]int{}
	for i, s := range (&server{}).steps() {
		place[s.Name] = i
	}
	for _, c := range []struct{ first, then, why string }{
		{"data directory", "listeners", "who is not this node binds nothing"},
		{"data directory", "consensus", "a second server beside a stopped first writes nothing (H39)"},
		{"listeners", "consensus", "a port in use is found before anything is written"},
		{"data check", "consensus", "no cluster is founded beside a disk of another (H70)"},
		{"entry", "consensus", "an empty directory under a voter's name must not listen for Raft"},
		{"http", "consensus", "health answers while a long log is read"},
		{"consensus", "metadata service", "it answers from the replicated state"},
		{"metadata service", "disks", "the cluster's identity and extent size decide which disks are its own"},
		{"disks", "registration", "a node is registered with its disks"},
		{"registration", "volumes", "grants go to registered processes"},
		{"disks", "volumes", "closing a volume syncs its disks"},
		{"metadata service", "volumes", "closing a volume may confirm a detach"},
		{"volumes", "disk watch", "what the disks report goes to the volumes"},
		{"volumes", "metadata watch", "what changes goes to the volumes"},
		{"volumes", "nbd", "connections end before the volumes under them"},
		{"nbd", "readiness", "whoever asks is sent elsewhere before connections end"},
	} {
		a, known := place[c.first]
		b, alsoKnown := place[c.then]
		if !known || !alsoKnown || a >= b {
			t.Errorf("%q must start before %q: %s", c.first, c.then, c.why)
		}
	}
}

// A consensus that cannot go on ends the server with its reason; readiness fails first.
func TestServerFails(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "disk"), 0o700); err != nil {
		t.Fatal(err)
	}
	ports, err := daemon.FreePorts(len(portNames))
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, dir, ports)
	r.group.Fail(fmt.Errorf("%w: for the test", block.ErrFormat))
	if err := <-r.done; !errors.Is(err, block.ErrFormat) {
		t.Errorf("ended with %v", err)
	}
	if err := r.readiness(); err == nil {
		t.Error("it still claims to be ready")
	}
}

func TestServerConfig(t *testing.T) {
	good := func() serverConfig {
		return serverConfig{node: "n", rack: "r", data: "/d", disks: []string{"/x"}, listen: "127.0.0.1", extentSize: 64 << 20, replicas: 3, grace: time.Second}
	}
	for name, c := range map[string]struct {
		change func(*serverConfig)
		says   string // empty: fine
	}{
		"good":                 {func(*serverConfig) {}, ""},
		"localhost":            {func(c *serverConfig) { c.listen = "localhost" }, ""},
		"insecure":             {func(c *serverConfig) { c.listen, c.insecure = "10.0.0.1", true }, ""},
		"disk below data":      {func(c *serverConfig) { c.disks = []string{"/d/x"} }, ""},
		"all addresses":        {func(c *serverConfig) { c.listen = "0.0.0.0" }, "--insecure"},
		"all addresses, v6":    {func(c *serverConfig) { c.listen = "::" }, "--insecure"},
		"data on a disk":       {func(c *serverConfig) { c.data = "/x/d" }, "lies on --disk"},
		"data is a disk":       {func(c *serverConfig) { c.data = "/x" }, "lies on --disk"},
		"a disk twice":         {func(c *serverConfig) { c.disks = []string{"/x", "/y/../x"} }, "twice"},
		"empty disk":           {func(c *serverConfig) { c.disks = []string{""} }, "empty name"},
		"name with a space":    {func(c *serverConfig) { c.rack = "a b" }, "--rack"},
		"name that is no text": {func(c *serverConfig) { c.node = "a\xff" }, "--node"},
		"rack's name too long": {func(c *serverConfig) { c.rack = strings.Repeat("r", 129) }, "--rack"},
		"disk that is no text": {func(c *serverConfig) { c.disks = []string{"/x\xff"} }, "--disk"},
		"socket's path":        {func(c *serverConfig) { c.nbdSocket = "/\xff" }, "--nbd-socket"},
		"name with a control":  {func(c *serverConfig) { c.node = "a\x01" }, "--node"},
		"odd extents":          {func(c *serverConfig) { c.extentSize = 3 << 20 }, "power of two"},
		"no replicas":          {func(c *serverConfig) { c.replicas = 0 }, "1, 2 or 3"},
		"port too high":        {func(c *serverConfig) { c.ports.http = 65536 }, "--http-port"},
		"no grace":             {func(c *serverConfig) { c.grace = 0 }, "--grace"},
		"bootstrap and join":   {func(c *serverConfig) { c.bootstrap, c.join = true, "h:1" }, "--join"},
		"listen is no address": {func(c *serverConfig) { c.listen = "node-a" }, "--listen"},
		"no data":              {func(c *serverConfig) { c.data = "" }, "--data"},
		"no disk":              {func(c *serverConfig) { c.disks = nil }, "--disk"},
		"joins":                {func(c *serverConfig) { c.join, c.ports.raft = "n1:7400,[::1]:7400", 1 }, ""},
		"joins without disks":  {func(c *serverConfig) { c.disks, c.join, c.ports.raft = nil, "n1:7400", 1 }, ""},
		"joins no address":     {func(c *serverConfig) { c.join, c.ports.raft = "n1:7400,n2", 1 }, "HOST:PORT"},
		"joins at any port":    {func(c *serverConfig) { c.join = "n1:7400" }, "--raft-port"},
	} {
		config := good()
		c.change(&config)
		err := config.complete()
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
	}
	c := good()
	if err := c.complete(); err != nil || c.nbdSocket != "/d/nbd.sock" || c.advertise != "127.0.0.1" {
		t.Errorf("defaults: %v %+v", err, c)
	}
	c.nbdSocket = noSocket
	if err := c.complete(); err != nil || c.nbdSocket != "" {
		t.Errorf("--nbd-socket none: %v %+v", err, c)
	}
}

func TestIOMode(t *testing.T) {
	for _, m := range []image.Mode{image.Auto, image.Direct, image.Buffered} {
		var c serverConfig
		f := pflag.NewFlagSet("server", pflag.ContinueOnError)
		c.register(f)
		if err := f.Parse([]string{"--io-mode", m.String()}); err != nil || c.mode() != m {
			t.Errorf("--io-mode %s: %s, %v", m, c.mode(), err)
		}
	}
}
