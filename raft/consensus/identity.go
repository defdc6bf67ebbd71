package consensus

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gabion-storage/gabion/server/block"
)

const (
	identityFormat = 1
	identityFile   = "identity.json"
)

// identity says whose directory this is.
type identity struct {
	Format  int             `json:"format"`
	Cluster block.ClusterID `json:"cluster_id"`
	Node    string          `json:"node"`
	Stage   string          `json:"stage"`
	// Directory tells this directory from another one of the same node.
	Directory block.UUID `json:"directory,omitzero"`
}

const (
	stageNew     = "new"     // bootstrap has begun and may not be finished
	stageJoining = "joining" // has never been a member as far as it knows
	stageReady   = "ready"   // log or snapshot must be there
	stageJoined  = "joined"  // as ready, of one that once was joining
)

// Origin is how a directory came to its state.
type Origin int

// The origins.
const (
	Blank    Origin = iota // there is none yet
	Founded                // it began with a cluster
	Entering               // it is to enter one, and has received nothing yet
	Joined                 // it entered one
)

// OriginOf looks at a directory without taking it. The cluster is zero if it is Blank.
func OriginOf(dir string) (Origin, block.ClusterID, error) {
	id, err := readIdentity(filepath.Join(dir, identityFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Blank, id.Cluster, nil
	case err != nil:
		return Blank, id.Cluster, err
	case id.Stage == stageJoining:
		return Entering, id.Cluster, nil
	case id.Stage == stageJoined:
		return Joined, id.Cluster, nil
	}
	return Founded, id.Cluster, nil
}

// Enter makes a blank directory that of a node which enters a cluster, and tells
// its identity, by which the application registers the node before it opens the
// directory: under the name of a voter, an empty one must not even listen.
// Repeating it changes nothing.
func Enter(dir, node string, cluster block.ClusterID) (directory block.UUID, err error) {
	lock, err := lockDir(dir)
	if err != nil {
		return block.UUID{}, err
	}
	id, err := identify(&Config{Dir: dir, Node: node, Cluster: cluster})
	return id.Directory, errors.Join(err, lock.Close())
}

// Withdraw makes a directory blank again after Enter, when the cluster refused it.
func Withdraw(dir string) error {
	if err := os.Remove(filepath.Join(dir, identityFile)); err != nil {
		return err
	}
	return syncDir(dir)
}

// lockDir takes the directory for this process until the file is closed or the
// process dies, whichever way.
func lockDir(dir string) (*os.File, error) {
	if err := makeDir(dir); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		holder := make([]byte, 32)
		n, _ := f.ReadAt(holder, 0)
		_ = f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		return nil, fmt.Errorf("%w: the data directory %s is held by another server (pid %s); stop it, or use another directory",
			block.ErrInUse, dir, strings.TrimSpace(string(holder[:n])))
	}
	if err := f.Truncate(0); err == nil {
		_, _ = fmt.Fprintf(f, "%d\n", os.Getpid()) // for people only
	}
	return f, nil
}

// identify reads the identity of the directory, or decides and records it if
// the directory is new.
func identify(c *Config) (identity, error) {
	path := filepath.Join(c.Dir, identityFile)
	id, err := readIdentity(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return create(c, path)
	case err != nil:
		return identity{}, err
	case id.Node != c.Node:
		return identity{}, fmt.Errorf("%w: the data directory %s belongs to node %q, not %q; a node keeps its name and its directory",
			block.ErrPrecondition, c.Dir, id.Node, c.Node)
	case !c.Cluster.IsZero() && id.Cluster != c.Cluster && !c.Bootstrap:
		return identity{}, fmt.Errorf("%w: the data directory %s belongs to cluster %s, not %s", block.ErrPrecondition, c.Dir, id.Cluster, c.Cluster)
	}
	if id.Directory.IsZero() { // of a release of before
		id.Directory = block.NewUUID()
		err = id.write(path)
	}
	return id, err
}

func readIdentity(path string) (identity, error) {
	var id identity
	b, err := os.ReadFile(path)
	if err != nil {
		return id, err
	}
	if err := json.Unmarshal(b, &id); err != nil {
		return id, fmt.Errorf("%w: %s: %w", block.ErrCorrupt, path, err)
	}
	if id.Format > identityFormat {
		return id, fmt.Errorf("%w: %s has format %d, this binary knows %d: start the newer binary", block.ErrFormat, path, id.Format, identityFormat)
	}
	return id, nil
}

func create(c *Config, path string) (identity, error) {
	if c.Cluster.IsZero() {
		return identity{}, fmt.Errorf("%w: the data directory %s is empty: start with --bootstrap to found a cluster, or with --join to enter one",
			block.ErrPrecondition, c.Dir)
	}
	for _, name := range []string{"log", "snapshots"} {
		if entries, err := os.ReadDir(filepath.Join(c.Dir, name)); err == nil && len(entries) > 0 {
			return identity{}, fmt.Errorf("%w: %s holds %s but no identity.json; restore it from a backup of the directory", block.ErrCorrupt, c.Dir, name)
		}
	}
	id := identity{Format: identityFormat, Cluster: c.Cluster, Node: c.Node, Stage: stageJoining, Directory: block.NewUUID()}
	if c.Bootstrap {
		id.Stage = stageNew
	}
	return id, id.write(path)
}

// advance records a later stage.
func (id *identity) advance(dir, stage string) error {
	id.Stage = stage
	return id.write(filepath.Join(dir, identityFile))
}

// write replaces the file as a whole, durably.
func (id identity) write(path string) error {
	b, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path+".tmp", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return replace(path+".tmp", path)
}

// replace renames and makes the rename durable.
func replace(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return syncDir(filepath.Dir(to))
}

func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
