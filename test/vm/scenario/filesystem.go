package scenario

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func filesystem() []lab.Scenario {
	return []lab.Scenario{
		{Name: "B069-never-formats-foreign", Run: neverFormatsForeign, Once: true, Timeout: 4 * time.Minute},
		{Name: "B068-never-formats-damaged", Run: neverFormatsDamaged, Once: true, Timeout: 4 * time.Minute},
		{Name: "B068-mkfs-killed", Run: mkfsKilled, Once: true, Timeout: 3 * time.Minute},
		{Name: "B080-power-cut-under-load", Run: powerCutUnderLoad, Timeout: 4 * time.Minute, Alone: true},
		{Name: "B081-read-only-as-it-is", Run: readOnlyAsItIs, Once: true, Timeout: 3 * time.Minute},
		{Name: "B071-B072-B093-raw-block", Run: rawIsTheUsers, Timeout: 3 * time.Minute},
		{Name: "B073-B074-B079-stage-again", Run: stageAgain, Once: true, Timeout: 3 * time.Minute},
		{Name: "B075-stages-at-once", Run: stagesAtOnce, Once: true, Timeout: 5 * time.Minute},
		{Name: "B076-B083-B084-half-way", Run: halfWay, Once: true, Timeout: 4 * time.Minute},
	}
}

// smallest is the size of a file system that is compared byte by byte.
var smallest = map[string]int64{"ext4": 64 * mib, "xfs": 320 * mib}

// foreign are contents that are somebody else's, made by the tools that make them in earnest in so many MiB, and what the
// refusal names.
var foreign = []struct {
	name    string
	mib     int
	command string
	word    string
	long    bool
}{
	{"luks1", 4, luks + "--type luks1 $1", "crypto_LUKS", true},
	{"luks2", 20, luks + "--type luks2 $1", "crypto_LUKS", false},
	{"gpt", 4, "printf 'label: gpt\\n,,L\\n' | sfdisk -q $1", "partition table", false},
	{"mbr", 4, "printf 'label: dos\\n,,L\\n' | sfdisk -q $1", "partition table", true},
	{"lvm", 8, "modprobe loop; pv=$(losetup --find --show $1); pvcreate -qq $pv; losetup -d $pv", "LVM2_member", false},
	{"swap", 4, "mkswap -q $1", "swap", false},
	{"btrfs", 128, "mkfs.btrfs -q $1", "btrfs", false},
	{"random", 4, "dd if=/dev/urandom of=$1 bs=1M seek=2 count=1 conv=notrunc status=none", "never overwritten", false},
	{"byte", 4, "printf x | dd of=$1 bs=1 seek=3000000 conv=notrunc status=none", "never overwritten", true},
}

const luks = "printf secret | cryptsetup luksFormat -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file - "

// neverFormatsForeign: a volume that holds anything is never formatted, whatever it is; the refusal names it, nothing is
// written and nothing stays attached (B069).
func neverFormatsForeign(t *lab.T) {
	s, p := cell(t)
	for _, c := range foreign {
		if c.long && !t.Long {
			continue
		}
		file := t.File(c.name, c.mib, c.command)
		v := t.Volume(p, p, lab.VolumeSpec{Name: c.name})
		v.Create()
		s.Fill(v, file, "--destination-is-zero")
		v.Publish()
		v.NotStaged("staging a volume with "+c.name, c.word)
		s.Holds(v, file)
		v.Down()
		v.Delete()
		t.Sh("rm", file)
	}
}

// neverFormatsDamaged: what was formatted once is never formatted again: not when its signature is damaged or gone, not
// when another type is asked for, and not when it cannot be read (B068, B069).
func neverFormatsDamaged(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin()
	for _, fs := range []string{"ext4", "xfs"} {
		v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs, Size: smallest[fs]})
		t.Write(filepath.Join(v.Up("a"), "file"), "content")
		v.Down()
		whole := filepath.Join(t.Dir, v.Name)
		t.Sh("cp", "--sparse=always", s.Image(v), whole)

		v.Publish()
		s.Arm(lab.Fault{Point: "disk.read", Match: v.ID, Error: "io"})
		v.NotStaged("staging what cannot be read", "cannot be read")
		s.Disarm("")
		other := map[string]string{"ext4": "xfs", "xfs": "ext4"}[v.FS]
		v.FS, other = other, v.FS
		v.NotStaged("staging another type", other)
		v.FS = other
		v.Unpublish()

		// The magic of each superblock, and then all of the first half MiB: a wipe that was stopped half-way.
		head := t.Peek(whole, 0, 512<<10)
		damaged := bytes.Clone(head)
		copy(damaged[map[string]int{"ext4": 1024 + 56, "xfs": 0}[v.FS]:], "\x00\x00")
		for what, content := range map[string][]byte{"damaged magic": damaged, "zeroes": make([]byte, len(head))} {
			file := filepath.Join(t.Dir, "head")
			t.Check(os.WriteFile(file, content, 0o600), "the head")
			s.Fill(v, file)
			t.Poke(whole, 0, content)
			v.Publish()
			v.NotStaged("staging with "+what, "signature is gone")
			v.Unpublish()
			s.Holds(v, whole) // the superblock's copies, too
		}
		t.Check(os.WriteFile(filepath.Join(t.Dir, "head"), head, 0o600), "the head")
		s.Fill(v, filepath.Join(t.Dir, "head"))
		t.Expect(filepath.Join(v.Up("b"), "file"), "content")
		v.Down()
		t.Sh("rm", whole)
	}
}

// mkfsKilled: a first mkfs that was killed half-way, alone or with the plugin, is done again, because the volume is known
// never to have been mounted; and who asks meanwhile does not start a second one (B068).
func mkfsKilled(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin()
	for _, c := range []struct {
		fs     string
		plugin bool // is killed, too
		long   bool
	}{{"ext4", true, false}, {"xfs", false, false}, {"ext4", false, true}, {"xfs", true, true}} {
		if c.long && !t.Long {
			continue
		}
		v := t.Volume(p, p, lab.VolumeSpec{Name: fmt.Sprintf("%s-%t", c.fs, c.plugin), FS: c.fs})
		v.Create()
		v.Publish()
		tool := "mkfs." + c.fs
		s.Arm(lab.Fault{Point: "disk.write", Match: v.ID, Delay: "1s"})
		v.WhileStaging(func(staged <-chan error) {
			t.Eventually(30*time.Second, tool+" writes", func() bool { return lab.Running(tool) && s.Hits("disk.write") > 0 })
			if c.plugin {
				p.Kill()
			}
			t.Sh("pkill", "-KILL", "-x", tool)
			t.Refused(<-staged, "a stage whose mkfs was killed")
		})
		s.Disarm("")
		if c.plugin {
			p.Start()
		}
		t.TryUntil(30*time.Second, "stage after mkfs was killed", v.TryStage)
		t.Write(filepath.Join(v.PublishTo("a"), "file"), c.fs)
		v.Down()
		s.CheckImage(v)
		t.Expect(filepath.Join(v.Up("b"), "file"), c.fs)
		v.Down()
	}
}

// powerCutUnderLoad: the power of node and server fails while files are written and synced. After the reboot the journal
// is replayed at the next stage, all files that were synced are there, and nothing of the time before is left (B080).
func powerCutUnderLoad(t *lab.T) {
	names := []string{"ext4", "xfs"}
	if t.Boot == 0 {
		_, p := cell(t)
		ids, pods := map[string]string{}, map[string]string{}
		for _, fs := range names {
			v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs})
			pods[fs] = v.Up("a")
			ids[fs] = v.ID
		}
		t.Save("volumes", ids)
		var loads []*lab.Synced
		for _, fs := range names {
			loads = append(loads, t.SyncFiles(pods[fs], filepath.Join(t.Dir, fs+".synced")))
		}
		for _, l := range loads {
			l.Reach(40)
		}
		t.PowerCut()
	}
	s, p := cell(t)
	var ids map[string]string
	t.Restore("volumes", &ids)
	for _, fs := range names {
		v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs})
		v.ID = ids[fs]
		pod := v.Up("a") // a kubelet does all of it again
		n := t.CheckSynced(pod, filepath.Join(t.Dir, fs+".synced"))
		replayed := t.KernelLines(`recovery complete|Ending recovery|Starting recovery`)
		t.Figure("%s: %d files that were synced are there; %s", fs, n, strings.Join(replayed, "; "))
		v.Down()
		s.CheckImage(v)
	}
	t.NoIOErrors()
}

// readOnlyAsItIs: a file system whose journal was not replayed is shown to readers without a single write; a blank one is
// not formatted for them (B081).
func readOnlyAsItIs(t *lab.T) {
	s, p := cell(t)
	for _, fs := range []string{"ext4", "xfs"} {
		v := t.Volume(p, p, lab.VolumeSpec{Name: fs, FS: fs, Size: smallest[fs]})
		t.Write(filepath.Join(v.Up("a"), "settled"), "content")
		v.Down()
		t.Write(filepath.Join(v.Up("a"), "synced"), "content") // of which the journal alone may know
		dirty := filepath.Join(t.Dir, "dirty")
		t.Sh("cp", "--sparse=always", s.Image(v), dirty) // synced and mounted: its journal is not empty
		v.Down()
		s.Fill(v, dirty)
		t.Sh("rm", dirty)

		v.Access, v.ReadOnly = csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, true
		v.Publish()
		touched := s.Touched(v)
		v.Stage()
		t.Check(v.TryPublishTo(t.Context(), "reader", true), "publishing read-only")
		t.Expect(filepath.Join(v.Target("reader"), "settled"), "content")
		v.Down()
		if now := s.Touched(v); now != touched {
			t.Errorf("%s: readers wrote: %s, before: %s", fs, now, touched)
		}
		v.Access, v.ReadOnly = csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, false
		t.Expect(filepath.Join(v.Up("writer"), "synced"), "content")
		v.Down()
		s.CheckImage(v)
	}
	blank := t.Volume(p, p, lab.VolumeSpec{Name: "blank", Access: csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, ReadOnly: true})
	blank.Create()
	blank.Publish()
	blank.NotStaged("staging a blank volume read-only", "read-only")
	if used := s.Born(blank); used > 0 {
		t.Errorf("a blank volume for readers has %d bytes", used)
	}
}

// rawIsTheUsers: what is shown of a raw volume is its device and nothing else, and nobody but its user writes to it: not
// when it is staged, not when it grows, though it holds a file system (B071, B072, B093).
func rawIsTheUsers(t *lab.T) {
	s, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: "raw", Block: true})
	pod := v.Up("a")
	t.Sh("mkfs.ext4", "-q", "-F", pod)
	v.Down()
	touched := s.Touched(v)
	super := t.Peek(s.Image(v), 0, 64<<10)
	pod = v.Up("a")
	v.Expand(2 * gib)
	if v.DeviceSize() != 2*gib {
		t.Errorf("the raw device has %d bytes", v.DeviceSize())
	}
	if info, err := os.Stat(pod); err != nil || info.Mode()&os.ModeDevice == 0 {
		t.Errorf("%s is no device: %v %v", pod, info, err)
	}
	v.Block = false
	t.RefusedAs(v.TryStage(t.Context()), "a raw volume staged as a file system", lab.FailedPrecondition)
	t.RefusedAs(v.TryPublishTo(t.Context(), "mounted", false), "a raw volume published as a file system", lab.FailedPrecondition)
	v.Block = true
	v.Down()
	if !bytes.Equal(t.Peek(s.Image(v), 0, 64<<10), super) {
		t.Errorf("growing a raw volume changed what it holds")
	}
	t.Logf("%s; before: %s", s.Touched(v), touched)

	// What lies where the device will show is never taken for it (B071).
	v.Publish()
	for what, command := range map[string]string{
		"a file":          "echo content > $1",
		"a stale node":    "mknod $1 b 43 4000",
		"a wrong node":    "mknod $1 b 254 0",
		"a dangling link": "ln -s /nowhere $1",
	} {
		marker := filepath.Join(v.Staging(), "device")
		t.Check(os.MkdirAll(v.Staging(), 0o750), "the staging path")
		t.Sh("sh", "-c", command, "sh", marker)
		err := v.TryStage(t.Context())
		if err == nil {
			err = v.TryPublishTo(t.Context(), "b", false)
		}
		if err == nil {
			if got, want := t.Sh("blockdev", "--getsize64", v.Target("b")), fmt.Sprint(v.Size); strings.TrimSpace(got) != want {
				t.Errorf("%s: the pod got something of %s bytes", what, got)
			}
			v.UnpublishFrom("b")
		} else {
			t.Refused(err, "staging onto "+what, marker)
		}
		t.Sh("rm", "-f", marker)
		v.Unstage()
	}
	v.Down()
}

// stageAgain: the same call again is the same, by whatever path and after whatever restart; another one is refused; and
// what the plugin remembers may be wrong (B073, B074, B079, B092).
func stageAgain(t *lab.T) {
	_, p := cell(t)
	v := t.Volume(p, p, lab.VolumeSpec{Name: "one", Access: csispec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
	other := t.Volume(p, p, lab.VolumeSpec{Name: "two"})
	t.Write(filepath.Join(v.Up("a"), "file"), "one")
	t.Write(filepath.Join(other.Up("a"), "file"), "two")
	device, mounts := v.Device(), len(lab.TakeResidue().Mounts)

	t.Sh("ln", "-sfn", filepath.Dir(v.Staging()), "/var/lib/kubelet/link")
	t.Check(v.TryStageAt(t.Context(), "/var/lib/kubelet/link/"+filepath.Base(v.Staging())), "stage by a link")
	p.Restart()
	v.Stage()
	v.PublishTo("a")
	if v.Device() != device || len(lab.TakeResidue().Mounts) != mounts {
		t.Errorf("device %s became %s, %d mounts became %d", device, v.Device(), mounts, len(lab.TakeResidue().Mounts))
	}
	v.FS = "xfs"
	t.RefusedAs(v.TryStage(t.Context()), "stage as another type", lab.AlreadyExists)
	v.FS, v.Flags = "ext4", []string{"noatime"}
	t.RefusedAs(v.TryStage(t.Context()), "stage with other options", lab.AlreadyExists)
	v.Flags = nil

	// Three pods, one of them read-only; nothing is checked while it is mounted (B079).
	v.PublishTo("b")
	t.Check(v.TryPublishTo(t.Context(), "c", true), "a read-only pod")

	// By any of the paths the file system grows; what is not staged is not touched (B092).
	for i, paths := range [][2]string{{v.Staging(), ""}, {v.Target("a"), ""}, {v.Target("a"), v.Staging()}} {
		v.Grow(v.Size + gib)
		t.Check(v.TryNodeExpandAt(t.Context(), paths[0], paths[1]), "expand by %q", paths)
		if size := t.Usable(v.Staging()); size < (int64(i)+2)*gib*9/10 {
			t.Errorf("expand by %q: the file system has %d bytes", paths, size)
		}
	}
	v.UnpublishFrom("b")
	v.UnpublishFrom("c")

	// The plugin's files swapped while it is away: every pod keeps its own data (B074).
	p.Kill()
	t.Logf("swapped pairwise: %q", lab.TakeResidue().State)
	t.Sh("sh", "-e", "-c", `for dir in $(find /run/gabion -name '*.json' -printf '%h\n' | sort -u); do
		set -- $dir/*.json; [ $# = 2 ] || continue; mv $1 /tmp/swap; mv $2 $1; mv /tmp/swap $2; done`)
	p.Start()
	t.Check(tryBoth(t, v, other), "after the files were swapped")
	t.Expect(filepath.Join(v.Target("d"), "file"), "one")
	t.Expect(filepath.Join(other.Target("d"), "file"), "two")
	for _, x := range []*lab.Volume{v, other} {
		x.Down()
		t.RefusedAs(x.TryNodeExpandAt(t.Context(), x.Staging(), ""), "expand of what is not staged", lab.NotFound)
	}
	t.Sh("rm", "/var/lib/kubelet/link")
}

func tryBoth(t *lab.T, volumes ...*lab.Volume) error {
	for _, v := range volumes {
		if err := v.TryStage(t.Context()); err != nil {
			return err
		}
		if err := v.TryPublishTo(t.Context(), "d", false); err != nil {
			return err
		}
	}
	return nil
}

// stagesAtOnce: many equal stages make one file system, and after any mixture of calls the mounts are as the last answer
// said (B075).
func stagesAtOnce(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin()
	v := t.Volume(p, p, lab.VolumeSpec{Name: "v"})
	v.Create()
	v.Publish()
	s.Arm(lab.Fault{Point: "disk.write", Match: v.ID, Delay: "50ms"})
	answers := t.AtOnce(make([]int, 20), func(ctx context.Context, _ int) error { return v.TryStage(ctx) })
	s.Disarm("")
	for _, err := range answers {
		if err != nil && lab.Code(err) != lab.Aborted {
			t.Errorf("one of many stages: %v", err)
		}
	}
	if n := strings.Count(p.Process().Log(), "a blank volume is formatted"); n != 1 {
		t.Errorf("formatted %d times", n)
	}
	v.Stage()

	rounds := t.Rounds(4, 200)
	random := t.Random()
	show := func(ctx context.Context) error { return v.TryShow(ctx, "a") }
	hide := func(ctx context.Context) error { return v.TryHide(ctx, "a") }
	calls := []func(context.Context) error{v.TryStage, v.TryUnstage, show, hide}
	for range rounds {
		t.AtOnce(random.Perm(len(calls)), func(ctx context.Context, i int) error { return calls[i](ctx) })
	}
	for _, last := range []struct {
		up     bool
		call   func(context.Context) error
		place  string
		before func(context.Context) error
	}{
		{call: v.TryUnstage, place: v.Staging(), before: hide}, {up: true, call: v.TryStage, place: v.Staging()},
		{up: true, call: show, place: v.Target("a")}, {call: hide, place: v.Target("a")},
	} {
		if last.before != nil {
			t.Check(last.before(t.Context()), "before the last call")
		}
		t.Check(last.call(t.Context()), "the last call")
		if lab.Mounted(last.place) != last.up {
			t.Errorf("%s mounted: %t", last.place, !last.up)
		}
	}
}

// halfWay: what fails half-way leaves nothing, or is ended by the same call later; no pod gets what is not there (B076,
// B083, B084).
func halfWay(t *lab.T) {
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin()
	v := t.Volume(p, p, lab.VolumeSpec{Name: "v", Parameters: map[string]string{"on-full": "error"}})
	v.Create()
	v.Publish()
	beyond := t.Baseline()

	// Each step of a stage fails in turn (B084).
	v.Flags = []string{"nosuchopt"}
	v.NotStaged("an option that does not exist", "mount flag 1") // what flags say may be a secret
	v.Flags = []string{"inode_readahead_blks=3"}                 // only powers of two can be
	v.NotStaged("an option that the kernel refuses", "mount")
	v.Flags = nil
	t.Check(os.MkdirAll(filepath.Dir(v.Staging()), 0o750), "the staging path's parent")
	t.Sh("sh", "-c", "rmdir "+v.Staging()+" 2>/dev/null; echo x > "+v.Staging())
	t.Refused(v.TryStageAt(t.Context(), v.Staging()), "a file at the staging path", v.Staging())
	t.Sh("rm", v.Staging())
	s.Arm(lab.Fault{Point: "disk.space", Match: v.ID, Error: "nospace"})
	v.NotStaged("mkfs that fails")
	s.Disarm("")
	s.Arm(lab.Fault{Point: "nbd.handshake", Hold: true})
	t.Refused(t.Within(2*time.Second, "a stage that is given up", v.TryStage), "a stage that is given up")
	s.Disarm("")
	v.Unstage()
	t.Clean("failed stages", beyond)
	v.Stage()
	t.Write(filepath.Join(v.PublishTo("a"), "file"), "content")

	// The file system has turned read-only: no further pod gets it (B083).
	t.Sh("mount", "-o", "remount,ro", v.Staging())
	t.RefusedAs(v.TryPublishTo(t.Context(), "b", false), "a pod on what has turned read-only", lab.FailedPrecondition)
	if v.Abnormal() == "" {
		t.Errorf("a file system that has turned read-only is called normal")
	}
	v.UnpublishFrom("a")
	v.Unstage()
	v.Stage()
	t.Write(filepath.Join(v.PublishTo("a"), "file"), "content 2")
	v.UnpublishFrom("a")

	// The unmount goes well, the detach does not, and then only publish is called (B076).
	held := t.Hold("/dev/" + v.Device())
	t.Refused(v.TryUnstage(t.Context()), "an unstage of a device that is held")
	t.RefusedAs(v.TryPublishTo(t.Context(), "b", false), "a publish after half an unstage", lab.FailedPrecondition)
	if lab.Mounted(v.Target("b")) {
		t.Errorf("something is mounted for the pod")
	}
	held()
	t.TryUntil(20*time.Second, "unstage", v.TryUnstage)
	v.Stage()
	t.Expect(filepath.Join(v.PublishTo("b"), "file"), "content 2")
}
