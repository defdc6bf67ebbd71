package nbd

import (
	"encoding/binary"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

// The options that choose and list: LIST, STRUCTURED_REPLY and the metadata contexts.

func (n *negotiation) list(id uint32, data []byte) error {
	if len(data) != 0 {
		return n.refuse(id, wire.RepErrInvalid, "LIST takes no data")
	}
	ctx, cancel := n.callContext()
	defer cancel()
	names, err := n.srv.cfg.Exports.List(ctx)
	if err != nil {
		return n.refuseErr(id, err)
	}
	for _, name := range names {
		p := binary.BigEndian.AppendUint32(nil, uint32(len(name)))
		n.appendReply(id, protocol.NEGOTIATION_TYPE_REPLY_SERVER, append(p, name...))
	}
	return n.ack(id)
}

func (n *negotiation) structuredReply(id uint32, data []byte) error {
	if len(data) != 0 {
		return n.refuse(id, wire.RepErrInvalid, "STRUCTURED_REPLY takes no data")
	}
	n.structured = true
	return n.ack(id)
}

// metaContext serves LIST_META_CONTEXT and SET_META_CONTEXT.
func (n *negotiation) metaContext(id uint32, data []byte) error {
	set := id == wire.OptSetMetaContext
	if set {
		n.meta, n.metaName = false, "" // also if the option fails
	}
	if !n.structured {
		return n.refuse(id, wire.RepErrInvalid, "structured replies must be negotiated first")
	}
	name, queries, ok := metaData(data)
	if !ok {
		return n.refuse(id, wire.RepErrInvalid, "the lengths inside the option do not add up")
	}
	if err := checkName(name); err != nil {
		return n.refuseErr(id, err)
	}
	if _, err := n.describe(string(name)); err != nil {
		return n.refuseErr(id, err)
	}
	chosen := len(queries) == 0 && !set
	for _, q := range queries {
		chosen = chosen || q == wire.Allocation || q == "base:" && !set
	}
	if !chosen {
		return n.ack(id)
	}
	context := uint32(0)
	if set {
		n.meta, n.metaName, context = true, string(name), allocationID
	}
	n.appendReply(id, wire.RepMetaContext, append(binary.BigEndian.AppendUint32(nil, context), wire.Allocation...))
	return n.ack(id)
}

// metaData takes the name and the queries out of the data of the metadata context options.
func metaData(p []byte) (name []byte, queries []string, ok bool) {
	text := func() (t []byte, ok bool) {
		if len(p) < 4 || uint64(binary.BigEndian.Uint32(p)) > uint64(len(p)-4) {
			return nil, false
		}
		length := binary.BigEndian.Uint32(p)
		t, p = p[4:4+length], p[4+length:]
		return t, true
	}
	if name, ok = text(); !ok || len(p) < 4 {
		return nil, nil, false
	}
	count := binary.BigEndian.Uint32(p)
	p = p[4:]
	for range count {
		q, ok := text()
		if !ok {
			return nil, nil, false
		}
		queries = append(queries, string(q))
	}
	return name, queries, len(p) == 0
}
