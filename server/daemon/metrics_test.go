package daemon

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gabion-storage/gabion/server/block"
)

func TestTraffic(t *testing.T) {
	var table TrafficTable
	id := block.VolumeID{UUID: block.UUID{1}}
	v := table.Of(id)
	v.Started(4)
	v.Finished(block.OpRead, 4096, 30*time.Microsecond, nil)
	v.Finished(block.OpRead, 8192, time.Minute, nil)
	v.Finished(block.OpRead, 512, 20*time.Microsecond, block.ErrIO)
	text := expose(t, &table)
	for _, line := range []string{
		`gabion_volume_bytes_total{op="read",volume_id="01000000-0000-0000-0000-000000000000"} 12288`,
		`gabion_volume_errors_total{op="read",volume_id="01000000-0000-0000-0000-000000000000"} 1`,
		`gabion_volume_in_flight{volume_id="01000000-0000-0000-0000-000000000000"} 1`,
		`gabion_volume_request_seconds_bucket{op="read",volume_id="01000000-0000-0000-0000-000000000000",le="2e-05"} 1`,
		`gabion_volume_request_seconds_bucket{op="read",volume_id="01000000-0000-0000-0000-000000000000",le="5e-05"} 2`,
		`gabion_volume_request_seconds_bucket{op="read",volume_id="01000000-0000-0000-0000-000000000000",le="30"} 2`,
		`gabion_volume_request_seconds_count{op="read",volume_id="01000000-0000-0000-0000-000000000000"} 3`,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("missing %s in\n%s", line, text)
		}
	}
	if table.Of(id) != v {
		t.Error("another opening has other counters")
	}
	table.Forget(id)
	if text := expose(t, &table); strings.Contains(text, "gabion_volume") {
		t.Errorf("a deleted volume still has series:\n%s", text)
	}
}

func expose(t *testing.T, c prometheus.Collector) string {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c)
	w := httptest.NewRecorder()
	NewHTTP(HTTPConfig{Metrics: r, Ready: func() error { return nil }, Log: quiet}).server.Handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	return w.Body.String()
}

func TestTrafficAllocatesNothing(t *testing.T) {
	var table TrafficTable
	v := table.Of(block.VolumeID{})
	if n := testing.AllocsPerRun(100, func() {
		v.Started(1)
		v.Finished(block.OpWrite, 4096, time.Millisecond, nil)
	}); n != 0 {
		t.Errorf("%v allocations per request", n)
	}
}

func TestRegistry(t *testing.T) {
	r := NewRegistry(Version{Version: "v1", Commit: "abc", Go: "go1"})
	got, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, f := range got {
		names[f.GetName()] = true
	}
	for _, n := range []string{"gabion_build_info", "go_goroutines", "process_resident_memory_bytes"} {
		if !names[n] {
			t.Errorf("no metric %s", n)
		}
	}
}
