package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
)

type attachView struct {
	Volume    volumeView     `json:"volume"`
	Attached  attachmentView `json:"attachment"`
	URI       string         `json:"uri"`
	SocketURI string         `json:"socket_uri,omitempty"` // on the server's host
}

func (a *app) attachCommand() *cobra.Command {
	var node, state string
	var readOnly, device bool
	var outage time.Duration
	cmd := &cobra.Command{
		Use:   "attach NAME",
		Short: "Let one consumer use a volume, and print its NBD URI or device",
		Long: `Let one consumer use a volume, and print the NBD URI to connect to; on the
server's own host a second line has the URI of the UNIX socket. The URI
contains the secret token that opens the volume. Attaching again prints the
same URI; a second consumer is refused until the first is detached, unless both
only read.

With --device the kernel of this machine connects to the volume, and the path of
the block device is printed; that needs root and the nbd module. "gabion attachd"
keeps it connected when servers restart.`,
		Example: `  qemu-img info $(gabion attach db | head -n 1)
  mkfs.ext4 $(gabion attach db --device)`,
		Args:              oneVolume,
		ValidArgsFunction: a.completeVolume,
		RunE: a.act(func(ctx context.Context, args []string) error {
			consumer, err := consumerAt(state, node)
			if err != nil {
				return err
			}
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				found, err := find(ctx, c, args[0])
				if err != nil {
					return err
				}
				if device {
					return a.attachDevice(ctx, c, found, &devices{state: state, node: consumer, outage: outage}, readOnly)
				}
				r, err := c.Attach(ctx, &metapb.AttachRequest{Volume: byID(found), Node: consumer, ReadOnly: readOnly})
				if err != nil {
					return err
				}
				view, err := viewAttach(r)
				if err != nil {
					return err
				}
				return a.print(view, func(t *table) {
					t.row(view.URI)
					if view.SocketURI != "" {
						t.row(view.SocketURI)
					}
				})
			})
		}),
	}
	f := cmd.Flags()
	f.StringVar(&node, "node", "", "name of the consumer (default this host's name)")
	f.BoolVar(&readOnly, "read-only", false, "refuse the consumer's writes")
	f.BoolVar(&device, "device", false, "connect this machine's kernel, and print the device")
	f.StringVar(&state, "state", defaultState, "`DIR` for what is remembered of devices")
	outageLimit(f, &outage)
	return cmd
}

func (a *app) detachCommand() *cobra.Command {
	var node, state string
	var giveUp bool
	cmd := &cobra.Command{
		Use:   "detach NAME",
		Short: "End a consumer's use of a volume",
		Long: `End a consumer's use of a volume: its connections are closed and what they had
sent is finished when this command returns. Its URI opens nothing any more. A
device of it on this machine is ended first, unless it is mounted or held.

With --give-up it ends a device of this machine, given by its path or its
volume's id, although it is mounted: all its requests fail, and what was not
flushed is lost. That needs no server and is for when there will be none again.`,
		Args:              oneVolume,
		ValidArgsFunction: a.completeVolume,
		RunE: a.act(func(ctx context.Context, args []string) error {
			if giveUp {
				return a.giveUp(ctx, args[0], &devices{state: state, node: node})
			}
			consumer, err := consumerAt(state, node)
			if err != nil {
				return err
			}
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				found, err := find(ctx, c, args[0])
				if err != nil {
					return err
				}
				held, err := a.attachmentOf(found, consumer)
				if err != nil {
					return err
				}
				if err := a.detachDevice(ctx, c, found, &devices{state: state, node: consumer}); err != nil {
					return err
				}
				if _, err := c.Detach(ctx, &metapb.DetachRequest{Volume: byID(found), Node: consumer, AttachmentId: held}); err != nil {
					return err
				}
				return a.printVolume(found.GetVolume(), label(found.GetVolume())+" is detached from "+consumer)
			})
		}),
	}
	f := cmd.Flags()
	f.StringVar(&node, "node", "", "name of the consumer (default this host's name)")
	f.StringVar(&state, "state", defaultState, "`DIR` for what is remembered of devices")
	f.BoolVar(&giveUp, "give-up", false, "end a device of this machine though it is in use and no server is there")
	return cmd
}

// attachmentOf returns the id of the consumer's attachment, "" if there is none
// at all. It keeps a forgotten --node from looking like a success: to the API, a
// consumer that is not attached is detached already.
func (a *app) attachmentOf(v *metapb.GetVolumeResponse, consumer string) (string, error) {
	var others []string
	for _, t := range v.GetAttachments() {
		if t.GetNode() == consumer {
			return t.GetId(), nil
		}
		others = append(others, t.GetNode())
	}
	if len(others) == 0 {
		return "", nil
	}
	remedy, err := a.insteadOf(v)
	if err != nil {
		return "", err
	}
	return "", fmt.Errorf("%w: volume %s is attached to %s, not to %s: %s",
		block.ErrInUse, quoted(v.GetVolume().GetName()), strings.Join(others, ", "), consumer, remedy)
}

// insteadOf is what to do about a volume that is attached to others only. A device
// shows which attachment is this machine's, if any still is: another's is used
// somewhere else, and nobody is to end it for the sake of a device here.
func (a *app) insteadOf(v *metapb.GetVolumeResponse) (string, error) {
	id, err := metapb.ParseVolumeID("volume id", v.GetVolume().GetId())
	if err != nil {
		return "", err
	}
	here, err := a.devicesOf(id)
	if err != nil {
		return "", err
	}
	for _, t := range v.GetAttachments() {
		if _, mine := here[t.GetId()]; mine || len(here) == 0 {
			return fmt.Sprintf("add --node %s to end its use of it", t.GetNode()), nil
		}
	}
	stale := slices.Min(slices.Collect(maps.Values(here)))
	return fmt.Sprintf("%s on this machine is of an attachment that has ended: `gabion detach --give-up %s` ends it", stale, stale), nil
}

func consumerName(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("%w: this host's name: %w: add --node NAME", block.ErrUnavailable, err)
	}
	return name, nil
}

func viewAttach(r *metapb.AttachResponse) (attachView, error) {
	t := r.GetAttachment()
	view := attachView{
		Volume:   viewVolume(r.GetVolume()),
		Attached: attachmentView{t.GetId(), t.GetNode(), t.GetReadOnly(), t.GetRevoking(), unixTime(t.GetCreatedAt())},
	}
	if len(r.GetEndpoints()) == 0 {
		return view, fmt.Errorf("%w: no server can serve volume %s now: look with `gabion node list`", block.ErrUnavailable, quoted(r.GetVolume().GetName()))
	}
	e := r.GetEndpoints()[0]
	export := "/" + r.GetVolume().GetId() + "/" + base64.RawURLEncoding.EncodeToString(t.GetToken())
	view.URI = (&url.URL{Scheme: "nbd", Host: e.GetNbdAddress(), Path: export}).String()
	if isLocalSocket(e) {
		view.SocketURI = "nbd+unix://" + export + "?" + url.Values{"socket": {e.GetNbdSocket()}}.Encode()
	}
	return view, nil
}

// isLocalSocket reports whether the endpoint's socket is one of this host: its
// address is, and there is a socket at its path.
func isLocalSocket(e *metapb.Endpoint) bool {
	found, err := os.Stat(e.GetNbdSocket())
	if err != nil || found.Mode().Type() != os.ModeSocket {
		return false
	}
	host, _, err := net.SplitHostPort(e.GetNbdAddress())
	return err == nil && isOwnAddress(host)
}

func isOwnAddress(host string) bool {
	if daemon.IsLoopback(host) {
		return true
	}
	if name, err := os.Hostname(); err == nil && name == host {
		return true
	}
	own, _ := net.InterfaceAddrs()
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok && n.IP.Equal(net.ParseIP(host)) {
			return true
		}
	}
	return false
}
