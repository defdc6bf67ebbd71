package block

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
)

// UUID is a 128-bit identity, random (version 4) when made by NewUUID. Its
// only text form is lower-case 8-4-4-4-12 hexadecimal, so that a checked
// identity is always safe as a file name.
type UUID [16]byte

// NewUUID returns a random version 4 UUID.
func NewUUID() UUID {
	var u UUID
	_, _ = rand.Read(u[:]) // never fails: crypto/rand aborts the process instead
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
}

// ParseUUID accepts the canonical text form only. Anything else is ErrInvalid.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return UUID{}, fmt.Errorf("%w: %.40q is not a UUID", ErrInvalid, s)
	}
	for i := range len(s) {
		if c := s[i]; c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return UUID{}, fmt.Errorf("%w: %.40q is not a UUID in lower case", ErrInvalid, s)
		}
	}
	digits := s[0:8] + s[9:13] + s[14:18] + s[19:23] + s[24:36]
	if _, err := hex.Decode(u[:], []byte(digits)); err != nil {
		return UUID{}, fmt.Errorf("%w: %.40q is not a UUID", ErrInvalid, s)
	}
	return u, nil
}

// String returns the canonical text form.
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return h[0:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// IsZero reports whether u is the absent identity.
func (u UUID) IsZero() bool { return u == UUID{} }

// MarshalText implements encoding.TextMarshaler.
func (u UUID) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler; see ParseUUID.
func (u *UUID) UnmarshalText(b []byte) error {
	v, err := ParseUUID(string(b))
	if err == nil {
		*u = v
	}
	return err
}

// The identities. Each is a distinct, comparable type, so that one is never
// passed where another is meant.
type (
	ClusterID    struct{ UUID } // a cell, chosen at bootstrap
	VolumeID     struct{ UUID } // a virtual disk; never reused
	DiskID       struct{ UUID } // one directory on one local file system
	AttachmentID struct{ UUID } // one consumer node's right to connect
)
