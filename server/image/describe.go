package image

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/vfs"
)

// The small JSON files: gabion.json, volume.json, the instance file and
// reason.json. All are written by vfs.Replace.
const (
	diskFile   = "gabion.json"
	volumeFile = "volume.json"
	reasonFile = "reason.json"

	jsonFormat = 1
	jsonLimit  = 64 << 10 // bytes; nobody's file of ours is longer
	diskType   = "gabion-disk"
)

// Identity is what gabion.json says of a disk.
type Identity struct {
	Disk     block.DiskID
	Cluster  block.ClusterID
	Format   int
	Geometry block.Geometry
}

type diskJSON struct {
	Type       string          `json:"type"`
	Format     int             `json:"format"`
	Disk       block.DiskID    `json:"disk"`
	Cluster    block.ClusterID `json:"cluster"`
	ExtentSize int64           `json:"extent_size"`
}

func (i Identity) encode() []byte {
	return encodeJSON(diskJSON{Type: diskType, Format: i.Format, Disk: i.Disk, Cluster: i.Cluster, ExtentSize: i.Geometry.ExtentSize})
}

// decodeIdentity reads gabion.json. ErrFormat: newer or foreign. ErrCorrupt: damaged.
func decodeIdentity(p []byte) (Identity, error) {
	var j diskJSON
	if err := decodeJSON(p, diskType, &j); err != nil {
		return Identity{}, err
	}
	id := Identity{Disk: j.Disk, Cluster: j.Cluster, Format: j.Format, Geometry: block.Geometry{ExtentSize: j.ExtentSize}}
	if err := id.Geometry.Validate(); err != nil || id.Disk.IsZero() || id.Cluster.IsZero() {
		return Identity{}, fmt.Errorf("%w: an identity is missing or the extent size is impossible", block.ErrCorrupt)
	}
	return id, nil
}

// Description is volume.json: what the file is, for a reader without the
// metadata service. It decides nothing while the service is there.
type Description struct {
	ID      block.VolumeID
	Name    string
	Size    int64 // bytes; the image's own size is what is written
	Version block.Version
	Policy  map[string]string // as the volume was created: "replicas", "durability", …
}

type volumeJSON struct {
	Type    string            `json:"type"`
	Format  int               `json:"format"`
	ID      block.VolumeID    `json:"id"`
	Name    string            `json:"name"`
	Size    int64             `json:"size"`
	Version block.Version     `json:"version"`
	Policy  map[string]string `json:"policy,omitempty"`
}

const volumeType = "gabion-volume"

func (d Description) encode() ([]byte, error) {
	p := encodeJSON(volumeJSON{volumeType, jsonFormat, d.ID, d.Name, d.Size, d.Version, d.Policy})
	if len(p) > jsonLimit {
		return nil, fmt.Errorf("describe volume %s: %w: %d bytes, at most %d", d.ID, block.ErrTooLarge, len(p), jsonLimit)
	}
	return p, nil
}

func decodeDescription(p []byte) (Description, error) {
	var j volumeJSON
	if err := decodeJSON(p, volumeType, &j); err != nil {
		return Description{}, err
	}
	return Description{ID: j.ID, Name: j.Name, Size: j.Size, Version: j.Version, Policy: j.Policy}, nil
}

func encodeJSON(v any) []byte {
	p, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		panic("image: a description cannot be encoded: " + err.Error()) // strings, numbers and UUIDs always can
	}
	return append(p, '\n')
}

// decodeJSON reads one of our files strictly, after it has looked at the type
// and the format: what is not ours, or newer, is ErrFormat and not ErrCorrupt.
func decodeJSON(p []byte, wantType string, v any) error {
	var head struct {
		Type   string `json:"type"`
		Format int    `json:"format"`
	}
	if err := json.Unmarshal(p, &head); err != nil {
		return fmt.Errorf("%w: %w", block.ErrCorrupt, err)
	}
	if head.Type != wantType {
		return fmt.Errorf("%w: not written by Gabion (type %.40q, not %q)", block.ErrFormat, head.Type, wantType)
	}
	if head.Format != jsonFormat {
		return fmt.Errorf("%w: format %d, this server knows %d; use a newer server", block.ErrFormat, head.Format, jsonFormat)
	}
	d := json.NewDecoder(bytes.NewReader(p))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: %w", block.ErrCorrupt, err)
	}
	return nil
}

// readIdentity is Probe in a pinned directory; raw is the file as it stands.
func readIdentity(dir vfs.Dir, path string) (id Identity, raw []byte, err error) {
	raw, err = vfs.ReadFile(dir, diskFile, jsonLimit)
	if errors.Is(err, block.ErrTooLarge) {
		err = fmt.Errorf("%w: %w", block.ErrFormat, err)
	}
	if err != nil {
		return Identity{}, nil, fmt.Errorf("disk %s: %w", path, err)
	}
	id, err = decodeIdentity(raw)
	if err != nil {
		return Identity{}, nil, fmt.Errorf("disk %s: %s: %w", path, diskFile, err)
	}
	return id, raw, nil
}
