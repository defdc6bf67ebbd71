package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
)

// Result is everything a run found out; its JSON form is what bench/baseline keeps.
type Result struct {
	Host    Host        `json:"host"`
	Size    int64       `json:"volume_bytes"`
	Seconds float64     `json:"round_seconds"`
	Peers   []PeerInfo  `json:"peers"`
	Jobs    []JobResult `json:"jobs"`
}

// PeerInfo is one server of the run. The first is compared with each of the others.
type PeerInfo struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	target  Target
}

// JobResult is one job's rounds, per peer.
type JobResult struct {
	Name  string              `json:"name"`
	Peers map[string]*Samples `json:"peers"`
}

// Samples are one peer's rounds, in the order in which they ran.
type Samples struct {
	Rounds          []Sample `json:"rounds"`
	CallsPerRequest float64  `json:"system_calls_per_request,omitempty"`
}

// metrics are what ratios are made of.
var metrics = map[string]func(Sample) float64{
	"iops": func(s Sample) float64 { return s.IOPS },
	"cpu":  func(s Sample) float64 { return s.CPUMicros },
	"p50":  func(s Sample) float64 { return s.P50Micros },
	"p99":  func(s Sample) float64 { return s.P99Micros },
}

// goal is what the project wants of a ratio of gabion to nbdkit.
type goal struct {
	job, metric string
	atMost      bool // else at least
	limit       float64
}

var goals = []goal{
	{"randread-4k-depth32", "cpu", true, 0.8},
	{"randread-4k-depth32", "iops", false, 1.2},
	{"randread-4k-depth1", "iops", false, 1.5},
	{"read-128k", "iops", false, 1},
	{"write-128k", "iops", false, 1},
}

func (s *Samples) median(metric string) float64 {
	var v []float64
	for _, r := range s.Rounds {
		v = append(v, metrics[metric](r))
	}
	return median(v)
}

// ratio is the median of the rounds' ratios: neighbours in time are compared, so a slow drift of the machine cancels out.
func (j JobResult) ratio(metric, a, b string) float64 {
	var v []float64
	for i := range min(len(j.Peers[a].Rounds), len(j.Peers[b].Rounds)) {
		if d := metrics[metric](j.Peers[b].Rounds[i]); d > 0 {
			v = append(v, metrics[metric](j.Peers[a].Rounds[i])/d)
		}
	}
	return median(v)
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

func (r Result) print(w io.Writer) {
	h := r.Host
	fmt.Fprintf(w, "\n%s, %d cores, kernel %s, %s, %s, commit %s, %s\n", h.CPU, h.Cores, h.Kernel, h.Go, h.Fio, h.Commit, h.Date)
	for _, p := range r.Peers {
		fmt.Fprintf(w, "%s: %s\n", p.Name, p.Version)
	}
	fmt.Fprintf(w, "medians; UNIX sockets, a filled volume of %d MiB, rounds of %.0f s in turns\n\n", r.Size>>20, r.Seconds)
	r.printFigures(w)
	for _, peer := range r.Peers[1:] {
		r.printRatios(w, r.Peers[0].Name, peer.Name)
	}
}

func (r Result) printFigures(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(t, "job\tpeer\tIOPS\tp50 µs\tp99 µs\tCPU µs/req\tcalls/req\tnoisy rounds\t")
	for _, j := range r.Jobs {
		for _, p := range r.Peers {
			s := j.Peers[p.Name]
			noisy, calls := 0, "-"
			for _, x := range s.Rounds {
				if x.warning() != "" {
					noisy++
				}
			}
			if s.CallsPerRequest > 0 {
				calls = fmt.Sprintf("%.2f", s.CallsPerRequest)
			}
			_, _ = fmt.Fprintf(t, "%s\t%s\t%.0f\t%.1f\t%.1f\t%.2f\t%s\t%d of %d\t\n", j.Name, p.Name,
				s.median("iops"), s.median("p50"), s.median("p99"), s.median("cpu"), calls, noisy, len(s.Rounds))
		}
	}
	_ = t.Flush()
}

func (r Result) printRatios(w io.Writer, a, b string) {
	fmt.Fprintf(w, "\n%s ÷ %s\n", a, b)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(t, "job\tIOPS\tCPU/req\tp50\tp99\tgoals\t")
	for _, j := range r.Jobs {
		_, _ = fmt.Fprintf(t, "%s\t%.2f×\t%.2f×\t%.2f×\t%.2f×\t%s\t\n", j.Name,
			j.ratio("iops", a, b), j.ratio("cpu", a, b), j.ratio("p50", a, b), j.ratio("p99", a, b), j.verdict(a, b))
	}
	_ = t.Flush()
}

// verdict says how a job's goals stand.
func (j JobResult) verdict(a, b string) string {
	if a != "gabion" || b != "nbdkit" {
		return ""
	}
	text := ""
	for _, g := range goals {
		if g.job != j.Name {
			continue
		}
		ratio, sign := j.ratio(g.metric, a, b), "≥"
		met := ratio >= g.limit
		if g.atMost {
			met, sign = ratio <= g.limit, "≤"
		}
		mark := "missed"
		if met {
			mark = "met"
		}
		text += fmt.Sprintf("  %s %s %.1f %s", g.metric, sign, g.limit, mark)
	}
	return text
}

func (r Result) save(path string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}
