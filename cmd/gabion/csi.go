package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/fault"
)

const csiHelp = `Run the CSI driver: the controller, which makes volumes and gives nodes the right
to them, or the node plugin, which makes them devices of this machine and mounts
them, or both.

The node plugin needs root, the host's network and process namespaces, its mounts
(with bidirectional propagation) and --state on a file system that a reboot empties.
It may be killed, replaced or away for as long as it likes: devices and mounts
stay, and the next one takes them over.`

// csiMode is which services an endpoint has.
type csiMode string

const (
	modeController csiMode = "controller"
	modeNode       csiMode = "node"
	modeAll        csiMode = "all"
)

func (m csiMode) controller() bool { return m == modeController || m == modeAll }
func (m csiMode) node() bool       { return m == modeNode || m == modeAll }

// pluginConfig is what `gabion csi` and `gabion attachd` were told.
type pluginConfig struct {
	mode     string // a csiMode; "" for attachd, which keeps devices and serves nothing
	endpoint string
	socket   string // path of the endpoint; "": none

	node, rack string
	state      string // directory, absolute
	servers    []string
	outage     time.Duration // that devices outlive

	http     string // HOST:PORT; "": none
	httpHost string // of http
	httpPort int
	insecure bool
	harden   bool
	faults   bool // may be injected over --http

	logLevel, logFormat string
	grace               time.Duration
	machine             machine
}

func (a *app) csiCommand() *cobra.Command {
	var c pluginConfig
	cmd := &cobra.Command{
		Use:     "csi",
		Short:   "Run the CSI driver",
		Long:    csiHelp,
		Example: "  gabion csi --mode controller --endpoint unix:///csi/csi.sock --server 10.0.0.1:7400,10.0.0.2:7400",
		Args:    cobra.NoArgs,
		RunE:    a.act(func(ctx context.Context, _ []string) error { return a.runPlugin(ctx, c) }),
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.Var(newChoice(&c.mode, string(modeAll), string(modeController), string(modeNode)), "mode", "which services to run")
	f.StringVar(&c.endpoint, "endpoint", "", "`unix:///PATH` of the socket to serve")
	c.register(f)
	return cmd
}

func (c *pluginConfig) register(f *pflag.FlagSet) {
	f.StringVar(&c.node, "node", "", "`NAME` of this node, as volumes are published to it (default this host's name)")
	f.StringVar(&c.rack, "rack", "default", "`NAME` of the rack that this node is in")
	f.StringVar(&c.state, "state", defaultState, "`DIR` for what is remembered of devices; on a file system that a reboot empties")
	outageLimit(f, &c.outage)
	f.StringVar(&c.http, "http", "", "`HOST:PORT` of metrics and health (default none)")
	f.BoolVar(&c.harden, "harden", true, "on a node, prepare for memory to be short, as far as capabilities allow: devices are connected\n"+
		"again without waiting for their own write-back (CAP_SYS_RESOURCE, CAP_IPC_LOCK)")
	f.BoolVar(&c.insecure, "insecure", false, "let --http listen beyond loopback")
	f.BoolVar(&c.faults, "fault-injection", false, "let --http delay and fail operations, for tests")
	f.Var(newChoice(&c.logLevel, "info", "debug", "warn", "error"), "log-level", "what to log")
	f.Var(newChoice(&c.logFormat, "auto", "text", "json"), "log-format", "how to log; auto: text on a terminal, else JSON")
	f.DurationVar(&c.grace, "grace", 10*time.Second, "how long an orderly stop may take")
}

// defaultState is where the devices of this machine are remembered.
const defaultState = "/run/gabion"

// complete fills in defaults and checks what can be checked without touching
// anything. Its errors are of usage.
func (c *pluginConfig) complete(servers string) (err error) {
	if c.mode != "" {
		if c.endpoint == "" {
			return usagef("the driver needs a socket: add --endpoint unix:///PATH")
		}
		if c.socket, err = driver.ParseEndpoint(c.endpoint); err != nil {
			return usagef("--endpoint: %w", err)
		}
	}
	if c.node, err = consumerName(c.node); err != nil {
		return err
	}
	if err := checkName("--node", c.node, 253); err != nil {
		return err
	}
	if err := checkName("--rack", c.rack, 128); err != nil {
		return err
	}
	if c.state, err = filepath.Abs(c.state); err != nil {
		return err
	}
	if err := checkPath("--state", c.state); err != nil {
		return err
	}
	if c.grace <= 0 {
		return usagef("--grace %v: it must be positive", c.grace)
	}
	c.servers = strings.Split(servers, ",")
	return c.completeHTTP()
}

func (c *pluginConfig) completeHTTP() error {
	if c.http == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(c.http)
	number, portErr := strconv.ParseUint(port, 10, 16)
	if err != nil || portErr != nil || host == "" {
		return usagef("--http %.60q: it is HOST:PORT, such as 127.0.0.1:7481", c.http)
	}
	c.httpHost, c.httpPort = host, int(number)
	if !daemon.IsLoopback(host) && !c.insecure {
		return fmt.Errorf("%w: --http %s lets other machines in, without encryption or authentication: listen on 127.0.0.1, or accept that with --insecure",
			block.ErrPrecondition, c.http)
	}
	return nil
}

// runPlugin runs `gabion csi` and `gabion attachd` until ctx ends.
func (a *app) runPlugin(ctx context.Context, c pluginConfig) error {
	if err := c.complete(a.servers); err != nil {
		return err
	}
	var missing []error
	if c.harden && csiMode(c.mode) != modeController && a.hardenRunner != nil {
		missing = a.hardenRunner() // may start the process anew
	}
	c.machine = a.machine
	p, err := newPlugin(c, a.err)
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		p.log.Warn("not prepared for memory to be short: devices may then not be connected again", "err", listed(missing))
	}
	return p.run(ctx)
}

func newPlugin(c pluginConfig, logTo io.Writer) (*plugin, error) {
	level, err := daemon.ParseLevel(c.logLevel)
	if err != nil {
		return nil, err
	}
	text := c.logFormat == "text" || c.logFormat == "auto" && isTerminal(logTo)
	p := &plugin{pluginConfig: c, log: daemon.NewLogger(logTo, text, level), version: daemon.ReadVersion(version)}
	if c.faults {
		p.faultSet = &fault.Set{}
		p.log.Warn("faults can be injected over --http")
	}
	p.group = daemon.NewGroup(p.log, c.grace, p.steps()...)
	return p, nil
}
