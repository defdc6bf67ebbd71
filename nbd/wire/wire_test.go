package wire

import (
	"bytes"
	"testing"
)

// Every header comes off the wire as it went on it.
func FuzzRequest(f *testing.F) {
	f.Add(Request{Flags: 1, Command: 2, Cookie: 3, Offset: 4, Length: 5}.Append(nil))
	f.Add(make([]byte, RequestSize))
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) < RequestSize {
			return
		}
		if r, ok := ParseRequest(p); ok && !bytes.Equal(r.Append(nil), p[:RequestSize]) {
			t.Errorf("%+v is %x, was %x", r, r.Append(nil), p)
		}
	})
}
