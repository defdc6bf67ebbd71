package scenario

import (
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

// openDevice opens a volume's device past the page cache.
func openDevice(t *lab.T, v *lab.Volume) *os.File {
	f, err := os.OpenFile("/dev/"+v.Device(), os.O_RDWR|unix.O_DIRECT, 0)
	t.Check(err, "the device of volume %s", v.Name)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// put writes a block that is one letter all over; nothing is synced.
func put(t *lab.T, f *os.File, off int64, letter byte) {
	b := lab.AlignedBlock()
	for i := range b {
		b[i] = letter
	}
	_, err := f.WriteAt(b, off)
	t.Check(err, "writing %q", letter)
}

// got is the letter of a block.
func got(t *lab.T, path string, off int64) string {
	b, err := lab.ReadDirect(path, off, 4096)
	t.Check(err, "reading %s", path)
	return string(b[:1])
}

const unflushed = 4096 // offset

// onFlush: what is acknowledged is durable after a flush only, unlike what a volume of one copy is by itself.
var onFlush = map[string]string{"durability": "flush"}

// cacheLost: the server's disk loses what was acknowledged and not flushed while the client lives on. Its device fails for
// good and never says that a sync was done (H21), whoever forgets what (H23); a fresh one has all that was flushed.
func cacheLost(t *lab.T) {
	t.LoadDriver()
	s := t.NewServer()
	disk := t.DiskOf(s, 1024)
	s.Start()
	p := t.Plugin()
	raw := t.Volume(p, p, lab.VolumeSpec{Name: "raw", Block: true, Parameters: onFlush})
	fs := t.Volume(p, p, lab.VolumeSpec{Name: "ext4", Parameters: onFlush})
	raw.Up("pod")
	file := filepath.Join(fs.Up("pod"), "file")
	t.Write(file, "flushed")
	dirty, err := os.OpenFile(filepath.Join(filepath.Dir(file), "dirty"), os.O_RDWR|os.O_CREATE, 0o600)
	t.Check(err, "a file")
	defer func() { _ = dirty.Close() }()
	device := openDevice(t, raw)
	put(t, device, 0, 'F')
	t.Check(device.Sync(), "syncing")
	put(t, device, unflushed, 'U')
	_, err = dirty.WriteString("not synced")
	t.Check(err, "writing")
	epoch := s.Metric("gabion_volume_cache_epoch", raw.ID)

	disk.LoseUnsynced()
	s.Start()
	began := time.Now()
	t.Refused(device.Sync(), "syncing after unflushed data was lost", "input/output error")
	t.Figure("the device failed %.2f s after the server was back", time.Since(began).Seconds())
	if now := s.Metric("gabion_volume_cache_epoch", raw.ID); now <= epoch {
		t.Errorf("the cache epoch was %v and is %v", epoch, now)
	}
	told := strings.Join(raw.Health(), "; ")
	t.Logf("health: %s", told)
	if !strings.Contains(told, "DATA_LOSS") {
		t.Errorf("the volume's health says %q and nothing of lost data", told)
	}
	if err := dirty.Sync(); err == nil && len(fs.Health()) > 0 {
		t.Errorf("a file was synced on a device that has failed")
	}

	p.Kill()
	t.Sh("rm", "-rf", "/run/gabion")
	p.Start()
	t.Pause(3 * time.Second) // more than a scan
	if told := raw.Health(); len(told) == 0 {
		t.Errorf("after a restart of the plugin the device is said to be well")
	}
	t.Refused(device.Sync(), "syncing after a restart of the plugin", "input/output error")

	raw.UnpublishFrom("pod")
	t.Logf("unstage while somebody has the failed device open: %v", raw.TryUnstage(t.Context()))
	raw.Stage() // beside the failed device
	pod := raw.PublishTo("pod")
	if letter := got(t, pod, 0); letter != "F" {
		t.Errorf("a block that was flushed is %q", letter)
	}
	t.Refused(device.Sync(), "syncing the failed device", "input/output error")
	t.Check(device.Close(), "closing the failed device")
	_ = dirty.Close()
	fs.UnpublishFrom("pod")
	fs.Unstage()
	file = filepath.Join(fs.Up("pod"), "file")
	t.Expect(file, "flushed")
	t.Write(file, "again")
	raw.Down()
	fs.Down()
	s.CheckImage(fs)
}

// cacheKept: a kill of the server's process loses nothing, nor does a power cut under write-through: the client sees a
// stall and no more (H22).
func cacheKept(t *lab.T) {
	t.LoadDriver()
	s := t.NewServer()
	disk := t.DiskOf(s, 1024)
	s.Start()
	p := t.Plugin()
	flush := t.Volume(p, p, lab.VolumeSpec{Name: "flush", Block: true, Parameters: onFlush})
	through := t.Volume(p, p, lab.VolumeSpec{Name: "through", Block: true, Parameters: map[string]string{"durability": "write-through"}})
	same := func(v *lab.Volume, fault string, f func()) {
		pod := v.Target("pod")
		device := openDevice(t, v)
		put(t, device, 0, 'U')
		epoch := s.Metric("gabion_volume_cache_epoch", v.ID)
		f()
		began := time.Now()
		t.Check(device.Sync(), "syncing %s after %s", v.Name, fault)
		t.Figure("%s after %s: a sync took %.2f s", v.Name, fault, time.Since(began).Seconds())
		if now := s.Metric("gabion_volume_cache_epoch", v.ID); now != epoch {
			t.Errorf("%s: the cache epoch of %s was %v and is %v", fault, v.Name, epoch, now)
		}
		if letter := got(t, pod, 0); letter != "U" {
			t.Errorf("%s: an acknowledged block of %s is %q", fault, v.Name, letter)
		}
		t.Check(device.Close(), "closing")
	}
	flush.Up("pod")
	through.Up("pod")
	same(flush, "a kill", func() { s.Restart(lab.AddrA) })
	same(through, "a kill", func() { s.Restart(lab.AddrB) })
	flush.Down()
	t.NoIOErrors() // the power cut makes the server's own file system speak
	same(through, "a power cut", func() {
		disk.LoseUnsynced()
		s.Start()
	})
	through.Down()
}
