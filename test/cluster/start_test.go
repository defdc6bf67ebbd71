package cluster_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// startOn runs a server with the given disks.
func startOn(t *testing.T, disks ...string) *cluster.Server {
	t.Helper()
	s := layout(t, cluster.Options{Disks: disks})
	ready(t, s)
	return s
}

// The refusals of the command line name the thing and the remedy.
func TestRefusalsOfTheCommandLine(t *testing.T) {
	s := start(t)
	cli(t, s, "volume", "create", "taken", "--size", "1GiB", "--replicas", "1")
	for name, c := range map[string]struct {
		args  []string
		code  int
		words []string
	}{
		"size not a multiple":     {[]string{"volume", "create", "x", "--size", "4097"}, 2, []string{"4097", "8192"}},
		"no size":                 {[]string{"volume", "create", "x"}, 2, []string{"--size"}},
		"size of nothing":         {[]string{"volume", "create", "x", "--size", "ten"}, 2, []string{"--size", "ten", "10GiB"}},
		"unknown spread":          {[]string{"volume", "create", "x", "--size", "1GiB", "--spread", "shelf"}, 2, []string{"spread", "shelf", "rack", "node"}},
		"unknown on-full":         {[]string{"volume", "create", "x", "--size", "1GiB", "--on-full", "panic"}, 2, []string{"on-full", "wait", "error"}},
		"unknown flag":            {[]string{"volume", "create", "x", "--size", "1GiB", "--compress"}, 2, []string{"--compress"}},
		"more copies than nodes":  {[]string{"volume", "create", "x", "--size", "1GiB"}, 1, []string{"--replicas 1"}},
		"name taken":              {[]string{"volume", "create", "taken", "--size", "2GiB", "--replicas", "1"}, 1, []string{"taken", "1073741824", "2147483648"}},
		"name with a control":     {[]string{"volume", "create", "a\x01b", "--size", "1GiB", "--replicas", "1"}, 1, []string{"name"}},
		"smaller":                 {[]string{"volume", "resize", "taken", "--size", "512MiB"}, 1, []string{"taken", "1073741824", "shrinking"}},
		"no such volume":          {[]string{"volume", "show", "nothing"}, 1, []string{"nothing"}},
		"attach nothing":          {[]string{"attach", "nothing"}, 1, []string{"nothing"}},
		"no server there":         {[]string{"volume", "list", "--server", "127.0.0.1:1", "--timeout", "2s"}, 1, []string{"127.0.0.1:1"}},
		"unknown command":         {[]string{"volumes"}, 2, []string{"volumes"}},
		"a server without a disk": {[]string{"server", "--data", s.Dir}, 2, []string{"--disk"}},
	} {
		t.Run(name, func(t *testing.T) { mentions(t, cliRefuses(t, s, c.code, c.args...), c.words...) })
	}
	t.Run("a second consumer", func(t *testing.T) {
		cli(t, s, "attach", "taken", "--node", "host-a")
		mentions(t, cliRefuses(t, s, 1, "attach", "taken", "--node", "host-b"), "taken", "host-a")
		mentions(t, cliRefuses(t, s, 1, "volume", "delete", "taken"), "taken", "host-a", "detach")
		cli(t, s, "detach", "taken", "--node", "host-a")
		cli(t, s, "attach", "taken", "--node", "host-b")
	})
}

func TestRefusalsOfStart(t *testing.T) {
	t.Run("port in use", func(t *testing.T) {
		s := layout(t, cluster.Options{})
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", s.Ports.NBD))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		mentions(t, refused(t, s), fmt.Sprint(s.Ports.NBD), "--nbd-port")
	})
	t.Run("beyond loopback", func(t *testing.T) {
		s := layout(t, cluster.Options{Flags: []string{"--listen", "0.0.0.0"}})
		mentions(t, refused(t, s), "0.0.0.0", "--insecure")
	})
	t.Run("neither bootstrap nor join", func(t *testing.T) {
		s := layout(t, cluster.Options{Flags: []string{"--bootstrap=false"}})
		mentions(t, refused(t, s), "--bootstrap")
	})
	t.Run("newer format", func(t *testing.T) {
		s := start(t)
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(s.Disks[0], "gabion.json")
		before := editJSON(t, path, "format", 99)
		mentions(t, refused(t, s), s.Disks[0], "99")
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
			t.Errorf("a disk of a newer format was touched: %v", err)
		}
	})
	t.Run("disk of another cluster", func(t *testing.T) {
		a, b := start(t), start(t)
		if err := a.Stop(); err != nil {
			t.Fatal(err)
		}
		if err := b.Stop(); err != nil {
			t.Fatal(err)
		}
		a.Disks = append(a.Disks, b.Disks[0])
		before := tree(t, b.Disks[0])
		mentions(t, refused(t, a), b.Disks[0], "cluster")
		if after := tree(t, b.Disks[0]); after != before {
			t.Errorf("another cluster's disk was touched:\n%s\n%s", before, after)
		}
	})
	t.Run("not blank", func(t *testing.T) {
		s := layout(t, cluster.Options{})
		if err := os.WriteFile(filepath.Join(s.Disks[0], "holiday.jpg"), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		mentions(t, refused(t, s), s.Disks[0], "holiday.jpg")
	})
}

// editJSON replaces one field of a JSON file and returns the new content.
func editJSON(t *testing.T, path, field string, value any) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	if _, ok := m[field]; !ok {
		t.Fatalf("%s has no field %q: %s", path, field, b)
	}
	m[field] = value
	if b, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return b
}

// tree is everything below dir with sizes and modification times.
func tree(t *testing.T, dir string) string {
	t.Helper()
	return system(t, "find", dir, "-printf", `%P %y %s %T@\n`)
}

// The first server is stopped, not dead; a supervisor starts another on the same directories.
func TestH39SecondServerOnANode(t *testing.T) {
	s := start(t)
	u := volume(t, s, "v", "64MiB")
	r := connect(t, s, u)
	block := bytes.Repeat([]byte{5}, 4096)
	if err := r.write(0, block); err != nil {
		t.Fatal(err)
	}
	if err := s.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	same := cluster.Options{Dir: s.Dir, Ports: &s.Ports}
	sibling := func(o cluster.Options) *cluster.Server {
		second := layout(t, o)
		return second
	}
	t.Run("everything the same", func(t *testing.T) {
		mentions(t, refused(t, sibling(same)), filepath.Join(s.Dir, "data"))
	})
	t.Run("other ports", func(t *testing.T) {
		mentions(t, refused(t, sibling(cluster.Options{Dir: s.Dir})), filepath.Join(s.Dir, "data"))
	})
	t.Run("another data directory", func(t *testing.T) {
		mentions(t, refused(t, sibling(cluster.Options{Disks: s.Disks})), s.Disks[0])
	})
	if err := s.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	r = connect(t, s, u)
	p := make([]byte, 4096)
	if err := r.read(0, p); err != nil || !bytes.Equal(p, block) {
		t.Errorf("the first server after the attempts: %v", err)
	}
}

func TestH69StrangerOnTheDisk(t *testing.T) {
	t.Run("mount missing at start", func(t *testing.T) {
		point := mount(t, "ext4", 192<<20)
		s := startOn(t, point)
		cli(t, s, "volume", "create", "v", "--size", "16MiB", "--replicas", "1")
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		system(t, "umount", point)
		mentions(t, refused(t, s), point, "mount")
		if entries, err := os.ReadDir(point); err != nil || len(entries) != 0 {
			t.Errorf("something was written below the mount point: %v %v", entries, err)
		}
		system(t, "mount", "-o", "loop", filepath.Join(filepath.Dir(point), "image"), point)
		ready(t, s)
	})
	t.Run("mount lost while it runs", func(t *testing.T) {
		point := mount(t, "ext4", 192<<20)
		s := startOn(t, point)
		u := volume(t, s, "v", "16MiB", "--durability", "flush")
		r := connect(t, s, u)
		if err := r.write(0, make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
		system(t, "umount", "--lazy", point)
		eventually(t, 30*time.Second, "status names the lost disk", func() bool {
			return strings.Contains(cli(t, s, "status"), "The disk at "+point)
		})
		if entries, err := os.ReadDir(point); err != nil || len(entries) != 0 {
			t.Errorf("something was written below the mount point: %v %v", entries, err)
		}
	})
	t.Run("one disk twice", func(t *testing.T) {
		s := start(t)
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		twin := filepath.Join(s.Dir, "twin")
		system(t, "cp", "-a", s.Disks[0], twin)
		s.Disks = append(s.Disks, twin)
		mentions(t, refused(t, s), s.Disks[0], twin)
	})
	t.Run("files unlinked while open", func(t *testing.T) {
		s := start(t)
		u := volume(t, s, "v", "16MiB", "--durability", "flush")
		r := connect(t, s, u)
		if err := r.write(0, make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(s.Disks[0], "volumes", u.VolumeID(), "head.img")); err != nil {
			t.Fatal(err)
		}
		eventually(t, 60*time.Second, "an event names the damage", func() bool {
			told := cli(t, s, "events")
			return strings.Contains(told, "DiskFailed") && strings.Contains(told, "head.img")
		})
		// What was written is lost, which is an error, and never zeros.
		r, err := open(s, u)
		if err == nil {
			_ = r.SetReadDeadline(time.Now().Add(time.Second))
			if _, err = r.send(cmdRead, 0, 0, 4096, nil); err == nil {
				_, err = r.receive(make([]byte, 4096))
			}
			_ = r.Close()
		}
		if err == nil {
			t.Error("a lost block is read without an error")
		}
	})
}

func TestH70MetadataKnowsNothing(t *testing.T) {
	block := bytes.Repeat([]byte{9}, 4096)
	prepared := func(t *testing.T) (*cluster.Server, cluster.URIs) {
		s := start(t)
		u := volume(t, s, "v", "64MiB")
		r := connect(t, s, u)
		if err := r.writeFUA(0, block); err != nil {
			t.Fatal(err)
		}
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		return s, u
	}
	data := func(s *cluster.Server) string { return filepath.Join(s.Dir, "data") }

	t.Run("empty", func(t *testing.T) {
		s, u := prepared(t)
		if err := os.Rename(data(s), data(s)+".away"); err != nil {
			t.Fatal(err)
		}
		before := tree(t, filepath.Join(s.Disks[0], "volumes"))
		mentions(t, refused(t, s), s.Disks[0], "cluster")
		if after := tree(t, filepath.Join(s.Disks[0], "volumes")); after != before {
			t.Errorf("the disk was touched:\n%s\n%s", before, after)
		}
		if err := errors.Join(os.RemoveAll(data(s)), os.Rename(data(s)+".away", data(s))); err != nil {
			t.Fatal(err)
		}
		ready(t, s)
		p := make([]byte, 4096)
		if err := connect(t, s, u).read(0, p); err != nil || !bytes.Equal(p, block) {
			t.Errorf("with its own metadata again: %v", err)
		}
	})
	t.Run("old backup", func(t *testing.T) {
		s, u := prepared(t)
		system(t, "cp", "-a", data(s), data(s)+".backup")
		var later string
		for i := range 3 { // generations that the backup does not know, and a volume
			ready(t, s)
			if i == 0 {
				w := volume(t, s, "later", "64MiB")
				later = filepath.Join(s.Disks[0], "volumes", w.VolumeID())
				if err := connect(t, s, w).writeFUA(0, block); err != nil {
					t.Fatal(err)
				}
			}
			if err := connect(t, s, u).writeFUA(4096, block); err != nil {
				t.Fatal(err)
			}
			s.Kill()
		}
		if err := errors.Join(os.RemoveAll(data(s)), os.Rename(data(s)+".backup", data(s))); err != nil {
			t.Fatal(err)
		}
		before := used(t, filepath.Join(s.Disks[0], "volumes"))
		ready(t, s)
		p := make([]byte, 4096)
		eventually(t, 30*time.Second, "grants have passed what the disk has seen, and the newest content is served", func() bool {
			r, err := open(s, u)
			if err != nil {
				return false // refused: the grant is below it
			}
			defer r.Close()
			return r.read(4096, p) == nil
		})
		if !bytes.Equal(p, block) {
			t.Errorf("the volume was opened below the generation that its disk has seen")
		}
		mentions(t, cli(t, s, "events"), "PrimaryDeposed", "has seen")
		eventually(t, 30*time.Second, "a metric counts the volume that nobody knows", func() bool {
			return metric(t, s, "gabion_disk_unknown_volumes") == 1
		})
		eventually(t, 30*time.Second, "the status names it", func() bool {
			return strings.Contains(cli(t, s, "status"), filepath.Base(later))
		})
		if n := used(t, later); n < 4096 {
			t.Errorf("the volume that nobody knows has %d bytes left", n)
		}
		if after := used(t, filepath.Join(s.Disks[0], "volumes")); after < before {
			t.Errorf("%d bytes became %d", before, after)
		}
	})
	t.Run("backup from before the first write", func(t *testing.T) {
		s := start(t)
		u := volume(t, s, "v", "64MiB")
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
		system(t, "cp", "-a", data(s), data(s)+".backup")
		ready(t, s)
		if err := connect(t, s, u).writeFUA(0, block); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.Stop(), os.RemoveAll(data(s)), os.Rename(data(s)+".backup", data(s))); err != nil {
			t.Fatal(err)
		}
		ready(t, s)
		if r, err := open(s, u); err == nil {
			p := make([]byte, 4096)
			err = r.read(0, p)
			t.Fatalf("served without its runs; a read brings %d, %v", p[0], err)
		} else {
			mentions(t, err.Error(), "older backup")
		}
	})
	t.Run("another cluster's", func(t *testing.T) {
		a, _ := prepared(t)
		b, _ := prepared(t)
		a.Disks = b.Disks
		before := tree(t, b.Disks[0])
		mentions(t, refused(t, a), b.Disks[0], "cluster")
		if after := tree(t, b.Disks[0]); after != before {
			t.Errorf("another cluster's disk was touched:\n%s\n%s", before, after)
		}
	})
}

// Within one boot: a killed process keeps the cache epoch, a remounted file system does not prove continuity.
func TestH24RemountIsNotContinuity(t *testing.T) {
	point := mount(t, "ext4", 128<<20)
	s := startOn(t, point)
	u := volume(t, s, "v", "32MiB", "--durability", "flush")
	w := volume(t, s, "w", "32MiB", "--durability", "write-through")
	block := bytes.Repeat([]byte{4}, 4096)
	dirty := func() {
		t.Helper()
		for _, x := range []cluster.URIs{u, w} {
			r := connect(t, s, x)
			if err := r.write(0, block); err != nil {
				t.Fatal(err)
			}
			_ = r.Close()
		}
	}
	epochs := func() [2]uint64 {
		t.Helper()
		dirty() // opens both volumes
		return [2]uint64{show(t, s, "v").CacheEpoch, show(t, s, "w").CacheEpoch}
	}
	first := epochs()
	s.Kill()
	ready(t, s)
	if got := epochs(); got != first {
		t.Errorf("after kill -9 the cache epochs are %v, they were %v", got, first)
	}
	s.Kill()
	remount(t, point)
	ready(t, s)
	got := epochs()
	if got[0] <= first[0] {
		t.Errorf("after a remount over unflushed data the cache epoch is %d, it was %d", got[0], first[0])
	}
	if got[1] != first[1] {
		t.Errorf("a write-through volume's cache epoch went from %d to %d", first[1], got[1])
	}
}
