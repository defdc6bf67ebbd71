package service

import (
	"strings"
	"testing"

	"github.com/gabion-storage/gabion/raft/consensus"
)

// H82: which losses are survived is said beforehand, and what to do if not.
func TestH82Endurance(t *testing.T) {
	for _, c := range []struct{ servers, sentence, wrong string }{
		{"", "", ""},
		{"A1", "1 voter in 1 rack; survives the loss of no server: start two more in other racks, with --join, and without --disk if they have none", ""},
		{"A1 b2", "1 voter in 1 rack; survives the loss of no server: start one more in another rack, with --join", ""},
		{"A1 b2 c3", "1 voter in 1 rack; survives the loss of no server yet: others get a vote", ""},
		{"A1 B2 c3", "2 voters in 2 racks; survives the loss of no server yet: others get a vote", ""},
		{"A1 B2", "2 voters in 2 racks; survives the loss of no server: start one more in another rack", ""},
		{"A1 B2 C3", "3 voters in 3 racks; survives the loss of any one server or rack", ""},
		{"A1 B1 C2 D2 E3", "5 voters in 3 racks; survives the loss of any 2 servers, or of any one rack", ""},
		{"A1 B2 C2", "3 voters in 2 racks; survives the loss of any one server, and not of rack 2: start a server in another rack, with --join",
			"It has 3 voters in 2 racks, and survives the loss of any one server, and not of rack 2. Start a server in another rack"},
		{"A1 B1 C1", "3 voters in 1 rack; survives the loss of any one server, and not of rack 1: start a server in another rack", ""},
		{"A1 B2 C3-", "3 voters in 2 racks, c down; survives the loss of no further server: start the server of c, or another one with --join",
			"It has 3 voters in 2 racks, c down, and survives the loss of no further server. Start the server of c"},
		{"A1 B2 C3 D4 E5-", "5 voters in 4 racks, e down; survives the loss of any one server or rack", ""},
	} {
		var list []consensus.Elector
		for _, word := range strings.Fields(c.servers) {
			list = append(list, consensus.Elector{Name: strings.ToLower(word[:1]), Rack: word[1:2], Voter: word[0] < 'a', Alive: !strings.HasSuffix(word, "-")})
		}
		sentence, wrong := endurance(list)
		said := strings.TrimSpace(wrong.GetProblem() + " " + wrong.GetRemedy())
		if !strings.HasPrefix(sentence, c.sentence) || c.sentence == "" != (sentence == "") || !strings.HasPrefix(said, c.wrong) || c.wrong == "" != (said == "") {
			t.Errorf("%s: %q, %q", c.servers, sentence, said)
		}
	}
}
