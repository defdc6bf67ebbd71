package scenario

import (
	"strings"

	"github.com/gabion-storage/gabion/test/vm/lab"
)

func basic() []lab.Scenario {
	return []lab.Scenario{
		{Name: "module", Run: module},
		{Name: "serve", Run: serve},
	}
}

// module loads nbd as the host requirements say, and finds no device until one is asked for.
func module(t *lab.T) {
	t.LoadDriver()
	if got := strings.TrimSpace(t.Sh("cat", "/sys/module/nbd/parameters/nbds_max", "/sys/module/nbd/parameters/max_part")); got != "0\n0" {
		t.Fatalf("nbds_max and max_part are %q", got)
	}
	if _, err := t.Try("sh", "-c", "ls -d /sys/block/nbd*"); err == nil {
		t.Fatalf("the module made devices by itself")
	}
}

// serve copies into a volume over the wire between two namespaces and reads it back, before and after a kill.
func serve(t *lab.T) {
	s := t.Server()
	s.Volume("v", "16MiB")
	uri := s.Attach("v", "n1")
	if size := strings.TrimSpace(t.Sh("nbdinfo", "--size", uri)); size != "16777216" {
		t.Fatalf("nbdinfo says %s bytes", size)
	}
	t.Sh("dd", "if=/dev/urandom", "of=/tmp/source", "bs=1M", "count=16")
	t.Sh("nbdcopy", "--flush", "/tmp/source", uri)
	s.Restart(lab.AddrB)
	t.Sh("nbdcopy", strings.Replace(uri, lab.AddrA, lab.AddrB, 1), "/tmp/copy")
	t.Sh("cmp", "/tmp/source", "/tmp/copy")
	t.Figure("the disk holds %d MiB", s.Used()>>20)
	t.Sh("rm", "/tmp/source", "/tmp/copy")
}
