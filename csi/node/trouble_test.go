package node_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/csi/node/nodetest"
	"github.com/gabion-storage/gabion/server/block"
)

// B045: an unmount is never lazy: what is busy stays, device and all.
func TestB045BusyIsAnError(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	r.must(r.publish(s, r.target("t")))
	r.host.Busy(r.target("t"), true)
	r.refused(r.unpublish(s, r.target("t")), block.ErrInUse, r.target("t"))
	r.host.Busy(r.target("t"), false)
	r.must(r.unpublish(s, r.target("t")))
	r.host.Busy(s.staging, true)
	r.refused(r.unstage(s), block.ErrInUse, s.staging)
	if r.mounts(s.staging) != 1 || r.host.Residue() == "" {
		t.Fatal("a busy file system was let go")
	}
	r.must(r.publish(s, r.target("t"))) // and still serves
	r.must(r.unpublish(s, r.target("t")))
	r.host.Busy(s.staging, false)
	r.must(r.unstage(s))
	r.clean(s, r.target("t"))
}

// B076: unmounted, but not detached; then only publish is called.
func TestB076PublishAfterHalfAnUnstage(t *testing.T) {
	for _, raw := range []bool{false, true} {
		r := newRig(t)
		s := r.use(r.vols.Add(GiB))
		s.raw = raw
		r.must(r.stage(s))
		r.host.Hold(s.id, true)
		r.refused(r.unstage(s), block.ErrInUse, s.id.String())
		r.refused(r.publish(s, r.target("t")), block.ErrPrecondition, "stage")
		if r.mounts(r.target("t")) != 0 {
			t.Fatal("an empty directory was published")
		}
		r.refused(r.unstage(s), block.ErrInUse) // B041: never OK while the kernel has it
		r.must(r.stage(s))                      // or stage anew, on the same device
		r.must(r.publish(s, r.target("t")))
		r.must(r.unpublish(s, r.target("t")))
		r.host.Hold(s.id, false)
		r.must(r.unstage(s))
		r.clean(s, r.target("t"))
	}
}

// B078, H86: the device has failed, or has gone: everything is taken down by
// the mount table alone, twice; metadata and servers are away.
func TestB078BrokenVolumesAreTakenDown(t *testing.T) {
	for name, breaks := range map[string]func(r *rig, s spec){
		"device failed": func(r *rig, s spec) {
			r.host.SetDevice(s.id, func(d *node.Device) { d.Condition = node.Condition{State: node.Failed, Message: "revoked"} })
		},
		"device gone": func(r *rig, s spec) { r.host.Lose(s.id) },
	} {
		for _, raw := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/raw=%t", name, raw), func(t *testing.T) {
				r := newRig(t)
				s := r.use(r.vols.Add(GiB))
				s.raw = raw
				r.must(r.stage(s))
				r.must(r.publish(s, r.target("t")))
				breaks(r, s)
				r.vols.Away(block.ErrUnavailable)
				r.refused(r.publish(s, r.target("u")), block.ErrPrecondition)
				r.refused(r.stage(s), block.ErrPrecondition, "unstage")
				for range 2 {
					r.must(r.unpublish(s, r.target("t")))
				}
				for range 2 {
					r.must(r.unstage(s))
				}
				r.clean(s, r.target("t"), r.target("u"))
				r.vols.Away(nil)
				r.must(r.stage(s))
			})
		}
	}
}

// B078: no server answers, and the file system has stopped after an error: its unmount would wait for a server, and so
// the device goes first. One that is well is not ended, for a server may come back, nor is one that a server answers.
func TestB078StoppedFileSystemWithoutServers(t *testing.T) {
	readOnly := func(r *rig, s spec) {
		r.host.SetTable(func(all mount.Table) mount.Table {
			for i := range all {
				all[i].SuperReadOnly = true
			}
			return all
		})
	}
	failed := func(r *rig, s spec) { r.host.Do(s.id, func(d *nodetest.Disk) { d.Errors = 3 }) }
	goesOn := func(r *rig, s spec) {
		failed(r, s)
		r.host.SetTable(func(all mount.Table) mount.Table {
			for i := range all {
				all[i].StopsOnError = false
			}
			return all
		})
	}
	shutDown := func(r *rig, s spec) { r.host.Do(s.id, func(d *nodetest.Disk) { d.Stopped = true }) }
	dying := func(r *rig, s spec) { r.host.Do(s.id, func(d *nodetest.Disk) { d.Stopped, d.Dying = true, true }) }
	silent := func(r *rig, s spec) { r.host.Do(s.id, func(d *nodetest.Disk) { d.Silent = make(chan struct{}) }) }
	noUsage := func(r *rig, s spec) { r.host.Do(s.id, func(d *nodetest.Disk) { d.NoUsage = true }) }
	well := func(*rig, spec) {}
	for _, c := range []struct {
		what   string
		breaks func(*rig, spec)
		state  node.State
		want   node.State // when it is unmounted
	}{
		{"turned read-only", readOnly, node.Waiting, node.Failed},
		{"counts errors, and stops on them", failed, node.Waiting, node.Failed},
		{"counts errors, and goes on", goesOn, node.Waiting, node.Waiting},
		{"shut down", shutDown, node.Waiting, node.Failed},
		{"shut down, and the server goes during the unmount", dying, node.Healthy, node.Failed},
		{"silent", silent, node.Waiting, node.Waiting},
		{"not to be asked", noUsage, node.Waiting, node.Waiting},
		{"well", well, node.Waiting, node.Waiting},
		{"turned read-only, with a server", readOnly, node.Healthy, node.Healthy},
		{"shut down, with a server", shutDown, node.Healthy, node.Healthy},
	} {
		t.Run(c.what, func(t *testing.T) {
			r := newRig(t)
			s := r.use(r.vols.Add(GiB))
			r.must(r.stage(s))
			c.breaks(r, s)
			r.host.SetDevice(s.id, func(d *node.Device) { d.Condition.State = c.state })
			r.vols.Away(block.ErrUnavailable)
			for range 2 {
				r.must(r.unstage(s))
			}
			r.host.Do(s.id, func(d *nodetest.Disk) {
				if d.Unmounted != c.want {
					t.Errorf("unmounted from a device that is %v, not %v", d.Unmounted, c.want)
				}
				if d.Silent != nil {
					close(d.Silent)
				}
			})
			r.clean(s, r.target("t"))
		})
	}
}

// What a file system says at one path is not taken for what it says at another.
func TestQuestionsAreOfAPath(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	r.must(r.publish(s, r.target("t")))
	gate := make(chan struct{})
	var asked sync.WaitGroup
	silent := func(gate chan struct{}) { r.host.Do(s.id, func(d *nodetest.Disk) { d.Silent = gate }) }
	silent(gate)
	asked.Go(func() { _, _ = r.condition(s, r.target("t")) })
	for r.host.Parked() == 0 {
		time.Sleep(time.Millisecond)
	}
	silent(nil)
	if abnormal, message := r.condition(s, s.staging); abnormal {
		t.Error(message)
	}
	close(gate)
	asked.Wait()
}

// H23: a device that has failed for good is still open somewhere. The volume is
// staged on a fresh one beside it; one that works and is in use is waited for.
func TestH23FreshDeviceBesideAFailedOne(t *testing.T) {
	for _, failed := range []bool{true, false} {
		r := newRig(t)
		s := r.use(r.vols.Add(GiB))
		r.must(r.stage(s))
		r.host.Hold(s.id, true)
		r.refused(r.unstage(s), block.ErrInUse)
		if failed {
			r.host.SetDevice(s.id, func(d *node.Device) { d.Condition = node.Condition{State: node.Failed, Lost: true, Message: "lost"} })
			r.must(r.stage(s))
		} else {
			s.mode = csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY // another device is due
			r.refused(r.stage(s), block.ErrInUse)
			s.mode = rwo
		}
		r.host.Hold(s.id, false)
		r.must(r.unstage(s))
		r.clean(s)
	}
}

// What is not there is gone, however odd the call.
func TestUnknownIsGone(t *testing.T) {
	r := newRig(t)
	for _, id := range []string{block.NewUUID().String(), "no-uuid"} {
		for _, path := range []string{r.target("none"), r.target("none/none/none")} {
			_, err := r.svc.NodeUnpublishVolume(t.Context(), &csispec.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: path})
			r.must(err)
			_, err = r.svc.NodeUnstageVolume(t.Context(), &csispec.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: path})
			r.must(err)
		}
	}
	s := r.use(block.VolumeID{UUID: block.NewUUID()})
	s.context = map[string]string{}
	r.refused(r.stage(s), block.ErrNotFound)
	r.refused(r.publish(s, r.target("t")), block.ErrPrecondition)
	_, err := r.expand(s, GiB, s.staging, "")
	r.refused(err, block.ErrNotFound)
}

// B079: one stage, three targets: fsck ran once, and only while unmounted.
func TestB079CheckedOnceAndUnmounted(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.host.Do(s.id, func(d *nodetest.Disk) { d.Type = "ext4" })
	r.vols.Set(s.id, func(v *node.Volume) { v.Format = node.FormatDone })
	r.must(r.stage(s))
	for i := range 3 {
		s := s
		s.readOnly = i == 2
		r.must(r.publish(s, r.target(fmt.Sprint("t", i))))
		r.must(r.stage(s))
	}
	if _, _, checks := r.host.Counts(); checks != 1 {
		t.Fatalf("%d checks", checks)
	}
}

// B081: a read-only volume is neither checked nor replayed nor formatted; the device refuses writes, too.
func TestB081ReadOnlyVolumes(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	s.mode = rox
	r.refused(r.stage(s), block.ErrPrecondition, "read-only")
	r.clean(s)
	r.host.Do(s.id, func(d *nodetest.Disk) { d.Type = "xfs" })
	r.vols.Set(s.id, func(v *node.Volume) { v.Format = node.FormatDone })
	r.must(r.stage(s))
	e, _ := r.host.Table().At(s.staging)
	if b, err := r.plugin.Inspect("/dev/nbd0"); err != nil || !b.ReadOnly || !e.SuperReadOnly {
		t.Fatalf("%+v, %+v, %v", b, e, err)
	}
	rw := s
	rw.mode = rwo
	r.refused(r.publish(rw, r.target("t")), block.ErrPrecondition, "read-only")
	r.must(r.publish(s, r.target("t")))
	if _, formats, checks := r.host.Counts(); formats+checks > 0 {
		t.Fatalf("%d formats, %d checks", formats, checks)
	}
}

// B083: a file system that turned read-only is published to nobody who writes,
// is told of, and is mounted anew as soon as nobody uses it.
func TestB083TurnedReadOnly(t *testing.T) {
	for name, turn := range map[string]func(r *rig, s spec){
		"as the mount table shows": func(r *rig, s spec) {
			r.host.SetTable(func(list mount.Table) mount.Table {
				for i := range list {
					list[i].SuperReadOnly = true
				}
				return list
			})
			r.host.Do(s.id, func(d *nodetest.Disk) { d.ReadOnly = true })
		},
		"as only a change shows": func(r *rig, s spec) { r.host.Do(s.id, func(d *nodetest.Disk) { d.ReadOnly = true }) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := r.use(r.vols.Add(GiB))
			r.must(r.stage(s))
			r.must(r.publish(s, r.target("a")))
			turn(r, s)
			r.refused(r.publish(s, r.target("b")), block.ErrPrecondition, "unstage")
			r.refused(r.stage(s), block.ErrPrecondition, r.target("a"))
			if name == "as the mount table shows" {
				if abnormal, message := r.condition(s, r.target("a")); !abnormal || !contains(message, "read-only") {
					t.Fatalf("%t, %s", abnormal, message)
				}
			}
			r.must(r.unpublish(s, r.target("a")))
			_, _, before := r.host.Counts()
			r.must(r.stage(s)) // or unstage and stage
			if _, _, after := r.host.Counts(); after != before+1 {
				t.Fatalf("%d checks", after-before)
			}
			r.must(r.publish(s, r.target("b")))
			r.must(r.unpublish(s, r.target("b")))
			r.must(r.unstage(s))
			r.clean(s, r.target("a"), r.target("b"))
		})
	}
}

// H75, B153, B077: a node comes back with what an earlier attachment left. The
// old device is never taken for the new one's.
func TestH75EarlierAttachment(t *testing.T) {
	for _, raw := range []bool{false, true} {
		r := newRig(t)
		s := r.use(r.vols.Add(GiB))
		s.raw = raw
		r.must(r.stage(s))
		r.must(r.publish(s, r.target("old")))
		r.vols.Attach(s.id, nil) // detached, used elsewhere, attached anew
		r.refused(r.stage(s), block.ErrPrecondition, "unstage")
		r.refused(r.publish(s, r.target("new")), block.ErrPrecondition, "unstage")
		r.must(r.unpublish(s, r.target("old")))
		r.must(r.unstage(s))
		r.must(r.stage(s))
		r.must(r.publish(s, r.target("new")))
		if attaches, _, _ := r.host.Counts(); attaches != 2 {
			t.Fatalf("%d attaches", attaches)
		}
	}
}

// H74: a call of an earlier attachment that comes late does nothing.
func TestH74LateStage(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	late := s
	late.context = map[string]string{driver.AttachmentKey: r.vols.Get(s.id).Attachment.String()}
	r.vols.Attach(s.id, nil)
	r.refused(r.stage(late), block.ErrPrecondition, "anew")
	r.clean(s)
	r.must(r.stage(s))
	r.refused(r.publish(late, r.target("t")), block.ErrPrecondition)
	r.refused(r.stage(late), block.ErrPrecondition)
	r.must(r.stage(s))
}

// B043: what is mounted elsewhere is not detached, and neither unmounted.
func TestB043UsedElsewhere(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	r.host.SetTable(func(list mount.Table) mount.Table {
		e := list[0]
		e.ID, e.Point = 9, "/mnt/admin"
		return append(list, e)
	})
	r.refused(r.unstage(s), block.ErrInUse, "/mnt/admin")
	if r.mounts(s.staging) != 1 {
		t.Fatal("unmounted")
	}
	r.host.SetTable(func(list mount.Table) mount.Table { return list[1:] })
	r.refused(r.stage(s), block.ErrInUse, "/mnt/admin")
	r.host.SetTable(func(mount.Table) mount.Table { return nil })
	r.must(r.unstage(s))
}

// B091: the device first; what the kernel does not show yet has not grown.
func TestB091DeviceBeforeFileSystem(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	r.must(r.publish(s, r.target("t")))
	_, err := r.expand(s, 2*GiB, r.target("t"), s.staging)
	r.refused(err, block.ErrPrecondition, s.id.String()) // the volume has not
	r.vols.Set(s.id, func(v *node.Volume) { v.Size = 2 * GiB })
	r.host.Delay(GiB)
	_, err = r.expand(s, 2*GiB, r.target("t"), s.staging)
	r.refused(err, block.ErrUnavailable)
	r.host.Do(s.id, func(d *nodetest.Disk) {
		if d.Size != GiB {
			t.Fatalf("the file system has %d bytes", d.Size)
		}
	})
	r.host.Delay(0)
	for range 2 {
		if size, err := r.expand(s, 2*GiB, r.target("t"), s.staging); err != nil || size != 2*GiB {
			t.Fatalf("%d, %v", size, err)
		}
	}
	r.host.Do(s.id, func(d *nodetest.Disk) {
		if d.Size != 2*GiB {
			t.Fatalf("the file system has %d bytes", d.Size)
		}
	})
	if size, err := r.expand(s, GiB, r.target("t"), ""); err != nil || size != 2*GiB { // never smaller
		t.Fatalf("%d, %v", size, err)
	}
	out, err := r.svc.NodeExpandVolume(t.Context(), &csispec.NodeExpandVolumeRequest{
		VolumeId: s.id.String(), VolumePath: r.target("t"), CapacityRange: &csispec.CapacityRange{RequiredBytes: 1, LimitBytes: GiB},
	})
	r.refused(err, block.ErrTooLarge)
	if out != nil {
		t.Fatal(out)
	}
}

// B092: each tool gets what it wants, whichever paths the call names.
func TestB092PathsOfExpand(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs"} {
		r := newRig(t)
		s := r.use(r.vols.Add(GiB))
		s.fs = fs
		r.vols.Set(s.id, func(v *node.Volume) { v.Size = 2 * GiB })
		_, err := r.expand(s, 2*GiB, s.staging, s.staging)
		r.refused(err, block.ErrNotFound)
		r.must(r.stage(s))
		for i, paths := range [][2]string{{s.staging, s.staging}, {r.target("t"), ""}, {r.target("t"), s.staging}, {r.target("none"), s.staging}, {r.target("none/none"), s.staging}} {
			if i == 1 {
				r.must(r.publish(s, r.target("t")))
			}
			if size, err := r.expand(s, 2*GiB, paths[0], paths[1]); err != nil || size != 2*GiB {
				t.Fatalf("%v: %d, %v", paths, size, err)
			}
		}
		_, err = r.expand(s, 2*GiB, r.target("none"), "")
		r.refused(err, block.ErrNotFound)
		if steps := r.plugin.Steps(); steps == 0 {
			t.Fatal("no steps")
		}
	}
}

// B093: what a raw volume holds is not looked into.
func TestB093RawVolumeGrowsAlone(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	s.raw = true
	r.must(r.stage(s))
	r.must(r.publish(s, r.target("t")))
	r.host.Do(s.id, func(d *nodetest.Disk) { d.Type, d.Size = "ext4", GiB })
	r.vols.Set(s.id, func(v *node.Volume) { v.Size = 2 * GiB })
	for _, path := range []string{r.target("t"), s.staging} {
		if size, err := r.expand(s, 2*GiB, path, ""); err != nil || size != 2*GiB {
			t.Fatalf("%d, %v", size, err)
		}
	}
	r.host.Do(s.id, func(d *nodetest.Disk) {
		if d.Size != GiB {
			t.Fatal("a tenant's file system was grown")
		}
	})
	out, err := r.svc.NodeGetVolumeStats(t.Context(), &csispec.NodeGetVolumeStatsRequest{VolumeId: s.id.String(), VolumePath: r.target("t")})
	if err != nil || len(out.GetUsage()) != 1 || out.GetUsage()[0].GetTotal() != 2*GiB {
		t.Fatalf("%v, %v", out, err)
	}
}

// condition is what the answer about usage says besides, as Kubernetes reads it.
func (r *rig) condition(s spec, path string) (abnormal bool, message string) {
	r.t.Helper()
	out, err := r.svc.NodeGetVolumeStats(context.Background(), &csispec.NodeGetVolumeStatsRequest{VolumeId: s.id.String(), VolumePath: path})
	r.must(err)
	abnormal, message, ok := driver.Condition(out)
	if !ok {
		r.t.Fatal("no condition")
	}
	return abnormal, message
}

func TestStatsAndHealth(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.must(r.stage(s))
	r.must(r.publish(s, r.target("t")))
	health := func() []*csispec.VolumeHealth_VolumeHealthEntry {
		out, err := r.svc.NodeGetVolumeHealth(t.Context(), &csispec.NodeGetVolumeHealthRequest{VolumeId: s.id.String(), VolumePublishPath: r.target("t")})
		r.must(err)
		return out.GetVolumeHealth().GetHealthStatuses()
	}
	out, err := r.svc.NodeGetVolumeStats(t.Context(), &csispec.NodeGetVolumeStatsRequest{VolumeId: s.id.String(), VolumePath: r.target("t")})
	if err != nil || len(out.GetUsage()) != 2 || out.GetUsage()[0].GetTotal() != GiB || out.GetUsage()[1].GetUsed() != 11 {
		t.Fatalf("%v, %v", out, err)
	}
	if abnormal, message := r.condition(s, r.target("t")); abnormal || message == "" || len(health()) > 0 {
		t.Fatal("a healthy volume is ill")
	}
	for _, c := range []struct {
		node.Condition
		want csispec.VolumeHealthErrorType
	}{
		{node.Condition{State: node.Waiting, Message: "no server answers"}, csispec.VolumeHealthErrorType_INACCESSIBLE},
		{node.Condition{State: node.Failed, Reason: "Revoked", Message: "the attachment was revoked"}, csispec.VolumeHealthErrorType_INACCESSIBLE},
		{node.Condition{State: node.Failed, Lost: true, Message: "unflushed data was lost"}, csispec.VolumeHealthErrorType_DATA_LOSS},
	} {
		r.host.SetDevice(s.id, func(d *node.Device) { d.Condition = c.Condition })
		if abnormal, message := r.condition(s, r.target("t")); !abnormal || message != c.Message {
			t.Fatalf("%t, %s", abnormal, message)
		}
		if h := health(); len(h) != 1 || h[0].GetStatus() != c.want || h[0].GetMessage() != c.Message || h[0].GetReason() == "" {
			t.Fatal(h)
		}
	}
	// What some kernels show nowhere else; it may be full all the same.
	r.host.SetDevice(s.id, func(d *node.Device) { d.Condition = node.Condition{} })
	r.host.Do(s.id, func(d *nodetest.Disk) { d.Errors = 3 })
	if abnormal, message := r.condition(s, r.target("t")); !abnormal || !strings.Contains(message, "errors, 3 since") {
		t.Fatalf("%t, %s", abnormal, message)
	}
	if h := health(); len(h) != 1 || h[0].GetStatus() != csispec.VolumeHealthErrorType_DEGRADED {
		t.Fatal(h)
	}
	out, err = r.svc.NodeGetVolumeStats(t.Context(), &csispec.NodeGetVolumeStatsRequest{VolumeId: s.id.String(), VolumePath: r.target("t")})
	if err != nil || len(out.GetUsage()) != 2 {
		t.Fatalf("%v, %v", out, err)
	}
	for _, path := range []string{r.target("none"), "some/path", r.target("none/none")} {
		_, err := r.svc.NodeGetVolumeStats(t.Context(), &csispec.NodeGetVolumeStatsRequest{VolumeId: s.id.String(), VolumePath: path})
		r.refused(err, block.ErrNotFound)
	}
	_, err = r.svc.NodeGetVolumeStats(t.Context(), &csispec.NodeGetVolumeStatsRequest{VolumeId: "no-uuid", VolumePath: r.target("t")})
	r.refused(err, block.ErrNotFound)
}

// B086: file systems that do not answer park one goroutine each, and hold up nobody.
func TestB086SilentFileSystems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		gate := make(chan struct{})
		var silent []spec
		for range 5 {
			s := r.use(r.vols.Add(GiB))
			r.must(r.stage(s))
			r.host.Do(s.id, func(d *nodetest.Disk) { d.Silent = gate })
			silent = append(silent, s)
		}
		healthy := r.use(r.vols.Add(GiB))
		r.must(r.stage(healthy))
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				s := silent[i%len(silent)]
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				out, err := r.svc.NodeGetVolumeStats(ctx, &csispec.NodeGetVolumeStatsRequest{VolumeId: s.id.String(), VolumePath: s.staging})
				if err != nil || ctx.Err() != nil || len(out.GetUsage()) != 0 {
					t.Errorf("%v, %v, %v", out, err, ctx.Err())
				}
			})
			wg.Go(func() {
				if abnormal, message := r.condition(healthy, healthy.staging); abnormal {
					t.Error(message)
				}
			})
		}
		wg.Wait()
		if n := r.host.Parked(); n != len(silent) {
			t.Fatalf("%d goroutines are parked", n)
		}
		for _, s := range silent { // other calls for them go on
			r.must(r.publish(s, r.target("t"+s.id.String())))
			if abnormal, message := r.condition(s, s.staging); !abnormal || !contains(message, "does not answer") {
				t.Fatal(message)
			}
		}
		close(gate)
		synctest.Wait()
		for _, s := range silent {
			r.host.Do(s.id, func(d *nodetest.Disk) { d.Silent = nil })
			if abnormal, message := r.condition(s, s.staging); abnormal {
				t.Fatal(message)
			}
		}
	})
}

// B068: a deadline ends no mkfs: it goes on, and the repetition joins it. A
// call given up before it touched the device is undone.
func TestB068DeadlineEndsNoTool(t *testing.T) {
	for _, where := range []string{"mkfs", "fsck", "mount", "attach"} {
		t.Run(where, func(t *testing.T) {
			r := newRig(t)
			s := r.use(r.vols.Add(GiB))
			if where == "fsck" {
				r.host.Do(s.id, func(d *nodetest.Disk) { d.Type, d.Data = "ext4", true })
				r.vols.Set(s.id, func(v *node.Volume) { v.Format = node.FormatDone })
			}
			begun, gate, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
			var once sync.Once
			r.restart(func(step string, _ int, after bool) error {
				if step == where && !after {
					once.Do(func() { close(begun); <-gate })
				}
				if step == where && after {
					defer func() { recover() }()
					close(ended)
				}
				return nil
			})
			ctx, cancel := context.WithCancel(t.Context())
			first := make(chan error, 1)
			go func() { first <- r.stageWithin(ctx, s) }()
			<-begun
			cancel()
			err := <-first
			r.refused(err, context.Canceled, s.id.String())
			if where == "attach" {
				close(gate)
				r.must(r.unstage(s)) // waits for the end of what was given up
				r.clean(s)
				r.must(r.stage(s))
				return
			}
			second := make(chan error, 1)
			go func() { second <- r.stage(s) }()
			ctx, cancel = context.WithCancel(t.Context())
			cancel()
			other := s
			other.flags = []string{"noatime"}
			r.refused(r.stageWithin(ctx, other), driver.ErrPending)
			close(gate)
			r.must(<-second)
			<-ended
			if attaches, formats, checks := r.host.Counts(); attaches != 1 || formats+checks != 1 {
				t.Fatalf("%d attaches, %d formats, %d checks", attaches, formats, checks)
			}
			r.must(r.unstage(s))
			r.clean(s)
		})
	}
}

// A plugin that ends while mkfs works says so; the next one goes on from what it finds.
func TestCloseWaits(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	begun, gate := make(chan struct{}), make(chan struct{})
	r.restart(func(step string, _ int, after bool) error {
		if step == "mkfs" && !after {
			close(begun)
			<-gate
		}
		return nil
	})
	done := make(chan error, 1)
	go func() { done <- r.stage(s) }()
	<-begun
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.svc.Close(ctx); !errors.Is(err, block.ErrUnavailable) || !contains(err.Error(), s.id.String()) {
		t.Fatal(err)
	}
	r.refused(r.unstage(s), block.ErrShutdown)
	close(gate)
	r.must(<-done)
	r.stop()
}

// A panic is one call's, and tells nobody anything.
func TestPanicIsOneCalls(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	once := false
	r.restart(func(step string, _ int, after bool) error {
		if step == "probe" && !once {
			once = true
			panic("boom")
		}
		return nil
	})
	if err := r.stage(s); err == nil || contains(err.Error(), "boom") || !contains(r.log.String(), "boom") {
		t.Fatal(err)
	}
	r.must(r.stage(s))
}

// B166: nothing that a user may have written a secret into is told.
func TestB166NothingIsTold(t *testing.T) {
	r := newRig(t)
	const marker = "MARKER-6b1f"
	s := r.use(r.vols.Add(GiB))
	s.context = map[string]string{driver.AttachmentKey: r.vols.Get(s.id).Attachment.String(), "password": marker}
	s.flags = []string{"noatime"}
	r.must(r.stage(s))
	s.context = map[string]string{driver.AttachmentKey: marker}
	for _, err := range []error{r.stage(s), r.publish(s, r.target("t"))} {
		r.refused(err, block.ErrInvalid)
		if contains(err.Error(), marker) {
			t.Fatal(err)
		}
	}
	if contains(r.log.String(), marker) {
		t.Fatal(r.log.String())
	}
}

func TestRequests(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	id, c := s.id.String(), s.capability()
	_, err := r.svc.NodePublishVolume(t.Context(), &csispec.NodePublishVolumeRequest{VolumeId: id, TargetPath: r.target("t"), VolumeCapability: c})
	r.refused(err, block.ErrPrecondition, "staging target path")
	for _, in := range []*csispec.NodeStageVolumeRequest{
		{StagingTargetPath: s.staging, VolumeCapability: c},
		{VolumeId: id, VolumeCapability: c},
		{VolumeId: id, StagingTargetPath: s.staging},
		{VolumeId: id, StagingTargetPath: "relative", VolumeCapability: c},
		{VolumeId: id, StagingTargetPath: "/", VolumeCapability: c},
		{VolumeId: id, StagingTargetPath: s.staging, VolumeCapability: &csispec.VolumeCapability{AccessMode: c.GetAccessMode()}},
		{VolumeId: id, StagingTargetPath: s.staging, VolumeCapability: &csispec.VolumeCapability{AccessType: c.GetAccessType()}},
	} {
		_, err := r.svc.NodeStageVolume(t.Context(), in)
		r.refused(err, block.ErrInvalid)
		_, err = r.svc.NodePublishVolume(t.Context(), &csispec.NodePublishVolumeRequest{
			VolumeId: in.GetVolumeId(), StagingTargetPath: in.GetStagingTargetPath(), VolumeCapability: in.GetVolumeCapability(),
		})
		r.refused(err, block.ErrInvalid)
	}
	_, err = r.svc.NodeStageVolume(t.Context(), &csispec.NodeStageVolumeRequest{VolumeId: "no-uuid", StagingTargetPath: s.staging, VolumeCapability: c})
	r.refused(err, block.ErrNotFound)
	group := s.capability()
	group.GetMount().VolumeMountGroup = "1000"
	_, err = r.svc.NodeStageVolume(t.Context(), &csispec.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: s.staging, VolumeCapability: group})
	r.refused(err, block.ErrInvalid)
	other := s
	other.fs = "btrfs"
	r.refused(r.stage(other), block.ErrInvalid, "btrfs")
	other = s
	other.staging = r.target("no/such/parent")
	r.refused(r.stage(other), block.ErrPrecondition)
	r.must(r.stage(s))
	r.refused(r.publish(s, s.staging), block.ErrInvalid)
	r.refused(r.publish(s, s.staging+"/below"), block.ErrInvalid)
	r.refused(r.publish(s, r.target("no/such")), block.ErrPrecondition)
	for _, in := range []*csispec.NodeExpandVolumeRequest{
		{VolumePath: s.staging}, {VolumeId: id}, {VolumeId: id, VolumePath: s.staging, CapacityRange: &csispec.CapacityRange{RequiredBytes: 2, LimitBytes: 1}},
		{VolumeId: id, VolumePath: s.staging, CapacityRange: &csispec.CapacityRange{RequiredBytes: -1}},
	} {
		_, err := r.svc.NodeExpandVolume(t.Context(), in)
		r.refused(err, block.ErrInvalid)
	}
	for _, in := range []*csispec.NodeGetVolumeStatsRequest{{VolumeId: id}, {VolumePath: s.staging}} {
		_, err := r.svc.NodeGetVolumeStats(t.Context(), in)
		r.refused(err, block.ErrInvalid)
	}
	_, err = r.svc.NodeGetVolumeHealth(t.Context(), &csispec.NodeGetVolumeHealthRequest{})
	r.refused(err, block.ErrInvalid)
}
