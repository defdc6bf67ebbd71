package cluster_test

import (
	"bytes"
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

// A volume of 64 TiB is created, attached, read and deleted at once and uses nothing.
func TestB055HugeVolumeUsesNothing(t *testing.T) {
	s := start(t)
	disk := s.Disks[0]
	before := used(t, disk)
	began := time.Now()
	u := volume(t, s, "huge", "64TiB")
	t.Logf("created and attached 64 TiB in %v, two processes of the CLI included", time.Since(began))
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("creating and attaching took %v", took)
	}
	r := connect(t, s, u)
	if r.size != 64<<40 {
		t.Fatalf("size %d, want 64 TiB", r.size)
	}
	p := bytes.Repeat([]byte{1}, 4096)
	for _, off := range []int64{0, 32 << 40, 64<<40 - 4096} {
		if err := r.read(off, p); err != nil || !bytes.Equal(p, make([]byte, 4096)) {
			t.Errorf("reading the unborn at %d: %v", off, err)
		}
	}
	if err := r.trim(0, 1<<30); err != nil {
		t.Errorf("trimming the unborn: %v", err)
	}
	if grown := used(t, disk) - before; grown > 256<<10 {
		t.Errorf("an unwritten volume uses %d bytes", grown)
	}
	if err := r.disconnect(); err != nil {
		t.Fatal(err)
	}
	cli(t, s, "detach", "huge")
	began = time.Now()
	cli(t, s, "volume", "delete", "huge")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("deleting took %v", took)
	}
	for _, size := range []string{"10000000000000000", "9223372036854775807", "65TiB"} {
		began := time.Now()
		said := cliRefuses(t, s, 2, "volume", "create", "monster", "--size", size, "--replicas", "1")
		mentions(t, said, "64TiB")
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("refusing %s took %v", size, took)
		}
	}
}

// Writing 1 GiB uses 1 GiB; trim gives it back, and so does deleting the volume.
func TestSpaceFollowsUse(t *testing.T) {
	const size, piece = 1 << 30, 1 << 20
	s := start(t)
	disk := s.Disks[0]
	u := volume(t, s, "v", "2GiB", "--durability", "flush")
	r := connect(t, s, u)
	before := used(t, disk)
	p := bytes.Repeat([]byte{0xa5}, piece)
	write := func() {
		for off := int64(0); off < size; off += piece {
			if err := r.write(off, p); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.flush(); err != nil {
			t.Fatal(err)
		}
	}
	write()
	if n := used(t, disk) - before; n < size || n > size+size/50 {
		t.Errorf("1 GiB written uses %d bytes", n)
	}
	if err := r.trim(0, size); err != nil {
		t.Fatal(err)
	}
	if n := used(t, disk) - before; n > 1<<20 {
		t.Errorf("1 GiB trimmed still uses %d bytes", n)
	}
	write()
	if err := r.disconnect(); err != nil {
		t.Fatal(err)
	}
	cli(t, s, "detach", "v")
	cli(t, s, "volume", "delete", "v")
	took := eventually(t, 60*time.Second, "the deleted volume's space is free", func() bool {
		return used(t, disk) < before+256<<10
	})
	t.Logf("space was back %v after the delete", took)
}

// 4 KiB every 64 KiB: holes stay holes, and a small trim gives its part back or keeps it, but never takes more.
func TestB142HolesAreHoles(t *testing.T) {
	s := start(t)
	u := volume(t, s, "v", "1GiB", "--durability", "flush")
	r := connect(t, s, u)
	image := filepath.Join(s.Disks[0], "volumes", u.VolumeID(), "head.img")
	p := bytes.Repeat([]byte{3}, 4096)
	total, step := int64(scaled(128<<20, 1<<30)), int64(64<<10)
	for off := int64(0); off < total; off += step {
		if err := r.write(off, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.flush(); err != nil {
		t.Fatal(err)
	}
	data := total / step * 4096
	if n := used(t, image); n > data*3/2 {
		t.Errorf("%d bytes of data use %d", data, n)
	}
	if err := r.trim(0, int(total)); err != nil {
		t.Fatal(err)
	}
	if n := used(t, image); n > 64<<10 {
		t.Errorf("after the trim %d bytes are still used", n)
	}
}

// Space that another volume had, the added part of a grown volume, and partly written blocks read as zeros.
func TestB167OldTenantsData(t *testing.T) {
	point := mount(t, "ext4", 192<<20)
	s := startOn(t, point)
	marker := bytes.Repeat([]byte("the old tenant's secret. "), 1<<20/25+1)[:1<<20]
	u := volume(t, s, "old", "64MiB")
	r := connect(t, s, u)
	for off := int64(0); off < 64<<20; off += 1 << 20 {
		if err := r.write(off, marker); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.flush(); err != nil {
		t.Fatal(err)
	}
	if err := r.disconnect(); err != nil {
		t.Fatal(err)
	}
	cli(t, s, "detach", "old")
	cli(t, s, "volume", "delete", "old")
	eventually(t, 60*time.Second, "the old volume's space is free", func() bool {
		return used(t, filepath.Join(point, "volumes"))+used(t, filepath.Join(point, "quarantine")) < 1<<20
	})

	u = volume(t, s, "new", "64MiB", "--block-size", "512")
	r = connect(t, s, u)
	own := bytes.Repeat([]byte{0xee}, 512)
	for off := int64(512); off < 64<<20; off += 1<<20 + 4096 { // part of a block here and there
		if err := r.write(off, own); err != nil {
			t.Fatal(err)
		}
	}
	cli(t, s, "volume", "resize", "new", "--size", "96MiB")
	if got := connect(t, s, u).size; got != 96<<20 {
		t.Fatalf("right after the resize %d bytes are served", got)
	}
	s.Kill()
	ready(t, s)
	r = connect(t, s, u)
	p := make([]byte, 1<<20)
	for off := int64(0); off < 96<<20; off += 1 << 20 {
		if err := r.read(off, p); err != nil {
			t.Fatal(err)
		}
		for i, b := range p {
			if b != 0 && b != 0xee {
				t.Fatalf("byte %d is %#x: %q", off+int64(i), b, p[i:min(i+40, len(p))])
			}
		}
	}
}

// The size that was asked for is the size everywhere.
func TestB053SizeIsOneNumber(t *testing.T) {
	s := start(t)
	for name, c := range map[string]struct {
		asked string
		want  int64
	}{
		"plain": {"1536MiB", 1536 << 20}, "decimal": {"2G", 2_000_003_072}, "one-block": {"4096", 4096}, "bytes": {"1073745920", 1<<30 + 4096},
	} {
		u := volume(t, s, name, c.asked)
		if got := show(t, s, name).Size; got != c.want {
			t.Errorf("%s: shown as %d, want %d", c.asked, got, c.want)
		}
		if r := connect(t, s, u); r.size != uint64(c.want) {
			t.Errorf("%s: served as %d, want %d", c.asked, r.size, c.want)
		}
		grown := c.want + 4096
		cli(t, s, "volume", "resize", name, "--size", fmt.Sprint(grown))
		eventually(t, time.Second, c.asked+" grown by a block is shown and served so", func() bool {
			return show(t, s, name).Size == grown && connect(t, s, u).size == uint64(grown)
		})
	}
}
