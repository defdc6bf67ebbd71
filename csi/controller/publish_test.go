package controller

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/gabion-storage/gabion/csi/driver"
	"github.com/gabion-storage/gabion/server/block"
)

func publish(t *testing.T, c *Controller, id, node string, vc *csispec.VolumeCapability, readOnly bool) (string, error) {
	t.Helper()
	r, err := c.ControllerPublishVolume(t.Context(), &csispec.ControllerPublishVolumeRequest{
		VolumeId: id, NodeId: node, VolumeCapability: vc, Readonly: readOnly,
	})
	return r.GetPublishContext()[driver.AttachmentKey], err
}

func unpublish(t *testing.T, c *Controller, id, node string) error {
	t.Helper()
	_, err := c.ControllerUnpublishVolume(t.Context(), &csispec.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})
	return err
}

// allModes are the specification's.
func allModes() (list []csispec.VolumeCapability_AccessMode_Mode) {
	for m := range csispec.VolumeCapability_AccessMode_Mode_name {
		list = append(list, csispec.VolumeCapability_AccessMode_Mode(m))
	}
	return append(list, 99)
}

// B066: all modes × mount and block × reading and writing. What Validate
// confirms, Create and Publish accept, and nothing else; and then a second node.
func TestB066EveryModeEverywhere(t *testing.T) {
	accepted := []string{"SINGLE_NODE_WRITER", "SINGLE_NODE_READER_ONLY", "MULTI_NODE_READER_ONLY", "SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_MULTI_WRITER"}
	for _, m := range allModes() {
		want := slices.Contains(accepted, m.String())
		for kind, vc := range map[string]*csispec.VolumeCapability{"raw": raw(m), "default": mounted("", m), "ext4": mounted("ext4", m), "xfs": mounted("xfs", m), "vfat": mounted("vfat", m)} {
			for _, readOnly := range []bool{false, true} {
				name := fmt.Sprintf("%v %s ro=%v", m, kind, readOnly)
				want := want && kind != "vfat"
				c := New(newCell())
				v := create(t, c, "other", gib)
				_, created := c.CreateVolume(t.Context(), &csispec.CreateVolumeRequest{Name: "v", VolumeCapabilities: caps(vc)})
				validated, err := c.ValidateVolumeCapabilities(t.Context(), &csispec.ValidateVolumeCapabilitiesRequest{VolumeId: v.GetVolumeId(), VolumeCapabilities: caps(vc)})
				if err != nil {
					t.Fatal(err)
				}
				_, published := publish(t, c, v.GetVolumeId(), "n1", vc, readOnly)
				if (created == nil) != want || (validated.GetConfirmed() != nil) != want || (published == nil) != want {
					t.Errorf("%s: create %v, validate %v, publish %v", name, created, validated, published)
				}
				if !want {
					if !errors.Is(created, block.ErrInvalid) || !errors.Is(published, block.ErrInvalid) || validated.GetMessage() == "" {
						t.Errorf("%s: create %v, validate %v, publish %v", name, created, validated, published)
					}
					continue
				}
				_, second := publish(t, c, v.GetVolumeId(), "n2", vc, readOnly)
				if several := m == csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY; several != (second == nil) || !several && (!errors.Is(second, block.ErrInUse) || !strings.Contains(second.Error(), "n1")) {
					t.Errorf("%s: a second node: %v", name, second)
				}
			}
		}
	}
}

// B066, B150: published again it is the same; with the other flag it is refused.
func TestPublishAgain(t *testing.T) {
	c := New(newCell())
	v := create(t, c, "v", gib)
	first, err := publish(t, c, v.GetVolumeId(), "n1", raw(writer), false)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := publish(t, c, v.GetVolumeId(), "n1", raw(writer), false); err != nil || again != first {
		t.Errorf("%s, %v", again, err)
	}
	if _, err := publish(t, c, v.GetVolumeId(), "n1", raw(writer), true); !errors.Is(err, block.ErrExists) {
		t.Errorf("read-only: %v", err)
	}
	if _, err := publish(t, c, v.GetVolumeId(), "n2", raw(writer), false); !errors.Is(err, block.ErrInUse) || !strings.Contains(err.Error(), "n1") {
		t.Errorf("another node: %v", err)
	}
	if err := unpublish(t, c, v.GetVolumeId(), "n1"); err != nil {
		t.Fatal(err)
	}
	if other, err := publish(t, c, v.GetVolumeId(), "n2", raw(writer), true); err != nil || other == first {
		t.Errorf("%s, %v", other, err)
	}
}

// B059, B060: what is not there.
func TestB060WhatIsNotThere(t *testing.T) {
	service := newCell()
	c := New(service)
	v := create(t, c, "v", gib)
	for _, x := range []struct {
		what, id, node string
		vc             *csispec.VolumeCapability
		want           error
	}{
		{"volume", block.NewUUID().String(), "n1", raw(writer), block.ErrNotFound},
		{"volume that cannot be", "no id", "n1", raw(writer), block.ErrNotFound},
		{"node", v.GetVolumeId(), "n9", raw(writer), block.ErrNotFound},
		{"volume id", "", "n1", raw(writer), block.ErrInvalid},
		{"node id", v.GetVolumeId(), "", raw(writer), block.ErrInvalid},
		{"capability", v.GetVolumeId(), "n1", nil, block.ErrInvalid},
	} {
		service.made()
		if _, err := publish(t, c, x.id, x.node, x.vc, false); !errors.Is(err, x.want) {
			t.Errorf("%s: %v", x.what, err)
		}
		if made := service.made(); x.node == "n9" && strings.Contains(made, "attach") {
			t.Errorf("%s: %s", x.what, made)
		}
	}
	for range 2 {
		for _, x := range []struct{ id, node string }{
			{block.NewUUID().String(), "n1"}, {"no id", "n1"}, {v.GetVolumeId(), "n9"}, {v.GetVolumeId(), "n2"}, {v.GetVolumeId(), ""},
		} {
			if err := unpublish(t, c, x.id, x.node); err != nil {
				t.Errorf("unpublish %v: %v", x, err)
			}
		}
	}
	if err := unpublish(t, c, "", "n1"); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("unpublish nothing: %v", err)
	}
	service.failWith = fmt.Errorf("%w: the primary has not confirmed", block.ErrUnavailable)
	if err := unpublish(t, c, v.GetVolumeId(), "n1"); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("not confirmed: %v", err)
	}
}

// An unpublish without a node ends all of them.
func TestB060AllNodes(t *testing.T) {
	c := New(newCell())
	v := create(t, c, "v", gib)
	rox := raw(csispec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)
	for _, n := range []string{"n1", "n2"} {
		if _, err := publish(t, c, v.GetVolumeId(), n, rox, false); err != nil {
			t.Fatal(err)
		}
	}
	get := func() []string {
		r, err := c.ControllerGetVolume(t.Context(), &csispec.ControllerGetVolumeRequest{VolumeId: v.GetVolumeId()})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetStatus().GetPublishedNodeIds()
	}
	if got := get(); !slices.Equal(got, []string{"n1", "n2"}) {
		t.Errorf("published to %v", got)
	}
	if err := unpublish(t, c, v.GetVolumeId(), ""); err != nil || len(get()) != 0 {
		t.Errorf("%v, still published to %v", err, get())
	}
}

func TestValidate(t *testing.T) {
	c := New(newCell())
	v := create(t, c, "v", gib)
	ask := func(in *csispec.ValidateVolumeCapabilitiesRequest) (*csispec.ValidateVolumeCapabilitiesResponse, error) {
		return c.ValidateVolumeCapabilities(t.Context(), in)
	}
	good := caps(raw(writer), mounted("xfs", writer))
	for says, in := range map[string]*csispec.ValidateVolumeCapabilitiesRequest{
		"":                      {VolumeCapabilities: good, Parameters: map[string]string{"replicas": "1"}},
		"replicas is 1, not 2":  {VolumeCapabilities: good, Parameters: map[string]string{"replicas": "2"}},
		"is unknown":            {VolumeCapabilities: good, Parameters: map[string]string{"x": "2"}},
		"capability names xfs":  {VolumeCapabilities: good, Parameters: map[string]string{driver.FSTypeKey: "ext4"}},
		"written from one node": {VolumeCapabilities: append(good, raw(csispec.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))},
		"no mutable parameters": {VolumeCapabilities: good, MutableParameters: map[string]string{"x": "2"}},
	} {
		in.VolumeId = v.GetVolumeId()
		r, err := ask(in)
		if err != nil || (r.GetConfirmed() != nil) != (says == "") || !strings.Contains(r.GetMessage(), says) {
			t.Errorf("%q: %v, %v", says, r, err)
		}
	}
	if _, err := ask(&csispec.ValidateVolumeCapabilitiesRequest{VolumeId: block.NewUUID().String(), VolumeCapabilities: good}); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("no volume: %v", err)
	}
	for _, in := range []*csispec.ValidateVolumeCapabilitiesRequest{{VolumeCapabilities: good}, {VolumeId: v.GetVolumeId()}} {
		if _, err := ask(in); !errors.Is(err, block.ErrInvalid) {
			t.Errorf("%v: %v", in, err)
		}
	}
}
