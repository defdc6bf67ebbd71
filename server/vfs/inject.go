package vfs

import (
	"errors"

	"github.com/gabion-storage/gabion/server/block"
)

// Op is an operation about to happen.
type Op struct {
	Kind   string // one of Kinds
	Name   string // the file or directory, one component (a path for FS.OpenDir)
	Offset int64
	Length int64
}

// Kinds are the operations a Hook sees.
var Kinds = []string{
	"opendir", "open", "mkdir", "rename", "unlink", "rmdir", "readdir", "stat", "syncdir", "lock", "space", "identity",
	"read", "write", "tryread", "trywrite", "datasync", "sync", "punch", "zero", "truncate", "seek", "map", "clone", "statfile",
}

// Hook is called before each operation, from the goroutine that does it. An
// error is the operation's result, and nothing is done; except that with a
// *Short a write is begun.
type Hook func(Op) error

// Short makes a write stop after N bytes with Err.
type Short struct {
	N   int
	Err error
}

func (s *Short) Error() string { return s.Err.Error() }
func (s *Short) Unwrap() error { return s.Err }

// Inject puts a hook before every operation on fs. Closing is never failed.
func Inject(fs FS, hook Hook) FS { return &hookFS{fs, hook} }

type hookFS struct {
	fs   FS
	hook Hook
}

func (h *hookFS) OpenDir(path string) (Dir, error) {
	if err := h.hook(Op{Kind: "opendir", Name: path}); err != nil {
		return nil, err
	}
	d, err := h.fs.OpenDir(path)
	if err != nil {
		return nil, err
	}
	return &hookDir{d, path, h.hook}, nil
}

type hookDir struct {
	Dir
	name string
	hook Hook
}

func (d *hookDir) Open(name string, flag Flag) (File, error) {
	if err := d.hook(Op{Kind: "open", Name: name}); err != nil {
		return nil, err
	}
	f, err := d.Dir.Open(name, flag)
	if err != nil {
		return nil, err
	}
	return &hookFile{f, name, d.hook}, nil
}

func (d *hookDir) OpenDir(name string) (Dir, error) {
	if err := d.hook(Op{Kind: "opendir", Name: name}); err != nil {
		return nil, err
	}
	sub, err := d.Dir.OpenDir(name)
	if err != nil {
		return nil, err
	}
	return &hookDir{sub, name, d.hook}, nil
}

func (d *hookDir) Rename(name string, to Dir, newName string) error {
	if err := d.hook(Op{Kind: "rename", Name: name}); err != nil {
		return err
	}
	if t, ok := to.(*hookDir); ok {
		to = t.Dir
	}
	return d.Dir.Rename(name, to, newName)
}

func (d *hookDir) Mkdir(name string) error  { return d.do("mkdir", name, d.Dir.Mkdir) }
func (d *hookDir) Unlink(name string) error { return d.do("unlink", name, d.Dir.Unlink) }
func (d *hookDir) Rmdir(name string) error  { return d.do("rmdir", name, d.Dir.Rmdir) }

func (d *hookDir) do(kind, name string, op func(string) error) error {
	if err := d.hook(Op{Kind: kind, Name: name}); err != nil {
		return err
	}
	return op(name)
}

func (d *hookDir) Sync() error { return hooked0(d.hook, Op{Kind: "syncdir", Name: d.name}, d.Dir.Sync) }
func (d *hookDir) Lock() error { return hooked0(d.hook, Op{Kind: "lock", Name: d.name}, d.Dir.Lock) }

func (d *hookDir) ReadDir() ([]Entry, error) {
	return hooked(d.hook, Op{Kind: "readdir", Name: d.name}, d.Dir.ReadDir)
}

func (d *hookDir) Stat(name string) (Info, error) {
	return hooked(d.hook, Op{Kind: "stat", Name: name}, func() (Info, error) { return d.Dir.Stat(name) })
}

func (d *hookDir) Space() (Space, error) {
	return hooked(d.hook, Op{Kind: "space", Name: d.name}, d.Dir.Space)
}

func (d *hookDir) Identity() (Identity, error) {
	return hooked(d.hook, Op{Kind: "identity", Name: d.name}, d.Dir.Identity)
}

func hooked0(hook Hook, op Op, do func() error) error {
	if err := hook(op); err != nil {
		return err
	}
	return do()
}

func hooked[T any](hook Hook, op Op, do func() (T, error)) (T, error) {
	if err := hook(op); err != nil {
		var zero T
		return zero, err
	}
	return do()
}

type hookFile struct {
	File
	name string
	hook Hook
}

func (f *hookFile) at(kind string, off, length int64) error {
	return f.hook(Op{Kind: kind, Name: f.name, Offset: off, Length: length})
}

func (f *hookFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.at("read", off, int64(len(p))); err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

func (f *hookFile) WriteAt(p []byte, off int64) (int, error) {
	return f.write("write", p, off, f.File.WriteAt)
}

func (f *hookFile) TryReadAt(p []byte, off int64) (int, error) {
	if err := f.at("tryread", off, int64(len(p))); err != nil {
		return 0, err
	}
	return f.File.TryReadAt(p, off)
}

func (f *hookFile) TryWriteAt(p []byte, off int64) (int, error) {
	return f.write("trywrite", p, off, f.File.TryWriteAt)
}

func (f *hookFile) write(kind string, p []byte, off int64, do func([]byte, int64) (int, error)) (int, error) {
	err := f.at(kind, off, int64(len(p)))
	if err == nil {
		return do(p, off)
	}
	var short *Short
	if errors.As(err, &short) {
		n, e := do(p[:min(short.N, len(p))], off)
		if e != nil {
			return n, e
		}
		return n, err
	}
	return 0, err
}

func (f *hookFile) Datasync() error {
	return hooked0(f.hook, Op{Kind: "datasync", Name: f.name}, f.File.Datasync)
}

func (f *hookFile) Sync() error { return hooked0(f.hook, Op{Kind: "sync", Name: f.name}, f.File.Sync) }

func (f *hookFile) PunchHole(off, length int64) error {
	if err := f.at("punch", off, length); err != nil {
		return err
	}
	return f.File.PunchHole(off, length)
}

func (f *hookFile) ZeroRange(off, length int64) error {
	if err := f.at("zero", off, length); err != nil {
		return err
	}
	return f.File.ZeroRange(off, length)
}

func (f *hookFile) Truncate(size int64) error {
	if err := f.at("truncate", size, 0); err != nil {
		return err
	}
	return f.File.Truncate(size)
}

func (f *hookFile) SeekData(off int64) (int64, error) {
	if err := f.at("seek", off, 0); err != nil {
		return 0, err
	}
	return f.File.SeekData(off)
}

func (f *hookFile) SeekHole(off int64) (int64, error) {
	if err := f.at("seek", off, 0); err != nil {
		return 0, err
	}
	return f.File.SeekHole(off)
}

func (f *hookFile) Mapped(off, length int64) (bool, error) {
	if err := f.at("map", off, length); err != nil {
		return false, err
	}
	return f.File.Mapped(off, length)
}

func (f *hookFile) CloneFrom(src File) error {
	if err := f.at("clone", 0, 0); err != nil {
		return err
	}
	if s, ok := src.(*hookFile); ok {
		src = s.File
	}
	return f.File.CloneFrom(src)
}

func (f *hookFile) Stat() (Info, error) {
	return hooked(f.hook, Op{Kind: "statfile", Name: f.name}, f.File.Stat)
}

// injected is what a rule's error looks like: a sentinel with its place.
func injected(op Op, kind error) error {
	if errors.Is(kind, ErrWouldBlock) || errors.Is(kind, block.ErrUnsupported) && (op.Kind == "tryread" || op.Kind == "trywrite") {
		return kind
	}
	return &OpError{Op: op.Kind, Name: op.Name, Kind: kind, Cause: errInjected}
}

var errInjected = errors.New("injected fault")
