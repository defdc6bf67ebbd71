package consensus

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
)

// Who votes: pure functions from what is known of the servers to the set of
// voters to aim at, and to the next step on the way there.

// Elector is a server as the choice of voters sees it.
type Elector struct {
	Name string
	Rack string
	// Voter and Leader are what it is now.
	Voter, Leader bool
	// Alive: not dead. A voter that was lost a moment ago is alive for a while,
	// so that a restart moves nothing.
	Alive bool
	// Fit: in good health now, and for long enough to be given a vote.
	Fit bool
	// Healthy: in good health now.
	Healthy bool
}

// A step is one change of one server.
type step struct {
	name    string
	promote bool // else demote
}

// wanted is how many voters a cell of so many servers has at most. Even
// numbers tolerate no more than the odd ones below them.
func wanted(servers int) int {
	switch {
	case servers >= 5:
		return 5
	case servers >= 3:
		return 3
	}
	return 1
}

// Losses is what a set of voters can lose.
type Losses struct {
	Voters int
	// Servers is how many more may be lost, whichever; negative: the majority is gone.
	Servers int
	// Racks are those with voters that are alive; Fatal those of them whose loss ends the majority.
	Racks, Fatal []string
}

// LossesOf judges the voters among electors.
func LossesOf(electors []Elector) Losses {
	alive, racks := 0, map[string]int{}
	l := Losses{}
	for _, e := range electors {
		if e.Voter {
			l.Voters++
		}
		if e.Voter && e.Alive {
			alive++
			racks[e.Rack]++
		}
	}
	l.Servers = alive - quorum(l.Voters)
	l.Racks = slices.Sorted(maps.Keys(racks))
	for _, rack := range l.Racks {
		if racks[rack] > l.Servers {
			l.Fatal = append(l.Fatal, rack)
		}
	}
	return l
}

func quorum(voters int) int { return voters/2 + 1 }

// survives reports whether no rack is needed.
func (l Losses) survives() bool { return len(l.Fatal) == 0 && l.Servers >= 0 }

// electorate is the best set of voters for a cell with so many servers: it
// tolerates the most losses; then it survives the loss of any one rack; then it
// differs least from the present one. The leader is always in it, and nobody
// gets a vote who is not fit.
//
// Servers of one rack that have no vote are alike but for their names, so only
// what is kept of the present voters is tried; the rest is filled in.
func electorate(electors []Elector, servers int) []string {
	var voters []Elector
	for _, e := range electors {
		if e.Voter {
			voters = append(voters, e)
		}
	}
	slices.SortFunc(voters, byName)
	spare := sparesOf(electors)
	var best *option
	for kept := range uint32(1) << min(len(voters), maxVoters) {
		for size := 1; size <= wanted(servers); size += 2 {
			o := newOption(voters, kept, spare, size)
			if o != nil && (best == nil || o.better(best)) {
				best = o
			}
		}
	}
	if best == nil {
		return nil
	}
	return best.names()
}

// maxVoters bounds the search; a cell has at most one more than five.
const maxVoters = 12

func byName(a, b Elector) int { return cmp.Compare(a.Name, b.Name) }

// sparesOf are those who could be given a vote, by rack, in order of names.
func sparesOf(electors []Elector) map[string][]Elector {
	spare := map[string][]Elector{}
	for _, e := range electors {
		if !e.Voter && e.Fit && e.Healthy && e.Alive {
			spare[e.Rack] = append(spare[e.Rack], e)
		}
	}
	for _, list := range spare {
		slices.SortFunc(list, byName)
	}
	return spare
}

// option is a set of voters that could be.
type option struct {
	set     []Elector
	losses  Losses
	changes int
}

// newOption keeps some of the present voters and fills up to size from the
// emptiest racks; nil if that cannot be.
func newOption(voters []Elector, kept uint32, spare map[string][]Elector, size int) *option {
	n := bits.OnesCount32(kept)
	if n > size {
		return nil
	}
	o := &option{changes: len(voters) - n + size - n}
	racks := map[string]int{}
	for i, v := range voters {
		switch {
		case kept&(1<<i) != 0:
			o.set = append(o.set, v)
			if v.Alive {
				racks[v.Rack]++
			}
		case v.Leader:
			return nil
		}
	}
	taken := map[string]int{}
	for len(o.set) < size {
		rack, ok := emptiest(spare, taken, racks)
		if !ok {
			return nil
		}
		e := spare[rack][taken[rack]]
		e.Voter = true
		o.set = append(o.set, e)
		taken[rack]++
		racks[rack]++
	}
	o.losses = LossesOf(o.set)
	return o
}

// emptiest is the rack with the fewest voters of those that have one to give.
func emptiest(spare map[string][]Elector, taken, racks map[string]int) (best string, ok bool) {
	for rack, list := range spare {
		if taken[rack] == len(list) {
			continue
		}
		if !ok || racks[rack] < racks[best] || racks[rack] == racks[best] && rack < best {
			best, ok = rack, true
		}
	}
	return best, ok
}

func (o *option) names() []string {
	var names []string
	for _, e := range o.set {
		names = append(names, e.Name)
	}
	slices.Sort(names)
	return names
}

func (o *option) better(than *option) bool {
	switch {
	case o.losses.Servers != than.losses.Servers:
		return o.losses.Servers > than.losses.Servers
	case o.losses.survives() != than.losses.survives():
		return o.losses.survives()
	case o.changes != than.changes:
		return o.changes < than.changes
	}
	return slices.Compare(o.names(), than.names()) < 0
}

// nextStep is the next change on the way from the present voters to others:
// one that leaves the cell no less tolerant than it is, and needs nobody who is
// not there now. ok is false if there is none.
func nextStep(electors []Elector, to []string) (next step, ok bool) {
	now := LossesOf(electors).Servers
	for _, s := range stepsTo(electors, to) {
		after := apply(electors, s)
		if LossesOf(after).Servers >= now && present(after) {
			return s, true
		}
	}
	return step{}, false
}

// stepsTo are all changes that lead on, the preferred first. A promotion goes
// before the demotion it makes possible: who was lost may come back meanwhile.
// The dead go before the living.
func stepsTo(electors []Elector, to []string) []step {
	var promotions, dead, living []step
	voters := 0
	for _, e := range slices.SortedFunc(slices.Values(electors), byName) {
		if e.Voter {
			voters++
		}
		switch chosen := slices.Contains(to, e.Name); {
		case chosen && !e.Voter:
			promotions = append(promotions, step{e.Name, true})
		case chosen || !e.Voter || e.Leader:
		case e.Alive:
			living = append(living, step{e.Name, false})
		default:
			dead = append(dead, step{e.Name, false})
		}
	}
	demotions := slices.Concat(dead, living)
	if voters > len(to) {
		return slices.Concat(demotions, promotions)
	}
	return slices.Concat(promotions, demotions)
}

func apply(electors []Elector, s step) []Elector {
	after := slices.Clone(electors)
	for i := range after {
		if after[i].Name == s.name {
			after[i].Voter = s.promote
		}
	}
	return after
}

// present reports whether a majority of the voters is in good health now: the
// change itself has to be committed by it.
func present(electors []Elector) bool {
	voters, healthy := 0, 0
	for _, e := range electors {
		if e.Voter {
			voters++
			if e.Healthy {
				healthy++
			}
		}
	}
	return healthy >= quorum(voters)
}
