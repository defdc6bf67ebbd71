package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/gabion-storage/gabion/raft/client"
	"github.com/gabion-storage/gabion/raft/metapb"
	"github.com/gabion-storage/gabion/server/block"
)

func (a *app) volumeCommand() *cobra.Command {
	return group("volume", "Create, list, show, resize and delete volumes",
		a.volumeCreateCommand(), a.volumeListCommand(), a.volumeShowCommand(), a.volumeResizeCommand(), a.volumeDeleteCommand())
}

const sizeHelp = `Sizes are written as 10GiB or 10Gi (powers of 1024), 10G or 10GB (powers of
1000), or as a number of bytes. Volumes are made of 4096-byte blocks: a size
with a unit is rounded up to one, a number of bytes must be a multiple.`

func (a *app) volumeCreateCommand() *cobra.Command {
	var size int64
	var replicas, blockSize uint32
	var spread, access, durability, onFull, grain string
	var racks []string
	cmd := &cobra.Command{
		Use:   "create NAME --size SIZE",
		Short: "Create a volume; it uses no space until it is written",
		Long: "Create a volume; it uses no space until it is written. Creating it again with the\n" +
			"same size and policy succeeds and changes nothing.\n\n" + sizeHelp,
		Example: "  gabion volume create db --size 10GiB --replicas 1",
		Args:    oneVolume,
		RunE: a.act(func(ctx context.Context, args []string) error {
			if size == 0 {
				return usagef("a volume needs a size: add --size, for example --size 10GiB")
			}
			if _, err := fmt.Sscan(grain, &blockSize); grain != "" && err != nil {
				return err
			}
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				v, err := c.CreateVolume(ctx, &metapb.CreateVolumeRequest{Name: args[0], Size: size, Racks: racks, Policy: &metapb.Policy{
					Replicas: replicas, Spread: spreads.value(spread), Access: accesses.value(access),
					Durability: durabilities.value(durability), OnFull: onFulls.value(onFull), BlockSize: blockSize,
				}})
				if err != nil {
					return err
				}
				return a.printVolume(v, label(v)+" is ready")
			})
		}),
	}
	f := cmd.Flags()
	f.Var(volumeSizeFlag{sizeFlag{&size}}, "size", "size of the volume, such as 10GiB")
	f.Uint32Var(&replicas, "replicas", 0, "copies on distinct nodes; 0: the cluster's default")
	f.Var(newOptionalChoice(&spread, "rack", "node"), "spread", "what the copies are kept apart by (default rack)")
	f.Var(newOptionalChoice(&access, "cluster", "rack"), "access", "where it is reachable from (default cluster)")
	f.StringSliceVar(&racks, "rack", nil, "`RACK[,...]` to be reachable from, the preferred first: with --access rack one of them has all\n"+
		"copies, else the first copy should lie in one (default any)")
	f.Var(newOptionalChoice(&durability, "flush", "write-through"), "durability", "when a write is durable: after a flush, or when it is acknowledged\n(default write-through for one replica, else flush)")
	f.Var(newOptionalChoice(&onFull, "wait", "error"), "on-full", "what a write meets on full disks: it waits, or fails (default wait)")
	f.Var(newOptionalChoice(&grain, "4096", "512"), "block-size", "block size that clients are told (default 4096)")
	return cmd
}

func (a *app) volumeListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List volumes by name", Args: cobra.NoArgs,
		RunE: a.act(func(ctx context.Context, _ []string) error {
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				volumes, err := listVolumes(ctx, c)
				if err != nil {
					return err
				}
				views := viewAll(viewVolume, volumes)
				return a.print(views, func(t *table) {
					t.row("NAME", "SIZE", "REPLICAS", "SPREAD", "ACCESS", "DURABILITY", "AGE", "ID")
					for _, v := range views {
						t.row(quoted(v.Name), formatSize(v.Size), fmt.Sprint(v.Replicas), v.Spread, v.Access, v.Durability, age(v.CreatedAt), v.ID)
					}
				})
			})
		}),
	}
}

// listVolumes reads all pages.
func listVolumes(ctx context.Context, c *client.Client) (all []*metapb.Volume, err error) {
	for token := ""; ; {
		page, err := c.ListVolumes(ctx, &metapb.ListVolumesRequest{StartingToken: token})
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetVolumes()...)
		if token = page.GetNextToken(); token == "" {
			return all, nil
		}
	}
}

func (a *app) volumeShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show one volume, by name or id", Args: oneVolume, ValidArgsFunction: a.completeVolume,
		RunE: a.act(func(ctx context.Context, args []string) error {
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				r, err := find(ctx, c, args[0])
				if err != nil {
					return err
				}
				d := viewDetails(r)
				return a.print(d, func(t *table) { showVolume(t, d) })
			})
		}),
	}
}

func showVolume(t *table, d volumeDetails) {
	size := fmt.Sprintf("%s (%d bytes)", formatSize(d.Size), d.Size)
	if d.WantedSize > 0 {
		size += ", growing to " + formatSize(d.WantedSize)
	}
	primary := "none yet: it has never been opened"
	if p := d.Primary; p != nil {
		primary = fmt.Sprintf("%s, generation %d", p.Node, p.Generation)
		if !p.Opened {
			primary += ", opening"
		}
	}
	var attached []string
	for _, t := range d.Attachments {
		line := t.Node
		if t.ReadOnly {
			line += " (read-only)"
		}
		if t.Detaching {
			line += " (being detached)"
		}
		attached = append(attached, line)
	}
	t.row("name", quoted(d.Name))
	t.row("id", d.ID)
	t.row("size", size)
	t.row("policy", fmt.Sprintf("%d replica(s), spread %s, access %s, durability %s, on-full %s, block size %d",
		d.Replicas, d.Spread, d.Access, d.Durability, d.OnFull, d.BlockSize))
	if d.Rack != "" {
		t.row("rack", d.Rack)
	}
	if d.Format != "" {
		t.row("formatting", d.Format)
	}
	t.row("attached to", strings.Join(attached, ", "))
	t.row("primary", primary)
	t.row("born extents", fmt.Sprint(d.BornExtents))
	t.row("version", fmt.Sprintf("%d, cache epoch %d", d.Version, d.CacheEpoch))
	for _, m := range d.Members {
		t.row("member", m.DiskID+" "+m.State)
	}
	for _, c := range d.Conditions {
		t.row(c.Severity, c.Problem+" "+c.Remedy)
	}
}

func (a *app) volumeResizeCommand() *cobra.Command {
	var size int64
	cmd := &cobra.Command{
		Use:               "resize NAME --size SIZE",
		Short:             "Grow a volume, also while it is in use",
		Long:              "Grow a volume, also while it is in use. A volume cannot shrink.\n\n" + sizeHelp,
		Example:           "  gabion volume resize db --size 20GiB",
		Args:              oneVolume,
		ValidArgsFunction: a.completeVolume,
		RunE: a.act(func(ctx context.Context, args []string) error {
			if size == 0 {
				return usagef("say how large: add --size, for example --size 20GiB")
			}
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				found, err := find(ctx, c, args[0])
				if err != nil {
					return err
				}
				v, err := c.ResizeVolume(ctx, &metapb.ResizeVolumeRequest{Volume: byID(found), Size: size})
				if err != nil {
					return err
				}
				return a.printVolume(v, label(v)+" has its new size")
			})
		}),
	}
	cmd.Flags().Var(volumeSizeFlag{sizeFlag{&size}}, "size", "new size of the volume, such as 20GiB")
	return cmd
}

func (a *app) volumeDeleteCommand() *cobra.Command {
	var ifExists bool
	cmd := &cobra.Command{
		Use: "delete NAME", Aliases: []string{"rm"}, Short: "Delete a volume and its data, by name or id",
		Long: "Delete a volume and its data, by name or id. Refused while it is attached.\nThere is no way back.",
		Args: oneVolume, ValidArgsFunction: a.completeVolume,
		RunE: a.act(func(ctx context.Context, args []string) error {
			return a.ask(ctx, func(ctx context.Context, c *client.Client) error {
				found, err := find(ctx, c, args[0])
				if ifExists && errors.Is(err, block.ErrNotFound) {
					return nil
				}
				if err != nil {
					return err
				}
				if _, err = c.DeleteVolume(ctx, &metapb.DeleteVolumeRequest{Volume: byID(found)}); err != nil {
					return err
				}
				return a.printVolume(found.GetVolume(), label(found.GetVolume())+" is deleted")
			})
		}),
	}
	cmd.Flags().BoolVar(&ifExists, "if-exists", false, "succeed if there is no such volume")
	return cmd
}

// printVolume shows v after a change, to a person as a sentence.
func (a *app) printVolume(v *metapb.Volume, sentence string) error {
	return a.print(viewVolume(v), func(t *table) { t.line(sentence) })
}

// label is how a sentence names a volume.
func label(v *metapb.Volume) string {
	return fmt.Sprintf("volume %s (%s)", quoted(v.GetName()), formatSize(max(v.GetSize(), v.GetWantedSize())))
}

// completeVolume offers the names of volumes to the shell.
func (a *app) completeVolume(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	var names []string
	if len(args) == 0 {
		a.timeout = time.Second                                                      // somebody waits at a prompt
		_ = a.ask(cmd.Context(), func(ctx context.Context, c *client.Client) error { // no server, no offers
			volumes, err := listVolumes(ctx, c)
			for _, v := range volumes {
				if name := v.GetName(); !strings.ContainsFunc(name, unicode.IsControl) { // shells take lines
					names = append(names, name)
				}
			}
			return err
		})
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
