package interop

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// nbdinfo's view of an export, as far as Gabion advertises anything.
type exportInfo struct {
	Protocol   string `json:"protocol"`
	Structured bool   `json:"structured"`
	Exports    []struct {
		Size       int64    `json:"export-size"`
		Contexts   []string `json:"contexts"`
		ReadOnly   bool     `json:"is_read_only"`
		CanFlush   bool     `json:"can_flush"`
		CanFUA     bool     `json:"can_fua"`
		CanTrim    bool     `json:"can_trim"`
		CanZero    bool     `json:"can_zero"`
		MultiConn  bool     `json:"can_multi_conn"`
		BlockMin   int64    `json:"block_size_minimum"`
		BlockPref  int64    `json:"block_size_preferred"`
		BlockMax   int64    `json:"block_size_maximum"`
		Rotational bool     `json:"is_rotational"`
	} `json:"exports"`
}

func nbdinfo(t *testing.T, uri string) exportInfo {
	t.Helper()
	var info exportInfo
	if err := json.Unmarshal([]byte(run(t, "nbdinfo", "--json", uri)), &info); err != nil {
		t.Fatal(err)
	}
	if len(info.Exports) != 1 {
		t.Fatalf("nbdinfo sees %d exports", len(info.Exports))
	}
	return info
}

func TestNBDInfoSeesEveryFeature(t *testing.T) {
	need(t, "nbdinfo")
	v := newVolume(t, "3GiB")
	for name, uri := range map[string]string{"TCP": v.TCP, "UNIX socket": v.Socket} {
		t.Run(name, func(t *testing.T) {
			info := nbdinfo(t, uri)
			e := info.Exports[0]
			if info.Protocol != "newstyle-fixed" || !info.Structured {
				t.Errorf("protocol %q, structured replies %v", info.Protocol, info.Structured)
			}
			if e.Size != 3<<30 {
				t.Errorf("size %d, want %d", e.Size, 3<<30)
			}
			if e.ReadOnly || !e.CanFlush || !e.CanFUA || !e.CanTrim || !e.CanZero || !e.MultiConn {
				t.Errorf("flags: %+v", e)
			}
			if e.BlockMin != 512 || e.BlockPref != 4096 || e.BlockMax != 32<<20 {
				t.Errorf("block sizes %d, %d, %d, want 512, 4096, 32 MiB", e.BlockMin, e.BlockPref, e.BlockMax)
			}
			if strings.Join(e.Contexts, " ") != "base:allocation" {
				t.Errorf("contexts %q", e.Contexts)
			}
		})
	}
}

func TestNBDInfoReadOnly(t *testing.T) {
	need(t, "nbdinfo", "nbdcopy")
	v := newVolume(t, "1MiB")
	gabion(t, "detach", v.name)
	v.attach(t, "--read-only")
	if !nbdinfo(t, v.Socket).Exports[0].ReadOnly {
		t.Error("a read-only attachment is not a read-only export")
	}
	zeros := filepath.Join(t.TempDir(), "zeros")
	if err := os.WriteFile(zeros, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, diagnostics, err := try(t, "nbdcopy", zeros, v.Socket); err == nil || !strings.Contains(diagnostics, "read-only") {
		t.Errorf("nbdcopy wrote to a read-only export: %v %s", err, diagnostics)
	}
}

// Names carry tokens, so the list is empty and a wrong name is refused without a hint.
func TestNBDInfoTellsStrangersNothing(t *testing.T) {
	need(t, "nbdinfo")
	v := newVolume(t, "1MiB")
	list := run(t, "nbdinfo", "--list", "--json", strings.Replace(v.Socket, v.Export(), "", 1))
	if strings.Contains(list, v.VolumeID()) {
		t.Errorf("the list names a volume: %s", list)
	}
	token := strings.TrimPrefix(v.Export(), v.VolumeID()+"/")
	for what, uri := range map[string]string{
		"wrong token":    strings.Replace(v.Socket, token, strings.Repeat("A", len(token)), 1),
		"no token":       strings.Replace(v.Socket, "/"+token, "", 1),
		"unknown volume": strings.Replace(v.Socket, v.VolumeID(), "00000000-0000-4000-8000-000000000000", 1),
	} {
		if out, _, err := try(t, "nbdinfo", uri); err == nil {
			t.Errorf("%s: served: %s", what, out)
		}
	}
}

// extentOf is one line of `nbdinfo --map --json`.
type extentOf struct {
	Offset, Length int64
	Type           int // 0 data, 3 hole and zero
}

func TestNBDInfoMap(t *testing.T) {
	need(t, "nbdinfo", "qemu-io")
	v := newVolume(t, "256MiB")
	want := func(extents ...extentOf) {
		t.Helper()
		var got []extentOf
		if err := json.Unmarshal([]byte(run(t, "nbdinfo", "--map", "--json", v.Socket)), &got); err != nil {
			t.Fatal(err)
		}
		if len(got) != len(extents) {
			t.Fatalf("map %v, want %v", got, extents)
		}
		for i := range got {
			if got[i] != extents[i] {
				t.Fatalf("map %v, want %v", got, extents)
			}
		}
	}
	want(extentOf{0, 256 << 20, 3})
	qemuIO(t, v.Socket, "write -P 1 1M 64k")
	want(extentOf{0, 1 << 20, 3}, extentOf{1 << 20, 64 << 10, 0}, extentOf{1<<20 + 64<<10, 255<<20 - 64<<10, 3})
	qemuIO(t, v.Socket, "discard 1M 64k")
	want(extentOf{0, 256 << 20, 3})
}

func TestNBDCopyBothWaysKeepsHoles(t *testing.T) {
	need(t, "nbdcopy")
	const size = 160 << 20 // the last extent is a partial one
	source := sparseFile(t, size)
	a, b := newVolume(t, "160MiB"), volume{}
	t.Run("second", func(t *testing.T) {
		b = newVolume(t, "160MiB")
		run(t, "nbdcopy", source, a.TCP)
		run(t, "nbdcopy", a.Socket, b.Socket)
		back := filepath.Join(t.TempDir(), "back.raw")
		run(t, "nbdcopy", b.TCP, back)
		sameFile(t, source, back)
		most := allocated(t, source) + 4<<20
		for what, path := range map[string]string{"the first volume": a.image(), "its copy": b.image(), "the file": back} {
			if n := allocated(t, path); n > most {
				t.Errorf("%s uses %d bytes of a source of %d", what, n, allocated(t, source))
			}
		}
	})
}

// A full volume is overwritten by a sparse source: what was there reads as zeros and is given back.
func TestNBDCopyOverOldContent(t *testing.T) {
	need(t, "nbdcopy", "qemu-io")
	v := newVolume(t, "96MiB")
	qemuIO(t, v.Socket, "write -P 0x5a 0 96M")
	source := sparseFile(t, 96<<20)
	run(t, "nbdcopy", source, v.Socket)
	back := filepath.Join(t.TempDir(), "back.raw")
	run(t, "nbdcopy", v.Socket, back)
	sameFile(t, source, back)
	if n := allocated(t, v.image()); n > allocated(t, source)+4<<20 {
		t.Errorf("the volume still uses %d bytes", n)
	}
}

func TestSizeFollowsGrowth(t *testing.T) {
	need(t, "nbdinfo", "qemu-io")
	v := newVolume(t, "64MiB")
	qemuIO(t, v.Socket, "write -P 7 63M 1M")
	gabion(t, "volume", "resize", v.name, "--size", "192MiB")
	served := func() string { return strings.TrimSpace(run(t, "nbdinfo", "--size", v.Socket)) }
	for range 100 { // the primary hears that the growth is confirmed a moment after the caller
		if served() == "201326592" {
			break
		}
	}
	if size := served(); size != "201326592" {
		t.Errorf("size %s after growth to 192 MiB", size)
	}
	qemuIO(t, v.Socket, "read -P 7 63M 1M", "read -P 0 64M 128M", "write -P 8 191M 1M", "read -P 8 191M 1M")
}
