package driver

import (
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
)

// The bytes are those of the message that was taken away, and survive the wire.
func TestCondition(t *testing.T) {
	in := &csispec.ListVolumesResponse_VolumeStatus{PublishedNodeIds: []string{"n1"}}
	if _, _, ok := Condition(in); ok {
		t.Error("there is one before it was set")
	}
	SetCondition(in, true, "A.")
	wire, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	if want := "\x0a\x02n1\x12\x06\x08\x01\x12\x02A."; string(wire) != want {
		t.Errorf("%q, not %q", wire, want)
	}
	out := &csispec.ListVolumesResponse_VolumeStatus{}
	if err := proto.Unmarshal(wire, out); err != nil {
		t.Fatal(err)
	}
	if abnormal, message, ok := Condition(out); !abnormal || message != "A." || !ok || out.GetPublishedNodeIds()[0] != "n1" {
		t.Errorf("%v %q %v", abnormal, message, ok)
	}
	well := &csispec.NodeGetVolumeStatsResponse{}
	SetCondition(well, false, "")
	if abnormal, message, ok := Condition(well); abnormal || message == "" || !ok {
		t.Errorf("%v %q %v", abnormal, message, ok)
	}
}
