package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

func (a *app) nodeCommand() *cobra.Command {
	return group("node", "List and remove the servers of the cluster", a.nodeRemoveCommand(), &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List nodes by name", Args: cobra.NoArgs,
		RunE: a.act(func(ctx context.Context, _ []string) error {
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				r, err := c.ListNodes(ctx, &metapb.ListNodesRequest{})
				if err != nil {
					return err
				}
				views := viewAll(viewNode, r.GetNodes())
				return a.print(views, func(t *table) {
					t.row("NAME", "RACK", "STATE", "ROLE", "SEEN", "NBD", "SOCKET", "VERSION")
					for _, n := range views {
						t.row(n.Name, n.Rack, upOrDown(n.Up), n.Role, age(n.SeenAt), n.NBDAddress, n.NBDSocket, n.Version)
					}
				})
			})
		}),
	})
}

func (a *app) nodeRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "remove NAME", Aliases: []string{"rm"}, Short: "Take out a node that will not come back",
		Long: `Take a node that will not come back out of the cluster. Its server must be down,
which counts after ten seconds of silence, and its disks must hold no part of a
volume. If it had a vote in the metadata service, another server gets one.
Afterwards its name is free: a server with another data directory can have it.`,
		Args: nodeArgument,
		RunE: a.act(func(ctx context.Context, args []string) error {
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				r, err := c.ListNodes(ctx, &metapb.ListNodesRequest{})
				if err != nil {
					return err
				}
				i := slices.IndexFunc(r.GetNodes(), func(n *metapb.Node) bool { return n.GetName() == args[0] })
				if i < 0 {
					return fmt.Errorf("%w: no node is called %.60q: see `gabion node list`", block.ErrNotFound, args[0])
				}
				if _, err := c.RemoveNode(ctx, &metapb.RemoveNodeRequest{Name: args[0]}); err != nil {
					return err
				}
				return a.print(viewNode(r.GetNodes()[i]), func(t *table) { t.line("node " + args[0] + " is removed") })
			})
		}),
	}
}

func nodeArgument(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("name one node: %s NAME", cmd.CommandPath())
	}
	return nil
}

func upOrDown(up bool) string {
	if up {
		return "up"
	}
	return "down"
}

func (a *app) diskCommand() *cobra.Command {
	return group("disk", "List the disks of the cluster", &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List disks by node and path", Args: cobra.NoArgs,
		RunE: a.act(func(ctx context.Context, _ []string) error {
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				r, err := c.ListDisks(ctx, &metapb.ListDisksRequest{})
				if err != nil {
					return err
				}
				views := viewAll(viewDisk, r.GetDisks())
				return a.print(views, func(t *table) {
					t.row("NODE", "PATH", "STATE", "CAPACITY", "AVAILABLE", "MODE", "ID", "PROBLEM")
					for _, d := range views {
						t.row(d.Node, d.Path, d.State, formatSize(d.Capacity), formatSize(d.Available), d.IOMode, d.ID, d.Problem)
					}
				})
			})
		}),
	})
}

type statusView struct {
	ClusterID       string          `json:"cluster_id"`
	Healthy         bool            `json:"healthy"`
	Conditions      []conditionView `json:"conditions"`
	Leader          string          `json:"leader"`
	Term            uint64          `json:"term"`
	AppliedIndex    uint64          `json:"applied_index"`
	Voters          []string        `json:"voters"`
	FeatureLevel    uint32          `json:"feature_level"`
	ExtentSize      int64           `json:"extent_size"`
	Endurance       string          `json:"endurance"` // which losses the metadata service survives
	Nodes           int64           `json:"nodes"`
	WithoutDisks    int64           `json:"nodes_without_disks"`
	NodesUp         int64           `json:"nodes_up"`
	Disks           int64           `json:"disks"`
	DisksOnline     int64           `json:"disks_online"`
	Volumes         int64           `json:"volumes"`
	Attachments     int64           `json:"attachments"`
	Capacity        int64           `json:"capacity"`
	Used            int64           `json:"used"`
	ProvisionedSize int64           `json:"provisioned"`
}

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say how the cluster is, and what to do about it", Args: cobra.NoArgs,
		RunE: a.act(func(ctx context.Context, _ []string) error {
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				s, err := readStatus(ctx, c)
				if err != nil {
					return err
				}
				return a.print(s, func(t *table) { showStatus(t, s) })
			})
		}),
	}
}

func readStatus(ctx context.Context, c *client.Client) (statusView, error) {
	r, err := c.GetStatus(ctx, &metapb.GetStatusRequest{})
	if err != nil {
		return statusView{}, err
	}
	s := statusView{
		ClusterID: r.GetClusterId(), Healthy: len(r.GetConditions()) == 0, Conditions: viewAll(viewCondition, r.GetConditions()),
		Leader: r.GetLeader(), Term: r.GetTerm(), AppliedIndex: r.GetAppliedIndex(), Voters: append([]string{}, r.GetVoters()...),
		Endurance: r.GetEndurance(), WithoutDisks: r.GetNodesWithoutDisks(),
		FeatureLevel: r.GetFeatureLevel(), ExtentSize: r.GetExtentSize(),
		Nodes: r.GetNodes(), NodesUp: r.GetNodesUp(), Disks: r.GetDisks(), DisksOnline: r.GetDisksOnline(),
		Volumes: r.GetVolumes(), Attachments: r.GetAttachments(),
		Capacity: r.GetCapacity(), Used: r.GetUsed(), ProvisionedSize: r.GetProvisioned(),
	}
	return s, nil
}

func showStatus(t *table, s statusView) {
	switch len(s.Conditions) {
	case 0:
		t.line("All is well.")
	case 1:
		t.line("One thing needs attention:")
	default:
		t.line(fmt.Sprintf("%d things need attention:", len(s.Conditions)))
	}
	for _, c := range s.Conditions {
		t.line(fmt.Sprintf("  %s: %s: %s %s", strings.ToUpper(c.Severity), object(c.Object), period(c.Problem), period(c.Remedy)))
	}
	t.line("")
	t.row("cluster", s.ClusterID)
	t.row("leader", fmt.Sprintf("%s (term %d, applied %d)", cmp.Or(s.Leader, "none"), s.Term, s.AppliedIndex))
	t.row("voters", strings.Join(s.Voters, ", "))
	if s.Endurance != "" {
		t.row("metadata", s.Endurance)
	}
	nodes := fmt.Sprintf("%d of %d up", s.NodesUp, s.Nodes)
	if s.WithoutDisks > 0 {
		nodes += fmt.Sprintf(", %d without disks", s.WithoutDisks)
	}
	t.row("nodes", nodes)
	t.row("disks", fmt.Sprintf("%d of %d online", s.DisksOnline, s.Disks))
	t.row("space", fmt.Sprintf("%s free of %s", formatSize(s.Capacity-s.Used), formatSize(s.Capacity)))
	t.row("volumes", fmt.Sprintf("%d of %s in all, %d attached", s.Volumes, formatSize(s.ProvisionedSize), s.Attachments))
}

// object is what a condition is about, such as "volume NAME".
func object(s string) string {
	kind, name, named := strings.Cut(s, " ")
	if !named {
		return s
	}
	return kind + " " + quoted(name)
}

// period makes a sentence of s.
func period(s string) string {
	if s == "" || strings.HasSuffix(s, ".") {
		return s
	}
	return s + "."
}

func (a *app) eventsCommand() *cobra.Command {
	var follow bool
	var after uint64
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show what happened in the cluster, oldest first",
		Long: `Show what happened in the cluster, oldest first: the newest thousand events.
With -o json each event is one line. A follower that lost its server goes on
where it was when it finds another.`,
		Args: cobra.NoArgs,
		RunE: a.act(func(ctx context.Context, _ []string) error {
			if follow {
				a.timeout = 0
			}
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				if !follow {
					past := watcher{client: c, after: after, handle: a.printEvent}
					return past.stream(ctx, false)
				}
				err := watch(ctx, c, after, a.printEvent)
				if ctx.Err() != nil {
					return nil // how a person ends a follower
				}
				return err
			})
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "keep printing what happens")
	f.Uint64Var(&after, "after", 0, "only events with a higher `INDEX`; 0: all that are kept")
	return cmd
}

func (a *app) printEvent(e *metapb.Event) error {
	v := viewEvent(e)
	if a.output == "json" {
		return writeJSON(a.out, v, "")
	}
	_, err := fmt.Fprintf(a.out, "%s  %-21s %s\n", v.Time.Local().Format(time.DateTime), v.Type, v.Message)
	return err
}
