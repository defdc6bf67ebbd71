package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/fault"
)

// HTTPConfig is what the operators' listener shows. Its functions are called from many goroutines.
type HTTPConfig struct {
	Metrics prometheus.Gatherer
	// Ready returns nil when the server serves, else a sentence that says what is missing. It must not block.
	Ready func() error
	// Faults are the rules of a server that was started with --fault-injection; nil: refused.
	Faults *fault.Set
	Log    *slog.Logger
}

// HTTP serves /metrics, /healthz, /readyz and, to this machine only,
// /debug/pprof/ and /faults.
type HTTP struct {
	server http.Server
	done   chan error
}

// NewHTTP returns a server that Start starts.
func NewHTTP(c HTTPConfig) *HTTP {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(c.Metrics, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(c.Log.Handler(), slog.LevelWarn),
		MaxRequestsInFlight: 4,
		Timeout:             30 * time.Second,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := c.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("/faults", localOnly(faultHandler(c.Faults, c.Log)))
	mux.Handle("GET /debug/pprof/", localOnly(http.HandlerFunc(pprof.Index)))
	mux.Handle("GET /debug/pprof/cmdline", localOnly(http.HandlerFunc(pprof.Cmdline)))
	mux.Handle("GET /debug/pprof/profile", localOnly(http.HandlerFunc(pprof.Profile)))
	mux.Handle("GET /debug/pprof/symbol", localOnly(http.HandlerFunc(pprof.Symbol)))
	mux.Handle("GET /debug/pprof/trace", localOnly(http.HandlerFunc(pprof.Trace)))
	return &HTTP{done: make(chan error, 1), server: http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(c.Log.Handler(), slog.LevelDebug), // what strangers send to the port is not news
	}}
}

// Start serves l until Stop. failed is called if serving ends by itself.
func (h *HTTP) Start(l net.Listener, failed func(error)) {
	go func() {
		err := h.server.Serve(l)
		if !errors.Is(err, http.ErrServerClosed) {
			failed(fmt.Errorf("%w: http listener: %v", block.ErrIO, err))
		}
		h.done <- err
	}()
}

// Stop lets requests finish until ctx ends, cuts the others, and waits for Start's goroutine.
func (h *HTTP) Stop(ctx context.Context) error {
	err := h.server.Shutdown(ctx)
	if err != nil { // a profile may run for longer than the grace time
		err = h.server.Close()
	}
	<-h.done
	return err
}

// localOnly refuses whoever is not on this machine: profiles show memory, and faults break things.
func localOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.RemoteAddr)
		if err != nil || !IsLoopback(host) {
			http.Error(w, r.URL.Path+" is served to this machine only: ask it through its loopback address", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}
