// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/backends/program"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// cleaner is a sink that cleans up.
type cleaner struct {
	sink.Sink
	sink.Cleaner
}

// TestTheManualKnowsAllFlags holds the flags of kpng, and of what is made with
// app.Main, against docs/running.md.
func TestTheManualKnowsAllFlags(t *testing.T) {
	manual, err := os.ReadFile("../../docs/running.md")
	if err != nil {
		t.Fatal(err)
	}
	described := map[string]bool{"help": true}
	for _, flag := range regexp.MustCompile(`--([a-z][a-z-]*[a-z])`).FindAllStringSubmatch(string(manual), -1) {
		described[flag[1]] = true
	}
	exist := map[string]bool{"help": true}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		cmd.InitDefaultVersionFlag()
		for _, flags := range []*pflag.FlagSet{cmd.Flags(), cmd.PersistentFlags()} {
			flags.VisitAll(func(f *pflag.Flag) {
				exist[f.Name] = true
				if !described[f.Name] && len(f.Name) > 1 {
					t.Errorf("docs/running.md does not describe --%s of %s", f.Name, cmd.CommandPath())
				}
				if usage := strings.TrimSpace(f.Usage); usage == "" {
					t.Errorf("--%s of %s has no help", f.Name, cmd.CommandPath())
				}
			})
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
	walk(app.Command("any", cleaner{}))
	// Backends that newRoot has on Windows only, or as they are there.
	for _, b := range []*program.Backend{program.Kernelspace(nil), program.WindowsUserspace()} {
		cmd := &cobra.Command{Use: b.Name}
		b.Register(cmd.Flags())
		walk(cmd)
	}
	for name := range described {
		if !exist[name] {
			t.Errorf("docs/running.md describes --%s, which no command has", name)
		}
	}
}
