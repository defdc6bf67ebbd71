package main

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/schollz/progressbar/v3"
)

// screen shows steps, one line each: on a terminal with colour and, while a
// step runs, with its progress; elsewhere the finished lines only.
type screen struct {
	out   io.Writer
	fancy bool
}

func newScreen(out io.Writer) *screen { return &screen{out, isTerminal(out)} }

func (s *screen) say(format string, args ...any) { fmt.Fprintf(s.out, format+"\n", args...) }

// step runs do and says how it went; what do returns is shown beside its name.
func (s *screen) step(name string, do func() (detail string, err error)) error {
	if s.fancy {
		fmt.Fprintf(s.out, "  · %s\r", name)
	}
	begin := time.Now()
	detail, err := do()
	mark, colour := "✓", "\x1b[32m"
	if err != nil {
		mark, colour, detail = "✗", "\x1b[31m", "failed"
	}
	if s.fancy {
		fmt.Fprintf(s.out, "\r\x1b[K  %s%s\x1b[0m %-44s %s \x1b[2m%s\x1b[0m\n", colour, mark, name, detail, brief(time.Since(begin)))
	} else {
		fmt.Fprintf(s.out, "  %s %-44s %s (%s)\n", mark, name, detail, brief(time.Since(begin)))
	}
	return err
}

// brief is a duration with two or three digits.
func brief(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	}
	return d.Round(10 * time.Millisecond).String()
}

// progress counts the bytes of a step that takes a while. Safe for concurrent use.
type progress struct {
	begin time.Time
	bytes atomic.Int64

	mu  sync.Mutex
	bar *progressbar.ProgressBar // nil: nobody looks
}

// warmUp is how long a rate means nothing.
const warmUp = 100 * time.Millisecond

func (s *screen) progress(name string, size int64) *progress {
	p := &progress{begin: time.Now()}
	if s.fancy {
		p.bar = progressbar.NewOptions64(size,
			progressbar.OptionSetWriter(s.out),
			progressbar.OptionSetDescription("  · "+name),
			progressbar.OptionShowBytes(true),
			progressbar.OptionUseIECUnits(true),
			progressbar.OptionSetWidth(24),
			progressbar.OptionThrottle(50*time.Millisecond),
			progressbar.OptionSetPredictTime(false),
			progressbar.OptionClearOnFinish(),
			progressbar.OptionSetTheme(progressbar.Theme{Saucer: "█", SaucerPadding: "░", BarStart: "", BarEnd: ""}),
		)
	}
	return p
}

func (p *progress) add(n int64) {
	p.bytes.Add(n)
	if p.bar == nil || time.Since(p.begin) < warmUp {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.bar.Set64(p.bytes.Load())
}

// done ends the bar and returns the throughput.
func (p *progress) done() string {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
	rate := float64(p.bytes.Load()) / max(time.Since(p.begin).Seconds(), 1e-6)
	return fmt.Sprintf("%s at %s/s", formatSize(p.bytes.Load()), formatSize(int64(rate)>>20<<20))
}
