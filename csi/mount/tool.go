package mount

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/gabion-storage/gabion/server/block"
)

// packages says where a tool comes from.
func packages(tool string) string {
	switch tool {
	case "mkfs.ext4", "e2fsck", "resize2fs":
		return "e2fsprogs"
	case "mkfs.xfs", "xfs_growfs":
		return "xfsprogs"
	}
	return "util-linux"
}

// outcome is how a tool ended.
type outcome struct {
	code int    // its exit code
	text string // the end of what it said, in one line
}

// run runs a tool to its end. An error means that it was not run, or did not
// end by itself.
func run(tool string, args ...string) (outcome, error) { return complete(exec.Command(tool, args...)) }

// complete is run for a command. What it says is its standard error, and its output unless somebody else takes that.
func complete(cmd *exec.Cmd) (outcome, error) {
	out := &tail{limit: 4096}
	cmd.Stderr = out
	if cmd.Stdout == nil {
		cmd.Stdout = out
	}
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	// A group of its own: what ends the plugin's group ends no repair half-way.
	cmd.SysProcAttr.Setpgid = true
	err := cmd.Run()
	o := outcome{text: oneLine(out.String())}
	tool := cmd.Args[0]
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.Is(err, exec.ErrNotFound):
		return o, fmt.Errorf("%w: this host has no %s: install %s", block.ErrUnsupported, tool, packages(tool))
	case errors.As(err, &exit) && exit.Exited():
		o.code = exit.ExitCode()
	case errors.As(err, &exit):
		return o, fmt.Errorf("%w: %s did not end by itself (%s): it is tried again", block.ErrUnavailable, tool, exit)
	default:
		return o, fmt.Errorf("%w: %s: %w", block.ErrUnavailable, tool, err)
	}
	return o, nil
}

// tail keeps the end of what is written to it, at most limit bytes.
type tail struct {
	limit int
	kept  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.limit; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string { return string(t.kept) }

// oneLine is the end of a tool's output, as much as an error has room for.
func oneLine(text string) string {
	text = strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
	const room = 400
	if len(text) > room {
		text = "…" + strings.ToValidUTF8(text[len(text)-room:], "")
	}
	return text
}
