package service

import (
	"fmt"
	"strings"

	"github.com/gabion-storage/gabion/raft/consensus"
	"github.com/gabion-storage/gabion/raft/metapb"
)

// endurance says which losses the metadata service survives, and is a condition
// where it could survive more than it does (H82).
func endurance(electors []consensus.Elector) (sentence string, wrong *metapb.Condition) {
	l := consensus.LossesOf(electors)
	if l.Voters == 0 {
		return "", nil // the server that founds the cluster is about to register
	}
	voters := fmt.Sprintf("%s in %s", count(l.Voters, "voter"), count(len(l.Racks), "rack"))
	down := downVoters(electors)
	if len(down) > 0 {
		voters += fmt.Sprintf(", %s down", strings.Join(down, " and "))
	}
	if l.Servers <= 0 && len(down) == 0 { // one voter, or two on the way to three
		return voters + "; survives the loss of no server" + more(len(electors)), nil
	}
	switch {
	case l.Servers <= 0:
		const problem, remedy = "survives the loss of no further server", "start the server of %s, or another one with --join, which takes its place"
		return fmt.Sprintf("%s; %s: "+remedy, voters, problem, strings.Join(down, " and ")),
			condition(metapb.Condition_WARNING, "metadata", fmt.Sprintf("It has %s, and %s.", voters, problem), capital(fmt.Sprintf(remedy, strings.Join(down, " and ")))+".")
	case len(l.Fatal) == 0:
		if l.Servers == 1 {
			return voters + "; survives the loss of any one server or rack", nil
		}
		return fmt.Sprintf("%s; survives the loss of any %s, or of any one rack", voters, servers(l.Servers)), nil
	}
	problem := fmt.Sprintf("survives the loss of any %s, and not of rack %s", servers(l.Servers), strings.Join(l.Fatal, ", nor of rack "))
	const remedy = "start a server in another rack, with --join, and without --disk if it has none"
	if rackCount(electors) > 1 { // else nobody told racks apart
		wrong = condition(metapb.Condition_WARNING, "metadata", fmt.Sprintf("It has %s, and %s.", voters, problem), capital(remedy)+".")
	}
	return fmt.Sprintf("%s; %s: %s", voters, problem, remedy), wrong
}

// more is what so many servers need so that one may be lost.
func more(servers int) string {
	const how = ", with --join, and without --disk if "
	switch servers {
	case 1:
		return ": start two more in other racks" + how + "they have none"
	case 2:
		return ": start one more in another rack" + how + "it has none"
	}
	return " yet: others get a vote when they have been up for a while"
}

func downVoters(electors []consensus.Elector) (names []string) {
	for _, e := range electors {
		if e.Voter && !e.Alive {
			names = append(names, e.Name)
		}
	}
	return names
}

func rackCount(electors []consensus.Elector) int {
	racks := map[string]bool{}
	for _, e := range electors {
		racks[e.Rack] = true
	}
	return len(racks)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// servers is how many of them, as it follows "any".
func servers(n int) string {
	if n == 1 {
		return "one server"
	}
	return fmt.Sprintf("%d servers", n)
}

func capital(s string) string { return strings.ToUpper(s[:1]) + s[1:] }
