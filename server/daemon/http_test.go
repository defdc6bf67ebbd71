package daemon

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

func handlerOf(ready func() error, faults *fault.Set) http.Handler {
	return NewHTTP(HTTPConfig{Metrics: prometheus.NewRegistry(), Ready: ready, Faults: faults, Log: quiet}).server.Handler
}

func TestHTTP(t *testing.T) {
	ok := handlerOf(func() error { return nil }, nil)
	notReady := handlerOf(func() error { return errors.New("no disk is open") }, nil)
	injecting := handlerOf(func() error { return nil }, &fault.Set{})
	const here, there = "127.0.0.1:1", "192.0.2.1:1"
	for _, c := range []struct {
		name         string
		handler      http.Handler
		from         string
		method, path string
		body         string
		status       int
		says         string
	}{
		{"health", ok, there, "GET", "/healthz", "", 200, "ok"},
		{"ready", ok, there, "GET", "/readyz", "", 200, "ok"},
		{"not ready", notReady, there, "GET", "/readyz", "", 503, "no disk is open"},
		{"healthy though not ready", notReady, there, "GET", "/healthz", "", 200, "ok"},
		{"metrics", ok, there, "GET", "/metrics", "", 200, ""},
		{"pprof here", ok, here, "GET", "/debug/pprof/", "", 200, "goroutine"},
		{"pprof from elsewhere", ok, there, "GET", "/debug/pprof/heap", "", 403, "this machine only"},
		{"no such page", ok, here, "GET", "/", "", 404, ""},
		{"faults refused", ok, here, "POST", "/faults", `{"point":"disk.sync"}`, 403, "--fault-injection"},
		{"faults from elsewhere", injecting, there, "GET", "/faults", "", 403, "this machine only"},
		{"no faults", injecting, here, "GET", "/faults", "", 200, "[]"},
		{"arm", injecting, here, "POST", "/faults", `{"point":"disk.sync","error":"io","delay":"500ms","count":2}`, 204, ""},
		{"list", injecting, here, "GET", "/faults", "", 200, `[{"point":"disk.sync","delay":"500ms","error":"io","count":2,"hits":0}]`},
		{"unknown point", injecting, here, "POST", "/faults", `{"point":"disk.explode"}`, 400, "disk.explode"},
		{"delay in nanoseconds", injecting, here, "POST", "/faults", `{"point":"disk.sync","delay":"500"}`, 400, "500ms"},
		{"unknown field", injecting, here, "POST", "/faults", `{"point":"disk.sync","dealy":"1s"}`, 400, "dealy"},
		{"not JSON", injecting, here, "POST", "/faults", `disk.sync`, 400, "a fault is JSON such as"},
		{"wrong method", injecting, here, "PUT", "/faults", ``, 405, ""},
		{"clear another", injecting, here, "DELETE", "/faults?point=disk.read", "", 204, ""},
		{"still armed", injecting, here, "GET", "/faults", "", 200, `disk.sync`},
		{"clear", injecting, here, "DELETE", "/faults", "", 204, ""},
		{"cleared", injecting, here, "GET", "/faults", "", 200, "[]"},
	} {
		r := httptest.NewRequest(c.method, c.path, strings.NewReader(c.body))
		r.RemoteAddr = c.from
		w := httptest.NewRecorder()
		c.handler.ServeHTTP(w, r)
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.says) {
			t.Errorf("%s: got %d %q, want %d with %q", c.name, w.Code, w.Body, c.status, c.says)
		}
	}
}

func TestFaultHitThroughHTTP(t *testing.T) {
	faults := &fault.Set{}
	h := handlerOf(func() error { return nil }, faults)
	r := httptest.NewRequest("POST", "/faults", strings.NewReader(`{"point":"disk.sync","match":"d1","error":"io"}`))
	r.RemoteAddr = "[::1]:1"
	h.ServeHTTP(httptest.NewRecorder(), r)
	if err := faults.Hit("disk.sync", "d1"); !errors.Is(err, block.ErrIO) {
		t.Errorf("got %v", err)
	}
	if err := faults.Hit("disk.sync", "d2"); err != nil {
		t.Errorf("another disk: %v", err)
	}
}

func TestHTTPStop(t *testing.T) {
	l, err := ListenTCP("127.0.0.1", 0, "--http-port")
	if err != nil {
		t.Fatal(err)
	}
	h := NewHTTP(HTTPConfig{Metrics: prometheus.NewRegistry(), Ready: func() error { return nil }, Log: quiet})
	h.Start(l, func(err error) { t.Errorf("failed: %v", err) })
	profile := make(chan error, 1)
	answered := make(chan struct{})
	go func() {
		r, err := http.Get("http://" + l.Addr().String() + "/debug/pprof/trace?seconds=300")
		if err == nil {
			close(answered)
			_, err = io.Copy(io.Discard, r.Body)
			r.Body.Close()
		}
		profile <- err
	}()
	<-answered
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := h.Stop(ctx); err != nil {
		t.Error(err)
	}
	if err := <-profile; err == nil {
		t.Error("a profile of five minutes was not cut")
	}
	http.DefaultClient.CloseIdleConnections()
}

// B147: what is not HTTP gets nothing, is not news, and disturbs nobody.
func TestB147ForeignBytesOnTheHTTPPort(t *testing.T) {
	l, err := ListenTCP("127.0.0.1", 0, "--http-port")
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	h := NewHTTP(HTTPConfig{
		Metrics: prometheus.NewRegistry(), Ready: func() error { return nil }, Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	h.Start(l, func(err error) { t.Errorf("failed: %v", err) })
	for name, bytes := range map[string]string{
		"binary":      "\x00\x01\x02NBDMAGIC\xff\xfe\n\n",
		"tls":         "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
		"http2":       "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"long header": "GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 64<<10),
		"nothing":     "",
	} {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, bytes)
		_ = c.(*net.TCPConn).CloseWrite()
		if b, _ := io.ReadAll(c); len(b) > 4096 {
			t.Errorf("%s: an answer of %d bytes", name, len(b))
		}
		c.Close()
	}
	r, err := http.Get("http://" + l.Addr().String() + "/healthz")
	if err != nil || r.StatusCode != http.StatusOK {
		t.Errorf("afterwards: %v %v", r, err)
	}
	r.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if err := h.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if log.Len() > 0 {
		t.Errorf("logged: %s", log.String())
	}
}
