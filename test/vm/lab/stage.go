package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// Aborted is the code of a call that came while another one of the volume was under way.
const Aborted = codes.Aborted

// TryStageAt is TryStage at another path, whose parent is there.
func (v *Volume) TryStageAt(ctx context.Context, path string) error {
	_, err := v.node.NodeClient.NodeStageVolume(ctx, &csispec.NodeStageVolumeRequest{
		VolumeId: v.ID, PublishContext: v.published, StagingTargetPath: path, VolumeCapability: v.Capability(), VolumeContext: v.context,
	})
	return err
}

// TryNodeExpandAt makes device and file system as large as the volume, by the paths that are told.
func (v *Volume) TryNodeExpandAt(ctx context.Context, path, staging string) error {
	_, err := v.node.NodeClient.NodeExpandVolume(ctx, &csispec.NodeExpandVolumeRequest{
		VolumeId: v.ID, VolumePath: path, StagingTargetPath: staging, CapacityRange: &csispec.CapacityRange{RequiredBytes: v.Size},
	})
	return err
}

// WhileStaging runs f while a stage is under way, which gives its answer to the channel.
func (v *Volume) WhileStaging(f func(staged <-chan error)) {
	ctx, cancel := v.t.call()
	defer cancel()
	staged := make(chan error, 1)
	var done sync.WaitGroup
	done.Go(func() { staged <- v.TryStage(ctx) })
	defer done.Wait()
	defer cancel()
	f(staged)
}

// TryShow shows the staged volume to a pod, which the scenario hides it from itself. Unlike TryPublishTo it may be called
// from several goroutines.
func (v *Volume) TryShow(ctx context.Context, pod string) error {
	if err := os.MkdirAll(filepath.Dir(v.Target(pod)), 0o750); err != nil {
		return err
	}
	_, err := v.node.NodeClient.NodePublishVolume(ctx, &csispec.NodePublishVolumeRequest{
		VolumeId: v.ID, PublishContext: v.published, StagingTargetPath: v.Staging(), TargetPath: v.Target(pod),
		VolumeCapability: v.Capability(), VolumeContext: v.context,
	})
	return err
}

// TryHide undoes TryShow.
func (v *Volume) TryHide(ctx context.Context, pod string) error {
	_, err := v.node.NodeClient.NodeUnpublishVolume(ctx, &csispec.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: v.Target(pod)})
	return err
}

// AtOnce makes calls at the same time, one for each number, and returns the answers.
func (t *T) AtOnce(numbers []int, call func(ctx context.Context, number int) error) []error {
	answers := make([]error, len(numbers))
	var done sync.WaitGroup
	for i, number := range numbers {
		done.Go(func() {
			ctx, cancel := t.call()
			defer cancel()
			answers[i] = call(ctx, number)
		})
	}
	done.Wait()
	return answers
}

// Hold opens a device until the returned function is called.
func (t *T) Hold(path string) (release func()) {
	f, err := os.Open(path)
	t.Check(err, "holding %s", path)
	release = sync.OnceFunc(func() { _ = f.Close() })
	t.Cleanup(release)
	return release
}

// Usable is the size of a mounted file system in bytes.
func (t *T) Usable(path string) int64 {
	var s unix.Statfs_t
	t.Check(unix.Statfs(path, &s), "%s", path)
	return int64(s.Blocks) * s.Bsize
}

// Synced writes numbered files and syncs each, and notes each on another disk when it is durable.
type Synced struct {
	t     *T
	count atomic.Int64
}

func syncedContent(i int64) []byte { return fmt.Appendf(nil, "file %d, as it was synced\n", i) }

// SyncFiles writes files into a directory until the scenario ends, and notes in a file how many are durable.
func (t *T) SyncFiles(dir, note string) *Synced {
	s := &Synced{t: t}
	f, err := os.Create(note)
	t.Check(err, "%s", note)
	quit := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for i := int64(0); ; i++ {
			select {
			case <-quit:
				return
			default:
			}
			if err := s.one(dir, f, i); err != nil {
				t.Errorf("%s: %v", dir, err)
				return
			}
			s.count.Store(i + 1)
		}
	})
	t.Cleanup(func() { close(quit); done.Wait(); _ = f.Close() })
	return s
}

func (s *Synced) one(dir string, note *os.File, i int64) error {
	f, err := os.Create(filepath.Join(dir, fmt.Sprintf("synced.%d", i)))
	if err != nil {
		return err
	}
	_, err = f.Write(syncedContent(i))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := syncDir(dir); err != nil { // XFS and ext4 do it with the file; POSIX does not say so
		return err
	}
	if _, err := note.WriteAt([]byte{'.'}, i); err != nil {
		return err
	}
	return note.Sync()
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Reach waits until so many files are durable.
func (s *Synced) Reach(n int64) {
	s.t.Eventually(time.Minute, "files are written", func() bool {
		if s.t.Failed() {
			s.t.Fatalf("a write failed")
		}
		return s.count.Load() >= n
	})
}

// CheckSynced ends the scenario unless all files are there that were noted as durable; it returns how many.
func (t *T) CheckSynced(dir, note string) int64 {
	info, err := os.Stat(note)
	t.Check(err, "%s", note)
	for i := range info.Size() {
		name := filepath.Join(dir, fmt.Sprintf("synced.%d", i))
		f, err := os.Open(name)
		t.Check(err, "of %d files that were synced", info.Size())
		b, err := io.ReadAll(f)
		_ = f.Close()
		if err != nil || !bytes.Equal(b, syncedContent(i)) {
			t.Fatalf("%s, of %d files that were synced: %q, %v", name, info.Size(), b, err)
		}
	}
	return info.Size()
}
