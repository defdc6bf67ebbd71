package controller

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

// B063, the controller's part: pages, tokens and bounds are passed on as they are.
func TestB063List(t *testing.T) {
	c := New(newCell())
	for i := range 25 {
		create(t, c, fmt.Sprintf("v%02d", i), gib)
	}
	first := create(t, c, "v00", gib)
	if _, err := publish(t, c, first.GetVolumeId(), "n1", raw(writer), false); err != nil {
		t.Fatal(err)
	}
	var seen []string
	for token := ""; ; {
		r, err := c.ListVolumes(t.Context(), &csispec.ListVolumesRequest{MaxEntries: 10, StartingToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range r.GetEntries() {
			seen = append(seen, e.GetVolume().GetVolumeId())
			if published := len(e.GetStatus().GetPublishedNodeIds()) > 0; published != (e.GetVolume().GetVolumeId() == first.GetVolumeId()) {
				t.Errorf("%v", e)
			}
		}
		if token = r.GetNextToken(); token == "" {
			break
		}
	}
	slices.Sort(seen)
	if len(slices.Compact(seen)) != 25 {
		t.Errorf("%d volumes seen", len(seen))
	}
	for _, x := range []struct {
		in   *csispec.ListVolumesRequest
		want error
	}{
		{&csispec.ListVolumesRequest{StartingToken: "x"}, block.ErrStale},
		{&csispec.ListVolumesRequest{MaxEntries: -1}, block.ErrInvalid},
		{&csispec.ListVolumesRequest{MaxEntries: math.MaxInt32}, nil},
	} {
		if _, err := c.ListVolumes(t.Context(), x.in); !errors.Is(err, x.want) {
			t.Errorf("%v: %v", x.in, err)
		}
	}
}

func TestHealth(t *testing.T) {
	service := newCell()
	c := New(service)
	for i := range 7 {
		v := create(t, c, fmt.Sprintf("v%d", i), gib)
		if i%3 == 1 {
			id, _ := parseID(v.GetVolumeId())
			service.volumes[id].Trouble = []Trouble{
				{Severe: true, Reason: "NotServed", Message: "A."}, {Severe: true, Reason: "NotServed", Message: "B."}, {Reason: "Impaired", Message: "C."},
			}
		}
	}
	all, err := c.ControllerListVolumeHealth(t.Context(), &csispec.ControllerListVolumeHealthRequest{})
	if err != nil || len(all.GetEntries()) != 2 || all.GetNextToken() != "" {
		t.Fatalf("%v, %v", all, err)
	}
	list := all.GetEntries()[0].GetHealthStatuses()
	if len(list) != 2 || list[0].GetMessage() != "A. B." || list[0].GetStatus() != csispec.VolumeHealthErrorType_INACCESSIBLE ||
		list[1].GetReason() != "Impaired" || list[1].GetStatus() != csispec.VolumeHealthErrorType_DEGRADED {
		t.Errorf("got %v", list)
	}
	listed, err := c.ListVolumes(t.Context(), &csispec.ListVolumesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range listed.GetEntries() {
		if abnormal, message, ok := driver.Condition(e.GetStatus()); !ok || abnormal != (i%3 == 1) || abnormal && message != "A. B. C." {
			t.Errorf("v%d: %v, %q, %v", i, abnormal, message, ok)
		}
	}
	n := 0
	for token, first := "", true; first || token != ""; first = false {
		r, err := c.ControllerListVolumeHealth(t.Context(), &csispec.ControllerListVolumeHealthRequest{MaxEntries: 1, StartingToken: token})
		if err != nil || len(r.GetEntries()) > 1 {
			t.Fatalf("%v, %v", r, err)
		}
		n, token = n+len(r.GetEntries()), r.GetNextToken()
	}
	if n != 2 {
		t.Errorf("%d in pages", n)
	}
	one, err := c.ControllerGetVolumeHealth(t.Context(), &csispec.ControllerGetVolumeHealthRequest{VolumeId: all.GetEntries()[1].GetVolumeId()})
	if err != nil || len(one.GetVolumeHealth().GetHealthStatuses()) != 2 {
		t.Errorf("%v, %v", one, err)
	}
	if _, err := c.ControllerGetVolumeHealth(t.Context(), &csispec.ControllerGetVolumeHealthRequest{VolumeId: block.NewUUID().String()}); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("no volume: %v", err)
	}
}

// B138, B139, the controller's part: parameters, capabilities and the rack are what is asked for.
func TestB138Capacity(t *testing.T) {
	service := newCell()
	service.room = 100 * gib
	c := New(service)
	rack := func(r string) *csispec.Topology {
		return &csispec.Topology{Segments: map[string]string{driver.TopologyRack: r}}
	}
	for _, x := range []struct {
		in        *csispec.GetCapacityRequest
		asked     string
		available int64
		minimum   int64
	}{
		{&csispec.GetCapacityRequest{}, "capacity:0::", 100 * gib, minRaw},
		{&csispec.GetCapacityRequest{AccessibleTopology: rack("r1"), Parameters: map[string]string{"replicas": "2", "access": "rack"}}, "capacity:2:rack:r1", 100 * gib, minRaw},
		{&csispec.GetCapacityRequest{VolumeCapabilities: caps(mounted("xfs", writer))}, "capacity:0::", 100 * gib, minXFS},
		{&csispec.GetCapacityRequest{VolumeCapabilities: caps(raw(csispec.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))}, "", 0, 0},
		{&csispec.GetCapacityRequest{AccessibleTopology: &csispec.Topology{Segments: map[string]string{"zone": "z"}}}, "capacity:0::", 100 * gib, minRaw},
		{&csispec.GetCapacityRequest{AccessibleTopology: &csispec.Topology{Segments: map[string]string{"zone": "z"}}, Parameters: map[string]string{"access": "rack"}}, "", 0, minRaw},
	} {
		r, err := c.GetCapacity(t.Context(), x.in)
		if err != nil || r.GetAvailableCapacity() != x.available || r.GetMaximumVolumeSize().GetValue() != x.available || r.GetMinimumVolumeSize().GetValue() != x.minimum {
			t.Errorf("%v: %v, %v", x.in, r, err)
		}
		if got := service.made(); got != x.asked {
			t.Errorf("%v: asked %q", x.in, got)
		}
	}
	if _, err := c.GetCapacity(t.Context(), &csispec.GetCapacityRequest{Parameters: map[string]string{"x": "y"}}); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("got %v", err)
	}
}

// What is announced is there, and the other way round.
func TestCapabilities(t *testing.T) {
	r, err := New(newCell()).ControllerGetCapabilities(t.Context(), &csispec.ControllerGetCapabilitiesRequest{})
	if err != nil || len(r.GetCapabilities()) != len(capabilities) {
		t.Errorf("%v, %v", r, err)
	}
}
