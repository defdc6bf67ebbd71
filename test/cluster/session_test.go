package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/test/cluster"
)

// device is the sockets of one numbered session, as a kernel's device has them.
type device struct {
	s       *cluster.Server
	export  string // without cache epoch and session
	sockets []*raw
}

// session opens n sockets of one session. A refusal is the first socket's.
func (d *device) session(number uint64, n int) error {
	for range n {
		r, err := dial(context.Background(), "tcp", fmt.Sprintf("127.0.0.1:%d", d.s.Ports.NBD))
		if err != nil {
			return err
		}
		if err := r.goTo(fmt.Sprintf("%s/1/%d", d.export, number)); err != nil {
			return errors.Join(err, r.Close())
		}
		d.sockets = append(d.sockets, r)
	}
	return nil
}

// leave forgets the sockets and returns them.
func (d *device) leave() []*raw {
	old := d.sockets
	d.sockets = nil
	return old
}

func (d *device) close() {
	for _, r := range d.leave() {
		_ = r.Close()
	}
}

// connectDevice opens a session that a test cannot go on without.
func connectDevice(t *testing.T, s *cluster.Server, u cluster.URIs, number uint64) *device {
	t.Helper()
	d := &device{s: s, export: u.Export()}
	t.Cleanup(d.close)
	if err := d.session(number, 4); err != nil {
		t.Fatal(err)
	}
	return d
}

// ended reports whether the server has closed a connection: what was answered before is read and thrown away.
func ended(r *raw) bool {
	_ = r.SetReadDeadline(time.Now().Add(patience))
	_, err := io.Copy(io.Discard, r)
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

const patience = 20 * time.Second

func page(b byte) []byte { return bytes.Repeat([]byte{b}, 4096) }

// hold keeps writes in the server, on their way to the disk, until release.
func hold(t *testing.T, s *cluster.Server) (release func()) {
	t.Helper()
	arm(t, s, `{"point":"primary.write","hold":true}`)
	return func() {
		t.Helper()
		if status, body, err := s.HTTP(t.Context(), "DELETE", "/faults", ""); err != nil || status/100 != 2 {
			t.Fatalf("clearing faults: %d %s %v", status, body, err)
		}
	}
}

// sent writes on a connection without waiting, and returns when the server has the write in hand.
func sent(t *testing.T, s *cluster.Server, r *raw, off int64, p []byte) {
	t.Helper()
	before := hits(t, s)
	if _, err := r.send(cmdWrite, 0, off, len(p), p); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, "the write to be in hand", func() bool { return hits(t, s) > before })
}

// running is a call whose answer is waited for later.
func running(call func() error) (done func() (error, bool)) {
	result := make(chan error, 1)
	go func() { result <- call() }()
	return func() (error, bool) {
		select {
		case err := <-result:
			return err, true
		case <-time.After(200 * time.Millisecond):
			return nil, false
		}
	}
}

func finish(t *testing.T, what string, done func() (error, bool)) {
	t.Helper()
	for began := time.Now(); time.Since(began) < patience; {
		if err, over := done(); over {
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			return
		}
	}
	t.Fatalf("%s does not end", what)
}

// H04: a newer session of a device is answered when the older one is closed and
// what it had sent is finished, and from then on nothing of the older one lands.
// H05: the sockets of one session do not evict each other.
func TestH04NewerSessionDrainsTheOlder(t *testing.T) {
	s := start(t, "--allow-local-devices", "--fault-injection")
	u := volume(t, s, "v", "64MiB")
	d := connectDevice(t, s, u, 100)
	for i, r := range d.sockets {
		if err := r.write(int64(i)*4096, page(1)); err != nil { // all four are alive
			t.Fatal(err)
		}
	}
	release := hold(t, s)
	sent(t, s, d.sockets[0], 0, page(2))
	old := d.leave()
	newer := running(func() error { return d.session(101, 1) })
	if err, over := newer(); over {
		t.Fatalf("answered while a write of the older session is in hand: %v", err)
	}
	for i, r := range old[1:] {
		if !ended(r) {
			t.Errorf("socket %d of the older session is open", i+1)
		}
	}
	release()
	finish(t, "the newer session", newer)
	if !ended(old[0]) {
		t.Error("the socket with a write in hand stays open")
	}
	if err := d.session(101, 3); err != nil { // beside the first, not against it
		t.Fatal(err)
	}
	for _, r := range d.sockets {
		if err := r.write(0, page(3)); err != nil {
			t.Fatal(err)
		}
	}
	late := &device{s: s, export: u.Export()}
	for _, number := range []uint64{100, 1} {
		if err := late.session(number, 1); !errors.Is(err, errRefused) || !strings.Contains(err.Error(), "older than session 101") {
			t.Errorf("session %d: %v", number, err)
		}
	}
	p := make([]byte, 4096)
	if err := d.sockets[3].read(0, p); err != nil || !bytes.Equal(p, page(3)) {
		t.Errorf("read %x, %v", p[:4], err)
	}
}

// H72, B114, B150: publishing elsewhere is refused by name; the end of a
// publication is answered when its sessions are closed and drained; then no
// write of it lands and no name of it opens anything, and the next node reads
// all that was acknowledged. Nobody asked the first node.
func TestH72UnpublishMeansIt(t *testing.T) {
	s := start(t, "--allow-local-devices", "--fault-injection")
	client := api(t, s)
	if err := s.CreateVolume(t.Context(), "v", "64MiB", "--durability", "flush"); err != nil {
		t.Fatal(err)
	}
	first, err := s.Attach(t.Context(), "v", "--node", "n1")
	if err != nil {
		t.Fatal(err)
	}
	d := connectDevice(t, s, first, 7)
	if err := d.sockets[2].write(4096, page(1)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Attach(t.Context(), "v", "--node", "n2"); err == nil || !strings.Contains(err.Error(), `attached to node "n1"`) {
		t.Fatalf("published twice: %v", err)
	}

	release := hold(t, s)
	sent(t, s, d.sockets[0], 0, page(2))
	ref := &metapb.VolumeRef{Id: first.VolumeID()}
	detach := func(ctx context.Context) error {
		_, err := client.Detach(ctx, &metapb.DetachRequest{Volume: ref, Node: "n1"})
		return metapb.FromStatus(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := detach(ctx); !errors.Is(err, block.ErrUnavailable) || !strings.Contains(err.Error(), `node "n1" has not confirmed`) {
		t.Fatalf("answered while a write is in hand: %v", err)
	}
	v, err := client.GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: ref})
	if err != nil || len(v.Conditions) != 1 || !strings.Contains(v.Conditions[0].Problem, "being detached from node n1") {
		t.Errorf("conditions %v, %v", v.GetConditions(), err)
	}
	if _, err := client.GetAttachment(t.Context(), &metapb.GetAttachmentRequest{Volume: ref, Node: "n1"}); !errors.Is(metapb.FromStatus(err), block.ErrNotFound) {
		t.Errorf("the token is still given out: %v", err)
	}
	if _, err := s.Attach(t.Context(), "v", "--node", "n2"); err == nil || !strings.Contains(err.Error(), "being detached") {
		t.Errorf("published before the end: %v", err)
	}
	second := running(func() error { return detach(t.Context()) })
	if err, over := second(); over {
		t.Fatalf("answered while a write is in hand: %v", err)
	}
	release()
	finish(t, "the detach", second)
	for i, r := range d.leave() {
		if !ended(r) {
			t.Errorf("socket %d of n1 is open", i)
		}
	}
	for _, number := range []uint64{7, 8, 1 << 40} {
		if err := d.session(number, 1); !errors.Is(err, errRefused) {
			t.Errorf("n1 came back as session %d: %v", number, err)
		}
	}
	if _, err := openTCP(s, first); !errors.Is(err, errRefused) {
		t.Errorf("n1's URI opens: %v", err)
	}

	next, err := s.Attach(t.Context(), "v", "--node", "n2")
	if err != nil || next.Export() == first.Export() {
		t.Fatalf("n2: %v", err)
	}
	e := connectDevice(t, s, next, 1)
	p := make([]byte, 4096)
	if err := e.sockets[0].read(4096, p); err != nil || !bytes.Equal(p, page(1)) {
		t.Errorf("acknowledged to n1, and n2 reads %x, %v", p[:4], err)
	}
	if err := e.sockets[1].write(0, page(9)); err != nil {
		t.Fatal(err)
	}
	if err := e.sockets[2].read(0, p); err != nil || !bytes.Equal(p, page(9)) {
		t.Errorf("n2 reads %x of what it wrote, %v", p[:4], err)
	}
}

// B114 under load: writers of n1 on all sockets and on new connections all the
// time. From the answer on nothing of n1 is acknowledged or lands.
func TestB114ForcedDetachUnderLoad(t *testing.T) {
	s := start(t, "--allow-local-devices")
	client := api(t, s)
	if err := s.CreateVolume(t.Context(), "v", "64MiB", "--durability", "flush"); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 4096)
	for round := range scaled(5, 100) {
		u, err := s.Attach(t.Context(), "v", "--node", "n1")
		if err != nil {
			t.Fatal(err)
		}
		var writers sync.WaitGroup
		var mu sync.Mutex
		session := uint64(1)
		over := make(chan struct{})
		for range 4 {
			writers.Go(func() {
				for {
					mu.Lock()
					session++
					number := session
					mu.Unlock()
					d := &device{s: s, export: u.Export()}
					if err := d.session(number, 1); err == nil {
						for d.sockets[0].write(int64(number%16)*4096, page(1)) == nil {
						}
					}
					d.close()
					select {
					case <-over:
						return
					default:
					}
				}
			})
		}
		eventually(t, patience, "n1 to write", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return session > 4
		})
		_, err = client.Detach(t.Context(), &metapb.DetachRequest{Volume: &metapb.VolumeRef{Name: "v"}, Node: "n1"})
		if err != nil {
			t.Fatal(err)
		}
		w, err := s.Attach(t.Context(), "v", "--node", "n2") // n1 goes on trying
		if err != nil {
			t.Fatal(err)
		}
		e := &device{s: s, export: w.Export()}
		if err := e.session(1, 1); err != nil {
			t.Fatal(err)
		}
		for i := range int64(16) {
			if err := e.sockets[0].write(i*4096, page(byte(100+round))); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(20 * time.Millisecond) // for what must not happen
		for i := range int64(16) {
			if err := e.sockets[0].read(i*4096, p); err != nil || !bytes.Equal(p, page(byte(100+round))) {
				t.Fatalf("round %d: page %d has %x, %v", round, i, p[:4], err)
			}
		}
		close(over)
		writers.Wait()
		e.close()
		cli(t, s, "detach", "v", "--node", "n2")
	}
}

// H72 with the primary dead: a detach that it did not confirm stands, and is
// confirmed by the next process, though nobody opens the volume.
func TestH72DetachWithTheServerDead(t *testing.T) {
	s := start(t, "--allow-local-devices", "--fault-injection")
	u := volume(t, s, "v", "64MiB")
	d := connectDevice(t, s, u, 1)
	if err := d.sockets[0].writeFUA(0, page(1)); err != nil {
		t.Fatal(err)
	}
	v, err := api(t, s).GetVolume(t.Context(), &metapb.GetVolumeRequest{Volume: &metapb.VolumeRef{Name: "v"}})
	if err != nil {
		t.Fatal(err)
	}
	node := v.Attachments[0].Node
	detach := func(limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		_, err := api(t, s).Detach(ctx, &metapb.DetachRequest{Volume: &metapb.VolumeRef{Name: "v"}, Node: node})
		return metapb.FromStatus(err)
	}
	_ = hold(t, s)
	sent(t, s, d.sockets[1], 4096, page(2))
	if err := detach(500 * time.Millisecond); err == nil {
		t.Fatal("answered while a write is in hand")
	}
	s.Kill()
	ready(t, s)
	if err := d.session(2, 1); !errors.Is(err, errRefused) {
		t.Errorf("what is being detached came back: %v", err)
	}
	if err := detach(patience); err != nil {
		t.Fatal(err)
	}
	w, err := s.Attach(t.Context(), "v", "--node", "n2")
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 4096)
	if err := connectDevice(t, s, w, 1).sockets[0].read(0, p); err != nil || !bytes.Equal(p, page(1)) {
		t.Errorf("n2 reads %x, %v", p[:4], err)
	}
}

// H87: a buffered disk refuses this host's own kernel, and tells what helps;
// plain clients and whoever knows no token see no difference.
func TestH87BufferedDiskRefusesTheLocalConsumer(t *testing.T) {
	s := start(t, "--io-mode", "buffered")
	u := volume(t, s, "v", "64MiB")
	d := &device{s: s, export: u.Export()}
	t.Cleanup(d.close)
	err := d.session(1, 1)
	for _, says := range []string{"--io-mode direct", "another node", s.Disks[0]} {
		if !errors.Is(err, errRefused) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %q", err, says)
		}
	}
	stranger := &device{s: s, export: u.VolumeID() + "/" + strings.Repeat("A", 43)}
	if err := stranger.session(1, 1); !errors.Is(err, errRefused) || strings.Contains(err.Error(), s.Disks[0]) {
		t.Errorf("a stranger hears %v", err)
	}
	if err := connect(t, s, u).write(0, page(1)); err != nil {
		t.Errorf("a plain client: %v", err)
	}
	r, err := dial(t.Context(), "unix", s.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if err := r.goTo(u.Export() + "/1/1"); !errors.Is(err, errRefused) {
		t.Errorf("a device over the socket: %v", err)
	}
	for _, flags := range [][]string{{"--io-mode", "direct"}, {"--io-mode", "buffered", "--allow-local-devices"}} {
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		s.Flags = flags
		ready(t, s)
		if err := d.session(1, 4); err != nil {
			t.Errorf("%v: %v", flags, err)
		}
		d.close()
	}
}
