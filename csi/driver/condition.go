package driver

import (
	"cmp"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Version 1.13 of the specification took VolumeCondition away and put volume
// health in its place. Kubernetes and its sidecars still ask for the condition,
// so both are told; the bindings have no name for the former any more.
const (
	ControllerVolumeCondition csispec.ControllerServiceCapability_RPC_Type = 11
	NodeVolumeCondition       csispec.NodeServiceCapability_RPC_Type       = 4

	conditionField              protowire.Number = 2 // of each message that had one
	abnormalField, messageField                  = protowire.Number(1), protowire.Number(2)
)

// SetCondition adds a VolumeCondition to a ListVolumesResponse.VolumeStatus, a
// ControllerGetVolumeResponse.VolumeStatus or a NodeGetVolumeStatsResponse.
func SetCondition(m proto.Message, abnormal bool, message string) {
	var c []byte
	if abnormal {
		c = protowire.AppendTag(c, abnormalField, protowire.VarintType)
		c = protowire.AppendVarint(c, 1)
	}
	c = protowire.AppendTag(c, messageField, protowire.BytesType)
	c = protowire.AppendString(c, cmp.Or(message, "nothing is wrong"))
	r := m.ProtoReflect()
	unknown := protowire.AppendTag(r.GetUnknown(), conditionField, protowire.BytesType)
	r.SetUnknown(protowire.AppendBytes(unknown, c))
}

// Condition reads what SetCondition wrote; ok is false if there is none.
func Condition(m proto.Message) (abnormal bool, message string, ok bool) {
	for b := []byte(m.ProtoReflect().GetUnknown()); len(b) > 0; {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return false, "", false
		}
		b = b[n:]
		if number == conditionField && kind == protowire.BytesType {
			c, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return false, "", false
			}
			abnormal, message = readCondition(c)
			return abnormal, message, true
		}
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return false, "", false
		}
		b = b[n:]
	}
	return false, "", false
}

func readCondition(b []byte) (abnormal bool, message string) {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return abnormal, message
		}
		b = b[n:]
		switch {
		case number == abnormalField && kind == protowire.VarintType:
			v, _ := protowire.ConsumeVarint(b)
			abnormal = v != 0
		case number == messageField && kind == protowire.BytesType:
			message, _ = protowire.ConsumeString(b)
		}
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return abnormal, message
		}
		b = b[n:]
	}
	return abnormal, message
}
