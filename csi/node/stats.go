package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/csi/mount"
	"github.com/gabion-storage/gabion/server/block"
)

// askPatience is how long a file system may take to say how full it is; less if the caller has less.
const askPatience = 5 * time.Second

// NodeGetVolumeStats implements the Node service. It takes no turn, and answers
// without the usage if the file system does not say in time.
func (s *Service) NodeGetVolumeStats(ctx context.Context, in *csispec.NodeGetVolumeStatsRequest) (*csispec.NodeGetVolumeStatsResponse, error) {
	if in.GetVolumeId() == "" {
		return nil, missing("volume id")
	}
	if in.GetVolumePath() == "" {
		return nil, missing("volume path")
	}
	now, e, err := s.locate(ctx, in.GetVolumeId(), in.GetVolumePath())
	if err != nil {
		return nil, err
	}
	out := &csispec.NodeGetVolumeStatsResponse{}
	list := health(now.device, e)
	if e.Node != (mount.Number{}) {
		out.Usage = []*csispec.VolumeUsage{{Unit: csispec.VolumeUsage_BYTES, Total: now.device.Size}}
	} else {
		var more []trouble
		out.Usage, more = s.usage(ctx, in.GetVolumeId(), e)
		list = append(list, more...)
	}
	message := ""
	if len(list) > 0 {
		message = list[0].message
	}
	driver.SetCondition(out, len(list) > 0, message)
	return out, nil
}

// NodeGetVolumeHealth implements the Node service.
func (s *Service) NodeGetVolumeHealth(ctx context.Context, in *csispec.NodeGetVolumeHealthRequest) (*csispec.NodeGetVolumeHealthResponse, error) {
	if in.GetVolumeId() == "" {
		return nil, missing("volume id")
	}
	id, err := parseID(in.GetVolumeId())
	if err != nil {
		return nil, err
	}
	now, err := s.look(ctx, id)
	if err != nil {
		return nil, err
	}
	if !now.attached {
		return nil, fmt.Errorf("%w: volume %s is not staged on this node", block.ErrNotFound, id)
	}
	e, mounted := now.find(s.resolvable(in.GetStagingTargetPath(), in.GetVolumePublishPath()))
	if all := now.table.FileSystemOf(now.device.Number); !mounted && len(all) > 0 {
		e = all[0]
	}
	list := health(now.device, e)
	if e.Point != "" && e.Node == (mount.Number{}) {
		_, more := s.usage(ctx, in.GetVolumeId(), e)
		list = append(list, more...)
	}
	out := &csispec.VolumeHealth{VolumeId: in.GetVolumeId()}
	for _, t := range list {
		out.HealthStatuses = append(out.HealthStatuses, &csispec.VolumeHealth_VolumeHealthEntry{Status: t.kind, Reason: t.reason, Message: t.message})
	}
	return &csispec.NodeGetVolumeHealthResponse{VolumeHealth: out}, nil
}

// locate returns the facts of a volume and its mount at a path.
func (s *Service) locate(ctx context.Context, volume, path string) (facts, mount.Entry, error) {
	id, err := parseID(volume)
	if err != nil {
		return facts{}, mount.Entry{}, err
	}
	now, err := s.look(ctx, id)
	if err != nil {
		return facts{}, mount.Entry{}, err
	}
	e, mounted := now.find(s.resolvable(path))
	if !mounted {
		return facts{}, mount.Entry{}, fmt.Errorf("%w: volume %s is not at %s", block.ErrNotFound, id, path)
	}
	return now, e, nil
}

// trouble is one thing that is wrong with a volume here.
type trouble struct {
	kind            csispec.VolumeHealthErrorType
	reason, message string
}

// health is what the facts say, worst first. e may be no mount.
func health(d Device, e mount.Entry) (list []trouble) {
	switch c := d.Condition; c.State {
	case Failed:
		kind := csispec.VolumeHealthErrorType_INACCESSIBLE
		if c.Lost {
			kind = csispec.VolumeHealthErrorType_DATA_LOSS
		}
		list = append(list, trouble{kind, reason(c.Reason, "DeviceFailed"), c.Message})
	case Waiting:
		list = append(list, trouble{csispec.VolumeHealthErrorType_INACCESSIBLE, reason(c.Reason, "DeviceWaits"), c.Message})
	case Healthy:
	}
	if e.Point != "" && e.Node == (mount.Number{}) && e.SuperReadOnly && !d.ReadOnly {
		list = append(list, trouble{csispec.VolumeHealthErrorType_INACCESSIBLE, "FileSystemReadOnly",
			"the file system has turned read-only after an error: the pods that use it are to be ended, so that it is checked and mounted anew"})
	}
	return list
}

func reason(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// usage asks the file system, and says what is wrong if it does not answer.
func (s *Service) usage(ctx context.Context, volume string, e mount.Entry) ([]*csispec.VolumeUsage, []trouble) {
	patience := askPatience
	if end, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(end)*3/4) // so that an answer without the usage still arrives
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	u, err := s.asking.ask(ctx, volume, e.Point)
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return nil, []trouble{{csispec.VolumeHealthErrorType_INACCESSIBLE, "FileSystemSilent", "the file system does not answer"}}
	case err != nil:
		return nil, []trouble{{csispec.VolumeHealthErrorType_INACCESSIBLE, "FileSystemFailed", err.Error()}}
	}
	out := []*csispec.VolumeUsage{{Unit: csispec.VolumeUsage_BYTES, Total: u.Total, Used: u.Used, Available: u.Available}}
	if u.Inodes > 0 {
		out = append(out, &csispec.VolumeUsage{Unit: csispec.VolumeUsage_INODES, Total: u.Inodes, Used: u.InodesUsed, Available: u.InodesAvail})
	}
	if u.Errors > 0 {
		return out, []trouble{{csispec.VolumeHealthErrorType_DEGRADED, "FileSystemErrors", fmt.Sprintf(
			"the file system has met errors, %d since it was checked, and may take no changes any more: the pods that use it are to be ended, so that it is checked and mounted anew",
			u.Errors)}}
	}
	return out, nil
}

// asking asks file systems for their usage, each at most once at a time at a
// path: one that never answers parks one thread for a path, however often it is
// asked for. An answer of one path says nothing of another: something else may
// have been mounted there.
type asking struct {
	usage func(point string) (mount.Usage, error)

	mu     sync.Mutex
	closed bool
	now    map[place]*question
}

// place is where a volume's file system is asked.
type place struct{ volume, point string }

type question struct {
	done  chan struct{} // closed with the answer
	usage mount.Usage
	err   error
}

func newAsking(usage func(string) (mount.Usage, error)) *asking {
	return &asking{usage: usage, now: map[place]*question{}}
}

func (a *asking) ask(ctx context.Context, volume, point string) (mount.Usage, error) {
	q, err := a.question(volume, point)
	if err != nil {
		return mount.Usage{}, err
	}
	select {
	case <-q.done:
		return q.usage, q.err
	case <-ctx.Done():
		return mount.Usage{}, ctx.Err()
	}
}

func (a *asking) question(volume, point string) (*question, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, fmt.Errorf("%w: the node plugin ends", block.ErrShutdown)
	}
	at := place{volume, point}
	q := a.now[at]
	if q == nil {
		q = &question{done: make(chan struct{})}
		a.now[at] = q
		go func() {
			q.usage, q.err = a.usage(point)
			a.mu.Lock()
			delete(a.now, at)
			a.mu.Unlock()
			close(q.done)
		}()
	}
	return q, nil
}

// close waits for the questions under way, until ctx ends.
func (a *asking) close(ctx context.Context) error {
	a.mu.Lock()
	a.closed = true
	var left []*question
	for _, q := range a.now {
		left = append(left, q)
	}
	a.mu.Unlock()
	for _, q := range left {
		select {
		case <-q.done:
		case <-ctx.Done():
			return fmt.Errorf("%w: a file system does not say how full it is", block.ErrUnavailable)
		}
	}
	return nil
}
