package replica

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gabion-storage/gabion/server/block"
)

// knownFile, in the server's state directory, remembers which disk was at which
// path: a blank directory where a disk was is a missing mount, not a new disk.
const knownFile = "disks.json"

func readKnown(dir string) (map[string]block.DiskID, error) {
	known := map[string]block.DiskID{}
	b, err := os.ReadFile(filepath.Join(dir, knownFile))
	if errors.Is(err, fs.ErrNotExist) {
		return known, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &known)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w; it says which disk belongs at which path: restore it, or remove it after checking that every disk is mounted",
			filepath.Join(dir, knownFile), err)
	}
	return known, nil
}

// writeKnown replaces the file; durable on return.
func writeKnown(dir string, known map[string]block.DiskID) error {
	b, err := json.MarshalIndent(known, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(dir, knownFile)
	if old, err := os.ReadFile(path); err == nil && string(old) == string(b) {
		return nil
	}
	return replaceFile(dir, path, b)
}

func replaceFile(dir, path string, b []byte) error {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
