// Command harness measures NBD servers side by side: it starts every peer on a
// volume of the same size and content, runs each fio job of bench/fio against
// one after the other, round by round (A B A B …), and prints what the
// first peer costs and does as ratios to the others. Ratios within one run are
// the result; absolute figures belong to the machine. See bench/README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

type config struct {
	binary  string
	jobs    string
	peers   string
	dir     string
	rounds  int
	length  time.Duration
	size    int64
	calls   bool
	save    string
	jobsDir string
}

func main() {
	var c config
	flag.StringVar(&c.binary, "binary", "bin/gabion", "the gabion `file` to measure")
	flag.StringVar(&c.jobs, "jobs", "", "comma-separated `names` of jobs; default: all")
	flag.StringVar(&c.peers, "peers", "gabion,nbdkit", "comma-separated `names`; ratios are of the first to each of the others")
	flag.StringVar(&c.dir, "dir", "", "`directory` for volumes and sockets; default: a temporary one")
	flag.StringVar(&c.jobsDir, "fio", "bench/fio", "`directory` of the job files")
	flag.IntVar(&c.rounds, "rounds", 5, "rounds per job")
	flag.DurationVar(&c.length, "length", 5*time.Second, "length of one round of one peer")
	flag.Int64Var(&c.size, "size", 1<<30, "size of the volume, in `bytes`")
	flag.BoolVar(&c.calls, "syscalls", false, "also count system calls per request, in one more, slower round under strace")
	flag.StringVar(&c.save, "save", "", "also write the result to this JSON `file`")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, c); err != nil {
		fmt.Fprintln(os.Stderr, "harness:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, c config) (err error) {
	if c.rounds < 1 || c.length < time.Second || c.size < 1<<20 {
		return errors.New("-rounds must be at least 1, -length 1s and -size 1 MiB")
	}
	jobs, err := findJobs(c.jobsDir, c.jobs)
	if err != nil {
		return err
	}
	peers, err := newPeers(c)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(c.dir, "gabion-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	result := Result{Host: describeHost(), Size: c.size, Seconds: c.length.Seconds()}
	for _, p := range peers {
		target, err := p.Start(ctx, filepath.Join(dir, p.Name()), c.size)
		if err != nil {
			return fmt.Errorf("starting %s: %w", p.Name(), err)
		}
		defer func() { err = errors.Join(err, p.Stop()) }()
		result.Peers = append(result.Peers, PeerInfo{Name: p.Name(), Version: p.Version(), target: target})
		if err := fill(ctx, target.URI, c.size); err != nil {
			return fmt.Errorf("filling the volume of %s: %w", p.Name(), err)
		}
	}
	for _, job := range jobs {
		measured, err := measure(ctx, c, job, result.Peers)
		if err != nil {
			return fmt.Errorf("job %s: %w", job.name, err)
		}
		result.Jobs = append(result.Jobs, measured)
	}
	result.print(os.Stdout)
	if c.save != "" {
		return result.save(c.save)
	}
	return nil
}

// measure runs all rounds of one job.
func measure(ctx context.Context, c config, job job, peers []PeerInfo) (JobResult, error) {
	r := JobResult{Name: job.name, Peers: make(map[string]*Samples)}
	for _, p := range peers {
		r.Peers[p.Name] = new(Samples)
	}
	for round := range c.rounds {
		for _, p := range peers {
			s, err := runJob(ctx, job, p.target, c.length)
			if err != nil {
				return r, fmt.Errorf("%s: %w", p.Name, err)
			}
			fmt.Fprintf(os.Stderr, "%-22s round %d/%d %-8s %9.0f IOPS %7.2f µs CPU per request%s\n",
				job.name, round+1, c.rounds, p.Name, s.IOPS, s.CPUMicros, s.warning())
			r.Peers[p.Name].Rounds = append(r.Peers[p.Name].Rounds, s)
		}
	}
	if !c.calls {
		return r, nil
	}
	for _, p := range peers {
		n, err := countCalls(ctx, job, p.target)
		if err != nil {
			return r, fmt.Errorf("%s: counting system calls: %w", p.Name, err)
		}
		r.Peers[p.Name].CallsPerRequest = n
	}
	return r, nil
}

func splitNames(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}
