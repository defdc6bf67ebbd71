package lab

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Plugin is a `gabion csi` process and a connection to its socket that outlives restarts.
type Plugin struct {
	t        *T
	Node     string   // its name as a consumer
	Flags    []string // added to the command line at the next start
	Wrapper  []string // command that runs it at the next start
	mode     string
	ns       string
	endpoint string
	proc     *Process
	conn     *grpc.ClientConn

	Identity   csispec.IdentityClient
	Controller csispec.ControllerClient
	NodeClient csispec.NodeClient
}

// Plugin starts node and controller plugin in one process on the consumer node, and waits until it answers.
func (t *T) Plugin(flags ...string) *Plugin { return t.plugin("all", "", flags) }

// PluginUnder is Plugin run by another command, such as taskset.
func (t *T) PluginUnder(wrapper ...string) *Plugin { return t.plugin("all", "", nil, wrapper...) }

// NodePlugin starts a node plugin alone on the consumer node.
func (t *T) NodePlugin(flags ...string) *Plugin { return t.plugin("node", "", flags) }

// ControllerPlugin starts a controller plugin beside the server: it goes on when the consumer node is cut off.
func (t *T) ControllerPlugin(flags ...string) *Plugin {
	return t.plugin("controller", storageNS, flags)
}

func (t *T) plugin(mode, ns string, flags []string, wrapper ...string) *Plugin {
	t.Net()
	dir := filepath.Join("/run/csi", mode)
	t.Check(os.MkdirAll(dir, 0o700), "the endpoint's directory")
	p := &Plugin{t: t, Node: "n1", mode: mode, ns: ns, endpoint: "unix://" + filepath.Join(dir, "csi.sock"), Flags: flags, Wrapper: wrapper}
	conn, err := grpc.NewClient(p.endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)), grpc.WithConnectParams(quickReconnect))
	t.Check(err, "the endpoint")
	p.conn = conn
	p.Identity, p.Controller, p.NodeClient = csispec.NewIdentityClient(conn), csispec.NewControllerClient(conn), csispec.NewNodeClient(conn)
	t.Cleanup(func() {
		_ = conn.Close()
		p.proc.end()
	})
	p.Start()
	return p
}

// quickReconnect: a scenario kills plugins often.
var quickReconnect = grpc.ConnectParams{MinConnectTimeout: time.Second}

// Args is the plugin's command line.
func (p *Plugin) Args() []string {
	args := append(slices.Clone(p.Wrapper), Gabion, "csi", "--mode", p.mode, "--endpoint", p.endpoint, "--server", AddrA+":7400,"+AddrB+":7400")
	if p.mode != "controller" {
		args = append(args, "--node", p.Node, "--rack", "r1")
	}
	return append(args, p.Flags...)
}

// Start runs the process and waits until it answers.
func (p *Plugin) Start() {
	p.Launch()
	p.WaitReady()
}

// Launch runs the process and does not wait.
func (p *Plugin) Launch() {
	p.proc = p.t.launch(Spec{Name: "csi-" + p.mode, NS: p.ns, Args: p.Args()})
}

// WaitReady waits until the plugin answers that it is ready.
func (p *Plugin) WaitReady() {
	began := time.Now()
	for {
		ctx, cancel := context.WithTimeout(p.t.ctx, 2*time.Second)
		answer, err := p.Identity.Probe(ctx, &csispec.ProbeRequest{})
		cancel()
		if err == nil && (answer.GetReady() == nil || answer.GetReady().GetValue()) {
			return
		}
		if !p.proc.Running() {
			p.t.Fatalf("the plugin ended: %v", p.proc.Err())
		}
		if time.Since(began) > patience {
			p.t.Fatalf("the plugin is not ready within %v: %v", patience, err)
		}
		p.t.Pause(startPoll)
	}
}

// Process is the present process, for Kill, Freeze, Thaw and Terminate.
func (p *Plugin) Process() *Process { return p.proc }

// Kill ends the process by SIGKILL.
func (p *Plugin) Kill() { p.proc.Kill() }

// Restart kills the process if it runs, starts another and waits until it answers.
func (p *Plugin) Restart() {
	p.Kill()
	p.Start()
}

// LoadDriver loads nbd as the host requirements say.
func (t *T) LoadDriver() { t.Sh("modprobe", "nbd", "nbds_max=0", "max_part=0") }

// The codes that scenarios ask for.
const (
	FailedPrecondition = codes.FailedPrecondition
	NotFound           = codes.NotFound
	AlreadyExists      = codes.AlreadyExists
	DataLoss           = codes.DataLoss
)

// RefusedAs ends the scenario unless a call was refused with a code, by a sentence that has each of the words.
func (t *T) RefusedAs(err error, what string, code codes.Code, words ...string) {
	t.Refused(err, what, words...)
	if got := status.Code(err); got != code {
		t.Fatalf("%s: %v, not %v: %v", what, got, code, err)
	}
}

// call bounds one CSI call as an orchestrator does.
func (t *T) call() (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.ctx, callTime)
}

const callTime = time.Minute
