package controller

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

// parameters are a StorageClass's.
type parameters struct {
	policy Policy
	fsType string // "": not named
}

// A provisioner that was told to adds who the volume is for. Nobody asks here.
var metadataKeys = []string{"csi.storage.k8s.io/pvc/name", "csi.storage.k8s.io/pvc/namespace", "csi.storage.k8s.io/pv/name"}

// parameter is one that there is: the words it takes, and what they set.
type parameter struct {
	takes []string
	set   func(p *parameters, at int, word string)
}

var known = map[string]parameter{
	"replicas":       {[]string{"1", "2", "3"}, func(p *parameters, at int, _ string) { p.policy.Replicas = uint32(at + 1) }},
	"spread":         {[]string{"rack", "node"}, func(p *parameters, _ int, w string) { p.policy.Spread = Spread(w) }},
	"access":         {[]string{"cluster", "rack"}, func(p *parameters, _ int, w string) { p.policy.Access = Access(w) }},
	"durability":     {[]string{"flush", "write-through"}, func(p *parameters, _ int, w string) { p.policy.Durability = Durability(w) }},
	"on-full":        {[]string{"wait", "error"}, func(p *parameters, _ int, w string) { p.policy.OnFull = OnFull(w) }},
	"blockSize":      {[]string{"4096", "512"}, func(p *parameters, at int, _ string) { p.policy.BlockSize = []uint32{4096, 512}[at] }},
	driver.FSTypeKey: {[]string{"ext4", "xfs"}, func(p *parameters, _ int, w string) { p.fsType = w }},
}

// later are parameters that will be there; until then nobody shall believe to have them.
var later = []string{"iops", "throughput"}

// parse reads parameters strictly: a word that means nothing would be believed to mean something.
func parse(given map[string]string) (parameters, error) {
	var p parameters
	for _, key := range slices.Sorted(maps.Keys(given)) {
		word := given[key]
		if slices.Contains(metadataKeys, key) {
			continue
		}
		if slices.Contains(later, key) {
			return p, fmt.Errorf("%w: parameter %q is not supported by this version: remove it from the StorageClass", block.ErrInvalid, key)
		}
		k, ok := known[key]
		if !ok {
			return p, fmt.Errorf("%w: parameter %.80q is unknown; there are %s", block.ErrInvalid, key, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
		at := slices.Index(k.takes, word)
		if at < 0 {
			return p, fmt.Errorf("%w: parameter %q is %.80q; it takes %s", block.ErrInvalid, key, word, alternatives(k.takes))
		}
		k.set(&p, at, word)
	}
	return p, nil
}

func alternatives(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// agree returns ErrInvalid if a capability names another file system than the parameters do.
func (p parameters) agree(list []*csispec.VolumeCapability) error {
	for _, c := range list {
		if fs := c.GetMount().GetFsType(); fs != "" && p.fsType != "" && fs != p.fsType {
			return fmt.Errorf("%w: parameter %q is %s, but the volume capability names %s", block.ErrInvalid, driver.FSTypeKey, p.fsType, fs)
		}
	}
	return nil
}

// formats is the file system that capabilities and parameters name; "" for a raw volume.
func (p parameters) formats(list []*csispec.VolumeCapability) string {
	for _, c := range list {
		if m := c.GetMount(); m != nil {
			return firstOf(m.GetFsType(), p.fsType)
		}
	}
	return ""
}

// context is what a node needs to know of a volume besides what the metadata service tells it.
func (p parameters) context() map[string]string {
	if p.fsType == "" {
		return nil
	}
	return map[string]string{driver.FSTypeKey: p.fsType}
}

// differs names the parts of a policy that were asked for and are not so; "": none.
func (p Policy) differs(is Policy) string {
	var list []string
	add := func(what string, wanted, has any, zero bool) {
		if !zero && wanted != has {
			list = append(list, fmt.Sprintf("%s is %v, not %v", what, has, wanted))
		}
	}
	add("replicas", p.Replicas, is.Replicas, p.Replicas == 0)
	add("spread", p.Spread, is.Spread, p.Spread == "")
	add("access", p.Access, is.Access, p.Access == "")
	add("durability", p.Durability, is.Durability, p.Durability == "")
	add("on-full", p.OnFull, is.OnFull, p.OnFull == "")
	add("blockSize", p.BlockSize, is.BlockSize, p.BlockSize == 0)
	return strings.Join(list, ", ")
}
