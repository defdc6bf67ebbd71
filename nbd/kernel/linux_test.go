package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/mdlayher/netlink"
)

// B043, B074: what is mounted from a device, and where its node is bound, also once the node is gone.
func TestMountsOf(t *testing.T) {
	table := strings.Join([]string{
		`22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw`,
		`90 22 43:3 / /var/lib/kubelet/x\\040y rw,relatime shared:9 - ext4 /dev/nbd3 rw`,
		`91 22 43:3 /sub /mnt rw - xfs /dev/nbd3 rw`,
		`92 22 43:30 / /other rw - ext4 /dev/nbd30 rw`,
		`93 22 0:5 /nbd3 /pods/raw rw,nosuid shared:2 - devtmpfs udev rw`,
		`94 22 0:5 /nbd3//deleted /pods/stale rw,nosuid shared:2 - devtmpfs udev rw`,
		`95 22 0:5 /nbd33 /pods/another rw,nosuid shared:2 - devtmpfs udev rw`,
		`96 22 0:30 /nbd3 /pods/file rw - ext4 /dev/sdb rw`,
		`broken`, ``,
	}, "\n")
	table = strings.ReplaceAll(table, `\\`, `\`)
	got := mountsOf([]byte(table), Node{Place: Place{Index: 3}, Major: 43, Minor: 3})
	want := []string{"/var/lib/kubelet/x y", "/mnt", "/pods/raw", "/pods/stale"}
	if !slices.Equal(got, want) {
		t.Errorf("in use: %q, want %q", got, want)
	}
	if got := mountsOf([]byte(table), Node{Place: Place{Index: 3}}); !slices.Equal(got, want[2:]) {
		t.Errorf("a device that is gone: %q", got)
	}
}

func TestVersionAdvice(t *testing.T) {
	for _, c := range []struct{ release, version, want string }{
		{"6.1.0-57-cloud-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-3 (2026-10-01)", ""},
		{"6.1.0-30-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.124-1 (2025-01-12)", "6.1.162"},
		{"6.12.117+deb12-cloud-amd64", "#1 SMP", ""},
		{"6.12.9", "#1 SMP", "6.12.63"},
		{"6.1.161-custom", "", "6.1.162"},
		{"5.15.0-91-generic", "#101-Ubuntu SMP", "older than any"},
		{"6.8.0-31-generic", "#31-Ubuntu SMP", ""},
		{"7.3.4+deb13-cloud-amd64", "", ""},
		{"strange", "", ""},
	} {
		got := strings.Join(versionAdvice(c.release, c.version), " ")
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.release, got, c.want)
		}
	}
}

// A kernel that does not keep what a device stands for is refused before a device is made.
func TestCheckBackends(t *testing.T) {
	for release, ok := range map[string]bool{
		"4.18.0-553.el8.x86_64": false, "5.4.0-42-generic": false, "5.13.19": false,
		"5.14.0-427.el9.x86_64": true, "6.1.0-57-cloud-amd64": true, "7.3.4+deb13-cloud-amd64": true, "strange": true,
	} {
		if err := checkBackends(release, ""); (err == nil) != ok || err != nil && !errors.Is(err, block.ErrPrecondition) {
			t.Errorf("%s: %v", release, err)
		}
	}
}

// sysfs as Linux lays it out; what is no nbd device is passed over.
func TestPlaces(t *testing.T) {
	root := t.TempDir()
	for name, content := range map[string]string{
		"nbd2/dev": "43:64\n", "nbd2/pid": "711\n", "nbd2/backend": "gabion/x\n", "nbd2/size": "2048\n", "nbd2/ro": "1\n",
		"nbd2/queue/logical_block_size": "4096\n", "nbd2/queue/max_sectors_kb": "128\n", "nbd2/queue/max_hw_sectors_kb": "32768\n",
		"nbd2/inflight": "       3        2\n", "nbd2/mq/0/cpu_list": "0\n", "nbd2/mq/1/cpu_list": "1\n", "nbd2/holders/dm-0/x": "",
		"nbd10/dev": "43:320\n", "nbd10/size": "0\n", "sda/dev": "8:0\n", "nbd02/dev": "43:1\n", "nbd3/size": "0\n",
	} {
		path := filepath.Join(root, "block", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l := &Linux{sys: root, proc: "/proc"}
	used := Place{Index: 2, Backend: "gabion/x", Configured: true}
	if got, err := l.Places(); err != nil || !slices.Equal(got, []Place{used, {Index: 3}, {Index: 10}}) {
		t.Errorf("Places: %+v, %v", got, err)
	}
	for index, want := range map[int]Node{
		2:  {Place: used, Size: 1 << 20, BlockSize: 4096, ReadOnly: true, Major: 43, Minor: 64, InFlight: 5, Queues: 2},
		10: {Place: Place{Index: 10}, Major: 43, Minor: 320},
	} {
		if got, err := l.Node(index); err != nil || got != want {
			t.Errorf("Node: %+v, %v", got, err)
		}
	}
	if _, err := l.Node(3); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("a device that is going: %v", err)
	}
	if _, err := (&Linux{sys: filepath.Join(root, "absent")}).Places(); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("without sysfs: %v", err)
	}
	if l.InFlight(2) != 5 || l.InFlight(99) != 0 {
		t.Errorf("InFlight: %d, %d", l.InFlight(2), l.InFlight(99))
	}
	if u, err := l.Users(2); err != nil || !slices.Equal(u.Holders, []string{"dm-0"}) {
		t.Errorf("Users: %+v, %v", u, err)
	}
	if err := l.Tune(2); err != nil {
		t.Error(err)
	}
	if p, err := os.ReadFile(filepath.Join(root, "block/nbd2/queue/max_sectors_kb")); err != nil || string(p) != "1280" {
		t.Errorf("after Tune: %q, %v", p, err)
	}
}

// What sysfs has and cannot be read is not gone.
func TestNodeCannotBeRead(t *testing.T) {
	for _, file := range []string{"dev", "backend", "size", "queue/logical_block_size", "ro", "mq", "pid"} {
		root := t.TempDir()
		dir := filepath.Join(root, "block/nbd0")
		if err := os.MkdirAll(filepath.Join(dir, "queue"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "dev"), []byte("43:0\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		l := &Linux{sys: root, proc: "/proc"}
		if _, err := l.Node(0); err != nil {
			t.Fatal(err)
		}
		_ = os.Remove(filepath.Join(dir, file))
		if err := os.Symlink(filepath.Base(file), filepath.Join(dir, file)); err != nil { // ELOOP
			t.Fatal(err)
		}
		if n, err := l.Node(0); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("Node, %s: %+v, %v", file, n, err)
		}
		_, listed := l.Places()
		if decides := file == "backend" || file == "pid"; decides != errors.Is(listed, block.ErrUnavailable) {
			t.Errorf("Places, %s: %v", file, listed)
		}
		if u, err := l.Users(0); !errors.Is(err, block.ErrUnavailable) {
			t.Errorf("Users, %s: %+v, %v", file, u, err)
		}
	}
}

// A process that has a device open is found without opening or waiting for anything.
func TestOpeners(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if opens(filepath.Join("/proc/self/fd", itoa(int(f.Fd()))), Node{Major: 1, Minor: 3}) {
		t.Error("a character device is no disk")
	}
	if opens("/proc/self/fd/999999", Node{}) {
		t.Error("a descriptor that is not there")
	}
}

func itoa(n int) string { return strings.TrimPrefix(devicePath(n), "/dev/nbd") }

func TestEventIndex(t *testing.T) {
	e := netlink.NewAttributeEncoder()
	e.Uint64(attrSize, 7)
	e.Uint32(attrIndex, 12)
	data, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		data []byte
		want int
	}{{data, 12}, {nil, -1}, {data[:12], -1}, {[]byte{1}, -1}} {
		if got := eventIndex(c.data); got != c.want {
			t.Errorf("eventIndex(% x) is %d, not %d", c.data, got, c.want)
		}
	}
}

func TestParseBackend(t *testing.T) {
	i := Identity{block.VolumeID{UUID: block.NewUUID()}, block.AttachmentID{UUID: block.NewUUID()}, 7}
	if got, ok := ParseBackend(i.Backend()); !ok || got != i {
		t.Errorf("%q: %+v, %v", i.Backend(), got, ok)
	}
	for _, s := range []string{
		"", "gabion", "gabion/", "gabion/a/b/1", i.Backend() + "/1", i.Backend() + " ", strings.ToUpper(i.Backend()),
		strings.Replace(i.Backend(), "/7", "/07", 1), strings.Replace(i.Backend(), "/7", "/-7", 1), "x" + i.Backend(),
	} {
		if got, ok := ParseBackend(s); ok {
			t.Errorf("%q is %+v", s, got)
		}
	}
}

// A token shows itself in no format.
func TestTokenIsSecret(t *testing.T) {
	a := Attachment{Token: "geheim"}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "token", a.Token)
	for _, s := range []string{fmt.Sprint(a), fmt.Sprintf("%+v %#v %q %x %s", a, a, a.Token, a.Token, a.Token), log.String()} {
		if strings.Contains(s, "geheim") || strings.Contains(s, "67656865696d") {
			t.Errorf("it shows: %s", s)
		}
	}
}

// Sockets of this process are found by address and cookie, and ended from outside.
func TestSocketIsFoundAndEnded(t *testing.T) {
	l := NewLinux()
	defer l.Close()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			t.Logf("no %s here: %v", address, err)
			continue
		}
		defer ln.Close()
		conn, err := new(net.Dialer).DialContext(context.Background(), "tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		s := &tcpSocket{TCPConn: conn.(*net.TCPConn)}
		defer s.Close()
		peer, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer peer.Close()
		if err := s.settle(); err != nil {
			t.Fatal(err)
		}
		if _, err := peer.Write(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 60)
		if _, err := io.ReadFull(conn, got); err != nil {
			t.Fatal(err)
		}
		info, err := l.Socket(s.ID())
		if err != nil || !info.Established || info.Taken != 60 || info.Untaken != 40 || info.Unsent != 0 {
			t.Fatalf("Socket(%v): %+v, %v", s.ID(), info, err)
		}
		if _, err := io.ReadFull(conn, got[:40]); err != nil {
			t.Fatal(err)
		}
		other := s.ID()
		other.Cookie++
		if _, err := l.Socket(other); !errors.Is(err, block.ErrNotFound) {
			t.Errorf("a socket of another cookie: %v", err)
		}
		if err := l.Destroy(other); err != nil {
			t.Errorf("ending a socket that is no more: %v", err)
		}
		if err := l.Destroy(s.ID()); errors.Is(err, block.ErrPrecondition) {
			t.Skip(err)
		} else if err != nil {
			t.Fatal(err)
		}
		if info, err := l.Socket(s.ID()); err == nil && info.Established {
			t.Errorf("an ended socket: %+v", info)
		}
		if _, err := conn.Read(got); err == nil {
			t.Error("an ended socket is read from")
		}
	}
}
