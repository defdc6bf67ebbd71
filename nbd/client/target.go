package client

import (
	"fmt"
	"net"
	"net/url"
	"strings"

	"github.com/gabion-storage/gabion/server/block"
)

// Target says where an export is.
type Target struct {
	Network string // "tcp" or "unix"
	Address string // host:port, or the socket's path
	Export  string // the export's name; what follows its first "/" is a secret
}

// ParseURI reads nbd://host[:port]/export and nbd+unix:///export?socket=path.
// An error does not repeat the URI, because it carries a token.
func ParseURI(uri string) (Target, error) {
	u, err := url.Parse(uri)
	if err != nil { // its text is the URI
		return Target{}, fmt.Errorf("%w: not a URI; nbd://host:port/export or nbd+unix:///export?socket=path is wanted", block.ErrInvalid)
	}
	export := strings.TrimPrefix(u.Path, "/")
	switch u.Scheme {
	case "nbd":
		if u.Hostname() == "" {
			return Target{}, fmt.Errorf("%w: the URI names no host", block.ErrInvalid)
		}
		port := u.Port()
		if port == "" {
			port = "10809"
		}
		return Target{Network: "tcp", Address: net.JoinHostPort(u.Hostname(), port), Export: export}, nil
	case "nbd+unix":
		socket := u.Query().Get("socket")
		if socket == "" || u.Host != "" {
			return Target{}, fmt.Errorf("%w: an nbd+unix URI has no host and ?socket=path", block.ErrInvalid)
		}
		return Target{Network: "unix", Address: socket, Export: export}, nil
	case "nbds", "nbds+unix":
		return Target{}, fmt.Errorf("%w: NBD over TLS", block.ErrUnsupported)
	}
	return Target{}, fmt.Errorf("%w: the URI's scheme is neither nbd nor nbd+unix", block.ErrInvalid)
}

// String names the target without the secret part of its export.
func (t Target) String() string {
	return fmt.Sprintf("%s at %s", t.public(), t.Address)
}

func (t Target) public() string {
	if name, _, secret := strings.Cut(t.Export, "/"); secret {
		return name + "/…"
	}
	return t.Export
}

// redact takes the secret part of the export's name out of a text that a server sent.
func (t Target) redact(text string) string {
	if _, secret, ok := strings.Cut(t.Export, "/"); ok {
		for part := range strings.SplitSeq(secret, "/") {
			if len(part) >= 8 {
				text = strings.ReplaceAll(text, part, "…")
			}
		}
	}
	return text
}
