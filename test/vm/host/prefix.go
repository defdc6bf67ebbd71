package host

import (
	"bytes"
	"io"
	"sync"
)

// Prefix returns a writer that puts a prefix before every line, for output that several write at a time. What is not
// ended by a newline is kept until it is. Safe for concurrent use.
func Prefix(w io.Writer, prefix string) io.Writer { return &prefixed{w: w, prefix: prefix} }

type prefixed struct {
	w      io.Writer
	prefix string

	mu   sync.Mutex
	line []byte
}

func (p *prefixed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.line = append(p.line, b...)
	for {
		i := bytes.IndexByte(p.line, '\n')
		if i < 0 {
			return len(b), nil
		}
		if _, err := p.w.Write(append([]byte(p.prefix), p.line[:i+1]...)); err != nil {
			return 0, err
		}
		p.line = p.line[i+1:]
	}
}
