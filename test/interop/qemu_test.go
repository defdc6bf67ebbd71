package interop

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

// qemuIO runs commands in one session of qemu-io, which says on standard output what went wrong.
func qemuIO(t *testing.T, uri string, commands ...string) {
	t.Helper()
	args := []string{"-f", "raw", "-t", "none"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	out := run(t, "qemu-io", append(args, uri)...)
	for _, bad := range []string{"failed", "rror", "invalid", "mismatch"} {
		if strings.Contains(out, bad) {
			t.Fatalf("qemu-io %q: %s", commands, out)
		}
	}
}

func TestQemuImg(t *testing.T) {
	need(t, "qemu-img")
	const size = 160 << 20
	source := sparseFile(t, size)
	v := newVolume(t, "160MiB")
	for name, uri := range map[string]string{"TCP": v.TCP, "UNIX socket": v.Socket} {
		t.Run(name, func(t *testing.T) {
			run(t, "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", source, uri)
			run(t, "qemu-img", "compare", "-s", "-f", "raw", "-F", "raw", source, uri)
		})
	}
	t.Run("to qcow2 and back", func(t *testing.T) {
		qcow := filepath.Join(t.TempDir(), "copy.qcow2")
		run(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", v.Socket, qcow)
		run(t, "qemu-img", "compare", "-f", "qcow2", "-F", "raw", qcow, source)
		if n := allocated(t, qcow); n > 8<<20 {
			t.Errorf("the copy uses %d bytes: the holes were not seen", n)
		}
	})
	t.Run("map", func(t *testing.T) { compareMaps(t, source, v.Socket) })
	t.Run("info", func(t *testing.T) {
		var info struct {
			Size int64 `json:"virtual-size"`
		}
		if err := json.Unmarshal([]byte(run(t, "qemu-img", "info", "--output=json", v.Socket)), &info); err != nil {
			t.Fatal(err)
		}
		if info.Size != size {
			t.Errorf("virtual size %d, want %d", info.Size, size)
		}
	})
}

// compareMaps checks that what is data in the file is data in the volume, and
// that at least everything outside the volume's 4 KiB blocks of data is zero there.
func compareMaps(t *testing.T, file, uri string) {
	t.Helper()
	type extent struct {
		Start, Length int64
		Data, Zero    bool
	}
	read := func(what string) []extent {
		var m []extent
		if err := json.Unmarshal([]byte(run(t, "qemu-img", "map", "-f", "raw", "--output=json", what)), &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	data := func(m []extent) (n int64) {
		for _, e := range m {
			if e.Data {
				n += e.Length
			}
		}
		return n
	}
	inFile, inVolume := read(file), read(uri)
	if a, b := data(inFile), data(inVolume); b > a+1<<20 || b < a-1<<20 {
		t.Errorf("%d bytes of data in the file, %d in the volume:\n%v\n%v", a, b, inFile, inVolume)
	}
}

func TestQemuIO(t *testing.T) {
	need(t, "qemu-io")
	for _, c := range []struct {
		name  string
		flags []string
		run   []string
		used  int64 // bytes that the volume occupies then; 0: not looked at
	}{
		{"write and read", nil, []string{"write -P 0xaa 0 64k", "write -P 0xbb 64k 1M", "read -P 0xaa 0 64k", "read -P 0xbb 64k 1M", "read -P 0 2M 1M"}, 0},
		{"FUA", nil, []string{"write -f -P 0xcc 4k 4k", "read -P 0xcc 4k 4k", "flush"}, 0},
		{"zero keeps space", nil, []string{"write -P 1 0 1M", "write -z 256k 256k", "read -P 1 0 256k", "read -P 0 256k 256k", "read -P 1 512k 512k"}, 1 << 20},
		{"zero unmaps", nil, []string{"write -P 1 0 1M", "write -z -u 4k 1020k", "read -P 1 0 4k", "read -P 0 4k 1020k"}, 4096},
		{"zero with FUA", nil, []string{"write -P 1 0 1M", "write -z -f 0 8k", "read -P 0 0 8k", "read -P 1 8k 1016k"}, 0},
		{"discard", nil, []string{"write -P 1 0 4M", "discard 1M 2M", "read -P 1 0 1M", "read -P 0 1M 2M", "read -P 1 3M 1M"}, 2 << 20},
		{"across extents", nil, []string{"write -P 9 67043328 128k", "read -P 9 67043328 128k", "write -z 67076096 64k", "read -P 0 67076096 64k", "read -P 9 67043328 32k", "read -P 9 67141632 32k"}, 0},
		{"unaligned", nil, []string{"write -P 3 0 8k", "write -P 4 511 3", "read -P 3 0 511", "read -P 4 511 3", "read -P 3 514 7678"}, 0},
		{"sectors", []string{"--block-size", "512"}, []string{"write -P 3 0 4k", "write -P 5 512 512", "read -P 3 0 512", "read -P 5 512 512", "read -P 3 1k 3k", "write -z 1k 512", "read -P 0 1k 512"}, 0},
		{"many at once", nil, []string{"aio_write -P 1 0 64k", "aio_write -P 2 64k 64k", "aio_write -P 3 128k 64k", "aio_flush", "read -P 1 0 64k", "read -P 2 64k 64k", "read -P 3 128k 64k"}, 0},
		{"last block", nil, []string{"write -P 6 134213632 4k", "read -P 6 134213632 4k"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := volume{name: "qemu-io-" + strings.ReplaceAll(c.name, " ", "-")}
			gabion(t, append([]string{"volume", "create", v.name, "--size", "128MiB", "--replicas", "1"}, c.flags...)...)
			t.Cleanup(func() { gabion(t, "volume", "delete", v.name) })
			v.attach(t)
			t.Cleanup(func() { gabion(t, "detach", v.name) })
			for _, uri := range []string{v.Socket, v.TCP} {
				qemuIO(t, uri, c.run...)
				if n := allocated(t, v.image()); c.used > 0 && (n < c.used-8192 || n > c.used+256<<10) {
					t.Errorf("the volume occupies %d bytes, want about %d", n, c.used)
				}
			}
		})
	}
}

// Flushed data is there after the server was killed, and also what was only acknowledged: the host stayed up.
func TestQemuIOAcrossKill(t *testing.T) {
	need(t, "qemu-io")
	v := newVolume(t, "128MiB")
	qemuIO(t, v.Socket, "write -P 0x11 0 8M", "flush", "write -P 0x22 4M 1M", "write -f -P 0x33 70M 64k")
	server.Kill()
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	qemuIO(t, v.Socket, "read -P 0x11 0 4M", "read -P 0x22 4M 1M", "read -P 0x11 5M 3M", "read -P 0x33 70M 64k")
}
