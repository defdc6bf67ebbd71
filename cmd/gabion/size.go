package main

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// units are those of Kubernetes quantities, with an optional B: K M G T P are
// powers of 1000, Ki Mi Gi Ti Pi of 1024.
var units = map[string]int64{
	"": 1, "B": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
	"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50,
}

// parseSize returns the bytes that s stands for: 10GiB, 1Ti, 500M, 1.5G, 4096.
// A fraction of a byte is rounded up.
func parseSize(s string) (int64, error) {
	if n, ok := parseBytes(s); ok {
		return n, nil
	}
	digits := strings.TrimRight(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz ")
	name := strings.TrimSpace(s[len(digits):])
	if digits == "" || len(digits) > 40 || strings.Trim(digits, "0123456789.") != "" {
		return 0, notSize(s)
	}
	unit, known := units[name]
	if !known {
		unit, known = units[strings.TrimSuffix(name, "B")]
	}
	if !known {
		return 0, badUnit(s, digits, name)
	}
	r, ok := new(big.Rat).SetString(digits)
	if !ok {
		return 0, notSize(s)
	}
	r.Mul(r, new(big.Rat).SetInt64(unit))
	n, rest := new(big.Int).QuoRem(r.Num(), r.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		n.Add(n, big.NewInt(1))
	}
	if !n.IsInt64() {
		return 0, fmt.Errorf("%.40s is more than %d bytes", s, int64(math.MaxInt64))
	}
	return n.Int64(), nil
}

// parseBytes accepts a number without a unit.
func parseBytes(s string) (int64, bool) {
	if strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil
}

func notSize(s string) error {
	return fmt.Errorf("%.40q is not a size: write it as 10GiB, 500M or 4096", s)
}

// badUnit names the unit that was probably meant: 10g, 10gb, 10gib.
func badUnit(s, digits, name string) error {
	if name != "" {
		letter := strings.ToUpper(name[:1])
		if _, ok := units[letter+"i"]; ok && len(name) <= 3 {
			digits = strings.TrimSpace(digits)
			return fmt.Errorf("%.40q has no unit that is known: write %s%siB for powers of 1024, or %s%s for powers of 1000",
				s, digits, letter, digits, letter)
		}
	}
	return fmt.Errorf("%.40q has no unit that is known: the units are KiB MiB GiB TiB PiB (powers of 1024) and K M G T P (powers of 1000)", s)
}

// formatSize writes n with a binary unit, exactly where one decimal is enough.
func formatSize(n int64) string {
	value, unit := float64(n), "B"
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB", "PiB"} {
		if math.Abs(value) < 1024 {
			break
		}
		value, unit = value/1024, u
	}
	if value == math.Trunc(value) {
		return strconv.FormatFloat(value, 'f', 0, 64) + unit
	}
	return strconv.FormatFloat(value, 'f', 1, 64) + unit
}
