package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gabion-storage/gabion/server/daemon"
)

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Say which binary this is", Args: cobra.NoArgs,
		RunE: a.act(func(context.Context, []string) error {
			v := daemon.ReadVersion(version)
			return a.print(v, func(t *table) { t.line(fmt.Sprintf("gabion %s (%s, %s/%s)", v.Version, v.Go, v.OS, v.Arch)) })
		}),
	}
}
