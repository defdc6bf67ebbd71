package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/nbd/kernel/kerneltest"
	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
)

// bench is a server, and a machine in memory whose kernel it serves.
type bench struct {
	t      *testing.T
	server *running
	fake   *kerneltest.Fake
	nbd    *kerneltest.Server
	api    *client.Client
	state  string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "disk"), 0o700); err != nil {
		t.Fatal(err)
	}
	ports, err := daemon.FreePorts(len(portNames))
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, server: start(t, dir, ports), fake: kerneltest.New(), state: filepath.Join(dir, "state")}
	b.nbd = b.fake.Server(fmt.Sprintf("127.0.0.1:%d", b.server.ports.nbd))
	if b.api, err = client.Dial([]string{fmt.Sprintf("127.0.0.1:%d", b.server.ports.metadata)}); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bench) close() {
	_ = b.api.Close()
	b.server.stop(b.t)
	b.fake.Close()
	http.DefaultClient.CloseIdleConnections()
}

// run runs a command line on the machine.
func (b *bench) run(args ...string) (code int, out, errs string) {
	var stdout, stderr bytes.Buffer
	a := newApp(&stdout, &stderr)
	a.machine = machine{b.fake, b.fake}
	code = a.run(b.t.Context(), append([]string{"--server", fmt.Sprintf("127.0.0.1:%d", b.server.ports.metadata)}, args...))
	return code, stdout.String(), stderr.String()
}

// volume creates a volume, and serves it.
func (b *bench) volume(name, node string) *kerneltest.Volume {
	b.t.Helper()
	b.server.gabion(b.t, "volume", "create", name, "--size", "64MiB")
	return b.serve(name, node)
}

// serve attaches a volume to a node, and lets the machine's server have it as that attachment.
func (b *bench) serve(name, node string) *kerneltest.Volume {
	b.t.Helper()
	r, err := b.api.Attach(b.t.Context(), &metapb.AttachRequest{Volume: &metapb.VolumeRef{Name: name}, Node: node})
	if err != nil {
		b.t.Fatal(err)
	}
	id, err := metapb.ParseVolumeID("volume", r.GetVolume().GetId())
	if err != nil {
		b.t.Fatal(err)
	}
	attachment, err := block.ParseUUID(r.GetAttachment().GetId())
	if err != nil {
		b.t.Fatal(err)
	}
	v := &kerneltest.Volume{
		Identity: kernel.Identity{Volume: id, Attachment: block.AttachmentID{UUID: attachment}, Epoch: block.CacheEpoch(r.GetVolume().GetCacheEpoch())},
		Token:    kernel.Token(base64.RawURLEncoding.EncodeToString(r.GetAttachment().GetToken())), Size: r.GetVolume().GetSize(), Flags: kerneltest.DefaultFlags,
	}
	b.nbd.Add(v)
	return v
}

func (b *bench) attachments(name string) int {
	b.t.Helper()
	r, err := b.api.GetVolume(b.t.Context(), &metapb.GetVolumeRequest{Volume: &metapb.VolumeRef{Name: name}})
	if err != nil {
		b.t.Fatal(err)
	}
	return len(r.GetAttachments())
}

// move ends a volume's attachment to one node and attaches it to another.
func (b *bench) move(name, from, to string) {
	b.t.Helper()
	ref := &metapb.VolumeRef{Name: name}
	if _, err := b.api.Detach(b.t.Context(), &metapb.DetachRequest{Volume: ref, Node: from}); err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.api.Attach(b.t.Context(), &metapb.AttachRequest{Volume: ref, Node: to}); err != nil {
		b.t.Fatal(err)
	}
}

// B033: how long a device outlives its servers is said when it is made.
func TestOutageLimit(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	b := newBench(t)
	defer b.close()
	for i, c := range []struct {
		flags []string
		want  time.Duration
	}{{nil, 24 * time.Hour}, {[]string{"--outage-limit", "90s"}, 90 * time.Second}} {
		name := fmt.Sprint("v", i)
		b.volume(name, "here")
		args := append([]string{"attach", name, "--device", "--node", "here", "--state", b.state}, c.flags...)
		for range 2 { // a device that is there keeps its own
			if code, _, errs := b.run(args...); code != 0 {
				t.Fatalf("exit %d, %q", code, errs)
			}
			args = append(args, "--outage-limit", "1h")
		}
		if got := b.fake.DeadTimeout(i); got != c.want {
			t.Errorf("%v: %v", c.flags, got)
		}
	}
	p, err := newPlugin(pluginFlags(t, "--outage-limit=2m"), io.Discard)
	if err != nil || p.devices.outage != 2*time.Minute {
		t.Errorf("a plugin: %v", err)
	}
	for i := range 2 {
		if code, _, errs := b.run("detach", fmt.Sprint("v", i), "--state", b.state); code != 0 {
			t.Errorf("exit %d, %q", code, errs)
		}
	}
}

// A device for people without Kubernetes: made, made again, refused while it is used, and gone.
func TestAttachDevice(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	b := newBench(t)
	defer b.close()
	b.volume("v", "here")
	attach := []string{"attach", "v", "--device", "--node", "here", "--state", b.state}
	code, first, errs := b.run(attach...)
	if code != 0 || first != "/dev/nbd0\n" || !strings.Contains(errs, "run `gabion attachd`") {
		t.Fatalf("exit %d, %q, %q", code, first, errs)
	}
	if code, again, errs := b.run("attach", "v", "--device", "--state", b.state); code != 0 || again != first { // by the machine's name
		t.Errorf("exit %d, %q, %q", code, again, errs)
	}
	code, out, _ := b.run(append(attach, "-o", "json")...)
	var view deviceView
	if err := json.Unmarshal([]byte(out), &view); code != 0 || err != nil || view.Device != "/dev/nbd0" || view.Size != 64<<20 || view.Node != "here" {
		t.Errorf("%v: %s", err, out)
	}
	if code, _, errs := b.run("attach", "v", "--device", "--node", "elsewhere", "--state", b.state); code != 1 || !strings.Contains(errs, "--node here") {
		t.Errorf("another name: exit %d, %q", code, errs)
	}
	unmount := b.fake.Mount(0, "/mnt")
	if code, _, errs := b.run("detach", "v", "--state", b.state); code != 1 || !strings.Contains(errs, "mounted at /mnt") || b.attachments("v") != 1 {
		t.Errorf("mounted: exit %d, %q", code, errs)
	}
	unmount()
	for range 2 {
		if code, _, errs := b.run("detach", "v", "--state", b.state); code != 0 {
			t.Errorf("exit %d, %q", code, errs)
		}
	}
	if nodes, err := b.fake.Places(); err != nil || len(nodes) > 0 && nodes[0].Configured || b.attachments("v") != 0 {
		t.Errorf("%v, %v, %d attachments", nodes, err, b.attachments("v"))
	}
}

// A machine that has lost its state has a device whose attachment has ended: nothing
// it is told leads to the end of another node's attachment, or to that one's name.
func TestDetachWithoutState(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	b := newBench(t)
	defer b.close()
	b.volume("db", "n1")
	if code, _, errs := b.run("attach", "db", "--device", "--node", "n1", "--state", b.state); code != 0 {
		t.Fatal(errs)
	}
	if err := os.RemoveAll(b.state); err != nil {
		t.Fatal(err)
	}
	// Under another name than the host's it is still told its own.
	if code, _, errs := b.run("detach", "db", "--node", "host", "--state", b.state); code != 1 || !strings.Contains(errs, "add --node n1") {
		t.Errorf("attached: exit %d, %q", code, errs)
	}
	b.move("db", "n1", "n2")
	code, _, errs := b.run("detach", "db", "--node", "n1", "--state", b.state)
	if code != 1 || strings.Contains(errs, "--node") || !strings.Contains(errs, "`gabion detach --give-up /dev/nbd0`") {
		t.Errorf("ended: exit %d, %q", code, errs)
	}
	if code, _, errs := b.run("detach", "/dev/nbd0", "--give-up", "--node", "n2", "--state", b.state); code != 0 || b.attachments("db") != 1 {
		t.Errorf("exit %d, %q, %d attachments", code, errs, b.attachments("db"))
	}
	if code, _, errs := b.run("detach", "db", "--node", "n2", "--state", b.state); code != 0 {
		t.Errorf("exit %d, %q", code, errs)
	}
	if name, err := nodeOf(b.state); err != nil || name != "" {
		t.Errorf("this machine is %q, %v", name, err)
	}
}

// What cannot be finished in time, here for want of a server that knows the volume,
// takes no attachment away: another call may be making its device of it.
func TestAttachDeviceFails(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	b := newBench(t)
	defer b.close()
	b.server.gabion(t, "volume", "create", "v", "--size", "64MiB")
	attach := []string{"attach", "v", "--device", "--node", "here", "--state", b.state, "--timeout", "2s"}
	code, out, errs := b.run(attach...)
	if code != 1 || out != "" || !strings.Contains(errs, "stays attached to here") || b.attachments("v") != 1 {
		t.Fatalf("exit %d, %q, %q, %d attachments", code, out, errs, b.attachments("v"))
	}
	b.serve("v", "here")
	release := b.fake.Stick("connect")
	if code, _, errs := b.run(attach...); code != 1 || !strings.Contains(errs, "no answer within 2s") || !strings.Contains(errs, "stays attached to here") {
		t.Errorf("a stuck driver: exit %d, %q", code, errs)
	}
	release()
	if code, out, errs := b.run(attach...); code != 0 {
		t.Errorf("again: exit %d, %q, %q", code, out, errs)
	}
	if code, _, errs := b.run("detach", "v", "--state", b.state); code != 0 || b.attachments("v") != 0 {
		t.Errorf("exit %d, %q", code, errs)
	}
}

// attachd adopts what a command left, connects it again, and leaves it when it ends.
func TestAttachd(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	b := newBench(t)
	defer b.close()
	v := b.volume("v", "here")
	attach := []string{"attach", "v", "--device", "--node", "here", "--state", b.state}
	if code, _, errs := b.run(attach...); code != 0 {
		t.Fatal(errs)
	}
	c := pluginFlags(t, "--node=here", "--state="+b.state)
	c.machine = machine{b.fake, b.fake}
	p := runPlugin(t, c, fmt.Sprintf("127.0.0.1:%d", b.server.ports.metadata))
	if code, _, errs := b.run(attach...); code != 0 || errs != "" { // no hint any more
		t.Errorf("exit %d, %q", code, errs)
	}
	b.nbd.Kill()
	if b.fake.Established() != 0 {
		t.Fatal("the kill proves nothing")
	}
	b.nbd.Serve()
	connected := func() bool {
		d, err := p.devices.manager.Find(v.Volume)
		return err == nil && d.Condition.Health == kernel.Connected && b.fake.Established() > 0
	}
	for begin := time.Now(); !connected(); time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > 20*time.Second {
			t.Fatalf("it is not connected again\n%s", p.log.String())
		}
	}
	other := pluginFlags(t, "--node=elsewhere", "--state="+b.state)
	other.machine = c.machine
	if err := other.complete("127.0.0.1:1"); err != nil {
		t.Fatal(err)
	}
	if second, err := newPlugin(other, &p.log); err != nil {
		t.Error(err)
	} else if err := second.run(t.Context()); err == nil || !strings.Contains(err.Error(), "--node here") {
		t.Errorf("a watcher by another name: %v", err)
	}
	p.end()
	if err := <-p.done; err != nil {
		t.Error(err)
	}
	if b.fake.Established() == 0 {
		t.Error("the device went with it")
	}
	if code, _, errs := b.run("detach", "v", "--state", b.state); code != 0 {
		t.Error(errs)
	}
	if b.fake.Established() != 0 {
		t.Error("sockets are left")
	}
}
