package consensus

import (
	"time"

	hraft "github.com/hashicorp/raft"
	autopilot "github.com/hashicorp/raft-autopilot"
)

// metaRack is where a server's rack is in what the library keeps of it.
const metaRack = "rack"

// promoter puts the electorate's choice in the library's words: at most one
// change in a round, and the library looks at the servers anew before the next.
type promoter struct{ stable time.Duration }

// CalculatePromotionsAndDemotions implements autopilot.Promoter.
func (p promoter) CalculatePromotionsAndDemotions(_ *autopilot.Config, s *autopilot.State) (changes autopilot.RaftChanges) {
	list, servers := p.electors(s, time.Now())
	next, ok := nextStep(list, electorate(list, servers))
	switch id := hraft.ServerID(next.name); {
	case !ok:
	case next.promote:
		changes.Promotions = []hraft.ServerID{id}
	default:
		changes.Demotions = []hraft.ServerID{id}
	}
	return changes
}

// electors are the members; servers is how many of them are registered.
func (p promoter) electors(s *autopilot.State, now time.Time) (list []Elector, servers int) {
	for id, server := range s.Servers {
		health, registered := server.Health, server.Server.NodeStatus != autopilot.NodeLeft
		lasts := now.Sub(health.StableSince) >= p.stable
		list = append(list, Elector{
			Name: string(id), Rack: server.Server.Meta[metaRack],
			Voter: server.HasVotingRights(), Leader: server.State == autopilot.RaftLeader,
			Alive: registered && (health.Healthy || !lasts), Fit: registered && health.Healthy && lasts, Healthy: registered && health.Healthy,
		})
		if registered {
			servers++
		}
	}
	return list, servers
}

// FilterFailedServerRemovals implements autopilot.Promoter: nobody is taken out
// for being dead, and a voter whose registration is gone is demoted before.
func (p promoter) FilterFailedServerRemovals(_ *autopilot.Config, _ *autopilot.State, failed *autopilot.FailedServers) *autopilot.FailedServers {
	return &autopilot.FailedServers{StaleNonVoters: failed.StaleNonVoters}
}

// GetServerExt implements autopilot.Promoter.
func (p promoter) GetServerExt(*autopilot.Config, *autopilot.ServerState) any { return nil }

// GetStateExt implements autopilot.Promoter.
func (p promoter) GetStateExt(*autopilot.Config, *autopilot.State) any { return nil }

// GetNodeTypes implements autopilot.Promoter: every server could vote.
func (p promoter) GetNodeTypes(_ *autopilot.Config, s *autopilot.State) map[hraft.ServerID]autopilot.NodeType {
	types := map[hraft.ServerID]autopilot.NodeType{}
	for id := range s.Servers {
		types[id] = autopilot.NodeVoter
	}
	return types
}

// IsPotentialVoter implements autopilot.Promoter.
func (p promoter) IsPotentialVoter(t autopilot.NodeType) bool { return t == autopilot.NodeVoter }
