package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Everywhere lets a server listen on all addresses of storage, so that it is reached at both, and its fault points over
// loopback. It says that it is at AddrA.
func Everywhere() []string { return []string{"--listen", "0.0.0.0", "--advertise", AddrA} }

// Fault is a rule of the server's fault points.
type Fault struct {
	Point string `json:"point"`
	Match string `json:"match,omitempty"` // a volume's id, at most points
	Delay string `json:"delay,omitempty"` // such as "500ms"
	Hold  bool   `json:"hold,omitempty"`  // until Disarm
	Error string `json:"error,omitempty"` // "io", "nospace", "unavailable"
	Count int    `json:"count,omitempty"` // 0: every time
	Hits  int    `json:"hits,omitempty"`  // as the server has counted
}

// Arm makes the server fail or delay at a point. The server listens Everywhere.
func (s *Server) Arm(f Fault) {
	b, err := json.Marshal(f)
	s.t.Check(err, "a fault")
	s.faults(http.MethodPost, "", string(b))
}

// Disarm ends the rules of a point, or all.
func (s *Server) Disarm(point string) { s.faults(http.MethodDelete, "?point="+point, "") }

// Hits is how often the rules of a point were met.
func (s *Server) Hits(point string) (n int) {
	var rules []Fault
	s.t.Check(json.Unmarshal([]byte(s.faults(http.MethodGet, "", "")), &rules), "the faults")
	for _, f := range rules {
		if f.Point == point {
			n += f.Hits
		}
	}
	return n
}

// AwaitHit waits until a rule of the point was met.
func (s *Server) AwaitHit(point string) {
	s.t.Eventually(20*time.Second, "the server is at "+point, func() bool { return s.Hits(point) > 0 })
}

func (s *Server) faults(method, query, body string) string {
	ctx, cancel := context.WithTimeout(s.t.ctx, 10*time.Second)
	defer cancel()
	status, said, err := ask(ctx, method, "http://127.0.0.1:7480/faults"+query, body)
	s.t.Check(err, "the server's fault points")
	if status/100 != 2 {
		s.t.Fatalf("the server's fault points: %d: %s", status, said)
	}
	return said
}

// Metric is the sum of a metric's series whose labels hold all the words.
func (s *Server) Metric(name string, words ...string) (sum float64) {
	_, text, err := s.HTTP(http.MethodGet, "/metrics", "")
	s.t.Check(err, "the server's metrics")
	for r := bufio.NewScanner(strings.NewReader(text)); r.Scan(); {
		series, value, _ := strings.Cut(r.Text(), " ")
		if series != name && !strings.HasPrefix(series, name+"{") || !hasAll(series, words) {
			continue
		}
		x, err := strconv.ParseFloat(value, 64)
		s.t.Check(err, "the metric %s", series)
		sum += x
	}
	return sum
}

func hasAll(s string, words []string) bool {
	for _, w := range words {
		if !strings.Contains(s, w) {
			return false
		}
	}
	return true
}

// CutOff makes the wire swallow what one connection sends and receives, as a path does that has died: nobody is told.
func (n *Network) CutOff(c Connection) {
	rule := func(hook, local, remote string) string {
		return fmt.Sprintf("table inet path {\nchain %[1]s {\ntype filter hook %[1]s priority 0\ntcp %[2]s %[4]d tcp %[3]s %[5]d drop\n}\n}",
			hook, local, remote, c.Port, nbdPort)
	}
	n.t.Sh("nft", rule("input", "dport", "sport"))
	n.t.Sh("nft", rule("output", "sport", "dport"))
}

// Join undoes CutOff.
func (n *Network) Join() { n.t.Sh("nft", "delete table inet path") }

// Connection is one of a node's connections to an NBD server.
type Connection struct {
	Port   int    // of the node
	Server string // address
}

const nbdPort = 10809

// Connections are the node's connections to NBD servers.
func (n *Network) Connections() (all []Connection) {
	for _, l := range lines(n.t.Sh("ss", "-Htn", "state", "established", "dport", "=", fmt.Sprintf(":%d", nbdPort))) {
		f := strings.Fields(l) // queues, local, peer
		if len(f) < 4 {
			continue
		}
		i := strings.LastIndexByte(f[2], ':')
		port, err := strconv.Atoi(f[2][i+1:])
		n.t.Check(err, "ss")
		server, _, _ := strings.Cut(strings.TrimPrefix(f[3], "[::ffff:"), ":")
		all = append(all, Connection{port, strings.TrimSuffix(server, "]")})
	}
	return all
}

// Destroy ends all the node's connections to NBD servers, as a firewall does that sends resets.
func (n *Network) Destroy() {
	n.t.Sh("ss", "-KHtn", "dport", "=", fmt.Sprintf(":%d", nbdPort))
}

// Reconnects is how often the plugin has given the volume's device new connections, counted in its log.
func (p *Plugin) Reconnects(v *Volume) (n int) {
	for _, l := range lines(p.proc.Log()) {
		if strings.Contains(l, "connected anew") && strings.Contains(l, v.ID) {
			n++
		}
	}
	return n
}
