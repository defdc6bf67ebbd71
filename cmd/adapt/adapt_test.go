package adapt

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc"

	"github.com/gabion-storage/gabion/csi/controller"
	"github.com/gabion-storage/gabion/csi/node"
	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

// Every word of a policy has its pair: one that the API learns fails here.
func TestEveryWordHasAPair(t *testing.T) {
	all := func(names map[int32]string, back func(n int32) int32) {
		for n, name := range names {
			if back(n) != n {
				t.Errorf("%s becomes %s", name, names[back(n)])
			}
		}
	}
	all(metapb.Policy_Spread_name, func(n int32) int32 { return int32(spreads.to(spreads.from(metapb.Policy_Spread(n)))) })
	all(metapb.Policy_Access_name, func(n int32) int32 { return int32(accesses.to(accesses.from(metapb.Policy_Access(n)))) })
	all(metapb.Policy_Durability_name, func(n int32) int32 { return int32(durabilities.to(durabilities.from(metapb.Policy_Durability(n)))) })
	all(metapb.Policy_OnFull_name, func(n int32) int32 { return int32(onFulls.to(onFulls.from(metapb.Policy_OnFull(n)))) })
	p := controller.Policy{Replicas: 2, Spread: controller.SpreadNode, Access: controller.AccessRack, Durability: controller.Flush, OnFull: controller.OnFullError, BlockSize: 512, FSType: "xfs"}
	if got := policyFrom(policyTo(p)); got != p {
		t.Errorf("%v becomes %v", p, got)
	}
}

// What a newer service may say of a format is never taken for blank.
func TestFormats(t *testing.T) {
	for n := range metapb.Volume_Format_name {
		f := metapb.Volume_Format(n)
		if back := formatTo(formatFrom(f)); back != f && f != metapb.Volume_FORMAT_UNSPECIFIED {
			t.Errorf("%v becomes %v", f, back)
		}
	}
	if got := formatFrom(99); got != node.FormatDone {
		t.Errorf("unknown: %v", got)
	}
}

// service has one volume with one attachment.
type service struct {
	metapb.MetadataClient
	volume     *metapb.Volume
	attachment *metapb.Attachment
	cluster    string
}

func (s service) GetVolume(context.Context, *metapb.GetVolumeRequest, ...grpc.CallOption) (*metapb.GetVolumeResponse, error) {
	return &metapb.GetVolumeResponse{Volume: s.volume, Attachments: []*metapb.Attachment{s.attachment}, BornExtents: 1}, nil
}

func (s service) GetAttachment(context.Context, *metapb.GetAttachmentRequest, ...grpc.CallOption) (*metapb.AttachResponse, error) {
	if s.attachment == nil {
		err := metapb.WithDetail(fmt.Errorf("%w: no attachment", block.ErrNotFound), metapb.DetailCluster, s.cluster)
		return nil, metapb.FromStatus(metapb.ToStatus(err))
	}
	return &metapb.AttachResponse{
		Volume: s.volume, Attachment: s.attachment, Endpoints: []*metapb.Endpoint{{NbdAddress: "a:1"}, {NbdAddress: "b:2"}}, ClusterId: s.cluster,
	}, nil
}

// An attachment that is about to end is no longer there to stage a volume by; whether its device goes is the service's to say.
func TestAttachments(t *testing.T) {
	id := block.VolumeID{UUID: block.NewUUID()}
	s := service{
		volume:     &metapb.Volume{Id: id.String(), Size: 4096, CacheEpoch: 3, Policy: &metapb.Policy{BlockSize: 512}},
		attachment: &metapb.Attachment{Id: block.NewUUID().String(), VolumeId: id.String(), Node: "n1", Token: []byte{1, 2, 3}},
	}
	n := Node{API: s, Name: "n1"}
	a, err := n.Attachment(t.Context(), id)
	if err != nil || a.Epoch != 3 || a.BlockSize != 512 || a.Size != 4096 || len(a.Addresses) != 2 || a.Token != kernel.Token("AQID") {
		t.Errorf("%+v, %v", a, err)
	}
	if v, err := n.Describe(t.Context(), id); err != nil || !v.Born || v.Attachment != a.ID {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := (Node{API: s, Name: "n2"}).Describe(t.Context(), id); !errors.Is(err, block.ErrNotFound) {
		t.Errorf("another node: %v", err)
	}
	s.attachment.Revoking = true
	if _, err := n.Describe(t.Context(), id); !errors.Is(err, block.ErrUnavailable) {
		t.Errorf("revoking: %v", err)
	}
	s.attachment.Id = "no id"
	s.attachment.Revoking = false
	if _, err := n.Attachment(t.Context(), id); !errors.Is(err, block.ErrCorrupt) {
		t.Errorf("no id: %v", err)
	}
}

// Every answer on which devices are ended says whose it is, unless the service is one of before.
func TestAttachmentsAreOfACluster(t *testing.T) {
	id := block.VolumeID{UUID: block.NewUUID()}
	for _, want := range []block.ClusterID{{UUID: block.NewUUID()}, {}} {
		s := service{attachment: &metapb.Attachment{Id: block.NewUUID().String(), VolumeId: id.String(), Node: "n1"}}
		if !want.IsZero() {
			s.cluster = want.String()
		}
		if a, err := (Node{API: s, Name: "n1"}).Attachment(t.Context(), id); err != nil || a.Cluster != want {
			t.Errorf("attached: %v, %v", a.Cluster, err)
		}
		s.attachment = nil
		if a, err := (Node{API: s, Name: "n1"}).Attachment(t.Context(), id); !errors.Is(err, block.ErrNotFound) || a.Cluster != want {
			t.Errorf("not attached: %v, %v", a.Cluster, err)
		}
	}
}
