package lab

import (
	"fmt"
	"strings"
)

// The network of a guest: the consumer node is the guest itself, since Linux 6.1 has nbd's netlink family in the first
// network namespace only; storage is a namespace behind a veth pair. A server listens on one of the two addresses that
// storage has, and a second consumer, for user-space clients, is one more namespace.
const (
	storageNS = "storage"
	AddrA     = "10.77.0.2" // of storage
	AddrB     = "10.77.0.3" // of storage, too
	nodeAddr  = "10.77.1.1" // of the consumer node
	gateway   = "10.77.1.2" // of storage, on the consumer's side
	nodeLink  = "st0"
)

// Network is the wire between the consumer node and the storage.
type Network struct{ t *T }

// Net builds the network if the scenario has none yet.
func (t *T) Net() *Network {
	if t.network != nil {
		return t.network
	}
	t.network = &Network{t}
	script := fmt.Sprintf(`
netns add %[1]s
link add %[2]s type veth peer name n1 netns %[1]s
addr add %[3]s/24 dev %[2]s
link set %[2]s up
route add 10.77.0.0/24 via %[4]s
`, storageNS, nodeLink, nodeAddr, gateway)
	inside := fmt.Sprintf(`
addr add %s/24 dev n1
addr add %s/32 dev lo
addr add %s/32 dev lo
link set lo up
link set n1 up
`, gateway, AddrA, AddrB)
	t.ip("", script)
	t.ip(storageNS, inside)
	t.Cleanup(func() {
		t.ip("", "link del "+nodeLink+"\nnetns del "+storageNS) // the end of a namespace takes its time
		t.network = nil
	})
	return t.network
}

// ip runs a batch of `ip` commands in a network namespace; "" is the guest's own.
func (t *T) ip(ns, script string) {
	args := []string{"ip"}
	if ns != "" {
		args = append(args, "-netns", ns)
	}
	for line := range strings.Lines(strings.TrimSpace(script)) {
		words := append(args[1:len(args):len(args)], strings.Fields(line)...)
		t.Sh(args[0], words...)
	}
}

// Drop makes the wire swallow all packets in both directions, as a broken switch does: nobody gets a FIN, an RST or an
// ICMP message, and a sender sees no error.
func (n *Network) Drop() {
	rule := func(link string) string {
		return fmt.Sprintf("table inet cut {\nchain in {\ntype filter hook input priority 0\niifname %q drop\n}\n}", link)
	}
	n.t.Sh("nft", rule(nodeLink))
	n.t.Sh("ip", "netns", "exec", storageNS, "nft", rule("n1"))
}

// Heal undoes Drop.
func (n *Network) Heal() {
	n.t.Sh("nft", "delete table inet cut")
	n.t.Sh("ip", "netns", "exec", storageNS, "nft", "delete table inet cut")
}
