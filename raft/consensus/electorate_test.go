package consensus

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// electors reads "A1* B2+ C3x d4 e5? f6~": a name and its rack; upper case votes,
// * leads, x is dead, + was lost a moment ago, ? is well but not for long, ~ is
// sick.
func electors(text string) (list []Elector) {
	for _, word := range strings.Fields(text) {
		e := Elector{Name: strings.ToLower(word[:1]), Rack: word[1:2], Voter: word[0] < 'a', Alive: true, Fit: true, Healthy: true}
		switch mark := word[2:]; mark {
		case "*":
			e.Leader = true
		case "x":
			e.Alive, e.Fit, e.Healthy = false, false, false
		case "+", "~":
			e.Fit, e.Healthy = false, false
		case "?":
			e.Fit = false
		}
		list = append(list, e)
	}
	return list
}

// way follows the steps to the end.
func way(list []Elector, servers int) string {
	var steps []string
	for range 20 {
		next, ok := nextStep(list, electorate(list, servers))
		if !ok {
			break
		}
		steps = append(steps, map[bool]string{true: "+", false: "-"}[next.promote]+next.name)
		list = apply(list, next)
	}
	return strings.Join(steps, " ")
}

func TestElectorate(t *testing.T) {
	for _, c := range []struct{ name, servers, want, way string }{
		{"one", "A1*", "a", ""},
		{"two: the second has no vote", "A1* b2", "a", ""},
		{"three", "A1* b2 c3", "a b c", "+b +c"},
		{"three, one of them new", "A1* b2 c3?", "a", ""},
		{"three, one of them dead", "A1* b2 c3x", "a", ""},
		{"on the way to three, the other dies", "A1* B2 c3x", "a", "-b"},
		{"four", "A1* B2 C3 d4", "a b c", ""},
		{"five", "A1* B2 C3 d1 e2", "a b c d e", "+d +e"},
		{"many, few racks", "A1* b1 c1 d1 e2 f2 g3", "a b e f g", "+b +e +f +g"},
		{"a voter dies, none to spare", "A1* B2 C3x", "a b c", ""},
		{"a voter dies, one to spare", "A1* B2 C3x d3", "a b d", "+d -c"},
		{"a voter was lost a moment ago", "A1* B2 C3+ d3", "a b c", ""},
		{"one of five dies, none to spare: three tolerate as much, and any rack", "A1* B2 C3 D1 E3x", "a b c", "-e -d"},
		{"one of five racks dies", "A1* B2 C3 D4 E5x", "a b c d e", ""},
		{"two of five die: fewer tolerate more", "A1* B2 C3 D1x E2x", "a b c", "-d -e"},
		{"two of five die, two to spare", "A1* B2 C3 D1x E2x f1 g2", "a b c f g", "+f -d +g -e"},
		{"two of five die, one to spare", "A1* B2 C3 D1x E2x f1", "a b c", "-d -e"},
		{"two of three in one rack", "A1* B2 C2 d3", "a b d", "+d -c"},
		{"two of three in the leader's rack", "A1* B1 C2 d3", "a c d", "+d -b"},
		{"two of three in one rack, no other", "A1* B2 C2 d2", "a b c", ""},
		{"three racks, five voters", "A1* B1 C1 D2 E3 f2 g3", "a b d e f", "+f -c"},
		{"a sick one gets no vote", "A1* B2 C3x d3~", "a b c", ""},
		{"racks never cost tolerance", "A1* B1 C1 D1 E1 f2", "a b c d e", ""},
		{"the leader stays", "A1 B1* C2 d3", "b c d", "+d -a"},
		{"a server left: four", "A1* B2 C3 D4", "a b c", "-d"},
		{"too few left", "A1* B2", "a", "-b"},
	} {
		list := electors(c.servers)
		got := electorate(list, len(list))
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("%s: %s: chose %s, want %s", c.name, c.servers, text, c.want)
		}
		if w := way(list, len(list)); w != c.way {
			t.Errorf("%s: %s: goes %q, want %q", c.name, c.servers, w, c.way)
		}
	}
}

// H82: it is said beforehand which losses are survived.
func TestH82Losses(t *testing.T) {
	for text, want := range map[string]string{
		"A1*":              "{1 0 [1] [1]}",
		"A1* B2 C3 d4":     "{3 1 [1 2 3] []}",
		"A1* B2 C2":        "{3 1 [1 2] [2]}",
		"A1* B2 C3x":       "{3 0 [1 2] [1 2]}",
		"A1* B1 C2 D2 E3":  "{5 2 [1 2 3] []}",
		"A1* B1 C1 D2 E3":  "{5 2 [1 2 3] [1]}",
		"A1* B2x C3x":      "{3 -1 [1] [1]}",
		"A1* B2 C3+ d1 e2": "{3 1 [1 2 3] []}",
	} {
		if got := fmt.Sprint(LossesOf(electors(text))); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// cell draws servers over racks; one of them leads.
func cell(t *rapid.T) []Elector {
	n := rapid.IntRange(1, 9).Draw(t, "servers")
	racks := rapid.IntRange(1, 5).Draw(t, "racks")
	var list []Elector
	voters := 0
	for i := range n {
		e := Elector{Name: fmt.Sprintf("n%d", i), Rack: fmt.Sprint(rapid.IntRange(1, racks).Draw(t, "rack"))}
		e.Voter = voters < 6 && rapid.Bool().Draw(t, "voter")
		switch state := rapid.IntRange(0, 5).Draw(t, "state"); {
		case state == 0:
		case state == 1:
			e.Alive = true
		case state == 2:
			e.Alive, e.Healthy = true, true
		default:
			e.Alive, e.Healthy, e.Fit = true, true, true
		}
		if e.Voter {
			voters++
		}
		list = append(list, e)
	}
	leader := rapid.IntRange(0, n-1).Draw(t, "leader")
	list[leader].Voter, list[leader].Leader, list[leader].Alive, list[leader].Healthy, list[leader].Fit = true, true, true, true, true
	return list
}

// No choice beats the one made: all sets are tried.
func TestElectorateIsBest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := cell(t)
		got := electorate(list, len(list))
		chosen := judge(list, got)
		for set := range 1 << len(list) {
			var names []string
			allowed := true
			for i, e := range list {
				in := set&(1<<i) != 0
				if in {
					names = append(names, e.Name)
				}
				allowed = allowed && (!in || e.Voter || e.Fit) && (in || !e.Leader)
			}
			if !allowed || len(names)%2 == 0 || len(names) > wanted(len(list)) {
				continue
			}
			if other := judge(list, names); slices.Compare(other, chosen) > 0 {
				t.Fatalf("%+v\nchose %v (%v); %v (%v) is better", list, got, chosen, names, other)
			}
		}
	})
}

// judge is what counts, most first: tolerance, racks, and how little changes.
func judge(list []Elector, set []string) []int {
	alive, changes, racks := 0, 0, map[string]int{}
	for _, e := range list {
		in := slices.Contains(set, e.Name)
		if in != e.Voter {
			changes++
		}
		if in && e.Alive {
			alive++
			racks[e.Rack]++
		}
	}
	needed := len(set)/2 + 1
	survives := 1
	for _, n := range racks {
		if alive-n < needed {
			survives = 0
		}
	}
	if alive < needed {
		survives = 0
	}
	return []int{alive - needed, survives, -changes}
}

// The way there: one change at a time, never less tolerant than before, never
// without the leader, only what is fit gets a vote; it ends, and where all who
// vote are well it ends at the choice, which then stays.
func TestElectorateSteps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := cell(t)
		well := present(list)
		for _, e := range list {
			well = well && (e.Alive == e.Healthy)
		}
		for taken := 0; ; taken++ {
			to := electorate(list, len(list))
			next, ok := nextStep(list, to)
			if !ok {
				if LossesOf(list).Voters != len(to) && well {
					t.Fatalf("stuck on the way to %v: %+v", to, list)
				}
				return
			}
			if taken > 20 {
				t.Fatalf("no end: %+v", list)
			}
			before := LossesOf(list)
			for _, e := range list {
				if e.Name == next.name && (next.promote == e.Voter || !next.promote && e.Leader || next.promote && !e.Fit) {
					t.Fatalf("%+v of %+v", next, e)
				}
			}
			list = apply(list, next)
			if after := LossesOf(list); after.Servers < before.Servers {
				t.Fatalf("%+v made it less tolerant: %+v, %+v", next, before, list)
			}
			if !present(list) {
				t.Fatalf("%+v: nobody could commit it: %+v", next, list)
			}
		}
	})
}
