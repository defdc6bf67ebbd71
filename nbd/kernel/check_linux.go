package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gabion-storage/gabion/server/block"
	"golang.org/x/sys/unix"
)

// Check implements Kernel.
func (l *Linux) Check() (advice []string, err error) {
	c, _, err := openFamily()
	if err != nil {
		if _, absent := os.Stat(filepath.Join(l.sys, "module/nbd")); absent == nil && errors.Is(err, block.ErrPrecondition) {
			err = fmt.Errorf("%w: the nbd driver is loaded and does not answer here: run in the host's network namespace (hostNetwork: true)", block.ErrPrecondition)
		}
		return nil, err
	}
	_ = c.Close()
	if err := checkBackends(uname()); err != nil {
		return nil, err
	}
	if err := l.checkDestroy(); err != nil {
		return nil, err
	}
	if _, err := os.Stat(l.dev); err != nil {
		return nil, fmt.Errorf("%w: no %s: mount the host's", block.ErrPrecondition, l.dev)
	}
	return append(l.moduleAdvice(), versionAdvice(uname())...), nil
}

// checkBackends refuses a kernel that does not keep what a device stands for. A
// device that was made on it could not even be ended: it looks like any program's.
func checkBackends(release, _ string) error {
	var major, minor int
	n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor)
	if n == 2 && slices.Compare([]int{major, minor}, []int{5, 14}) < 0 {
		return fmt.Errorf("%w: kernel %s does not keep backend identifiers (Linux 5.14 and later do): devices could not be told apart",
			block.ErrPrecondition, release)
	}
	return nil
}

// checkDestroy ends a connection of its own from outside.
func (l *Linux) checkDestroy() error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("%w: a socket on loopback: %w", block.ErrPrecondition, err)
	}
	defer ln.Close()
	conn, err := new(net.Dialer).DialContext(context.Background(), "tcp", ln.Addr().String())
	if err != nil {
		return fmt.Errorf("%w: a connection on loopback: %w", block.ErrPrecondition, err)
	}
	s := &tcpSocket{TCPConn: conn.(*net.TCPConn)}
	defer s.Close()
	if err := s.settle(); err != nil {
		return err
	}
	if i, err := l.Socket(s.ID()); err != nil {
		return fmt.Errorf("%w: this kernel does not show its sockets: load tcp_diag (modprobe tcp_diag): %w", block.ErrPrecondition, err)
	} else if !i.Established {
		return fmt.Errorf("%w: this kernel shows a new connection as ended", block.ErrPrecondition)
	}
	if err := l.Destroy(s.ID()); err != nil {
		return err
	}
	if i, err := l.Socket(s.ID()); err == nil && i.Established {
		return fmt.Errorf("%w: this kernel does not end sockets that it is told to end", block.ErrPrecondition)
	}
	return nil
}

// moduleAdvice is about parameters of the module that make trouble.
func (l *Linux) moduleAdvice() []string {
	d := sysDir{path: filepath.Join(l.sys, "module/nbd/parameters")}
	var advice []string
	for _, name := range []string{"nbds_max", "max_part"} {
		if v := d.text(name); v != "" && v != "0" {
			advice = append(advice, fmt.Sprintf("the nbd module has %s=%s: load it with nbds_max=0 max_part=0 "+
				"(options nbd nbds_max=0 max_part=0 in /etc/modprobe.d), or devices may be busy or hang while partitions are looked for", name, v))
		}
	}
	return advice
}

// floors are the first releases of a series without known use-after-frees in the driver.
var floors = [][3]int{{6, 1, 162}, {6, 12, 63}}

// uname is what this kernel says of itself; it cannot fail.
func uname() (release, version string) {
	var u unix.Utsname
	_ = unix.Uname(&u)
	return unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Version[:])
}

// versionAdvice is about a kernel that is older than its series' fixes. It knows
// kernel.org's numbers and those that Debian writes into the version.
func versionAdvice(release, version string) []string {
	v, ok := kernelVersion(release, version)
	if !ok {
		return nil
	}
	if slices.Compare(v[:], []int{6, 1, 0}) < 0 {
		return []string{fmt.Sprintf("kernel %s is older than any that Gabion was tried on: use 6.1.162, 6.12.63 or a later one", release)}
	}
	for _, f := range floors {
		if v[0] == f[0] && v[1] == f[1] && v[2] < f[2] {
			return []string{fmt.Sprintf("kernel %d.%d.%d has known faults in its nbd driver: use %d.%d.%d or later", v[0], v[1], v[2], f[0], f[1], f[2])}
		}
	}
	return nil
}

var debianVersion = regexp.MustCompile(`\bDebian (\d+\.\d+\.\d+)`)

// kernelVersion is what kernel.org calls it; false if a distribution hides that.
func kernelVersion(release, version string) (v [3]int, ok bool) {
	text := release
	if m := debianVersion.FindStringSubmatch(version); m != nil {
		text = m[1]
	}
	parts := strings.SplitN(text, ".", 3)
	if len(parts) < 3 {
		return v, false
	}
	parts[2], _, _ = strings.Cut(parts[2], "-")
	for i, p := range parts {
		n, err := strconv.Atoi(p)
		if err != nil {
			return v, false
		}
		v[i] = n
	}
	// An unchanging x.y.0 is a distribution's own numbering: it tells no more than the series.
	return v, v[2] > 0 || slices.Compare(v[:], []int{6, 1, 0}) < 0
}
