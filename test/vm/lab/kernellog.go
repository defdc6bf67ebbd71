package lab

import (
	"bufio"
	"bytes"
	"errors"
	"regexp"
	"strings"
	"syscall"
)

// KernelLog reads the kernel's messages from where it was opened.
type KernelLog struct{ lines []string }

// OpenKernelLog marks the present end of the log.
func OpenKernelLog() *KernelLog {
	return &KernelLog{lines: readKernelLog()}
}

// Since are the messages after the mark.
func (k *KernelLog) Since() []string {
	all := readKernelLog()
	return all[min(len(k.lines), len(all)):]
}

// readKernelLog reads all that the ring holds; it is large enough for a boot.
func readKernelLog() []string {
	fd, err := syscall.Open("/dev/kmsg", syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return []string{"/dev/kmsg: " + err.Error()}
	}
	defer func() { _ = syscall.Close(fd) }()
	var lines []string
	b := make([]byte, 8192)
	for {
		n, err := syscall.Read(fd, b)
		if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.EINTR) {
			continue // overwritten meanwhile: the next read goes on after the gap
		}
		if err != nil || n <= 0 {
			return lines
		}
		record, _, _ := bytes.Cut(b[:n], []byte{'\n'}) // continuation lines carry a dictionary
		if _, text, ok := strings.Cut(string(record), ";"); ok {
			lines = append(lines, text)
		}
	}
}

// never is what no scenario may see.
var never = regexp.MustCompile(`BUG:|WARNING:|Oops|general protection|blocked for more than|Kernel panic|refcount_t|KASAN|Call Trace`)

// ioError is what a workload's kernel says when an error has reached it.
var ioError = regexp.MustCompile(`I/O error|EXT4-fs (error|warning)|EXT4-fs \(.*\): (error|Remounting filesystem read-only|failed to convert)|JBD2: .*[Ee]rror|Aborting journal|XFS .*(error|Corruption|[Ss]hutting down|shutdown)`)

// KernelLines are the kernel's messages of this scenario that match.
func (t *T) KernelLines(pattern string) []string {
	re := regexp.MustCompile(pattern)
	var found []string
	for _, l := range t.kernel.Since() {
		if re.MatchString(l) {
			found = append(found, l)
		}
	}
	return found
}

// NoIOErrors fails the scenario if an I/O error has reached the kernel's users since it began.
func (t *T) NoIOErrors() {
	for _, l := range t.kernel.Since() {
		if ioError.MatchString(l) {
			t.Errorf("kernel: %s", l)
		}
	}
}

// known are warnings of kernels about themselves that say nothing about their users: Linux 6.1's mq-deadline counts a
// request twice that nbd sends again, and says so when the device goes.
var known = regexp.MustCompile(`WARNING: .* dd_exit_sched`)

func (t *T) checkKernel() {
	skip := false // what a known warning dumps
	last := ""    // the end of a dump that is tolerated
	for _, l := range t.kernel.Since() {
		switch {
		case last != "":
			if strings.Contains(l, last) {
				last = ""
			}
		case t.tolerated != "" && strings.Contains(l, t.tolerated):
			last = t.toleratedEnd
		case known.MatchString(l):
			skip = true
		case strings.Contains(l, "[ end trace"):
			skip = false
		case !skip && never.MatchString(l):
			t.Errorf("kernel: %s", l)
		}
	}
}

// Tolerate lets the kernel's log have a dump that begins and ends with lines of such texts, and returns how many there are.
func (t *T) Tolerate(begin, end string) int {
	t.tolerated, t.toleratedEnd = begin, end
	return len(t.KernelLines(regexp.QuoteMeta(begin)))
}

// tellKernel logs the scenario's kernel messages, the last ones in full.
func (t *T) tellKernel() {
	lines := t.kernel.Since()
	for _, l := range lines[max(0, len(lines)-60):] {
		t.Logf("kernel: %s", l)
	}
}

// lines splits text.
func lines(text string) []string {
	var l []string
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		l = append(l, s.Text())
	}
	return l
}
