package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/server/block"
)

// H86, B044: no server is there, and a mounted device is given up: what waits fails, and the number is free once it is unmounted.
func TestDetachGiveUp(t *testing.T) {
	b := newBench(t)
	defer b.close()
	b.volume("v", "here")
	if code, _, errs := b.run("attach", "v", "--device", "--node", "here", "--state", b.state); code != 0 {
		t.Fatalf("exit %d, %q", code, errs)
	}
	unmount := b.fake.Mount(0, "/mnt")
	b.nbd.Kill()
	waits := b.fake.Start(0)
	for _, name := range []string{"v", "/dev/nbd1"} {
		if code, _, errs := b.run("detach", name, "--give-up", "--state", b.state); code != 1 || !strings.Contains(errs, "/dev/nbd0") {
			t.Errorf("%s: exit %d, %q", name, code, errs)
		}
	}
	if code, _, errs := b.run("detach", "/dev/nbd0", "--give-up", "--state", b.state, "--server", "127.0.0.1:1"); code != 0 || !strings.Contains(errs, "mounted at /mnt") {
		t.Errorf("exit %d, %q", code, errs)
	}
	if err := <-waits; !errors.Is(err, block.ErrIO) {
		t.Errorf("a request that waited: %v", err)
	}
	unmount()
	if nodes, err := b.fake.Places(); err != nil || len(nodes) > 0 && nodes[0].Configured {
		t.Errorf("%v, %v", nodes, err)
	}
}
