package node_test

import (
	"os"
	"path/filepath"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/csi/node/nodetest"
	"github.com/gabion-storage/gabion/server/block"
)

func TestLife(t *testing.T) {
	for _, tt := range []struct {
		name string
		set  func(*spec)
	}{
		{"ext4", func(s *spec) { s.fs = "ext4" }},
		{"xfs", func(s *spec) { s.fs = "xfs"; s.flags = []string{"noatime"} }},
		{"no type", func(*spec) {}},
		{"block", func(s *spec) { s.raw = true }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			s := r.use(r.vols.Add(GiB))
			tt.set(&s)
			a, b := r.target("a"), r.target("b")
			for round := range 2 {
				for range 2 {
					r.must(r.stage(s))
				}
				for range 2 {
					r.must(r.publish(s, a))
					r.must(r.publish(s, b))
				}
				if n := len(r.host.Table()); n != 3 {
					t.Fatalf("%d mounts", n)
				}
				r.refused(r.unstage(s), block.ErrInUse, a)
				for range 2 {
					r.must(r.unpublish(s, a))
					r.must(r.unpublish(s, b))
				}
				for range 2 {
					r.must(r.unstage(s))
				}
				r.clean(s, a, b)
				attaches, formats, checks := r.host.Counts()
				wantFormats, wantChecks := 1, round
				if s.raw {
					wantFormats, wantChecks = 0, 0
				}
				if attaches != round+1 || formats != wantFormats || checks != wantChecks {
					t.Fatalf("round %d: %d attaches, %d formats, %d checks", round, attaches, formats, checks)
				}
			}
		})
	}
}

func TestInfoAndCapabilities(t *testing.T) {
	r := newRig(t)
	info, err := r.svc.NodeGetInfo(t.Context(), nil)
	r.must(err)
	// B065: a constant, whatever is in use.
	if info.GetNodeId() != "n1" || info.GetMaxVolumesPerNode() != 250 || info.GetAccessibleTopology().GetSegments()[driver.TopologyRack] != "r1" {
		t.Fatal(info)
	}
	caps, err := r.svc.NodeGetCapabilities(t.Context(), nil)
	r.must(err)
	if len(caps.GetCapabilities()) != 6 {
		t.Fatal(caps)
	}
}

// B066: every mode that is announced works; the others are refused the same way everywhere.
func TestB066AccessModes(t *testing.T) {
	r := newRig(t)
	for mode := range csispec.VolumeCapability_AccessMode_Mode_name {
		for _, raw := range []bool{false, true} {
			mode := csispec.VolumeCapability_AccessMode_Mode(mode)
			s := r.use(r.vols.Add(GiB))
			s.mode, s.raw = mode, raw
			reads := mode == rox || mode == csispec.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
			if reads {
				r.host.Do(s.id, func(d *nodetest.Disk) { d.Type = "ext4" })
				r.vols.Set(s.id, func(v *node.Volume) { v.Format, v.ReadOnly = node.FormatDone, true })
			}
			err := r.stage(s)
			switch mode {
			case rwo, rwop, rwMany, rox, csispec.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
				r.must(err)
				r.must(r.publish(s, r.target("t")))
				e, _ := r.host.Table().At(r.target("t"))
				if e.ReadOnly != reads {
					t.Errorf("%s: %+v", mode, e)
				}
				r.must(r.unpublish(s, r.target("t")))
				r.must(r.unstage(s))
			default:
				r.refused(err, block.ErrInvalid)
				r.refused(r.publish(s, r.target("t")), block.ErrInvalid)
			}
			r.clean(s, r.target("t"))
		}
	}
}

// The volume context names the file system where the capability does not.
func TestFileSystemOfTheContext(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	s.volume = map[string]string{driver.FSTypeKey: "xfs", "other": "thing"}
	r.must(r.stage(s))
	r.must(r.publish(s, r.target("t")))
	if e, _ := r.host.Table().At(r.target("t")); e.Type != "xfs" {
		t.Fatalf("%+v", e)
	}
	s.fs = "ext4"
	r.refused(r.stage(s), block.ErrExists, "xfs", "ext4")
	s.fs, s.volume = "", map[string]string{driver.FSTypeKey: "zfs"}
	r.refused(r.stage(s), block.ErrInvalid, "zfs")
}

// B154: once means one node, unless the mode says one pod.
func TestB154TwoPodsOneNode(t *testing.T) {
	for _, raw := range []bool{false, true} {
		for mode, both := range map[csispec.VolumeCapability_AccessMode_Mode]bool{rwo: true, rwMany: true, rwop: false} {
			r := newRig(t)
			s := r.use(r.vols.Add(GiB))
			s.mode, s.raw = mode, raw
			a, b := r.target("a"), r.target("b")
			r.must(r.stage(s))
			r.must(r.publish(s, a))
			err := r.publish(s, b)
			if both {
				r.must(err)
			} else {
				r.refused(err, block.ErrPrecondition, a)
				if _, err := os.Lstat(b); err == nil {
					t.Fatal("a refused target was made")
				}
			}
			r.must(r.publish(s, a))
			r.must(r.unpublish(s, b))
			if r.mounts(a) != 1 {
				t.Fatal("unpublishing one target took the other")
			}
			r.must(r.unpublish(s, a))
			r.must(r.publish(s, b))
			r.must(r.unpublish(s, b))
			r.must(r.unstage(s))
			r.clean(s, a, b)
		}
	}
}

func TestReadOnlyTargets(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	a, b := r.target("a"), r.target("b")
	r.must(r.publish(s, a))
	ro := s
	ro.readOnly = true
	r.must(r.publish(ro, b))
	if e, _ := r.host.Table().At(b); !e.ReadOnly {
		t.Fatalf("%+v", e)
	}
	r.must(r.publish(ro, b))
	r.refused(r.publish(s, b), block.ErrExists, b)
	r.refused(r.publish(ro, a), block.ErrExists, a)
	r.must(r.unpublish(s, a))
	opt := s
	opt.flags = []string{"ro"}
	r.must(r.publish(opt, a))
	if e, _ := r.host.Table().At(a); !e.ReadOnly {
		t.Fatalf("%+v", e)
	}
}

// B072: a raw volume is never written to by the driver, and access types do not mix.
func TestB072RawBlockStaysRaw(t *testing.T) {
	r := newRig(t)
	for _, content := range []string{"", "ext4", "crypto_LUKS"} {
		s := r.use(r.vols.Add(GiB))
		s.raw = true
		r.host.Do(s.id, func(d *nodetest.Disk) { d.Type = content })
		r.must(r.stage(s))
		r.must(r.publish(s, r.target("dev")))
		if b, err := r.plugin.Inspect(r.target("dev")); err != nil || b.Size != GiB {
			t.Fatalf("%+v, %v", b, err)
		}
		fs := s
		fs.raw = false
		r.refused(r.stage(fs), block.ErrExists)
		r.refused(r.publish(fs, r.target("dir")), block.ErrPrecondition, "raw block")
		r.must(r.unpublish(s, r.target("dev")))
		r.must(r.unstage(s))
		r.clean(s, r.target("dev"), r.target("dir"))
	}
	if _, formats, checks := r.host.Counts(); formats+checks > 0 {
		t.Fatalf("%d formats, %d checks", formats, checks)
	}
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	raw := s
	raw.raw = true
	r.refused(r.stage(raw), block.ErrExists)
	r.refused(r.publish(raw, r.target("dev")), block.ErrPrecondition, "file system")
}

// B072, B068: a volume whose mkfs was begun and that then was used raw is never formatted again.
func TestStartedFormatThenRawUse(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.vols.Set(s.id, func(v *node.Volume) { v.Format = node.FormatStarted })
	s.raw = true
	r.must(r.stage(s))
	r.must(r.unstage(s))
	s.raw = false
	r.refused(r.stage(s), block.ErrCorrupt)
	r.clean(s)
}

// B071: what lies in the way in the staging place is never taken for the volume.
func TestB071LeftoversAreNoDevices(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"file with content": func(p string) error { return os.WriteFile(p, []byte("x"), 0o600) },
		"empty file":        func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"dangling link":     func(p string) error { return os.Symlink("/nowhere", p) },
		"directory":         func(p string) error { return os.Mkdir(p, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := r.use(r.vols.Add(GiB))
			s.raw = true
			leftover := filepath.Join(s.staging, "device")
			r.must(put(leftover))
			r.refused(r.publish(s, r.target("t")), block.ErrPrecondition)
			if err := r.stage(s); err != nil {
				r.refused(err, block.ErrPrecondition, leftover)
				r.refused(r.publish(s, r.target("t")), block.ErrPrecondition)
				r.must(os.Remove(leftover))
				if residue := r.host.Residue(); residue != "" {
					t.Fatal(residue)
				}
				r.must(r.stage(s))
			}
			r.must(r.publish(s, r.target("t")))
			if b, err := r.plugin.Inspect(r.target("t")); err != nil || b.Size != GiB {
				t.Fatalf("%+v, %v", b, err)
			}
		})
	}
	t.Run("node of a device that had the number before", func(t *testing.T) {
		r := newRig(t)
		s := r.use(r.vols.Add(GiB))
		s.raw = true
		r.must(r.stage(s))
		r.must(r.publish(s, r.target("t")))
		r.host.Lose(s.id) // the nodes are orphans now
		r.refused(r.publish(s, r.target("t")), block.ErrPrecondition)
		r.refused(r.stage(s), block.ErrPrecondition, "unstage")
		r.must(r.unstage(s))
		r.must(r.stage(s)) // gets the same number
		r.must(r.publish(s, r.target("t")))
		if e, _ := r.host.Table().At(r.target("t")); e.Orphaned() || r.mounts(r.target("t")) != 1 {
			t.Fatalf("%+v", e)
		}
	})
}

// B073: three times, by another spelling of the path, after a restart: one mount, one device.
func TestB073StageIsIdempotent(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	s.flags = []string{"noatime"}
	r.must(r.stage(s))
	link := filepath.Join(r.dir, "link")
	r.must(os.Symlink(filepath.Dir(s.staging), link))
	through := s
	through.staging = link + "/./globalmount/"
	r.must(r.stage(through))
	r.restart(nil)
	r.must(r.stage(s))
	if attaches, _, _ := r.host.Counts(); attaches != 1 || len(r.host.Table()) != 1 {
		t.Fatalf("%d attaches, %v", attaches, r.host.Table().Points())
	}
	r.must(r.publish(through, link+"/../target"))
	if r.mounts(r.target("target")) != 1 {
		t.Fatal(r.host.Table().Points())
	}
	other := s
	other.fs = "xfs"
	r.refused(r.stage(other), block.ErrExists, "xfs")
	other = s
	other.flags = []string{"noatime", "discard"}
	r.refused(r.stage(other), block.ErrExists, "options")
	other = s
	other.mode = rox
	r.refused(r.stage(other), block.ErrExists)
	r.must(os.RemoveAll(r.state)) // what was remembered is lost: not compared
	r.must(r.stage(s))
	r.must(r.unpublish(s, r.target("target")))
	r.must(r.unstage(through))
	r.clean(s)
}

// B085: a new plugin with other defaults leaves what is staged alone.
func TestB085RestartLeavesTheSessionAlone(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	r.restart(func(step string, n int, _ bool) error {
		t.Errorf("step %d: %s", n, step)
		return nil
	})
	r.vols.Away(block.ErrUnavailable) // nor is anybody asked
	r.must(r.stage(s))
	r.host.SetDevice(s.id, func(d *node.Device) { d.Condition.State = node.Waiting })
	r.must(r.stage(s))
	r.vols.Away(nil)
	r.restart(nil)
}

// B082: mounts of devices that had the name before count as nothing.
func TestB082OrphansCountAsNothing(t *testing.T) {
	r := newRig(t)
	gone := r.use(r.vols.Add(GiB))
	r.must(r.stage(gone))
	r.must(r.publish(gone, r.target("orphan")))
	r.host.Lose(gone.id)
	// The name is used again; the number is another.
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	r.host.SetTable(func(list mount.Table) mount.Table {
		for i := range list {
			list[i].Source = "/dev/nbd7"
		}
		return list
	})
	r.host.SetDevice(s.id, func(d *node.Device) { d.Path = "/dev/nbd7" })
	r.must(r.publish(s, r.target("t")))
	r.must(r.unpublish(s, r.target("t")))
	r.must(r.unstage(s))
	if !contains(r.log.String(), "a mount is left of a device that has gone", r.target("orphan")) {
		t.Fatal("the orphan is not told")
	}
	r.must(r.unpublish(gone, r.target("orphan")))
	r.must(r.unstage(gone))
	r.clean(s)
}
