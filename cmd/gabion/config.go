package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/image"
)

// serverConfig is what `gabion server` was told.
type serverConfig struct {
	node, rack string
	data       string   // absolute
	disks      []string // absolute

	listen    string // host to bind
	advertise string // host that others are told
	ports     portConfig
	nbdSocket string // absolute, empty: none

	bootstrap bool
	join      string

	extentSize int64
	replicas   uint32
	ioMode     string
	harden     bool
	devices    bool // of this host may use volumes on buffered disks
	insecure   bool
	faults     bool

	logLevel  string
	logFormat string
	grace     time.Duration
}

// portConfig has the ports in the order in which they are checked; 0 takes a free one.
type portConfig struct{ metadata, raft, replica, nbd, http int }

const noSocket = "none"

func (c *serverConfig) register(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVar(&c.node, "node", "", "unique, lasting `NAME` of this server (default this host's name)")
	f.StringVar(&c.rack, "rack", "default", "`NAME` of the rack that this server fails with")
	f.StringVar(&c.data, "data", "", "`DIR` for the server's own state")
	f.StringSliceVar(&c.disks, "disk", nil, "`DIR[,...]`, one for each disk: the root of a file system of its own")
	f.StringVar(&c.listen, "listen", "127.0.0.1", "`ADDR` to listen on")
	f.StringVar(&c.advertise, "advertise", "", "`HOST` that clients and other servers are told (default the one of --listen)")
	f.IntVar(&c.ports.metadata, "metadata-port", 7400, "`PORT` of the metadata API")
	f.IntVar(&c.ports.raft, "raft-port", 7401, "`PORT` of Raft")
	f.IntVar(&c.ports.replica, "replica-port", 7402, "`PORT` of the replica protocol")
	f.IntVar(&c.ports.nbd, "nbd-port", 10809, "`PORT` of NBD")
	f.IntVar(&c.ports.http, "http-port", 7480, "`PORT` of metrics and health")
	f.StringVar(&c.nbdSocket, "nbd-socket", "", "`PATH` of the NBD UNIX socket (default nbd.sock in --data; none: no socket)")
	f.BoolVar(&c.bootstrap, "bootstrap", false, "found a cluster if --data is empty; else simply start")
	f.StringVar(&c.join, "join", "", "enter the cluster of the servers at `HOST:PORT[,...]` if --data is empty; else simply start")
	c.extentSize = block.DefaultExtentSize
	f.Var(sizeFlag{&c.extentSize}, "extent-size", "with --bootstrap: `SIZE` of the cluster's extents, a power of two, for ever")
	f.Uint32Var(&c.replicas, "default-replicas", 3, "with --bootstrap: copies of a volume that names none")
	f.Var(newChoice(&c.ioMode, image.Auto.String(), image.Direct.String(), image.Buffered.String()), "io-mode",
		"how the disks' images are accessed: past the page cache (direct) or through it; auto is what suits them")
	f.BoolVar(&c.harden, "harden", true, "prepare for memory to be short, as far as capabilities allow: stay in memory, be killed\n"+
		"last, write back without waiting for oneself (CAP_SYS_RESOURCE, CAP_IPC_LOCK)")
	f.BoolVar(&c.devices, "allow-local-devices", false, "let this host's own kernel use volumes here though a disk is accessed through the page\n"+
		"cache, where write-back may wait for itself; for tests")
	f.BoolVar(&c.insecure, "insecure", false, "listen beyond loopback, without encryption and without asking who is there")
	f.BoolVar(&c.faults, "fault-injection", false, "let the HTTP port delay and fail operations, for tests")
	f.Var(newChoice(&c.logLevel, "info", "debug", "warn", "error"), "log-level", "what to log")
	f.Var(newChoice(&c.logFormat, "auto", "text", "json"), "log-format", "how to log; auto: text on a terminal, else JSON")
	f.DurationVar(&c.grace, "grace", 10*time.Second, "how long an orderly stop may take")
}

// complete fills in defaults and checks what can be checked without touching
// anything. Its errors are of usage.
func (c *serverConfig) complete() error {
	var err error
	if c.node, err = consumerName(c.node); err != nil {
		return err
	}
	if err := checkName("--node", c.node, 253); err != nil {
		return err
	}
	if err := checkName("--rack", c.rack, 128); err != nil {
		return err
	}
	if c.bootstrap && c.join != "" {
		return usagef("--bootstrap founds a cluster and --join enters one: give one of them")
	}
	if c.data == "" {
		return usagef("the server needs a directory for its state: add --data DIR")
	}
	if len(c.disks) == 0 && c.join == "" {
		return usagef("the server needs a disk: add --disk DIR, or let it enter a cluster without any by --join")
	}
	if c.grace <= 0 {
		return usagef("--grace %v: it must be positive", c.grace)
	}
	if err := (block.Geometry{ExtentSize: c.extentSize}).Validate(); err != nil {
		return usagef("--extent-size: %w", err)
	}
	if c.replicas < 1 || c.replicas > 3 {
		return usagef("--default-replicas %d: it is 1, 2 or 3", c.replicas)
	}
	if err := c.completePaths(); err != nil {
		return err
	}
	if err := c.completeAddresses(); err != nil {
		return err
	}
	return c.checkJoined()
}

// checkJoined checks what a server of several needs.
func (c *serverConfig) checkJoined() error {
	if c.join == "" {
		return nil
	}
	for _, address := range strings.Split(c.join, ",") {
		if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
			return usagef("--join %.60q: it is HOST:PORT of a server's metadata API, such as 10.0.0.1:7400, or several with commas between them", c.join)
		}
	}
	if c.ports.raft == 0 {
		return usagef("--raft-port 0: servers of one cluster must find each other where they were before: choose a port")
	}
	return nil
}

func (c *serverConfig) completePaths() (err error) {
	if c.data, err = filepath.Abs(c.data); err != nil {
		return err
	}
	seen := map[string]bool{}
	for i, d := range c.disks {
		if d == "" {
			return usagef("--disk has an empty name in it")
		}
		if d, err = filepath.Abs(d); err != nil {
			return err
		}
		if c.disks[i] = d; seen[d] {
			return usagef("--disk names %s twice", d)
		}
		if err := checkPath("--disk", d); err != nil {
			return err
		}
		seen[d] = true
		if within(c.data, d) {
			return usagef("--data %s lies on --disk %s: give the state a directory of its own", c.data, d)
		}
	}
	switch c.nbdSocket {
	case "":
		c.nbdSocket = filepath.Join(c.data, "nbd.sock")
	case noSocket:
		c.nbdSocket = ""
	default:
		if c.nbdSocket, err = filepath.Abs(c.nbdSocket); err != nil {
			return err
		}
	}
	return checkPath("--nbd-socket", c.nbdSocket)
}

// checkPath refuses a path that cannot be told to the metadata service.
func checkPath(flag, path string) error {
	if len(path) > maxSentence || !utf8.ValidString(path) {
		return usagef("%s %.60q: a path has at most %d bytes, in UTF-8", flag, path, maxSentence)
	}
	return nil
}

// within reports whether path is dir or below it.
func within(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, ".."+string(os.PathSeparator))
}

func (c *serverConfig) completeAddresses() error {
	ip := net.ParseIP(c.listen)
	if ip == nil && c.listen != "localhost" {
		return usagef("--listen %.60q: it is an IP address of this machine, such as 127.0.0.1", c.listen)
	}
	if !daemon.IsLoopback(c.listen) && !c.insecure {
		return fmt.Errorf("%w: --listen %s lets other machines in, without encryption or authentication: listen on 127.0.0.1, or accept that with --insecure", block.ErrPrecondition, c.listen)
	}
	if c.advertise == "" {
		c.advertise = c.listen
		if ip != nil && ip.IsUnspecified() {
			name, err := os.Hostname()
			if err != nil {
				return fmt.Errorf("%w: this host's name: %w: add --advertise HOST", block.ErrUnavailable, err)
			}
			c.advertise = name
		}
	}
	for flag, port := range map[string]int{
		"--metadata-port": c.ports.metadata, "--raft-port": c.ports.raft, "--replica-port": c.ports.replica,
		"--nbd-port": c.ports.nbd, "--http-port": c.ports.http,
	} {
		if port < 0 || port > 65535 {
			return usagef("%s %d: a port is a number up to 65535; 0 takes a free one", flag, port)
		}
	}
	return nil
}

// advertised is how others reach what listens on l.
func (c *serverConfig) advertised(l net.Listener) string {
	return net.JoinHostPort(c.advertise, strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
}

// checkName keeps what people will read in tables and sentences readable.
func checkName(flag, name string, limit int) error {
	bad := func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) || r == ',' }
	if name == "" || len(name) > limit || !utf8.ValidString(name) || strings.ContainsFunc(name, bad) {
		return usagef("%s %.60q: a name has 1 to %d bytes of printable characters without spaces and commas", flag, name, limit)
	}
	return nil
}

// mode is --io-mode as the disks know it.
func (c *serverConfig) mode() image.Mode {
	for _, m := range []image.Mode{image.Direct, image.Buffered} {
		if m.String() == c.ioMode {
			return m
		}
	}
	return image.Auto
}
