package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// app is one run of the command line.
type app struct {
	out, err io.Writer
	// daemon.Harden and HardenRunner; nil: not this process.
	harden, hardenRunner func() []error
	machine              machine // where devices are

	servers string        // --server
	output  string        // -o
	timeout time.Duration // --timeout; 0: none

	// acting is set once arguments and flags were understood: an error before
	// that is one of usage.
	acting bool
}

func newApp(out, err io.Writer) *app { return &app{out: out, err: err} }

// errUsage marks an error in what was typed: exit code 2.
var errUsage = errors.New("usage")

func usagef(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errUsage, fmt.Errorf(format, args...))
}

// run executes one command line and returns its exit code.
func (a *app) run(ctx context.Context, args []string) int {
	root := a.rootCommand()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	switch {
	case err == nil:
		return 0
	case !a.acting || errors.Is(err, errUsage):
		text := strings.TrimPrefix(err.Error(), errUsage.Error()+": ")
		fmt.Fprintf(a.err, "gabion: %s\nRun '%s --help' for usage.\n", text, cmd.CommandPath())
		return 2
	}
	fmt.Fprintf(a.err, "gabion: %s\n", a.sentence(err))
	return 1
}

const rootHelp = `Gabion turns the disks of ordinary Linux machines into thin-provisioned volumes
and serves them over NBD.

A first look, without root:   gabion demo
Exit codes: 0 done, 1 refused or failed, 2 usage.`

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:                        "gabion",
		Short:                      "Replicated block storage over NBD",
		Long:                       rootHelp,
		SilenceErrors:              true,
		SilenceUsage:               true,
		Args:                       noSuchCommand,
		RunE:                       help,
		SuggestionsMinimumDistance: 2,
	}
	root.SetOut(a.out)
	root.SetErr(a.err)
	f := root.PersistentFlags()
	f.StringVar(&a.servers, "server", envOr("GABION_SERVER", defaultServer), "metadata servers, `HOST:PORT[,...]`; the environment variable GABION_SERVER sets the default")
	f.VarP(newChoice(&a.output, "table", "json"), "output", "o", "how to print: table or json")
	f.DurationVar(&a.timeout, "timeout", 30*time.Second, "give up after this long; 0: never")
	root.SetHelpCommand(helpCommand(root))
	root.AddCommand(
		a.serverCommand(), a.volumeCommand(), a.attachCommand(), a.detachCommand(), a.attachdCommand(), a.csiCommand(), a.nodeCommand(), a.diskCommand(),
		a.statusCommand(), a.eventsCommand(), a.demoCommand(), a.versionCommand(),
	)
	return root
}

// act is the RunE of a command that takes what it was given.
func (a *app) act(f func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		a.acting = true
		if a.timeout < 0 {
			return usagef("--timeout %v: it is positive, or 0 for never", a.timeout)
		}
		return f(cmd.Context(), args)
	}
}

// group is a command that only has subcommands; a word it does not know is an error.
func group(use, short string, sub ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: noSuchCommand, RunE: help, SuggestionsMinimumDistance: 2}
	c.AddCommand(sub...)
	return c
}

func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	meant := ""
	if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
		meant = fmt.Sprintf(": did you mean %s?", strings.Join(s, " or "))
	}
	return fmt.Errorf("there is no command \"%s %.40s\"%s", cmd.CommandPath(), args[0], meant)
}

// oneVolume is the argument of a command that acts on a volume.
func oneVolume(cmd *cobra.Command, args []string) error {
	switch len(args) {
	case 0:
		return fmt.Errorf("name the volume: %s NAME", cmd.CommandPath())
	case 1:
		return nil
	}
	return fmt.Errorf("one volume at a time: %.40q is too much", args[1])
}

// helpCommand is cobra's, but one that is asked about what is not there says so.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Help about any command",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err == nil {
				err = noSuchCommand(cmd, rest)
			}
			if err != nil {
				return err
			}
			return cmd.Help()
		},
	}
}

func help(cmd *cobra.Command, _ []string) error { return cmd.Help() }

func envOr(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

// isTerminal reports whether a person reads w.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
