package lab

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// unanswered tells of devices with requests in flight: who receives in the kernel, what lies in the
// sockets on either side, and, of a server that runs, what it does. Nothing is said while there are none.
func (t *T) unanswered() {
	var devices []string
	paths, _ := filepath.Glob("/sys/block/nbd*/inflight")
	for _, p := range paths {
		if f := strings.Fields(ReadText(p)); len(f) == 2 && (f[0] != "0" || f[1] != "0") {
			devices = append(devices, fmt.Sprintf("%s: %s reads, %s writes", filepath.Base(filepath.Dir(p)), f[0], f[1]))
		}
	}
	if len(devices) == 0 {
		return
	}
	t.Logf("not answered: %s", strings.Join(devices, "; "))
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range procs {
		if comm := ReadText(d + "/comm"); strings.Contains(comm, "-recv") { // the driver's receivers, or a rescuer in their place
			t.Logf("%s: %s", comm, strings.ReplaceAll(ReadText(d+"/stack"), "\n", " < "))
		}
	}
	queues := func(of string) error {
		table, err := os.ReadFile("/proc/thread-self/net/tcp")
		for _, l := range lines(string(table)) {
			if f := strings.Fields(l); len(f) > 5 && f[4] != "00000000:00000000" && f[4] != "tx_queue" {
				t.Logf("%s: %s → %s in state %s has %s to send and receive", of, f[1], f[2], f[3], f[4])
			}
		}
		return err
	}
	_ = queues("the node")
	_ = inNamespace(storageNS, func() error { return queues("the storage") })
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second) // the scenario's own may be over
	defer cancel()
	for _, addr := range []string{AddrA, AddrB} {
		_, text, err := ask(ctx, http.MethodGet, "http://"+addr+":7480/metrics", "")
		for _, l := range lines(text) {
			if err == nil && strings.HasPrefix(l, "gabion_volume_in_flight") && !strings.HasSuffix(l, " 0") {
				t.Logf("the server at %s: %s", addr, l)
			}
		}
	}
	_, text, err := ask(ctx, http.MethodGet, "http://127.0.0.1:7480/debug/pprof/goroutine?debug=1", "")
	if err == nil {
		t.Logf("the server's goroutines:\n%s", text)
	}
}
