package consensus

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

// logger passes the library's log lines on to slog. A warning that repeats
// (a peer that is down is one every heartbeat) passes once per interval.
type logger struct {
	to    *slog.Logger
	name  string
	args  []any
	quiet *quiet
}

func newLogger(to *slog.Logger, name string) hclog.Logger {
	return &logger{to: to.With("component", name), name: name, quiet: &quiet{seen: map[string]seen{}}}
}

// quiet remembers the warnings of the last interval. Messages are constants of
// the library, so there are few; the bound is for safety only.
type quiet struct {
	mu   sync.Mutex
	seen map[string]seen
}

type seen struct {
	at         time.Time
	suppressed int
}

const (
	quietInterval = 10 * time.Second
	quietMessages = 256
)

// pass reports whether msg may be logged, and how often it was not since it last was.
func (q *quiet) pass(msg string, now time.Time) (bool, int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	s, ok := q.seen[msg]
	if ok && now.Sub(s.at) < quietInterval {
		s.suppressed++
		q.seen[msg] = s
		return false, 0
	}
	if len(q.seen) >= quietMessages {
		clear(q.seen)
	}
	q.seen[msg] = seen{at: now}
	return true, s.suppressed
}

func level(l hclog.Level) slog.Level {
	switch {
	case l >= hclog.Error:
		return slog.LevelError
	case l == hclog.Warn:
		return slog.LevelWarn
	case l == hclog.Info:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}

// Log implements hclog.Logger.
func (l *logger) Log(lv hclog.Level, msg string, args ...any) {
	to := level(lv)
	if !l.to.Enabled(context.Background(), to) {
		return
	}
	if to >= slog.LevelWarn {
		ok, suppressed := l.quiet.pass(msg, time.Now())
		if !ok {
			return
		}
		if suppressed > 0 {
			args = append(slices.Clip(args), "suppressed", suppressed)
		}
	}
	l.to.Log(context.Background(), to, msg, attributes(append(slices.Clip(l.args), args...))...)
}

// attributes turns hclog's pairs into slog's: a Format value is a printf, "error" is our "err".
func attributes(args []any) []any {
	for i := 0; i+1 < len(args); i += 2 {
		if args[i] == "error" {
			args[i] = "err"
		}
		if f, ok := args[i+1].(hclog.Format); ok && len(f) > 0 {
			args[i+1] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
	}
	return args
}

func (l *logger) Trace(msg string, args ...any) { l.Log(hclog.Trace, msg, args...) }
func (l *logger) Debug(msg string, args ...any) { l.Log(hclog.Debug, msg, args...) }
func (l *logger) Info(msg string, args ...any)  { l.Log(hclog.Info, msg, args...) }
func (l *logger) Warn(msg string, args ...any)  { l.Log(hclog.Warn, msg, args...) }
func (l *logger) Error(msg string, args ...any) { l.Log(hclog.Error, msg, args...) }

func (l *logger) enabled(lv slog.Level) bool { return l.to.Enabled(context.Background(), lv) }
func (l *logger) IsTrace() bool              { return false }
func (l *logger) IsDebug() bool              { return l.enabled(slog.LevelDebug) }
func (l *logger) IsInfo() bool               { return l.enabled(slog.LevelInfo) }
func (l *logger) IsWarn() bool               { return l.enabled(slog.LevelWarn) }
func (l *logger) IsError() bool              { return l.enabled(slog.LevelError) }
func (l *logger) ImpliedArgs() []any         { return l.args }
func (l *logger) Name() string               { return l.name }
func (l *logger) SetLevel(hclog.Level)       {} // the handler of slog decides
func (l *logger) GetLevel() hclog.Level      { return hclog.Debug }

func (l *logger) With(args ...any) hclog.Logger {
	c := *l
	c.args = append(slices.Clip(l.args), args...)
	return &c
}

func (l *logger) Named(name string) hclog.Logger {
	c := *l
	c.name = l.name + "." + name
	return &c
}

func (l *logger) ResetNamed(name string) hclog.Logger {
	c := *l
	c.name = name
	return &c
}

func (l *logger) StandardLogger(opts *hclog.StandardLoggerOptions) *log.Logger {
	return log.New(l.StandardWriter(opts), "", 0)
}

func (l *logger) StandardWriter(*hclog.StandardLoggerOptions) io.Writer { return lines{l} }

type lines struct{ l *logger }

func (w lines) Write(p []byte) (int, error) {
	w.l.Info(string(bytes.TrimSpace(p)))
	return len(p), nil
}
