package kernel

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	recordVersion = 1
	recordSuffix  = ".json"
	maxRecord     = 64 << 10
)

// phase is the step a device was at when its record was written; see DESIGN.md.
type phase string

const (
	phaseConnecting phase = "connecting"
	phaseConnected  phase = "connected"
	phaseMoving     phase = "moving"
	phaseEnding     phase = "ending"
)

// record is what is kept of a device, so that it can be reconnected without the
// metadata service. The kernel's own facts win over it.
type record struct {
	Version int `json:"version"`
	Identity
	Phase   phase  `json:"phase"`
	Index   int    `json:"index"`
	Refused string `json:"refused,omitempty"` // why it was ended for good
	Hasty   bool   `json:"hasty,omitempty"`   // its dead-connection timeout may be that of a resize

	Cluster   block.ClusterID `json:"cluster,omitzero"` // zero: not known
	Token     Token           `json:"token"`
	Addresses []string        `json:"addresses"`
	Server    string          `json:"server"` // the one of Addresses that has the session

	Session block.SessionNumber `json:"session"` // the newest that may have been used
	Sockets []SocketID          `json:"sockets"` // all that the driver may have: a superset

	Connections int           `json:"connections"` // at least 1
	Size        int64         `json:"size"`
	BlockSize   int64         `json:"block_size"`
	Flags       uint16        `json:"flags"` // as the server gave them; 0: not known
	Timeout     time.Duration `json:"timeout"`
	DeadTimeout time.Duration `json:"dead_timeout"`
}

func (r *record) path() string { return devicePath(r.Index) }

// state is a directory of records.
type state struct{ dir string }

func (s state) path(i Identity) string {
	return filepath.Join(s.dir, fmt.Sprintf("%s_%s_%d%s", i.Volume, i.Attachment, i.Epoch, recordSuffix))
}

// save replaces the record. It is on the disk when save returns.
func (s state) save(r *record) error {
	p, err := json.MarshalIndent(r, "", "\t")
	if err == nil {
		err = replace(s.path(r.Identity), p)
	}
	if err != nil {
		return fmt.Errorf("%w: keeping the state of volume %s: %w", block.ErrUnavailable, r.Volume, err)
	}
	return nil
}

func replace(path string, p []byte) error {
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(p)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// load returns nil for a record that is not there. A damaged one is an error.
func (s state) load(i Identity) (*record, error) {
	f, err := os.Open(s.path(i))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, maxRecord))
	r := new(record)
	if err == nil {
		err = json.Unmarshal(p, r)
	}
	if err == nil && (r.Version != recordVersion || r.Identity != i || r.Connections < 1) {
		err = errors.New("it is of another version or device")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: the state of volume %s: %w", block.ErrCorrupt, i.Volume, err)
	}
	return r, nil
}

func (s state) remove(i Identity) error {
	if err := os.Remove(s.path(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return nil
}

// of returns a volume's records. One that is not readable says nothing.
func (s state) of(id block.VolumeID) ([]*record, error) {
	kept, err := s.list(id.String())
	if err != nil {
		return nil, err
	}
	var all []*record
	for _, i := range kept {
		if r, err := s.load(i); err == nil && r != nil {
			all = append(all, r)
		}
	}
	return all, nil
}

// list returns the identities of which there is a record and whose text begins with prefix.
func (s state) list(prefix string) ([]Identity, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	var found []Identity
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		name, ok := strings.CutSuffix(e.Name(), recordSuffix)
		if i, ours := ParseBackend(backendPrefix + strings.ReplaceAll(name, "_", "/")); ok && ours {
			found = append(found, i)
		}
	}
	return found, nil
}
