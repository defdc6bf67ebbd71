package scenario

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func space() []lab.Scenario {
	return []lab.Scenario{
		{Name: "space", Run: spaceReturns},
		{Name: "H64-growth", Run: growth, Timeout: 3 * time.Minute},
		{Name: "mkfs-64TiB", Run: hugeVolume, Memory: 2048, Timeout: 5 * time.Minute, Long: true},
	}
}

// spaceReturns: what is trimmed or deleted is free on the server's disk.
func spaceReturns(t *lab.T) {
	s, p := cell(t)
	for _, fs := range []string{"ext4", "xfs"} {
		v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs, Size: 512 * mib})
		pod := v.Up("pod")
		empty := s.Used()
		t.Sh("dd", "if=/dev/zero", "of="+filepath.Join(pod, "big"), "bs=1M", "count=64", "conv=fsync")
		full := s.Used()
		t.Sh("rm", filepath.Join(pod, "big"))
		t.Eventually(30*time.Second, fs+": fstrim returns the space", func() bool { // XFS frees in the background
			t.Sh("sync", "-f", pod)
			t.Sh("fstrim", pod)
			return s.Used() < empty+16*mib
		})
		trimmed := s.Used()
		v.Down()
		v.Delete()
		t.Eventually(20*time.Second, "the deleted volume's space comes back", func() bool { return s.Used() < 8*mib })
		t.Figure("%s: %d MiB when empty, %d with 64 MiB, %d trimmed", fs, empty>>20, full>>20, trimmed>>20)
		if full-empty < 60*mib {
			t.Errorf("%s: 64 MiB take only %d", fs, full-empty)
		}
	}
}

// growth: volumes grow while they are written to (H64, B091, B092); of a raw one only the device does (B093).
func growth(t *lab.T) {
	s, p := cell(t)
	ext4 := t.Volume(p, p, lab.VolumeSpec{Name: "ext4", Size: 256 * mib})
	xfs := t.Volume(p, p, lab.VolumeSpec{Name: "xfs", FS: "xfs", Size: 512 * mib})
	raw := t.Volume(p, p, lab.VolumeSpec{Name: "raw", Block: true, Size: 256 * mib})
	places := []string{ext4.Up("pod"), xfs.Up("pod")}
	t.Sh("mkfs.ext4", "-q", "-F", raw.Up("pod"))
	t.Sh("sync")
	before := t.Sh("dumpe2fs", "-h", raw.Target("pod"))
	l := t.Load(places...)
	for _, v := range []*lab.Volume{ext4, xfs, raw} {
		l.Steady(10 * time.Second)
		v.Expand(v.Size * 2)
		if v.DeviceSize() != v.Size {
			t.Fatalf("%s: the device has %d bytes, the volume %d", v.Name, v.DeviceSize(), v.Size)
		}
		t.Check(v.TryNodeExpand(t.Context()), "expanding %s on the node again", v.Name)
		if v.Block {
			continue
		}
		if size := fsSize(t, v.Target("pod")); size < v.Size*9/10 {
			t.Errorf("%s: the file system has %d bytes, the volume %d", v.Name, size, v.Size)
		}
	}
	if after := t.Sh("dumpe2fs", "-h", raw.Target("pod")); after != before {
		t.Errorf("the file system inside a raw volume was touched")
	}
	_, err := s.TryCLI("volume", "resize", "ext4", "--size", "64MiB")
	t.Refused(err, "shrinking")
	l.Outage("the server restarts after a growth", func() { s.Restart(lab.AddrA) })
	l.Stop()
	t.NoIOErrors()
	for _, v := range []*lab.Volume{ext4, xfs} {
		v.Down()
		s.CheckImage(v)
	}
	t.RefusedAs(ext4.TryNodeExpand(t.Context()), "expanding what is not staged", lab.NotFound)
}

func fsSize(t *lab.T, point string) (bytes int64) {
	_, err := fmt.Sscan(strings.Fields(t.Sh("df", "-B1", "--output=size", point))[1], &bytes)
	t.Check(err, "df %s", point)
	return bytes
}

// hugeVolume prints what a file system on 64 TiB costs.
func hugeVolume(t *lab.T) {
	s, p := cell(t)
	for _, fs := range []string{"ext4", "xfs"} {
		v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs, Size: 64 * tib})
		v.Create()
		v.Publish()
		began, used := time.Now(), s.Used()
		v.Stage()
		t.Figure("mkfs.%s on 64 TiB: staged in %.1f s, %s extents born, %d MiB on the disk", fs, time.Since(began).Seconds(), born(t, s, v), (s.Used()-used)>>20)
		t.Write(filepath.Join(v.PublishTo("pod"), "file"), "content")
		v.Down()
		began = time.Now()
		v.Up("pod")
		t.Figure("%s on 64 TiB: staged again in %.1f s", fs, time.Since(began).Seconds())
		t.Expect(filepath.Join(v.Target("pod"), "file"), "content")
		v.Down()
		v.Delete()
	}
}

func born(t *lab.T, s *lab.Server, v *lab.Volume) string {
	var view struct {
		Born json.Number `json:"born_extents"`
	}
	t.Check(json.Unmarshal([]byte(s.CLI("volume", "show", v.ID, "-o", "json")), &view), "volume show")
	return view.Born.String()
}
