package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Code is the gRPC code of a call's outcome.
func Code(err error) codes.Code { return status.Code(err) }

// Grow makes the volume larger in the metadata and on the server.
func (v *Volume) Grow(size int64) {
	v.must("controller expand", func(ctx context.Context) error {
		_, err := v.controller.Controller.ControllerExpandVolume(ctx, &csispec.ControllerExpandVolumeRequest{
			VolumeId: v.ID, CapacityRange: &csispec.CapacityRange{RequiredBytes: size}, VolumeCapability: v.Capability(),
		})
		return err
	})
	v.Size = size
}

// NodeExpand makes device and file system as large as the volume.
func (v *Volume) NodeExpand() { v.must("node expand", v.TryNodeExpand) }

// Threads is how many threads a process has.
func Threads(pid int) int {
	all, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	return len(all)
}

// Parked is how many threads of a process wait in the kernel and cannot be killed.
func Parked(pid int) (n int) {
	all, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, path := range all {
		if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), "State:\tD") {
			n++
		}
	}
	return n
}

// Health is what the node says is wrong with the volume: status and message of each trouble.
func (v *Volume) Health() (wrong []string) {
	v.must("health", func(ctx context.Context) (err error) {
		wrong, err = v.TryHealth(ctx)
		return err
	})
	return wrong
}

// TryHealth is Health for what may fail.
func (v *Volume) TryHealth(ctx context.Context) (wrong []string, err error) {
	a, err := v.node.NodeClient.NodeGetVolumeHealth(ctx, &csispec.NodeGetVolumeHealthRequest{VolumeId: v.ID, StagingTargetPath: v.Staging()})
	for _, h := range a.GetVolumeHealth().GetHealthStatuses() {
		wrong = append(wrong, fmt.Sprintf("%v: %s: %s", h.GetStatus(), h.GetReason(), h.GetMessage()))
	}
	return wrong, err
}

// Gone says that the volume was deleted, or is deleted by somebody else.
func (v *Volume) Gone() { v.ID = "" }
