package scenario

import (
	"path/filepath"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func limits() []lab.Scenario {
	return []lab.Scenario{
		{Name: "B033-outage-limit", Run: outageLimit, Once: true, Waits: true, Timeout: 4 * time.Minute},
	}
}

// outageLimit: an outage that is shorter than the devices' limit is a pause and no error; a longer one fails everything
// that waits, is told, and is over when the volumes have been staged anew (B033).
func outageLimit(t *lab.T) {
	const limit = 25 * time.Second // several commits of a journal
	t.LoadDriver()
	s := t.Server(lab.Everywhere()...)
	p := t.Plugin("--outage-limit", limit.String())
	volumes := []*lab.Volume{t.Volume(p, p, lab.VolumeSpec{Name: "ext4"}), t.Volume(p, p, lab.VolumeSpec{Name: "xfs", FS: "xfs"})}
	var pods []string
	for _, v := range volumes {
		pods = append(pods, v.Up("a"))
		t.Write(filepath.Join(pods[len(pods)-1], "kept"), "content")
	}
	l := t.Load(pods...)
	l.Outage("a server that is away for less than the limit", func() {
		s.Kill()
		t.Pause(limit - 5*time.Second)
		s.Start()
	})
	l.Stop()
	t.NoIOErrors()

	s.Kill()
	began := time.Now() // file systems write by themselves, too
	for i, v := range volumes {
		failed := make(chan error, 1)
		go func() { failed <- lab.TryWrite(filepath.Join(pods[i], "lost"), "content") }()
		select {
		case err := <-failed:
			t.Refused(err, "a write beyond the limit")
		case <-time.After(limit + 20*time.Second):
			t.Fatalf("%s: a write still waits %v after the server's end", v.Name, time.Since(began))
		}
		took := time.Since(began)
		if took < limit {
			t.Errorf("%s: a write failed after %v; the limit is %v", v.Name, took, limit)
		}
		t.Figure("%s: a write has failed %.1f s after the server's end, the limit being %v", v.Name, took.Seconds(), limit)
	}
	s.Start()
	for i, v := range volumes {
		t.Eventually(30*time.Second, "the device is connected again", func() bool { return !strings.Contains(strings.Join(v.Health(), " "), "Disconnected") })
		t.Refused(lab.TryWrite(filepath.Join(pods[i], "after"), "content"), "a write after the limit")
		t.Logf("%s: %s", v.Name, strings.Join(v.Health(), "; "))
		if v.Abnormal() == "" {
			t.Errorf("%s: nothing is wrong, says the volume's condition", v.Name)
		}
		v.Down()
		t.Expect(filepath.Join(v.Up("b"), "kept"), "content")
		v.Down()
	}
}
