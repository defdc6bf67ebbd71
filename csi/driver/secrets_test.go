package driver

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/gabion-storage/gabion/server/block"
)

// marked puts a marker of its own into every place of a message where a user may have a secret.
func marked(m proto.Message) (markers []string) {
	marker := func(where string) string {
		s := fmt.Sprintf("MARKER-%d-%s", len(markers), where)
		markers = append(markers, s)
		return s
	}
	var fill func(m protoreflect.Message)
	fill = func(m protoreflect.Message) {
		fields := m.Descriptor().Fields()
		for i := range fields.Len() {
			f := fields.Get(i)
			switch name := string(f.Name()); {
			case f.IsMap() && (isSecret(f) || name == "publish_context" || name == "volume_context"):
				v := m.Mutable(f).Map()
				v.Set(protoreflect.ValueOfString("key").MapKey(), protoreflect.ValueOfString(marker(name)))
			case name == "mount_flags":
				l := m.Mutable(f).List()
				l.Append(protoreflect.ValueOfString("noatime"))
				l.Append(protoreflect.ValueOfString(marker(name)))
				l.Append(protoreflect.ValueOfString("password=" + marker(name)))
			case name == "volume_capability":
				fill(m.Mutable(f).Message())
			case name == "volume_capabilities":
				l := m.Mutable(f).List()
				fill(l.AppendMutable().Message())
			case name == "mount":
				fill(m.Mutable(f).Message())
			}
		}
	}
	fill(m.ProtoReflect())
	return markers
}

// requests are one of every kind, by method.
func requests() map[string]proto.Message {
	all := map[string]proto.Message{}
	services := (&csispec.CreateVolumeRequest{}).ProtoReflect().Descriptor().ParentFile().Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			in, err := protoregistry.GlobalTypes.FindMessageByName(methods.Get(j).Input().FullName())
			if err != nil {
				panic(err)
			}
			all[string(methods.Get(j).Name())] = in.New().Interface()
		}
	}
	return all
}

// B166: markers in all places where a secret may be are in no log line, at the
// highest level, and in no error, whatever the service quotes.
func TestB166SecretsAreNowhere(t *testing.T) {
	n := 0
	for method, req := range requests() {
		markers := marked(req)
		n += len(markers)
		text := redact(req, "it failed with "+fmt.Sprint(req))
		clean := fmt.Sprint(withoutSecrets(req))
		for i, m := range markers {
			if strings.Contains(text, m) || strings.Contains(text, m[:minHidden+2]) {
				t.Errorf("%s: %s is in the error: %s", method, m, text)
			}
			if strings.HasSuffix(m, "secrets") && strings.Contains(clean, m) {
				t.Errorf("%s: the service is told secret %d", method, i)
			}
		}
		for _, a := range about(req) {
			if strings.Contains(a.Value.String(), "MARKER") {
				t.Errorf("%s: logged as %v", method, a)
			}
		}
	}
	if n < 40 {
		t.Errorf("only %d places", n)
	}
}

func TestB166OverTheSocket(t *testing.T) {
	in := &csispec.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: "/staging"}
	markers := marked(in)
	pub := &csispec.ControllerPublishVolumeRequest{VolumeId: "v", NodeId: "n"}
	markers = append(markers, marked(pub)...)
	fail := func(_ context.Context, req any) error {
		return fmt.Errorf("%w: request %v: mount: bad option %.20q", block.ErrInvalid, req, "password="+markers[0])
	}
	e := both(t, slog.LevelDebug-10, fail)
	_, stage := csispec.NewNodeClient(e).NodeStageVolume(t.Context(), in)
	_, publish := csispec.NewControllerClient(e).ControllerPublishVolume(t.Context(), pub)
	for _, err := range []error{stage, publish} {
		if status.Code(err) != codes.InvalidArgument || strings.Contains(err.Error(), "MARKER") {
			t.Errorf("got %v", err)
		}
	}
	if !strings.Contains(stage.Error(), "(mount flag 2)") {
		t.Errorf("it does not say which flag: %v", stage)
	}
	panics := both(t, slog.LevelDebug-10, func(_ context.Context, req any) error { panic(fmt.Sprint(req)) })
	_, _ = csispec.NewNodeClient(panics).NodeStageVolume(t.Context(), in)
	if log := e.log.String() + panics.log.String(); strings.Contains(log, "MARKER") || !strings.Contains(log, "a call panicked") {
		t.Errorf("the log:\n%s", log)
	}
}

// What is no secret stays readable.
func TestRedactKeepsSentences(t *testing.T) {
	id := block.NewUUID().String()
	req := &csispec.NodeStageVolumeRequest{
		VolumeId: "v", PublishContext: map[string]string{AttachmentKey: id},
		VolumeCapability: &csispec.VolumeCapability{AccessType: &csispec.VolumeCapability_Mount{Mount: &csispec.VolumeCapability_MountVolume{MountFlags: []string{"ro", "noatime"}}}},
	}
	want := "attachment " + id + " is gone; /dev/nbd0 is read-only (ro), mounted with noatime"
	if got := redact(req, want); got != want {
		t.Errorf("got %s", got)
	}
}
