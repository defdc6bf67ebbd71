package node_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/csi/node/nodetest"
	"github.com/gabion-storage/gabion/server/block"
)

// op is one call of a volume's life.
type op struct {
	name string
	do   func(r *rig, s spec) error
}

func ops(target string) []op {
	return []op{
		{"stage", func(r *rig, s spec) error { return r.stage(s) }},
		{"publish", func(r *rig, s spec) error { return r.publish(s, r.target(target)) }},
		{"unpublish", func(r *rig, s spec) error { return r.unpublish(s, r.target(target)) }},
		{"unstage", func(r *rig, s spec) error { return r.unstage(s) }},
	}
}

// lives are the kinds of volumes that everything is tried on.
func lives() map[string]func(r *rig) spec {
	return map[string]func(r *rig) spec{
		"blank": func(r *rig) spec { return r.use(r.vols.Add(GiB)) },
		"xfs": func(r *rig) spec {
			s := r.use(r.vols.Add(GiB))
			r.host.Do(s.id, func(d *nodetest.Disk) { d.Type, d.Data = "xfs", true })
			r.vols.Set(s.id, func(v *node.Volume) { v.Format = node.FormatDone })
			return s
		},
		"read-only": func(r *rig) spec {
			s := r.use(r.vols.Add(GiB))
			s.mode = rox
			r.host.Do(s.id, func(d *nodetest.Disk) { d.Type, d.Data = "ext4", true })
			r.vols.Set(s.id, func(v *node.Volume) { v.Format, v.ReadOnly = node.FormatDone, true })
			return s
		},
		"raw": func(r *rig) spec {
			s := r.use(r.vols.Add(GiB))
			s.raw = true
			return s
		},
		"left over from an earlier attachment": func(r *rig) spec {
			s := r.use(r.vols.Add(GiB))
			_, err := r.plugin.Attach(context.Background(), s.id, false)
			r.must(err)
			r.vols.Attach(s.id, nil)
			return s
		},
		"new directory": func(r *rig) spec {
			s := r.use(r.vols.Add(GiB))
			r.must(os.Remove(s.staging))
			return s
		},
	}
}

// H76, B084: the plugin is killed before and after every step of every call.
// The next plugin's repetition succeeds, and so does the opposite call; nothing
// is formatted that anybody could have written to, and nothing stays.
func TestH76KilledAtEveryStep(t *testing.T) {
	for name, build := range lives() {
		for victim, op := range ops("t") {
			for _, after := range []bool{false, true} {
				for _, repeat := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s/%s/after=%t/repeat=%t", name, op.name, after, repeat), func(t *testing.T) {
						for k := 1; killed(t, build, victim, k, after, repeat); k++ {
							if k > 50 {
								t.Fatal("endless")
							}
						}
					})
				}
			}
		}
	}
}

// killed runs one life with a kill at step k of the victim; false: it has fewer steps.
func killed(t *testing.T, build func(*rig) spec, victim, k int, after, repeat bool) bool {
	t.Helper()
	r := newRig(t)
	s := build(r)
	list := ops("t")
	for _, op := range list[:victim] {
		r.must(op.do(r, s))
	}
	r.restart(func(_ string, n int, isAfter bool) error {
		if n == k && isAfter == after {
			return nodetest.ErrKilled
		}
		return nil
	})
	err := list[victim].do(r, s)
	happened := r.plugin.Steps() >= k
	if happened && !errors.Is(err, nodetest.ErrKilled) && err == nil {
		// Its last words were not needed: fine, as long as what follows works.
		t.Logf("step %d of %s: killed and OK", k, list[victim].name)
	}
	r.restart(nil)
	if repeat {
		r.must(list[victim].do(r, s))
	}
	if victim == 0 && !repeat || victim == 3 && !repeat {
		r.must(r.unstage(s)) // undoes a stage, finishes an unstage
	}
	r.must(r.unpublish(s, r.target("t")))
	r.must(r.unstage(s))
	_ = os.MkdirAll(s.staging, 0o750) // if it had been made for it, it has gone with it
	r.clean(s, r.target("t"))
	// And everything works anew.
	for _, op := range list {
		r.must(op.do(r, s))
	}
	r.clean(s, r.target("t"))
	r.stop()
	if broken := r.host.Broken(); len(broken) > 0 {
		t.Fatalf("step %d: %q", k, broken)
	}
	return happened
}

// B084: each step of a stage fails in turn. A failed stage leaves nothing,
// unstaging it succeeds, and so does the next one.
func TestB084FailedStageLeavesNothing(t *testing.T) {
	for name, build := range lives() {
		for _, after := range []bool{false, true} {
			for k := 1; ; k++ {
				r := newRig(t)
				s := build(r)
				_, statErr := os.Lstat(s.staging)
				failed := ""
				r.restart(func(step string, n int, isAfter bool) error {
					if n == k && isAfter == after && failed == "" {
						failed = step
						return fmt.Errorf("%w: step %s fails", block.ErrIO, step)
					}
					return nil
				})
				err := r.stage(s)
				if failed == "" {
					r.must(err)
					break
				}
				if err == nil && failed != "try" { // of a finished mkfs that is looked at: it is made again
					t.Fatalf("%s: stage is OK though %s failed", name, failed)
				}
				if residue := r.host.Residue(); err != nil && residue != "" && failed != "detach" {
					t.Fatalf("%s: %s failed: residue: %s", name, failed, residue)
				}
				if _, err := os.Lstat(s.staging); (err == nil) != (statErr == nil) && failed != "mkdir" {
					t.Fatalf("%s: %s failed: the staging directory is not as found", name, failed)
				}
				r.must(r.unstage(s))
				_ = os.MkdirAll(s.staging, 0o750)
				r.clean(s)
				r.must(r.stage(s))
				r.must(r.unstage(s))
			}
		}
	}
}

// B084: an option that is none is refused before anything is attached.
func TestB084UnknownOption(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	s.flags = []string{"noatime", "nosuchopt"}
	r.refused(r.stage(s), block.ErrInvalid, "mount flag 2", "nosuchopt")
	if r.plugin.Steps() > 0 {
		t.Fatal("something was done")
	}
	s.flags = nil
	r.must(r.stage(s))
}

// B075: 20 stages at once while mkfs is slow: one mkfs, one device, one mount.
func TestB075OneMkfsForManyStages(t *testing.T) {
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
	var wg sync.WaitGroup
	errs := make([]error, 20)
	for i := range errs {
		wg.Go(func() { errs[i] = r.stage(s) })
	}
	<-begun
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := r.svc.NodeUnstageVolume(ctx, &csispec.NodeUnstageVolumeRequest{VolumeId: s.id.String(), StagingTargetPath: s.staging})
	r.refused(err, driver.ErrPending, "stage")
	close(gate)
	wg.Wait()
	for _, err := range errs {
		r.must(err)
	}
	if attaches, formats, _ := r.host.Counts(); attaches != 1 || formats != 1 || r.mounts(s.staging) != 1 {
		t.Fatalf("%d attaches, %d formats, %d mounts", attaches, formats, r.mounts(s.staging))
	}
	r.must(r.unstage(s)) // "pending" does not stick
	r.clean(s)
}

// B075: whatever meets, the mount table is what the last reply said.
func TestB075RandomInterleavings(t *testing.T) {
	const rounds = 200
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for _, raw := range []bool{false, true} {
		r := newRig(t)
		s := r.use(r.vols.Add(GiB))
		s.raw = raw
		list := slices.Concat(ops("a"), ops("b"))
		for range rounds {
			var wg sync.WaitGroup
			for range 1 + rnd.IntN(4) {
				op := list[rnd.IntN(len(list))]
				wg.Go(func() { _ = op.do(r, s) })
			}
			wg.Wait()
			last := list[rnd.IntN(len(list))]
			err := last.do(r, s)
			agrees(t, r, s, last.name, err)
		}
		for _, target := range []string{"a", "b"} {
			r.must(r.unpublish(s, r.target(target)))
		}
		r.must(r.unstage(s))
		r.clean(s, r.target("a"), r.target("b"))
		if _, formats, _ := r.host.Counts(); formats > 1 {
			t.Fatalf("%d formats", formats)
		}
	}
}

func agrees(t *testing.T, r *rig, s spec, last string, err error) {
	t.Helper()
	where := s.staging
	if s.raw {
		where += "/device"
	}
	staged := r.mounts(where)
	for _, p := range []string{where, r.target("a"), r.target("b")} {
		if r.mounts(p) > 1 {
			t.Fatalf("%s: %d mounts at %s", last, r.mounts(p), p)
		}
	}
	published := r.mounts(r.target("a")) + r.mounts(r.target("b"))
	if staged == 0 && published > 0 {
		t.Fatalf("%s (%v): published and not staged", last, err)
	}
	switch last {
	case "stage":
		if err != nil || staged != 1 {
			t.Fatalf("stage: %v, %d mounts", err, staged)
		}
	case "unstage":
		if (err == nil) != (staged == 0) || err == nil && r.host.Residue() != "" {
			t.Fatalf("unstage: %v, %d mounts, %s", err, staged, r.host.Residue())
		}
	case "publish":
		if (err == nil) != (staged == 1) {
			t.Fatalf("publish: %v, %d mounts", err, staged)
		}
	case "unpublish":
		if err != nil {
			t.Fatal(err)
		}
	}
}
