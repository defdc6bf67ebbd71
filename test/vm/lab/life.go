package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gabion-storage/gabion/nbd/client"
	"github.com/gabion-storage/gabion/nbd/kernel"
)

// InUse is the code of a call that is refused because somebody uses the device.
const InUse = codes.FailedPrecondition

// pluginHTTP is where a plugin with Injectable listens.
const pluginHTTP = "127.0.0.1:7481"

// Injectable are the flags of a plugin whose steps can be held, and whose metrics can be read.
func Injectable() []string { return []string{"--http", pluginHTTP, "--fault-injection"} }

// http asks the HTTP port of a plugin.
func (p *Plugin) http(method, path, body string) string {
	ctx, cancel := context.WithTimeout(p.t.ctx, 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "http://"+pluginHTTP+path, strings.NewReader(body))
	p.t.Check(err, "the plugin's HTTP port")
	r.Close = true
	answer, err := http.DefaultClient.Do(r)
	p.t.Check(err, "the plugin's HTTP port")
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	p.t.Check(err, "the plugin's HTTP port")
	if answer.StatusCode >= 300 {
		p.t.Fatalf("%s %s: %s: %s", method, path, answer.Status, text)
	}
	return string(text)
}

// Metric is the value of one of the plugin's metrics.
func (p *Plugin) Metric(name string) (value float64) {
	for _, l := range lines(p.http(http.MethodGet, "/metrics", "")) {
		if rest, ok := strings.CutPrefix(l, name+" "); ok {
			_, _ = fmt.Sscan(rest, &value)
		}
	}
	return value
}

// Hold lets the plugin wait at a fault point until it is killed.
func (p *Plugin) Hold(point string) {
	p.http(http.MethodPost, "/faults", fmt.Sprintf(`{"point":%q,"hold":true}`, point))
}

// Holding tells whether the plugin has come to a point where it waits.
func (p *Plugin) Holding() bool {
	var rules []struct{ Hits int }
	p.t.Check(json.Unmarshal([]byte(p.http(http.MethodGet, "/faults", "")), &rules), "the plugin's faults")
	return slices.ContainsFunc(rules, func(r struct{ Hits int }) bool { return r.Hits > 0 })
}

// KillAt runs a call and kills the plugin when it has come to a fault point.
func (p *Plugin) KillAt(point string, call func(context.Context) error) {
	p.Hold(point)
	p.KillWhen(point, p.Holding, call)
}

// KillWhen runs a call and kills the plugin as soon as something is seen. A call that ends before it fails the scenario.
func (p *Plugin) KillWhen(what string, seen func() bool, call func(context.Context) error) {
	ctx, cancel := p.t.call()
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- call(ctx) }()
	for !seen() {
		select {
		case err := <-ended:
			p.t.Fatalf("the call ended before %s: %v", what, err)
		case <-time.After(time.Millisecond):
		}
	}
	p.Kill()
	cancel()
	<-ended
}

// Baseline remembers what the node has of devices, mounts, state and connections to volumes, and returns what there is
// beyond it later on. What is on its way out gets a moment.
func (t *T) Baseline() (beyond func() []string) {
	before := ofVolumes()
	return func() (left []string) {
		for range 250 {
			if left = ofVolumes().Beyond(before); len(left) == 0 {
				return nil
			}
			t.Pause(20 * time.Millisecond)
		}
		return left
	}
}

func ofVolumes() Residue {
	const nbdPort = ":2A39"
	r := TakeResidue()
	r.Processes = nil
	r.Sockets = slices.DeleteFunc(r.Sockets, func(s string) bool { return !strings.HasSuffix(s, nbdPort) })
	return r
}

// Clean ends the scenario if something is left beyond a baseline.
func (t *T) Clean(what string, beyond func() []string) {
	if left := beyond(); len(left) > 0 {
		t.Fatalf("%s: left behind: %s", what, strings.Join(left, "; "))
	}
}

// Devices are all devices of the volume that the kernel has.
func (v *Volume) Devices() (all []string) {
	devices, _ := filepath.Glob("/sys/block/nbd*")
	for _, d := range devices {
		if strings.HasPrefix(backend(d), "gabion/"+v.ID+"/") {
			all = append(all, filepath.Base(d))
		}
	}
	return all
}

// Backend is what an nbd device says it is.
func Backend(device string) string { return backend("/sys/block/" + device) }

// TryUntil repeats a call as an orchestrator does until it succeeds, within the limit.
func (t *T) TryUntil(limit time.Duration, what string, call func(context.Context) error) {
	end := time.Now().Add(limit)
	for {
		ctx, cancel := t.call()
		err := call(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
		t.Pause(50 * time.Millisecond)
	}
}

// Within is a call with a deadline of its own; it fails the scenario if the answer comes later than that.
func (t *T) Within(limit time.Duration, what string, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(t.ctx, limit)
	defer cancel()
	began := time.Now()
	err := call(ctx)
	took := time.Since(began)
	t.Logf("%s: after %.2f s: %v", what, took.Seconds(), err)
	if took > limit+time.Second {
		t.Errorf("%s took %.2f s; allowed are %v", what, took.Seconds(), limit)
	}
	return err
}

// Background repeats f until the returned function is called, which waits for its end. It is also called at the
// scenario's end.
func (t *T) Background(f func()) (stop func()) {
	quit := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-quit:
				return
			default:
				f()
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(quit)
		done.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// Elsewhere runs a program beside the storage, as another consumer would: past whatever is dropped on the wire.
func (t *T) Elsewhere(args ...string) string {
	out, err := t.TryElsewhere(args...)
	t.Check(err, "elsewhere: %s", strings.Join(args, " "))
	return out
}

// TryElsewhere is Elsewhere for what may fail.
func (t *T) TryElsewhere(args ...string) (string, error) {
	return run(t.ctx, "nsenter", append([]string{"--net=/run/netns/" + storageNS, "--"}, args...)...)
}

// Foreign is an nbd device of another program.
type Foreign struct {
	Index   int
	Backend string
	linux   *kernel.Linux
}

// TryForeign makes a device of another program at an index, of an export.
func (t *T) TryForeign(uri string, index int, name string) (*Foreign, error) {
	target, err := client.ParseURI(uri)
	if err != nil {
		return nil, err
	}
	socket, export, err := kernel.TCP{}.Dial(t.ctx, target)
	if err != nil {
		return nil, err
	}
	defer func() { _ = socket.Close() }()
	f := &Foreign{Index: index, Backend: name, linux: kernel.NewLinux()}
	return f, f.linux.Connect(kernel.Connect{
		Index: index, Backend: name, Size: export.Size, BlockSize: 4096, Flags: export.Flags, Timeout: 3 * time.Second,
		DeadTimeout: time.Minute, Sockets: []kernel.Socket{socket},
	})
}

// End disconnects the device.
func (f *Foreign) End() error { return f.linux.Disconnect(f.Index) }

// Disconnect ends a volume's device as another program would, behind the plugin's back.
func (v *Volume) Disconnect() {
	var index int
	_, err := fmt.Sscanf(v.Device(), "nbd%d", &index)
	v.t.Check(err, "the device of volume %s", v.Name)
	v.t.Check(kernel.NewLinux().Disconnect(index), "disconnecting %s", v.Device())
}

// Settle waits until the device manager has looked at all that has changed, and has no device open.
func (t *T) Settle() { t.Sh("udevadm", "settle", "--timeout=20") }

// FDs is how many descriptors a process has.
func FDs(pid int) int {
	all, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(all)
}

// Mounted tells whether something is mounted at a path.
func Mounted(path string) bool { return slices.Contains(TakeResidue().Mounts, path) }

// Running tells whether a program of that name runs.
func Running(name string) bool { return len(processes(name)) > 0 }
