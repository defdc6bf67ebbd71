package main

import (
	"strings"
	"testing"
)

func TestParseSize(t *testing.T) {
	for _, c := range []struct {
		in   string
		want int64
		err  string // what the error says
	}{
		{in: "0", want: 0},
		{in: "4096", want: 4096},
		{in: "4096B", want: 4096},
		{in: "10GiB", want: 10 << 30},
		{in: "10Gi", want: 10 << 30},
		{in: "1Ti", want: 1 << 40},
		{in: "64TiB", want: 64 << 40},
		{in: "500M", want: 500e6},
		{in: "500MB", want: 500e6},
		{in: "1k", want: 1000},
		{in: "1KB", want: 1000},
		{in: "1KiB", want: 1024},
		{in: "1.5GiB", want: 3 << 29},
		{in: "0.1Ki", want: 103},
		{in: ".5Ki", want: 512},
		{in: "10 GiB", want: 10 << 30},
		{in: "7PiB", want: 7 << 50},
		{in: "8191PiB", want: 8191 << 50},
		{in: "8192PiB", err: "more than"},
		{in: "99999999999999999999", err: "more than"},
		{in: "", err: "not a size"},
		{in: "GiB", err: "not a size"},
		{in: "-1", err: "not a size"},
		{in: "-1GiB", err: "not a size"},
		{in: "+1GiB", err: "not a size"},
		{in: "1e3", err: "not a size"},
		{in: "0x10", err: "not a size"},
		{in: "1/3Gi", err: "not a size"},
		{in: "1.2.3G", err: "not a size"},
		{in: "1,5G", err: "not a size"},
		{in: "10g", err: "write 10GiB for powers of 1024, or 10G"},
		{in: "10gb", err: "write 10GiB for powers of 1024, or 10G"},
		{in: "10gib", err: "write 10GiB"},
		{in: "500m", err: "write 500MiB"},
		{in: "1EiB", err: "no unit that is known"},
		{in: "1EB", err: "no unit that is known"},
		{in: "1QB", err: "no unit that is known"},
		{in: "ten", err: "write it as 10GiB"},
		{in: "1" + strings.Repeat("0", 100) + "G", err: "not a size"},
	} {
		got, err := parseSize(c.in)
		if c.err == "" && (err != nil || got != c.want) {
			t.Errorf("%q: got %d, %v; want %d", c.in, got, err, c.want)
		}
		if c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%q: got %d, %v; want an error saying %q", c.in, got, err, c.err)
		}
	}
}

func TestVolumeSize(t *testing.T) {
	for _, c := range []struct {
		in   string
		want int64
		err  string
	}{
		{in: "500M", want: 500002816}, // with a unit: rounded up
		{in: "10GiB", want: 10 << 30},
		{in: "1B", want: 4096},
		{in: "4096", want: 4096}, // a number of bytes: exact
		{in: "1000", err: "not a multiple of 4096 bytes; the next is 4096"},
		{in: "0", err: "must be positive"},
		{in: "0GiB", err: "must be positive"},
		{in: "65TiB", err: "largest volume is 64TiB"},
		{in: "8191PiB", err: "largest volume is 64TiB"},
	} {
		var got int64
		err := volumeSizeFlag{sizeFlag{&got}}.Set(c.in)
		if c.err == "" && (err != nil || got != c.want) {
			t.Errorf("%q: got %d, %v; want %d", c.in, got, err, c.want)
		}
		if c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%q: got %d, %v; want an error saying %q", c.in, got, err, c.err)
		}
	}
}

func TestFormatSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0B", 1: "1B", 1023: "1023B", 1024: "1KiB", 1536: "1.5KiB", 10 << 30: "10GiB", 500002816: "476.8MiB", 64 << 40: "64TiB", -2048: "-2KiB",
	} {
		if got := formatSize(n); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
}
