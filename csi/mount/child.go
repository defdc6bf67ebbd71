package mount

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"

	"github.com/gabion-storage/gabion/server/block"
)

// childName is what a child is called in the list of processes, its task behind it.
const childName = "gabion-mount"

// A process that was started as a child does its task, before anything else of its program begins.
func init() {
	if len(os.Args) == 2 && os.Args[0] == childName {
		os.Exit(work(os.Args[1], os.Stdout))
	}
}

// task is what a child does: one call of Linux.
type task struct {
	Do       job
	Device   string   `json:",omitempty"`
	Point    string   `json:",omitempty"`
	Type     FS       `json:",omitempty"`
	Options  []string `json:",omitempty"`
	ReadOnly bool     `json:",omitempty"`
}

type job string

const (
	doProbe    job = "probe"
	doSync     job = "sync"
	doTry      job = "try"
	doMount    job = "mount"
	doUnmount  job = "unmount"
	doWritable job = "writable"
)

// answer is what a child says at its end.
type answer struct {
	Content Content
	Error   string // "": done
	Kind    int    // of the error: its place in kindsOfErrors
}

// mountTask is a task with a file system.
func mountTask(do job, f FileSystem, point string) task {
	return task{Do: do, Device: f.Device, Point: point, Type: f.Type, Options: f.Options.Strings(), ReadOnly: f.ReadOnly}
}

// apart has a task done by a child and waits for it. A process that waits for a
// device in the kernel cannot be killed, and would keep its socket and locks from
// the next plugin; a child has none of them.
func apart(t task) (Content, error) {
	b, err := json.Marshal(t)
	if err != nil {
		return Content{}, fmt.Errorf("%w: %s: %w", block.ErrInvalid, t.Do, err)
	}
	var said bytes.Buffer
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{childName, string(b)}
	cmd.Stdout = &said
	// It ends with the plugin as soon as the kernel lets it, so that nothing shows late. That is a thread's matter.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	o, err := complete(cmd)
	if err != nil {
		return Content{}, err
	}
	var a answer
	if err := json.Unmarshal(said.Bytes(), &a); o.code != 0 || err != nil {
		return Content{}, fmt.Errorf("%w: the process that was to %s ended with exit code %d: %s", block.ErrUnavailable, t.Do, o.code, o.text)
	}
	return a.Content, a.err()
}

// work is all that a child does.
func work(text string, to io.Writer) (code int) {
	var t task
	if err := json.Unmarshal([]byte(text), &t); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	var a answer
	var err error
	a.Content, err = t.do()
	a.set(err)
	if err := json.NewEncoder(to).Encode(a); err != nil {
		return 1
	}
	return 0
}

func (t task) do() (c Content, err error) {
	switch t.Do {
	case doProbe:
		return probe(t.Device)
	case doSync:
		return c, syncDevice(t.Device)
	case doUnmount:
		return c, unmount(t.Point)
	case doWritable:
		return c, writable(t.Point)
	case doTry, doMount:
	default:
		return c, fmt.Errorf("%w: task %q", block.ErrInvalid, t.Do)
	}
	f := FileSystem{Device: t.Device, Type: t.Type, ReadOnly: t.ReadOnly}
	if f.Options, err = ParseOptions(t.Type, t.Options); err != nil {
		return c, err
	}
	if t.Do == doTry {
		return c, try(f)
	}
	return c, mountAt(f, t.Point)
}

// kindsOfErrors are the sentinels that a child's errors wrap; any other is the first.
func kindsOfErrors() []error {
	return []error{block.ErrIO, block.ErrInvalid, block.ErrNotFound, block.ErrInUse, block.ErrReadOnly,
		block.ErrUnavailable, block.ErrCorrupt, block.ErrUnsupported, block.ErrPrecondition}
}

func (a *answer) set(err error) {
	if err == nil {
		return
	}
	a.Error = err.Error()
	a.Kind = max(0, slices.IndexFunc(kindsOfErrors(), func(kind error) bool { return errors.Is(err, kind) }))
}

func (a *answer) err() error {
	if a.Error == "" {
		return nil
	}
	return &childError{text: a.Error, kind: kindsOfErrors()[a.Kind]}
}

// childError is an error as the child had it.
type childError struct {
	text string
	kind error
}

func (e *childError) Error() string { return e.text }
func (e *childError) Unwrap() error { return e.kind }
