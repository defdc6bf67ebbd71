package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/cmd/adapt"
	"github.com/gabion-storage/gabion/csi/controller"
	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/fault"
)

// plugin is one process that stands between an orchestrator, or a person, and
// the cell. Its parts are set by the steps that start them, in their order.
type plugin struct {
	pluginConfig
	log     *slog.Logger
	version daemon.Version
	group   *daemon.Group

	listener net.Listener // of the endpoint
	operator net.Listener // of --http
	serving  sync.WaitGroup
	registry *prometheus.Registry
	calls    *callMetrics
	missing  atomic.Pointer[string] // what keeps the plugin from being ready; nil: nothing
	faultSet *fault.Set             // nil: no injection
	http     *daemon.HTTP

	client  *client.Client
	devices *devices      // nil in a controller
	stager  *node.Service // nil without a node service
	driver  *driver.Server
}

// steps is the whole of a plugin in the order in which it starts; it stops in the reverse order.
func (p *plugin) steps() []daemon.Step {
	steps := []daemon.Step{
		// Another plugin at the same socket is found before anything is touched. Who connects already waits.
		{Name: "endpoint", Start: p.listen, Stop: p.closeListeners},
		{Name: "http", Start: p.startHTTP, Stop: p.stopHTTP},
		{Name: "metadata client", Start: p.dial, Stop: func(context.Context) error { return p.client.Close() }},
	}
	mode := csiMode(p.mode)
	if mode != modeController {
		p.devices = &devices{state: p.state, node: p.node, outage: p.outage, log: p.log, faults: p.faultSet, machine: p.machine}
		steps = append(steps,
			// What this machine lacks is said now and not at the first pod.
			daemon.Step{Name: "kernel devices", Start: p.openDevices, Stop: func(context.Context) error { return p.devices.close() }},
			// From here on devices of before are taken care of, whoever asks or does not ask.
			daemon.Loop("device watch", p.watchDevices),
		)
	}
	if mode.node() {
		// The node is known before a volume can be published to it; an absent metadata service holds up nothing else.
		steps = append(steps, daemon.Loop("registration", func(ctx context.Context) { p.announcer().run(ctx) }))
	}
	if p.socket != "" {
		steps = append(steps, daemon.Step{Name: "csi", Start: p.startCSI, Stop: p.stopCSI})
	}
	return append(steps, daemon.Step{Name: "readiness", Start: p.ready, Stop: p.notReady})
}

func (p *plugin) run(ctx context.Context) error {
	p.log.Info("starting", "mode", p.mode, "node", p.node, "rack", p.rack, "version", p.version.Version, "endpoint", p.endpoint)
	if err := p.group.Run(ctx); err != nil {
		p.log.Error("ended", "err", err)
		return err
	}
	p.log.Info("ended in order")
	return nil
}

func (p *plugin) listen(context.Context) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, p.closeListeners(context.Background()))
		}
	}()
	if p.httpHost != "" {
		if p.operator, err = daemon.ListenTCP(p.httpHost, p.httpPort, "--http"); err != nil {
			return err
		}
	}
	if p.socket == "" {
		return nil
	}
	// Whoever reaches the socket can mount and delete: nobody but root does.
	if err := os.MkdirAll(filepath.Dir(p.socket), 0o700); err != nil {
		return fmt.Errorf("%w: the directory of --endpoint: %w", block.ErrUnavailable, err)
	}
	if p.listener, err = daemon.ListenUnix(p.socket, "--endpoint"); err != nil {
		return err
	}
	if err := os.Chmod(p.socket, 0o600); err != nil {
		return fmt.Errorf("%w: --endpoint: %w", block.ErrUnavailable, err)
	}
	return nil
}

func (p *plugin) closeListeners(context.Context) error {
	var errs []error
	for _, l := range []net.Listener{p.listener, p.operator} {
		if l != nil {
			if err := l.Close(); !errors.Is(err, net.ErrClosed) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

func (p *plugin) startHTTP(context.Context) error {
	p.waitFor("it is starting")
	p.registry = daemon.NewRegistry(p.version)
	p.calls = newCallMetrics(p.registry)
	if p.operator == nil {
		return nil
	}
	p.http = daemon.NewHTTP(daemon.HTTPConfig{Metrics: p.registry, Ready: p.readiness, Faults: p.faultSet, Log: p.log})
	p.http.Start(p.operator, p.group.Fail)
	return nil
}

func (p *plugin) stopHTTP(ctx context.Context) error {
	if p.http == nil {
		return nil
	}
	return p.http.Stop(ctx)
}

func (p *plugin) dial(context.Context) (err error) {
	p.client, err = client.Dial(p.servers)
	return err
}

func (p *plugin) openDevices(context.Context) error {
	if err := p.devices.own(p.client); err != nil {
		return err
	}
	p.registry.MustRegister(p.devices.metrics())
	if _, err := p.devices.watched(true); err != nil {
		return errors.Join(err, p.devices.close())
	}
	return nil
}

// watchDevices ends the plugin if devices cannot be watched: the next one may.
func (p *plugin) watchDevices(ctx context.Context) {
	if err := p.devices.manager.Run(ctx); err != nil && ctx.Err() == nil {
		p.group.Fail(err)
	}
}

func (p *plugin) startCSI(context.Context) error {
	config := driver.Config{Version: p.version.Version, Ready: p.well, Observe: p.calls.observe, Log: p.log}
	if csiMode(p.mode).controller() {
		config.Controller = controller.New(adapt.Volumes{API: p.client})
	}
	if csiMode(p.mode).node() {
		p.stager = p.nodeService()
		config.Node = p.stager
	}
	p.driver = driver.New(config)
	p.serving.Go(func() {
		if err := p.driver.Serve(p.listener); err != nil {
			p.group.Fail(err)
		}
	})
	return nil
}

func (p *plugin) stopCSI(ctx context.Context) error {
	p.driver.Stop(ctx)
	p.serving.Wait()
	if p.stager != nil {
		return p.stager.Close(ctx) // what a caller gave up on may still be at work
	}
	return nil
}

// probeLimit is how long the metadata service may take for a Probe.
const probeLimit = 3 * time.Second

// well is what a Probe finds. A controller is nothing without the metadata
// service. A node plugin is: it keeps devices alive meanwhile, and whoever
// restarts it for the metadata's absence only makes the return take longer.
func (p *plugin) well(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	if csiMode(p.mode).controller() {
		if _, err := p.client.GetStatus(ctx, &metapb.GetStatusRequest{}); err != nil {
			return err
		}
	}
	if p.devices != nil {
		_, err := p.devices.check.ask(probePatience)
		return err
	}
	return nil
}

func (p *plugin) waitFor(what string) { p.missing.Store(&what) }

func (p *plugin) readiness() error {
	if what := p.missing.Load(); what != nil {
		return fmt.Errorf("%w: %s", block.ErrUnavailable, *what)
	}
	return nil
}

func (p *plugin) ready(context.Context) error {
	p.missing.Store(nil)
	attrs := []any{"node", p.node}
	if p.listener != nil {
		attrs = append(attrs, "endpoint", p.endpoint)
	}
	if p.operator != nil {
		attrs = append(attrs, "http", p.operator.Addr().String())
	}
	p.log.Info("ready", attrs...)
	return nil
}

func (p *plugin) notReady(context.Context) error {
	p.waitFor("it is stopping")
	return nil
}

// callMetrics count the calls of an orchestrator.
type callMetrics struct {
	total *prometheus.CounterVec
	took  *prometheus.HistogramVec
}

func newCallMetrics(r prometheus.Registerer) *callMetrics {
	m := &callMetrics{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "gabion_csi_calls_total", Help: "CSI calls answered."}, []string{"method", "code"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "gabion_csi_call_seconds", Help: "How long CSI calls took.", Buckets: []float64{.005, .02, .1, .5, 2, 10, 60},
		}, []string{"method"}),
	}
	r.MustRegister(m.total, m.took)
	return m
}

// observe implements driver.Config.Observe. Methods are the specification's and codes gRPC's: their number is bounded.
func (m *callMetrics) observe(method string, code codes.Code, took time.Duration) {
	m.total.WithLabelValues(method, code.String()).Inc()
	m.took.WithLabelValues(method).Observe(took.Seconds())
}
