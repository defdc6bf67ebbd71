package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/test/cluster"
)

// Host is what a result depends on beside the code. It names no machine.
type Host struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Kernel string `json:"kernel"`
	Fio    string `json:"fio"`
	Go     string `json:"go"`
	Commit string `json:"commit"` // of the harness and, unless -binary says otherwise, of gabion
	Date   string `json:"date"`
}

func describeHost() Host {
	h := Host{Cores: runtime.NumCPU(), Fio: firstLine("fio", "--version"), Go: runtime.Version(), CPU: "unknown", Kernel: "unknown"}
	h.Date = time.Now().UTC().Format(time.DateOnly)
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		h.Kernel = strings.TrimSpace(string(b))
	}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := strings.Cut(string(b), "model name\t: "); ok {
			h.CPU, _, _ = strings.Cut(rest, "\n")
		}
	}
	git := exec.Command("git", "describe", "--tags", "--always", "--dirty")
	git.Dir = cluster.Root()
	if out, err := git.Output(); err == nil {
		h.Commit = strings.TrimSpace(string(out))
	}
	return h
}

// systemClock is the time of all cores since boot.
type systemClock struct{ total, busy, stolen time.Duration }

// readSystemClock reads the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
func readSystemClock() (systemClock, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return systemClock{}, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	f := strings.Fields(line)
	if len(f) < 9 || f[0] != "cpu" {
		return systemClock{}, fmt.Errorf("/proc/stat begins with %.80q", line)
	}
	var c systemClock
	for i, s := range f[1:9] {
		ticks, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return systemClock{}, fmt.Errorf("/proc/stat: %w", err)
		}
		t := time.Duration(ticks) * 10 * time.Millisecond
		c.total += t
		switch i {
		case 3, 4: // idle, iowait
		case 7:
			c.stolen += t
		default:
			c.busy += t
		}
	}
	return c, nil
}
