package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gabion-storage/gabion/cmd/adapt"
	"github.com/gabion-storage/gabion/nbd/kernel"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
	"github.com/gabion-storage/gabion/server/daemon"
	"github.com/gabion-storage/gabion/server/fault"
)

// machine is where devices are. Tests have one of their own.
type machine struct {
	kernel kernel.Kernel
	dialer kernel.Dialer
}

// devices are this machine's, for one process. Several processes may have them
// at a time; they agree on the node's name, because by it a device's right to
// exist is asked for.
type devices struct {
	state   string
	node    string
	outage  time.Duration // that a device made here outlives; 0: the default
	log     *slog.Logger
	faults  *fault.Set // may be nil
	machine            // the zero value: this one
	check   *hostCheck
	manager *kernel.Manager
	watch   *os.File // locked while this process watches
}

// own is open for who makes devices, or keeps them: from now on this machine is the node.
func (d *devices) own(api metapb.MetadataClient) error {
	if err := d.open(api); err != nil {
		return err
	}
	if err := claimNode(d.state, d.node); err != nil {
		return errors.Join(err, d.close())
	}
	return nil
}

// open finds out whether this machine can have devices at all.
func (d *devices) open(api metapb.MetadataClient) (err error) {
	if d.kernel == nil {
		if os.Geteuid() != 0 {
			return fmt.Errorf("%w: devices are made by root: run this as root", block.ErrPermission)
		}
		d.machine = machine{kernel.NewLinux(), kernel.TCP{}}
	}
	d.check = &hostCheck{kernel: d.kernel, log: d.log}
	ended, err := d.check.ask(checkPatience)
	if err != nil {
		return err
	}
	if !ended { // what hangs may be a device of ours: taking care of those frees it
		d.log.Warn("the nbd driver does not answer: some program's call of it hangs; what this machine lacks is seen later")
	}
	if err := os.MkdirAll(d.state, 0o700); err != nil {
		return fmt.Errorf("%w: --state: %w", block.ErrUnavailable, err)
	}
	d.manager, err = kernel.New(kernel.Config{
		State: filepath.Join(d.state, "nbd"), Kernel: d.kernel, Dialer: d.dialer, Metadata: adapt.Node{API: api, Name: d.node}, Log: d.log, Faults: d.faults,
		DeadTimeout: d.outage,
	})
	return err
}

func (d *devices) close() error {
	err := d.manager.Close()
	if d.watch != nil {
		err = errors.Join(err, d.watch.Close())
	}
	return err
}

// watched tells whether some process keeps this machine's devices connected;
// with take, this one is such a process until close.
func (d *devices) watched(take bool) (bool, error) {
	f, err := os.OpenFile(filepath.Join(d.state, "watch"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return false, fmt.Errorf("%w: --state: %w", block.ErrUnavailable, err)
	}
	if take {
		d.watch = f
		return true, syscall.Flock(int(f.Fd()), syscall.LOCK_SH)
	}
	defer func() { _ = f.Close() }()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil, nil
}

// nodeFile has the name of the node that this machine is.
const nodeFile = "node"

// nodeOf is the name by which the devices remembered in state were attached, "" if nobody ever said one.
func nodeOf(state string) (string, error) {
	b, err := os.ReadFile(filepath.Join(state, nodeFile))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// claimNode gives the machine its name, or refuses another one than it has: a
// watcher of another name would find the devices revoked, and end them.
func claimNode(state, name string) error {
	f, err := os.OpenFile(filepath.Join(state, nodeFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("%w: --state: %w", block.ErrUnavailable, err)
	}
	defer func() { _ = f.Close() }()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("%w: locking %s: %w", block.ErrUnavailable, f.Name(), err)
	}
	has, err := nodeOf(state)
	switch {
	case err != nil:
		return err
	case has == name:
		return nil
	case has != "":
		return fmt.Errorf("%w: this machine's devices belong to node %s: use --node %s, or remove %s when `gabion csi` and `gabion attachd` are stopped and no volume is attached",
			block.ErrPrecondition, has, has, f.Name())
	}
	if _, err := f.WriteAt([]byte(name+"\n"), 0); err != nil {
		return fmt.Errorf("%w: %w", block.ErrUnavailable, err)
	}
	return nil
}

// metrics are the devices' health.
func (d *devices) metrics() daemon.Samples {
	s := descs{}.metric("device_health", "0: connected; 1: requests wait for a server; 2: refused for good; 3: ended and still held open.", "volume_id", "device")
	return s.collector(func(emit emit) {
		list, err := d.manager.Devices()
		if err != nil {
			return
		}
		for _, x := range list {
			emit(s["device_health"], gauge, float64(x.Condition.Health-kernel.Connected), x.Volume.String(), x.Path)
		}
	})
}
