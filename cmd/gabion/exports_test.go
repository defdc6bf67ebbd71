package main

import (
	"net"
	"testing"
)

func TestOnThisHost(t *testing.T) {
	for _, c := range []struct {
		address net.Addr
		want    bool
	}{
		{&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}, true},
		{&net.TCPAddr{IP: net.IPv4(127, 8, 7, 6), Port: 1}, true},
		{&net.TCPAddr{IP: net.IPv6loopback, Port: 1}, true},
		{&net.TCPAddr{IP: net.ParseIP("::ffff:127.0.0.1"), Port: 1}, true},
		{&net.UnixAddr{Name: "", Net: "unix"}, true},
		{&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1}, false}, // documentation's
		{&net.TCPAddr{IP: net.ParseIP("2001:db8::1"), Port: 1}, false},
	} {
		if got, err := onThisHost(c.address); err != nil || got != c.want {
			t.Errorf("%v: %t, %v", c.address, got, err)
		}
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok {
			if here, err := onThisHost(&net.TCPAddr{IP: n.IP, Port: 1}); err != nil || !here {
				t.Errorf("%v is not here: %v", n.IP, err)
			}
		}
	}
}

func TestOnlyDevicesNumberTheirSessions(t *testing.T) {
	for name, want := range map[string]bool{"": false, "id/token": false, "id/token/1/2": true, "id/token/1/2/3": false} {
		if ofDevice(name) != want {
			t.Errorf("%q", name)
		}
	}
}
