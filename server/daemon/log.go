package daemon

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/gabion-storage/gabion/server/block"
)

// NewLogger writes to w: text for a person at a terminal, JSON for a collector
// otherwise. Keys are volume_id, disk_id, node, generation, offset, length, err.
func NewLogger(w io.Writer, terminal bool, level slog.Level) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if terminal {
		return slog.New(slog.NewTextHandler(w, o))
	}
	return slog.New(slog.NewJSONHandler(w, o))
}

// ParseLevel accepts debug, info, warn and error.
func ParseLevel(s string) (slog.Level, error) {
	var l slog.Level
	switch s {
	case "debug", "info", "warn", "error":
		return l, l.UnmarshalText([]byte(s))
	}
	return 0, fmt.Errorf("%w: log level %.20q: it is debug, info, warn or error", block.ErrInvalid, s)
}
