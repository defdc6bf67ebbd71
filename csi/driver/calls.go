package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"runtime/debug"
	"strings"
	"time"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

const (
	// patience is how long a call may take whose caller named no deadline.
	patience = 2 * time.Minute
	// reserve is how long before the caller's deadline a call gives up, so that its reason still arrives: at most this, and at most a tenth.
	reserve = 500 * time.Millisecond
)

// calls is what every call goes through; see the package's documentation.
type calls struct {
	config  Config
	repeats *repeats
	turns   *turns
}

// errPanic is what became of a call that panicked: no sentinel, so INTERNAL.
var errPanic = errors.New("internal error: the driver's log has the rest")

func (c *calls) report(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	begin := time.Now()
	answer, err := next(ctx, req)
	took, got, text := time.Since(begin), code(err), ""
	if err != nil {
		text = redact(req, sentence(err))
	}
	method := path.Base(info.FullMethod)
	if c.config.Observe != nil {
		c.config.Observe(method, got, took)
	}
	c.log(ctx, method, req, got, text, took)
	return answer, toStatus(err, text)
}

// log writes the line of a call. What changes nothing is told at debug level,
// and so is an error that says the same as a moment ago: a caller that retries
// without pause does not fill the log.
func (c *calls) log(ctx context.Context, method string, req any, got codes.Code, text string, took time.Duration) {
	level := slog.LevelInfo
	attrs := []slog.Attr{slog.String("method", method)}
	attrs = append(attrs, about(req)...)
	attrs = append(attrs, slog.String("code", got.String()), slog.Duration("took", took))
	switch {
	case got == codes.OK:
		if looks[method] {
			level = slog.LevelDebug
		}
	default:
		level = slog.LevelWarn
		if got == codes.Internal || got == codes.DataLoss {
			level = slog.LevelError
		}
		n, fresh := c.repeats.seen(method + "\x00" + object(req) + "\x00" + text)
		if !fresh {
			level = slog.LevelDebug
		} else if n > 0 {
			attrs = append(attrs, slog.Int("repeated", n))
		}
		attrs = append(attrs, slog.String("err", text))
	}
	c.config.Log.LogAttrs(ctx, level, "csi", attrs...)
}

// looks are the calls that change nothing.
var looks = map[string]bool{
	"GetPluginInfo": true, "GetPluginCapabilities": true, "Probe": true,
	"ControllerGetCapabilities": true, "ControllerGetVolume": true, "ControllerGetVolumeHealth": true, "ControllerListVolumeHealth": true,
	"GetCapacity": true, "ListVolumes": true, "ValidateVolumeCapabilities": true,
	"NodeGetCapabilities": true, "NodeGetInfo": true, "NodeGetVolumeStats": true, "NodeGetVolumeHealth": true, "NodeGetStorageHealth": true,
}

func (c *calls) recover(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (answer any, err error) {
	defer func() {
		if p := recover(); p != nil {
			answer, err = nil, errPanic
			c.config.Log.Error("a call panicked", "method", path.Base(info.FullMethod), "panic", redact(req, fmt.Sprint(p)), "stack", string(debug.Stack()))
		}
	}()
	return next(ctx, req)
}

func (c *calls) deadline(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	left := patience
	if end, ok := ctx.Deadline(); ok {
		left = time.Until(end)
		left -= min(reserve, left/10)
	}
	ctx, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	return next(ctx, req)
}

// dropSecrets hands on the request without its secrets. The original stays as
// it is: report looks into it.
func (c *calls) dropSecrets(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	return next(ctx, withoutSecrets(req))
}

func (c *calls) turn(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	key := turnOf(path.Base(info.FullMethod), req)
	if key == "" {
		return next(ctx, req)
	}
	done, err := c.turns.take(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("%w for %s: it is repeated later", err, object(req))
	}
	defer done()
	return next(ctx, req)
}

// turnOf is what a call must have for itself while it lasts; "": nothing.
//
// On a node all changes to a volume go one after the other. In the controller
// the metadata service orders what meets; only calls of the same kind take
// turns, so that a growth that waits for a node which is down holds up no detach.
func turnOf(method string, req any) string {
	switch method {
	case "CreateVolume", "DeleteVolume", "ControllerPublishVolume", "ControllerUnpublishVolume", "ControllerExpandVolume", "ControllerModifyVolume":
		return method + "\x00" + object(req)
	case "NodeStageVolume", "NodeUnstageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeExpandVolume":
		return "node\x00" + object(req)
	}
	return ""
}

// object is what a call is about: a volume's id, or the name it is to get.
func object(req any) string {
	switch r := req.(type) {
	case interface{ GetVolumeId() string }:
		return shorten(r.GetVolumeId())
	case *csispec.CreateVolumeRequest:
		return shorten(r.GetName())
	}
	return ""
}

// about are the log's attributes of a request: identities and sizes, nothing that a user may have written a secret into.
func about(req any) (list []slog.Attr) {
	text := func(key, value string) {
		if value != "" {
			list = append(list, slog.String(key, shorten(value)))
		}
	}
	switch r := req.(type) {
	case interface{ GetVolumeId() string }:
		text("volume_id", r.GetVolumeId())
	case *csispec.CreateVolumeRequest:
		text("name", r.GetName())
	}
	if r, ok := req.(interface{ GetNodeId() string }); ok {
		text("node", r.GetNodeId())
	}
	if r, ok := req.(interface{ GetStagingTargetPath() string }); ok {
		text("staging", r.GetStagingTargetPath())
	}
	if r, ok := req.(interface{ GetTargetPath() string }); ok {
		text("target", r.GetTargetPath())
	}
	if r, ok := req.(interface {
		GetCapacityRange() *csispec.CapacityRange
	}); ok && r.GetCapacityRange() != nil {
		list = append(list, slog.Int64("required", r.GetCapacityRange().GetRequiredBytes()), slog.Int64("limit", r.GetCapacityRange().GetLimitBytes()))
	}
	return list
}

// shorten keeps what a caller chose from filling a log line.
func shorten(s string) string {
	const limit = 256
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= limit {
		return s
	}
	return fmt.Sprintf("%.*s…(%d bytes)", limit, s, len(s))
}
