package lab

import (
	"bufio"
	"os"
	"strings"
	"sync"
	"time"

	"fmt"
)

// Go runs a program in the background; its end is told to the channel, and the scenario does not end before it.
func (t *T) Go(name string, args ...string) <-chan error {
	ended := make(chan error, 1)
	var done sync.WaitGroup
	done.Go(func() {
		_, err := t.Try(name, args...)
		ended <- err
	})
	t.Cleanup(done.Wait)
	return ended
}

// Await ends the scenario unless a program of Go ends well within the limit.
func (t *T) Await(ended <-chan error, limit time.Duration, what string, args ...any) {
	what = fmt.Sprintf(what, args...)
	select {
	case err := <-ended:
		t.Check(err, "%s", what)
	case <-time.After(limit):
		t.blocked()
		t.Fatalf("%s: not within %v", what, limit)
	}
}

// MemoryAvailable is what the guest's kernel calls available, in bytes.
func MemoryAvailable() int64 {
	b, _ := os.ReadFile("/proc/meminfo")
	for s := bufio.NewScanner(strings.NewReader(string(b))); s.Scan(); {
		var kib int64
		if _, err := fmt.Sscanf(s.Text(), "MemAvailable: %d kB", &kib); err == nil {
			return kib << 10
		}
	}
	return 0
}

// sanityTest is the binary of package sanity's tests.
const sanityTest = "/gabion/bin/sanity"

// Sanity runs csi-sanity against a plugin of all services and returns what it says of how much it ran.
func (t *T) Sanity(p *Plugin, access string) string {
	out, err := t.Try("env", "GABION_BINARY="+Gabion, "GABION_SANITY="+access, "GABION_SANITY_ENDPOINT="+p.endpoint,
		sanityTest, "-test.run=^TestSanity$", "-test.v")
	if err != nil {
		for _, l := range tail(out, 200) {
			t.Logf("sanity: %s", l)
		}
		t.Fatalf("csi-sanity: %.500v", err)
	}
	for _, l := range lines(out) {
		if strings.Contains(l, "specs ran") {
			return strings.TrimSpace(l)
		}
	}
	t.Fatalf("csi-sanity says nothing of what it ran:\n%s", out)
	return ""
}
