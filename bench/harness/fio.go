package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// job is one fio job file, known by its name without the extension.
type job struct{ name, path string }

func findJobs(dir, wanted string) ([]job, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.fio"))
	if err != nil {
		return nil, err
	}
	var all []job
	for _, p := range paths {
		all = append(all, job{strings.TrimSuffix(filepath.Base(p), ".fio"), p})
	}
	if wanted == "" && len(all) > 0 {
		return all, nil
	}
	var jobs []job
	for _, name := range splitNames(wanted) {
		i := slices.IndexFunc(all, func(j job) bool { return j.name == name })
		if i < 0 {
			return nil, fmt.Errorf("no job %q in %s", name, dir)
		}
		jobs = append(jobs, all[i])
	}
	if len(jobs) == 0 {
		return nil, fmt.Errorf("no job files in %s", dir)
	}
	return jobs, nil
}

// Sample is one round of one job against one peer.
type Sample struct {
	Requests   int64   `json:"requests"`
	IOPS       float64 `json:"iops"`
	MeanMicros float64 `json:"latency_mean_us"`
	P50Micros  float64 `json:"latency_p50_us"`
	P99Micros  float64 `json:"latency_p99_us"`
	CPUMicros  float64 `json:"server_cpu_us_per_request"`
	// Foreign is the part of all cores' time that neither server nor fio used: above a few per cent the round is wrong.
	Foreign float64 `json:"foreign_cpu"`
	// Stolen is the part that the hypervisor took.
	Stolen float64 `json:"stolen_cpu"`
}

func (s Sample) warning() string {
	if s.Foreign > 0.05 || s.Stolen > 0.02 {
		return fmt.Sprintf("  NOISY: others used %.0f %% of the cores, %.0f %% were stolen", 100*s.Foreign, 100*s.Stolen)
	}
	return ""
}

// runJob is one round. Nothing else asks the server for anything, so its CPU
// time around fio's run, over all requests of the run, is the cost of a request.
func runJob(ctx context.Context, j job, t Target, length time.Duration) (Sample, error) {
	system, server, err := readClocks(t.PID)
	if err != nil {
		return Sample{}, err
	}
	out, fioCPU, err := fio(ctx, t.URI, length, j.path)
	if err != nil {
		return Sample{}, err
	}
	systemAfter, serverAfter, err := readClocks(t.PID)
	if err != nil {
		return Sample{}, err
	}
	s, err := out.sample()
	if err != nil {
		return Sample{}, err
	}
	used := serverAfter - server
	s.CPUMicros = float64(used.Microseconds()) / float64(s.Requests)
	if all := systemAfter.total - system.total; all > 0 {
		s.Foreign = max(0, float64(systemAfter.busy-system.busy-used-fioCPU)/float64(all))
		s.Stolen = float64(systemAfter.stolen-system.stolen) / float64(all)
	}
	return s, nil
}

func readClocks(pid int) (systemClock, time.Duration, error) {
	system, err := readSystemClock()
	if err != nil {
		return system, 0, err
	}
	server, err := cluster.CPUTime(pid)
	return system, server, err
}

// fill writes the whole volume, so that reads meet the page cache and writes allocated space.
func fill(ctx context.Context, uri string, size int64) error {
	_, _, err := fio(ctx, uri, time.Second, "--name=fill", "--ioengine=nbd", "--uri="+uri, "--rw=write", "--bs=1m",
		"--iodepth=4", "--refill_buffers", fmt.Sprintf("--size=%d", size), "--end_fsync=1")
	return err
}

// fio runs one fio process and returns its report and the CPU time that it used.
func fio(ctx context.Context, uri string, length time.Duration, args ...string) (*fioReport, time.Duration, error) {
	cmd := exec.CommandContext(ctx, "fio", append([]string{"--output-format=json"}, args...)...)
	cmd.Env = append(os.Environ(), "BENCH_URI="+uri, fmt.Sprintf("BENCH_SECONDS=%d", int(length.Seconds())))
	var out, diagnostics bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &diagnostics
	if err := cmd.Run(); err != nil {
		return nil, 0, fmt.Errorf("fio: %w: %s", err, diagnostics.String())
	}
	var r fioReport
	// Engines print a line or two of their own before the report.
	if err := json.Unmarshal(out.Bytes()[max(0, bytes.IndexByte(out.Bytes(), '{')):], &r); err != nil {
		return nil, 0, fmt.Errorf("reading fio's report: %w", err)
	}
	return &r, cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}

// fioReport is the part of fio's JSON that is used.
type fioReport struct {
	Jobs []struct {
		Error int          `json:"error"`
		Read  fioDirection `json:"read"`
		Write fioDirection `json:"write"`
	} `json:"jobs"`
}

type fioDirection struct {
	IOPS    float64                `json:"iops"`
	Total   int64                  `json:"total_ios"`
	Latency struct{ Mean float64 } `json:"lat_ns"`
	Client  struct {
		Percentile map[string]float64 `json:"percentile"`
	} `json:"clat_ns"`
}

// sample is the report of a job of one direction with group_reporting.
func (r *fioReport) sample() (Sample, error) {
	if len(r.Jobs) != 1 {
		return Sample{}, fmt.Errorf("fio reports %d groups; a job file has one job and group_reporting", len(r.Jobs))
	}
	j := r.Jobs[0]
	d := j.Read
	if d.Total == 0 {
		d = j.Write
	}
	if j.Error != 0 || d.Total == 0 {
		return Sample{}, fmt.Errorf("fio did %d requests, error %d", d.Total, j.Error)
	}
	return Sample{
		Requests: d.Total, IOPS: d.IOPS, MeanMicros: d.Latency.Mean / 1e3,
		P50Micros: d.Client.Percentile["50.000000"] / 1e3, P99Micros: d.Client.Percentile["99.000000"] / 1e3,
	}, nil
}

// strace's summary ends in a line "100.00 SECONDS USECS/CALL CALLS [ERRORS] total".
var straceTotal = regexp.MustCompile(`(?m)^100\.00\s+\S+\s+\S+\s+(\d+)\s.*total$`)

// countCalls runs the job once more with strace on the server.
func countCalls(ctx context.Context, j job, t Target) (float64, error) {
	summary, err := os.CreateTemp("", "gabion-strace-*")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.Remove(summary.Name()) }()
	defer func() { _ = summary.Close() }()

	strace := exec.CommandContext(ctx, "strace", "-f", "-c", "-o", summary.Name(), "-p", strconv.Itoa(t.PID))
	if err := strace.Start(); err != nil {
		return 0, err
	}
	out, _, runErr := fio(ctx, t.URI, 2*time.Second, j.path)
	_ = strace.Process.Signal(syscall.SIGINT)
	_ = strace.Wait() // it ends with the signal
	if runErr != nil {
		return 0, runErr
	}
	s, err := out.sample()
	if err != nil {
		return 0, err
	}
	text, err := os.ReadFile(summary.Name())
	if err != nil {
		return 0, err
	}
	m := straceTotal.FindSubmatch(text)
	if m == nil {
		return 0, errors.New("strace printed no total")
	}
	calls, err := strconv.ParseFloat(string(m[1]), 64)
	return calls / float64(s.Requests), err
}
