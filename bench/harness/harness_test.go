package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReportOfOneGroup(t *testing.T) {
	for _, c := range []struct {
		name, report string
		requests     int64
		bad          string
	}{
		{name: "read", requests: 7,
			report: `{"jobs":[{"error":0,"read":{"total_ios":7,"iops":3.5,"lat_ns":{"mean":2000},"clat_ns":{"percentile":{"99.000000":4000}}},"write":{"total_ios":0}}]}`},
		{name: "write", requests: 9, report: `{"jobs":[{"error":0,"read":{"total_ios":0},"write":{"total_ios":9}}]}`},
		{name: "nothing done", bad: "did 0 requests", report: `{"jobs":[{"error":0,"read":{"total_ios":0},"write":{"total_ios":0}}]}`},
		{name: "failed", bad: "error 5", report: `{"jobs":[{"error":5,"read":{"total_ios":1},"write":{"total_ios":0}}]}`},
		{name: "two groups", bad: "2 groups", report: `{"jobs":[{},{}]}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var r fioReport
			if err := json.Unmarshal([]byte(c.report), &r); err != nil {
				t.Fatal(err)
			}
			s, err := r.sample()
			switch {
			case c.bad == "" && err != nil, c.bad != "" && (err == nil || !strings.Contains(err.Error(), c.bad)):
				t.Fatalf("error %v, want %q", err, c.bad)
			case s.Requests != c.requests:
				t.Fatalf("%d requests, want %d", s.Requests, c.requests)
			case c.name == "read" && (s.MeanMicros != 2 || s.P99Micros != 4):
				t.Fatalf("latencies %v and %v µs, want 2 and 4", s.MeanMicros, s.P99Micros)
			}
		})
	}
}

// A slow round slows both peers; the ratio must not see it.
func TestRatioComparesNeighbours(t *testing.T) {
	j := JobResult{Name: "randread-4k-depth32", Peers: map[string]*Samples{
		"gabion": {Rounds: []Sample{{IOPS: 200, CPUMicros: 4}, {IOPS: 20, CPUMicros: 40}, {IOPS: 220, CPUMicros: 4}}},
		"nbdkit": {Rounds: []Sample{{IOPS: 100, CPUMicros: 8}, {IOPS: 10, CPUMicros: 80}, {IOPS: 110, CPUMicros: 8}}},
	}}
	if r := j.ratio("iops", "gabion", "nbdkit"); r != 2 {
		t.Errorf("IOPS ratio %v, want 2", r)
	}
	if r := j.ratio("cpu", "gabion", "nbdkit"); r != 0.5 {
		t.Errorf("CPU ratio %v, want 0.5", r)
	}
	if v := j.verdict("gabion", "nbdkit"); strings.Count(v, " met") != 2 {
		t.Errorf("verdict %q, want both goals met", v)
	}
}

func TestStraceTotal(t *testing.T) {
	for summary, want := range map[string]string{
		"100.00    1.234567           2    654321        17 total\n": "654321",
		"100.00    1.234567           2    654321           total\n": "654321",
	} {
		m := straceTotal.FindStringSubmatch("% time     seconds  usecs/call     calls    errors syscall\n" + summary)
		if m == nil || m[1] != want {
			t.Errorf("total of %q: %v", summary, m)
		}
	}
}

// Every goal and every file of bench/fio name the same jobs.
func TestGoalsNameJobs(t *testing.T) {
	jobs, err := findJobs(filepath.Join("..", "fio"), "")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, j := range jobs {
		names[j.name] = true
		if b, err := os.ReadFile(j.path); err != nil || !strings.Contains(string(b), "["+j.name+"]") {
			t.Errorf("%s has no section of its own name (%v)", j.path, err)
		}
	}
	for _, g := range goals {
		if !names[g.job] {
			t.Errorf("a goal names job %q, which bench/fio lacks", g.job)
		}
	}
}
