package nbd_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gabion-storage/gabion/nbd/wire"
	"github.com/pojntfx/go-nbd/pkg/protocol"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata/wire")

// A transcript in testdata/wire has what a raw client sends ("> ...") and what
// the server answers ("< ..."); running it produces it again. The verbs:
//
//	> connect                       a new connection; the greeting is answered with client flags 3
//	> connect FLAGS                 with other flags
//	> option ID DATA... [length:N]  an option; replies are shown up to ACK or an error
//	> request COMMAND FLAGS OFFSET LENGTH [DATA...]
//	> send DATA...                  anything else
//	> end                           nothing more is sent; shows how the server closes
//
// DATA is any of u16:N u32:N str:TEXT (with its length) text:TEXT zeros:N fill:N x:HEX.
func transcript(t *testing.T, s *served, name string) {
	t.Helper()
	file := filepath.Join("testdata", "wire", name+".txt")
	want, err := os.ReadFile(file)
	must(t, err)
	var out bytes.Buffer
	r := raw{t: t, at: s.unix, out: &out}
	defer r.close()
	for line := range strings.Lines(string(want)) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "> "):
			fmt.Fprintln(&out, line)
			r.do(strings.Fields(line[2:]))
		case !strings.HasPrefix(line, "<"):
			fmt.Fprintln(&out, line)
		}
	}
	if *update {
		must(t, os.WriteFile(file, out.Bytes(), 0o644))
	} else if out.String() != string(want) {
		t.Errorf("%s: run the test with -update and look at the difference; got:\n%s", file, out.String())
	}
}

// raw is a client that checks nothing.
type raw struct {
	t          testing.TB
	at         string
	out        io.Writer
	nc         net.Conn
	noZeroes   bool
	structured bool
	cookie     uint64
}

func (r *raw) close() {
	if r.nc != nil {
		_ = r.nc.Close()
	}
}

func (r *raw) say(format string, args ...any) { fmt.Fprintf(r.out, "< "+format+"\n", args...) }

func (r *raw) connect(flags uint32) {
	r.close()
	nc, err := net.Dial("unix", r.at)
	must(r.t, err)
	*r = raw{t: r.t, at: r.at, out: r.out, nc: nc, noZeroes: flags&2 != 0}
	_ = nc.SetDeadline(time.Now().Add(20 * time.Second))
	p := r.receive(18)
	if !bytes.Equal(p, []byte("NBDMAGICIHAVEOPT\x00\x03")) {
		r.t.Fatalf("greeting %q", p)
	}
	r.send(binary.BigEndian.AppendUint32(nil, flags))
}

func (r *raw) do(words []string) {
	switch words[0] {
	case "connect":
		flags := uint64(3)
		if len(words) > 1 {
			flags = number(r.t, words[1])
		}
		r.connect(uint32(flags))
	case "option":
		r.option(words[1:])
	case "request":
		r.request(words[1:])
	case "send":
		r.send(data(r.t, words[1:]))
	case "end":
		_ = r.nc.(*net.UnixConn).CloseWrite()
		rest, err := io.ReadAll(r.nc)
		r.say("%d bytes, then %s", len(rest), ending(err))
	default:
		r.t.Fatalf("no verb %q", words[0])
	}
}

func ending(err error) string {
	switch {
	case err == nil, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "closed" // with or without unread bytes of ours
	}
	return err.Error()
}

func number(t testing.TB, s string) uint64 {
	n, err := strconv.ParseUint(s, 0, 64)
	must(t, err)
	return n
}

// data builds bytes from DATA words.
func data(t testing.TB, words []string) (p []byte) {
	for _, w := range words {
		kind, value, _ := strings.Cut(w, ":")
		switch kind {
		case "u16":
			p = binary.BigEndian.AppendUint16(p, uint16(number(t, value)))
		case "u32":
			p = binary.BigEndian.AppendUint32(p, uint32(number(t, value)))
		case "str":
			p = append(binary.BigEndian.AppendUint32(p, uint32(len(value))), value...)
		case "text":
			p = append(p, value...)
		case "zeros":
			p = append(p, make([]byte, number(t, value))...)
		case "fill":
			p = append(p, bytes.Repeat([]byte("n"), int(number(t, value)))...)
		case "x":
			b, err := hex.DecodeString(value)
			must(t, err)
			p = append(p, b...)
		default:
			t.Fatalf("no data %q", w)
		}
	}
	return p
}

// send may fail if the server has closed already; what it said shows in the next read.
func (r *raw) send(p []byte) { _, _ = r.nc.Write(p) }

// receive reads n bytes; nil if the server closed.
func (r *raw) receive(n int) []byte {
	p := make([]byte, n)
	if got, err := io.ReadFull(r.nc, p); err != nil {
		r.say("%d bytes, then %s", got, ending(err))
		return nil
	}
	return p
}

func (r *raw) option(words []string) {
	id := uint32(number(r.t, words[0]))
	length := -1
	if last := words[len(words)-1]; strings.HasPrefix(last, "length:") {
		length = int(number(r.t, last[7:]))
		words = words[:len(words)-1]
	}
	p := data(r.t, words[1:])
	if length < 0 {
		length = len(p)
	}
	head := binary.BigEndian.AppendUint32([]byte("IHAVEOPT"), id)
	r.send(append(binary.BigEndian.AppendUint32(head, uint32(length)), p...))
	if id == wire.OptExportName {
		r.exportName()
		return
	}
	for {
		h := r.receive(20)
		if h == nil {
			return
		}
		if got := binary.BigEndian.Uint32(h[8:]); binary.BigEndian.Uint64(h) != protocol.NEGOTIATION_MAGIC_REPLY || got != id {
			r.t.Fatalf("reply header %x to option %d", h, id)
		}
		kind := binary.BigEndian.Uint32(h[12:])
		p := r.receive(int(binary.BigEndian.Uint32(h[16:])))
		r.reply(id, kind, p)
		if kind == protocol.NEGOTIATION_TYPE_REPLY_ACK || kind&wire.RepErr != 0 {
			return
		}
	}
}

func (r *raw) exportName() {
	n := 10 + 124
	if r.noZeroes {
		n = 10
	}
	if p := r.receive(n); p != nil {
		r.say("size %d flags %#x and %d zeros", binary.BigEndian.Uint64(p), binary.BigEndian.Uint16(p[8:]), bytes.Count(p[10:], []byte{0}))
	}
}

func (r *raw) reply(id, kind uint32, p []byte) {
	be := binary.BigEndian
	switch {
	case kind&wire.RepErr != 0:
		r.say("error %d: %s", kind&^wire.RepErr, p)
	case kind == protocol.NEGOTIATION_TYPE_REPLY_ACK:
		r.say("ack")
		if id == wire.OptStructuredReply {
			r.structured = true
		}
	case kind == protocol.NEGOTIATION_TYPE_REPLY_SERVER:
		if n := be.Uint32(p); int(n) != len(p)-4 {
			r.t.Errorf("a server reply of %d bytes with a name of %d", len(p), n)
		}
		r.say("server %q", p[4:])
	case kind == wire.RepMetaContext:
		r.say("context %d %q", be.Uint32(p), p[4:])
	case be.Uint16(p) == protocol.NEGOTIATION_TYPE_INFO_EXPORT && len(p) == 12:
		r.say("export size %d flags %#x", be.Uint64(p[2:]), be.Uint16(p[10:]))
	case be.Uint16(p) == protocol.NEGOTIATION_TYPE_INFO_BLOCKSIZE && len(p) == 14:
		r.say("blocks min %d preferred %d max %d", be.Uint32(p[2:]), be.Uint32(p[6:]), be.Uint32(p[10:]))
	default:
		r.say("reply %d: %x", kind, p)
	}
}

func (r *raw) request(words []string) {
	r.cookie++
	q := wire.Request{
		Command: uint16(number(r.t, words[0])), Flags: uint16(number(r.t, words[1])),
		Offset: number(r.t, words[2]), Length: uint32(number(r.t, words[3])), Cookie: r.cookie,
	}
	payload := words[4:]
	r.send(q.Append(nil))
	if len(payload) == 1 && strings.HasPrefix(payload[0], "zeros:") {
		// In pieces: the race detector stops the whole process for the length of one large copy.
		for n := number(r.t, payload[0][6:]); n > 0; n -= min(n, 1<<20) {
			r.send(make([]byte, min(n, 1<<20)))
		}
	} else {
		r.send(data(r.t, payload))
	}
	if q.Command == protocol.TRANSMISSION_TYPE_REQUEST_DISC {
		return
	}
	r.answer(q)
}

// answer reads and shows the reply to q.
func (r *raw) answer(q wire.Request) {
	be := binary.BigEndian
	p := r.receive(4)
	if p == nil {
		return
	}
	if be.Uint32(p) == protocol.TRANSMISSION_MAGIC_REPLY {
		p = r.receive(12)
		if got := be.Uint64(p[4:]); got != q.Cookie {
			r.t.Fatalf("a reply with cookie %d, want %d", got, q.Cookie)
		}
		if be.Uint32(p) == 0 && q.Command == protocol.TRANSMISSION_TYPE_REQUEST_READ {
			r.say("ok, %s", summary(r.receive(int(q.Length))))
		} else {
			r.say("errno %d", be.Uint32(p))
		}
		return
	}
	p = r.receive(16)
	if got := be.Uint64(p[4:]); got != q.Cookie || be.Uint16(p) != wire.ChunkDone {
		r.t.Fatalf("chunk %x, want cookie %d and the done flag", p, q.Cookie)
	}
	body := r.receive(int(be.Uint32(p[12:])))
	switch kind := be.Uint16(p[2:]); kind {
	case wire.ChunkOffsetData:
		r.say("data at %d, %s", be.Uint64(body), summary(body[8:]))
	case wire.ChunkError:
		r.say("error chunk, errno %d", be.Uint32(body))
	case wire.ChunkStatus:
		var b strings.Builder
		for d := body[4:]; len(d) > 0; d = d[8:] {
			fmt.Fprintf(&b, " %d:%d", be.Uint32(d), be.Uint32(d[4:]))
		}
		r.say("status of context %d:%s", be.Uint32(body), b.String())
	default:
		r.say("chunk %d: %x", kind, body)
	}
}

// summary shows bytes as runs.
func summary(p []byte) string {
	var b strings.Builder
	for i := 0; i < len(p); {
		j := i
		for j < len(p) && p[j] == p[i] {
			j++
		}
		fmt.Fprintf(&b, "%d x %#02x ", j-i, p[i])
		i = j
	}
	return strings.TrimSpace(b.String())
}
