// Command run runs scenarios in a VM: `make vm`, or
//
//	go run ./test/vm/run -kernel 6.1 -scenario 'load/.*' -v
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/gabion-storage/gabion/test/vm/host"
	"github.com/gabion-storage/gabion/test/vm/lab"
	"github.com/gabion-storage/gabion/test/vm/scenario"
)

type options struct {
	kernels  string
	scenario string
	long     bool
	verbose  bool
	list     bool
	binary   string
	cache    string
	append   string
	cpu      string
	keep     string
	parallel int
	seed     uint64
}

func main() {
	var o options
	flag.StringVar(&o.kernels, "kernel", "6.1,latest", "series of Debian cloud kernels, or latest; several with commas")
	flag.StringVar(&o.scenario, "scenario", "", "regular expression of whole names; default: all")
	flag.BoolVar(&o.long, "long", false, "longer rounds, and the scenarios that are only for them")
	flag.BoolVar(&o.verbose, "v", false, "print what scenarios log as they go")
	flag.BoolVar(&o.list, "list", false, "list the scenarios and end")
	flag.StringVar(&o.binary, "binary", os.Getenv("GABION_BINARY"), "static gabion binary to test; default: built from the tree")
	flag.StringVar(&o.cache, "cache", "", "directory for kernels and the root image; default: gabion-vm in the user's cache directory")
	flag.StringVar(&o.cpu, "cpu", "Nehalem,+rdrand,+rdtscp", "model of the guest's processors, as QEMU names it")
	flag.StringVar(&o.append, "append", "", "more words for the kernel's command line")
	flag.StringVar(&o.keep, "console", "bin/vm-console", "where the console goes if a scenario fails, or with -v: this and the kernel's version and a number")
	flag.IntVar(&o.parallel, "parallel", runtime.NumCPU(), "processors that guests use at the same time")
	flag.Uint64Var(&o.seed, "seed", 0, "of what is random in scenarios; 0: a new one")
	flag.Parse()
	if o.seed == 0 {
		o.seed = rand.Uint64()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
}

func (o *options) run(ctx context.Context) error {
	scenarios, err := o.choose()
	if err != nil {
		return err
	}
	if o.list {
		for _, s := range scenarios {
			fmt.Println(s.Name)
		}
		return nil
	}
	root, kernels, err := o.prepare(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "gabion-vm-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binaries, err := o.build(ctx, dir)
	if err != nil {
		return err
	}
	suite := host.Suite{Processors: o.parallel, Out: os.Stdout, Verbose: o.verbose, Long: o.long, Seed: o.seed}
	for _, kernel := range kernels {
		m, err := o.machine(ctx, dir, root, kernel, binaries)
		if err != nil {
			return err
		}
		suite.Machines = append(suite.Machines, m)
	}
	return suite.Run(ctx, scenarios)
}

// prepare makes sure that the cache has what the run needs. Only this has to wait for other runs.
func (o *options) prepare(ctx context.Context) (root string, kernels []*host.Kernel, err error) {
	cache, err := host.OpenCache(o.cache, os.Stdout)
	if err != nil {
		return "", nil, err
	}
	defer func() { _ = cache.Close() }()
	if root, err = cache.RootImage(ctx); err != nil {
		return "", nil, err
	}
	for series := range strings.SplitSeq(o.kernels, ",") {
		k, err := cache.FetchKernel(ctx, series)
		if err != nil {
			return "", nil, err
		}
		kernels = append(kernels, k)
	}
	return root, kernels, nil
}

// choose are the scenarios that were asked for.
func (o *options) choose() ([]lab.Scenario, error) {
	re, err := regexp.Compile("^(?:" + o.scenario + ")$")
	if err != nil {
		return nil, err
	}
	chosen := slices.DeleteFunc(scenario.All(), func(s lab.Scenario) bool {
		if o.scenario != "" {
			return !re.MatchString(s.Name)
		}
		return s.Long && !o.long
	})
	if len(chosen) == 0 {
		return nil, fmt.Errorf("SCENARIO=%s is the name of no scenario; -list lists them", o.scenario)
	}
	return chosen, nil
}

// build makes the static binaries of the guest: its first process, the agent, gabion, and csi-sanity's suite.
func (o *options) build(ctx context.Context, dir string) ([]string, error) {
	_, file, _, _ := runtime.Caller(0)
	tree := filepath.Join(filepath.Dir(file), "..", "..", "..")
	gabion := filepath.Join(dir, "gabion")
	initial, agent := filepath.Join(dir, "init"), filepath.Join(dir, "agent")
	wanted := map[string]string{initial: "./test/vm/guest/init", agent: "./test/vm/guest/agent"}
	if o.binary == "" {
		wanted[gabion] = "./cmd/gabion"
	} else if err := os.Symlink(o.binary, gabion); err != nil {
		return nil, err
	}
	suite := filepath.Join(dir, "sanity")
	wanted[suite] = "./test/sanity"
	for out, pkg := range wanted {
		verb := []string{"build"}
		if out == suite {
			verb = []string{"test", "-c"}
		}
		cmd := exec.CommandContext(ctx, "go", append(verb, "-trimpath", "-ldflags=-s -w", "-o", out, pkg)...)
		cmd.Dir, cmd.Stderr = tree, os.Stderr
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH=amd64")
		if err := cmd.Run(); err != nil {
			return nil, fmt.Errorf("building %s: %w", pkg, err)
		}
	}
	return []string{initial, agent, gabion, suite}, nil
}

// machine lays out what the guests of one kernel share.
func (o *options) machine(ctx context.Context, dir, root string, k *host.Kernel, binaries []string) (*host.Machine, error) {
	at := func(name string) string { return filepath.Join(dir, k.Release+"-"+name) }
	m := &host.Machine{
		Kernel: k, Root: root, Payload: at("payload.img"), Initrd: at("initrd"), Data: at("data.img"), Console: at("console.log"),
		Keep: o.keep, CPU: o.cpu, Append: o.append,
	}
	if err := host.WritePayload(ctx, m.Payload, k, binaries...); err != nil {
		return nil, err
	}
	if err := host.WriteInitrd(m.Initrd, k, binaries[0]); err != nil {
		return nil, err
	}
	return m, nil
}
