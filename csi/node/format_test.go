package node_test

import (
	"testing"

	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/csi/node/nodetest"
	"github.com/gabion-storage/gabion/server/block"
)

// B068, B069, H76: the whole table of what may be formatted. Only what was
// never born, and what an mkfs was begun on, ever is.
func TestB069OnlyProvenBlankIsFormatted(t *testing.T) {
	const (
		formats = "formats"
		mounts  = "mounts"
	)
	foreign := []string{"crypto_LUKS", "LVM2_member", "swap", "btrfs", "partition table gpt", "several signatures", "ext3", "something that blkid does not name"}
	tests := []struct {
		name     string
		format   node.FormatState
		born     bool
		found    string
		asked    string
		readOnly bool
		want     string // formats, mounts
		err      error
	}{
		{name: "new", want: formats},
		{name: "new, xfs", asked: "xfs", want: formats},
		{name: "new, read-only", readOnly: true, err: block.ErrPrecondition},
		{name: "new, but not empty", found: "ext4", err: block.ErrCorrupt},
		{name: "started, nothing there", format: node.FormatStarted, born: true, want: formats},
		{name: "started and finished", format: node.FormatStarted, born: true, found: "ext4", want: mounts},
		{name: "started as another type", format: node.FormatStarted, born: true, found: "ext4", asked: "xfs", want: formats},
		{name: "started, read-only", format: node.FormatStarted, born: true, found: "ext4", readOnly: true, err: block.ErrPrecondition},
		{name: "done", format: node.FormatDone, born: true, found: "xfs", want: mounts},
		{name: "done, read-only", format: node.FormatDone, born: true, found: "xfs", readOnly: true, want: mounts},
		{name: "done, the type that is there", format: node.FormatDone, born: true, found: "xfs", asked: "xfs", want: mounts},
		{name: "done, another type", format: node.FormatDone, born: true, found: "xfs", asked: "ext4", err: block.ErrPrecondition},
		{name: "done, signature gone", format: node.FormatDone, born: true, err: block.ErrCorrupt},
		{name: "done, nothing born any more", format: node.FormatDone, err: block.ErrCorrupt},
		{name: "prepared by hand", born: true, found: "ext4", want: mounts},
		{name: "data without signature", born: true, err: block.ErrPrecondition},
		{name: "data without signature, read-only", born: true, readOnly: true, err: block.ErrPrecondition},
	}
	for _, f := range foreign {
		for _, state := range []node.FormatState{node.FormatNone, node.FormatStarted, node.FormatDone} {
			tests = append(tests, struct {
				name     string
				format   node.FormatState
				born     bool
				found    string
				asked    string
				readOnly bool
				want     string
				err      error
			}{name: f, format: state, born: true, found: f, err: block.ErrPrecondition})
		}
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			s := r.use(r.vols.Add(GiB))
			s.fs = tt.asked
			if tt.readOnly {
				s.mode = rox
			}
			r.host.Do(s.id, func(d *nodetest.Disk) { d.Type = tt.found })
			r.vols.Set(s.id, func(v *node.Volume) { v.Format, v.Born, v.ReadOnly = tt.format, tt.born, tt.readOnly })
			if tt.name == "new, but not empty" { // the metadata service insists
				r.vols.Set(s.id, func(v *node.Volume) { v.Born = false })
				r.plugin = nodetest.NewPlugin(r.host, r.vols, nil)
				r.refused(r.stageUnborn(s), block.ErrCorrupt, "ext4")
				r.clean(s)
				return
			}
			err := r.stage(s)
			_, n, _ := r.host.Counts()
			if tt.err != nil {
				r.refused(err, tt.err, s.id.String())
				if !tt.readOnly {
					r.refused(err, tt.err, tt.found)
				}
				if n > 0 {
					t.Fatal("it was formatted")
				}
				r.clean(s)
				if v := r.vols.Get(s.id); v.Format != tt.format {
					t.Fatalf("format state %d", v.Format)
				}
				r.must(r.unstage(s))
				return
			}
			r.must(err)
			if (n > 0) != (tt.want == formats) {
				t.Fatalf("%d formats", n)
			}
			if v := r.vols.Get(s.id); tt.format != node.FormatNone && v.Format != node.FormatDone || tt.want == formats && v.Format != node.FormatDone {
				t.Fatalf("format state %d", v.Format)
			}
			r.must(r.unstage(s))
			r.clean(s)
		})
	}
}

// unborn is a metadata service that says that nothing was ever written.
type unborn struct{ node.Volumes }

func (u unborn) Describe(ctx ctx, id block.VolumeID) (node.Volume, error) {
	v, err := u.Volumes.Describe(ctx, id)
	v.Born = false
	return v, err
}

func (r *rig) stageUnborn(s spec) error {
	r.stop()
	r.plugin = nodetest.NewPlugin(r.host, unborn{r.vols}, nil)
	r.svc = r.service()
	return r.stage(s)
}

// An unreadable device is not blank, and leaves no residue.
func TestUnreadableIsNotFormatted(t *testing.T) {
	for _, state := range []node.FormatState{node.FormatNone, node.FormatStarted, node.FormatDone} {
		r := newRig(t)
		s := r.use(r.vols.Add(GiB))
		r.host.Do(s.id, func(d *nodetest.Disk) { d.Unreadable = true })
		r.vols.Set(s.id, func(v *node.Volume) { v.Format = state })
		r.refused(r.stage(s), block.ErrIO)
		r.clean(s)
		r.host.Do(s.id, func(d *nodetest.Disk) { d.Unreadable = false })
		if state != node.FormatDone {
			r.must(r.stage(s))
		}
	}
}

// What only a person can repair is told, and stays as it is.
func TestDamageIsForAPerson(t *testing.T) {
	r := newRig(t)
	s := r.use(r.vols.Add(GiB))
	r.host.Do(s.id, func(d *nodetest.Disk) { d.Type, d.Damaged = "ext4", true })
	r.vols.Set(s.id, func(v *node.Volume) { v.Format = node.FormatDone })
	r.refused(r.stage(s), block.ErrCorrupt, s.id.String())
	r.clean(s)
}

// B074: identity is compared before anything is read or written.
func TestB074AnotherDeviceIsNotTouched(t *testing.T) {
	for name, change := range map[string]func(*node.Device){
		"volume":      func(d *node.Device) { d.Volume = block.VolumeID{UUID: block.NewUUID()} },
		"attachment":  func(d *node.Device) { d.Attachment = block.AttachmentID{UUID: block.NewUUID()} },
		"node":        func(d *node.Device) { d.Path = "/dev/nbd99" },
		"number":      func(d *node.Device) { d.Number.Minor = 99 },
		"larger":      func(d *node.Device) { d.Size = 2 * GiB },
		"no size":     func(d *node.Device) { d.Size = 0 },
		"other mode":  func(d *node.Device) { d.ReadOnly = true },
		"other bytes": func(d *node.Device) { d.Size-- },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := r.use(r.vols.Add(GiB))
			r.stop()
			r.plugin = nodetest.NewPlugin(r.host, r.vols, func(step string, _ int, after bool) error {
				switch step {
				case "probe", "fsck", "mkfs", "mount", "try", "format state 1":
					t.Errorf("%s", step)
				}
				return nil
			})
			r.svc = r.serviceWith(liar{r.plugin, change})
			if err := r.stage(s); err == nil {
				t.Fatal("staged")
			}
			r.clean(s)
		})
	}
	t.Run("publish and expand", func(t *testing.T) {
		r := newRig(t)
		s, other := r.use(r.vols.Add(GiB)), r.use(r.vols.Add(GiB))
		r.must(r.stage(s))
		r.must(r.stage(other))
		wrong := s
		wrong.staging = other.staging
		r.refused(r.publish(wrong, r.target("t")), block.ErrPrecondition)
		_, err := r.expand(s, GiB, other.staging, "")
		r.refused(err, block.ErrNotFound)
	})
}

// liar is an attacher whose devices are not what they are said to be.
type liar struct {
	node.Attacher
	change func(*node.Device)
}

func (l liar) Attach(ctx ctx, id block.VolumeID, readOnly bool) (node.Device, error) {
	d, err := l.Attacher.Attach(ctx, id, readOnly)
	l.change(&d)
	return d, err
}
