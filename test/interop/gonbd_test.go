package interop

import (
	"net"
	"os"
	"testing"

	"github.com/pojntfx/go-nbd/pkg/client"
)

// go-nbd's client shakes hands and asks for the list, which is empty.
func TestGoNBDList(t *testing.T) {
	for network, address := range map[string]string{"unix": server.Socket, "tcp": tcpAddress()} {
		t.Run(network, func(t *testing.T) {
			conn, err := net.Dial(network, address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			names, err := client.List(conn)
			if err != nil || len(names) != 0 {
				t.Errorf("list %q, %v", names, err)
			}
		})
	}
}

// go-nbd's client drives a kernel device; there is one only where the kernel has the nbd module.
func TestGoNBDKernelDevice(t *testing.T) {
	device, err := os.OpenFile("/dev/nbd0", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no kernel device to attach: %v", err)
	}
	defer device.Close()
	v := newVolume(t, "64MiB")
	conn, err := net.Dial("unix", server.Socket)
	if err != nil {
		t.Fatal(err)
	}
	connected, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- client.Connect(conn, device, &client.Options{ExportName: v.Export(), OnConnected: func() { close(connected) }})
	}()
	select {
	case err := <-ended:
		t.Fatalf("the device was not connected: %v", err)
	case <-connected:
	}
	want, got := pattern(1, 1<<20), make([]byte, 1<<20)
	if _, err := device.WriteAt(want, 1<<20); err != nil {
		t.Error(err)
	}
	if err := device.Sync(); err != nil {
		t.Error(err)
	}
	if _, err := device.ReadAt(got, 1<<20); err != nil || string(got) != string(want) {
		t.Errorf("the device does not hold what was written: %v", err)
	}
	if err := client.Disconnect(device); err != nil {
		t.Error(err)
	}
	<-ended
}
