package node

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/gabion-storage/gabion/server/block"
)

// memory is what a volume was staged with: <StateDir>/<volume id>.json. It is
// written before the mount and removed after the detach; nothing is decided by
// it but whether a repeated stage asks for the same. It has no secrets: an
// option that could hold one is refused.
type memory struct {
	Staging string   `json:"staging"`
	Options []string `json:"options"`
}

func (s *Service) memoryPath(id block.VolumeID) string {
	return filepath.Join(s.cfg.StateDir, id.String()+".json")
}

func (s *Service) remember(id block.VolumeID, staging string, options []string) {
	if s.cfg.StateDir == "" {
		return
	}
	if options == nil {
		options = []string{}
	}
	b, err := json.Marshal(memory{Staging: staging, Options: options})
	if err == nil {
		err = os.MkdirAll(s.cfg.StateDir, 0o700)
	}
	path := s.memoryPath(id)
	if err == nil {
		err = os.WriteFile(path+".new", b, 0o600)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		s.cfg.Log.Warn("mount options are not remembered: a stage with others will not be refused", "volume_id", id, "err", err)
		s.forget(id) // none is better than an older one
	}
}

// recall returns the options that a volume was staged with at a path, if that is known.
func (s *Service) recall(id block.VolumeID, staging string) ([]string, bool) {
	if s.cfg.StateDir == "" {
		return nil, false
	}
	var m memory
	b, err := os.ReadFile(s.memoryPath(id))
	if err != nil || json.Unmarshal(b, &m) != nil || m.Staging != staging || m.Options == nil {
		return nil, false
	}
	return slices.Clone(m.Options), true
}

func (s *Service) forget(id block.VolumeID) {
	if s.cfg.StateDir == "" {
		return
	}
	for _, p := range []string{s.memoryPath(id), s.memoryPath(id) + ".new"} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.cfg.Log.Warn("remembered mount options stay", "volume_id", id, "err", err)
		}
	}
}
