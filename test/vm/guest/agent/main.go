// Command agent runs scenarios inside a test VM, as the kernel's command line asks, and tells the host what comes of them.
package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/test/vm/lab"
	"github.com/gabion-storage/gabion/test/vm/scenario"
)

const (
	eventPort = "/dev/ttyS1"
	dataDir   = "/data"
)

// main runs what the kernel's command line asks for, and stops at the first one that fails or wants a power
// cut: the host ends or boots the VM as it sees fit.
func main() {
	port, err := openPort()
	if err != nil {
		fmt.Println("agent:", err)
		os.Exit(1)
	}
	events := lab.NewEvents(port)
	events.Send(lab.Event{Kind: lab.Booted, Text: release()})
	plan := lab.Plan{Long: argument("gabion.long") == "1", Data: dataDir}
	plan.Seed, _ = strconv.ParseUint(argument("gabion.seed"), 10, 64)
	plan.Boot, _ = strconv.Atoi(argument("gabion.boot"))
	all := scenario.All()
	for name := range strings.SplitSeq(argument("gabion.run"), ",") {
		i := slices.IndexFunc(all, func(s lab.Scenario) bool { return s.Name == name })
		if i < 0 {
			events.Send(lab.Event{Kind: lab.Failed, Scenario: name, Text: "no such scenario"})
			continue
		}
		outcome := lab.RunScenario(all[i], plan, events)
		events.Send(lab.Event{Kind: outcome, Scenario: name})
		if outcome == lab.Cut {
			_ = unix.Pause() // until the host cuts the power: nothing is synced
		}
		if outcome != lab.Passed {
			break
		}
		plan.Boot = 0
	}
	syncData()
	events.Send(lab.Event{Kind: lab.Ended})
}

// openPort opens the serial line to the host, without the line editing of a terminal.
func openPort() (*os.File, error) {
	f, err := os.OpenFile(eventPort, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	t, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, err
	}
	t.Oflag, t.Lflag, t.Iflag = 0, 0, 0
	return f, unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, t)
}

func argument(name string) string {
	b, _ := os.ReadFile("/proc/cmdline")
	for _, word := range strings.Fields(string(b)) {
		if key, value, ok := strings.Cut(word, "="); ok && key == name {
			return value
		}
	}
	return ""
}

func release() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	return unix.ByteSliceToString(u.Release[:])
}

// syncData syncs the persistent disk alone: a failed scenario may have left a file system whose device answers nobody.
func syncData() {
	if d, err := os.Open(dataDir); err == nil {
		_ = unix.Syncfs(int(d.Fd()))
		_ = d.Close()
	}
}
