package nbd

import (
	"net"
	"time"
	"unsafe"
)

// SetClock replaces the monotonic clock of requests before the server serves.
func (s *Server) SetClock(now func() time.Duration) { s.now = now }

// Prepare sets a served connection's socket options.
func Prepare(nc net.Conn) error {
	_, err := prepareSocket(nc)
	return err
}

// Errnos is the errno that the table has for each sentinel.
func Errnos() map[error]uint32 {
	all := map[error]uint32{}
	for _, o := range outcomes {
		all[o.err] = o.errno
	}
	return all
}

func addr(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }
