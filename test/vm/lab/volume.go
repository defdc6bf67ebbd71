package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
)

// kubelet is where volumes are staged and published, as a kubelet has it.
const kubelet = "/var/lib/kubelet"

// VolumeSpec says what a claim asks for. Zero values: 1 GiB, ext4, mounted, for one node.
type VolumeSpec struct {
	Name       string
	Size       int64
	FS         string // "": ext4
	Block      bool   // raw, no file system
	ReadOnly   bool   // published read-only by the controller
	Access     csispec.VolumeCapability_AccessMode_Mode
	Parameters map[string]string
	Flags      []string // mount options
}

// Volume is a volume as an orchestrator handles it: by CSI calls of a controller and a node plugin. Each call has a form
// that is repeated while what refuses it passes (see Repeat) and ends the scenario if it fails, and one that begins with
// Try and is one call.
type Volume struct {
	VolumeSpec
	ID string

	t          *T
	controller *Plugin
	node       *Plugin
	context    map[string]string // of the volume
	published  map[string]string // context of the publish
	pods       []string
}

// Volume describes a volume of these plugins; nothing is called yet. It is let go and deleted after the scenario.
func (t *T) Volume(controller, node *Plugin, spec VolumeSpec) *Volume {
	if spec.Size == 0 {
		spec.Size = 1 << 30
	}
	if spec.FS == "" {
		spec.FS = "ext4"
	}
	if spec.Access == csispec.VolumeCapability_AccessMode_UNKNOWN {
		spec.Access = csispec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	}
	v := &Volume{VolumeSpec: spec, t: t, controller: controller, node: node}
	t.Cleanup(func() {
		if !t.Failed() && v.ID != "" {
			v.Down()
			v.Delete()
		}
	})
	return v
}

// Capability is the volume's capability.
func (v *Volume) Capability() *csispec.VolumeCapability {
	c := &csispec.VolumeCapability{AccessMode: &csispec.VolumeCapability_AccessMode{Mode: v.Access}}
	if v.Block {
		c.AccessType = &csispec.VolumeCapability_Block{Block: &csispec.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csispec.VolumeCapability_Mount{Mount: &csispec.VolumeCapability_MountVolume{FsType: v.FS, MountFlags: v.Flags}}
	}
	return c
}

// Staging is the volume's staging path.
func (v *Volume) Staging() string {
	if v.Block {
		return filepath.Join(kubelet, "plugins/kubernetes.io/csi/volumeDevices/staging", v.Name)
	}
	return filepath.Join(kubelet, "plugins/kubernetes.io/csi/csi.gabion.dev", v.Name, "globalmount")
}

// Target is where a pod has the volume.
func (v *Volume) Target(pod string) string {
	if v.Block {
		return filepath.Join(kubelet, "pods", pod, "volumeDevices", v.Name)
	}
	return filepath.Join(kubelet, "pods", pod, "volumes/kubernetes.io~csi", v.Name, "mount")
}

// TryCreate creates the volume.
func (v *Volume) TryCreate(ctx context.Context) error {
	parameters := map[string]string{"replicas": "1"}
	for key, value := range v.Parameters {
		parameters[key] = value
	}
	a, err := v.controller.Controller.CreateVolume(ctx, &csispec.CreateVolumeRequest{
		Name: v.Name, CapacityRange: &csispec.CapacityRange{RequiredBytes: v.Size},
		VolumeCapabilities: []*csispec.VolumeCapability{v.Capability()}, Parameters: parameters,
	})
	if err == nil {
		v.ID, v.context = a.GetVolume().GetVolumeId(), a.GetVolume().GetVolumeContext()
	}
	return err
}

// TryPublish gives the node the right to the volume.
func (v *Volume) TryPublish(ctx context.Context) error {
	a, err := v.controller.Controller.ControllerPublishVolume(ctx, &csispec.ControllerPublishVolumeRequest{
		VolumeId: v.ID, NodeId: v.node.Node, VolumeCapability: v.Capability(), Readonly: v.ReadOnly, VolumeContext: v.context,
	})
	if err == nil {
		v.published = a.GetPublishContext()
	}
	return err
}

// TryStage makes the volume a device of the node and mounts it at its staging path.
func (v *Volume) TryStage(ctx context.Context) error {
	if err := os.MkdirAll(v.Staging(), 0o750); err != nil {
		return err
	}
	_, err := v.node.NodeClient.NodeStageVolume(ctx, &csispec.NodeStageVolumeRequest{
		VolumeId: v.ID, PublishContext: v.published, StagingTargetPath: v.Staging(), VolumeCapability: v.Capability(), VolumeContext: v.context,
	})
	return err
}

// TryPublishTo shows the volume to a pod.
func (v *Volume) TryPublishTo(ctx context.Context, pod string, readOnly bool) error {
	if err := os.MkdirAll(filepath.Dir(v.Target(pod)), 0o750); err != nil {
		return err
	}
	_, err := v.node.NodeClient.NodePublishVolume(ctx, &csispec.NodePublishVolumeRequest{
		VolumeId: v.ID, PublishContext: v.published, StagingTargetPath: v.Staging(), TargetPath: v.Target(pod),
		VolumeCapability: v.Capability(), Readonly: readOnly, VolumeContext: v.context,
	})
	if err == nil {
		v.forget(pod)
		v.pods = append(v.pods, pod)
	}
	return err
}

// TryUnpublishFrom takes the volume from a pod.
func (v *Volume) TryUnpublishFrom(ctx context.Context, pod string) error {
	_, err := v.node.NodeClient.NodeUnpublishVolume(ctx, &csispec.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: v.Target(pod)})
	if err == nil {
		v.forget(pod)
	}
	return err
}

func (v *Volume) forget(pod string) {
	for i, p := range v.pods {
		if p == pod {
			v.pods = append(v.pods[:i], v.pods[i+1:]...)
			return
		}
	}
}

// TryUnstage unmounts the volume and takes its device away.
func (v *Volume) TryUnstage(ctx context.Context) error {
	_, err := v.node.NodeClient.NodeUnstageVolume(ctx, &csispec.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging()})
	return err
}

// TryUnpublish ends the node's right.
func (v *Volume) TryUnpublish(ctx context.Context) error {
	_, err := v.controller.Controller.ControllerUnpublishVolume(ctx, &csispec.ControllerUnpublishVolumeRequest{VolumeId: v.ID, NodeId: v.node.Node})
	return err
}

// TryDelete deletes the volume.
func (v *Volume) TryDelete(ctx context.Context) error {
	_, err := v.controller.Controller.DeleteVolume(ctx, &csispec.DeleteVolumeRequest{VolumeId: v.ID})
	if err == nil {
		v.ID = ""
	}
	return err
}

// TryExpand makes the volume larger: in the metadata, then on the node if it is staged.
func (v *Volume) TryExpand(ctx context.Context, size int64) error {
	a, err := v.controller.Controller.ControllerExpandVolume(ctx, &csispec.ControllerExpandVolumeRequest{
		VolumeId: v.ID, CapacityRange: &csispec.CapacityRange{RequiredBytes: size}, VolumeCapability: v.Capability(),
	})
	if err != nil {
		return err
	}
	v.Size = a.GetCapacityBytes()
	return v.TryNodeExpand(ctx)
}

// TryNodeExpand makes device and file system as large as the volume.
func (v *Volume) TryNodeExpand(ctx context.Context) error {
	path := v.Staging()
	if len(v.pods) > 0 {
		path = v.Target(v.pods[0])
	}
	_, err := v.node.NodeClient.NodeExpandVolume(ctx, &csispec.NodeExpandVolumeRequest{
		VolumeId: v.ID, VolumePath: path, StagingTargetPath: v.Staging(), VolumeCapability: v.Capability(),
		CapacityRange: &csispec.CapacityRange{RequiredBytes: v.Size},
	})
	return err
}

// TryStats asks for the volume's use and condition at its first pod.
func (v *Volume) TryStats(ctx context.Context) (*csispec.NodeGetVolumeStatsResponse, error) {
	path := v.Staging()
	if len(v.pods) > 0 {
		path = v.Target(v.pods[0])
	}
	return v.node.NodeClient.NodeGetVolumeStats(ctx, &csispec.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: path, StagingTargetPath: v.Staging()})
}

// must runs a call that has to succeed, be it after a refusal that passes.
func (v *Volume) must(what string, f func(ctx context.Context) error) {
	ctx, cancel := v.t.call()
	defer cancel()
	what = fmt.Sprintf("%s of volume %s", what, v.Name)
	began := time.Now()
	v.t.Check(v.t.Repeat(ctx, what, f), "%s", what)
	v.t.Logf("%s: %.2f s", what, time.Since(began).Seconds())
}

// Create creates the volume.
func (v *Volume) Create() { v.must("create", v.TryCreate) }

// Publish gives the node the right to the volume.
func (v *Volume) Publish() { v.must("controller publish", v.TryPublish) }

// Stage makes the volume a device and mounts it at its staging path.
func (v *Volume) Stage() { v.must("stage", v.TryStage) }

// PublishTo shows the volume to a pod and returns the path.
func (v *Volume) PublishTo(pod string) string {
	v.must("publish", func(ctx context.Context) error { return v.TryPublishTo(ctx, pod, false) })
	return v.Target(pod)
}

// UnpublishFrom takes the volume from a pod.
func (v *Volume) UnpublishFrom(pod string) {
	v.must("unpublish", func(ctx context.Context) error { return v.TryUnpublishFrom(ctx, pod) })
}

// Unstage unmounts the volume and takes its device away.
func (v *Volume) Unstage() { v.must("unstage", v.TryUnstage) }

// Unpublish ends the node's right.
func (v *Volume) Unpublish() { v.must("controller unpublish", v.TryUnpublish) }

// Delete deletes the volume.
func (v *Volume) Delete() { v.must("delete", v.TryDelete) }

// Expand makes the volume, its device and its file system larger.
func (v *Volume) Expand(size int64) {
	v.must("expand", func(ctx context.Context) error { return v.TryExpand(ctx, size) })
}

// Up brings the volume to a pod, creating it if need be, and returns the pod's path.
func (v *Volume) Up(pod string) string {
	if v.ID == "" {
		v.Create()
	}
	v.Publish()
	v.Stage()
	return v.PublishTo(pod)
}

// Down takes the volume from its pods and from the node. It may be called at any step.
func (v *Volume) Down() {
	for len(v.pods) > 0 {
		v.UnpublishFrom(v.pods[0])
	}
	v.Unstage()
	v.Unpublish()
}

// Device is the volume's nbd device as the kernel has it, such as "nbd3"; "": none.
func (v *Volume) Device() string {
	devices, _ := filepath.Glob("/sys/block/nbd*")
	for _, d := range devices {
		if strings.HasPrefix(backend(d), "gabion/"+v.ID+"/") {
			return filepath.Base(d)
		}
	}
	return ""
}

// DeviceSize is the size of the volume's device in bytes, as the kernel has it.
func (v *Volume) DeviceSize() int64 {
	b, err := os.ReadFile(fmt.Sprintf("/sys/block/%s/size", v.Device()))
	v.t.Check(err, "the device of volume %s", v.Name)
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	v.t.Check(err, "the size of volume %s", v.Name)
	return sectors * 512
}
