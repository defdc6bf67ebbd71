package primary

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"

	"github.com/gabion-storage/gabion/server/block"
)

// maxName bounds an export name, in bytes: two numbers, an id and the longest token.
const maxName = 256

// name is a parsed export name. It holds the token's digest, never the token.
type name struct {
	volume  block.VolumeID
	digest  [32]byte
	epoch   block.CacheEpoch    // numbered sessions
	session block.SessionNumber // 0: plain
}

var errName = fmt.Errorf("%w: an export name is <volume id>/<token>, or <volume id>/<token>/<cache epoch>/<session>", block.ErrInvalid)

// parseName accepts the one canonical form only. Its errors do not repeat the
// name, which holds a secret.
func parseName(s string) (name, error) {
	if len(s) > maxName {
		return name{}, errName
	}
	parts := strings.Split(s, "/")
	if len(parts) != 2 && len(parts) != 4 {
		return name{}, errName
	}
	id, err := block.ParseUUID(parts[0])
	if err != nil {
		return name{}, errName
	}
	token, err := base64.RawURLEncoding.Strict().DecodeString(parts[1])
	if err != nil || len(token) == 0 || strings.ContainsAny(parts[1], "\r\n") {
		return name{}, errName
	}
	n := name{volume: block.VolumeID{UUID: id}, digest: sha256.Sum256(token)}
	if len(parts) == 4 {
		epoch, ok1 := parseNumber(parts[2])
		session, ok2 := parseNumber(parts[3])
		if !ok1 || !ok2 {
			return name{}, errName
		}
		n.epoch, n.session = block.CacheEpoch(epoch), block.SessionNumber(session)
	}
	return n, nil
}

// parseNumber takes a positive decimal number without sign or leading zeros.
func parseNumber(s string) (uint64, bool) {
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil && n > 0 && s[0] != '0' && s[0] != '+'
}
