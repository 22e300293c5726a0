// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/backends/program"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// cleaner is a sink with the method Cleanup, so app.Command adds the flag --cleanup.
type cleaner struct {
	sink.Sink
	sink.Cleaner
}

// manual returns the text of docs/running.md and docs/operations.md.
func manual(t *testing.T) []byte {
	t.Helper()
	var text []byte
	for _, file := range []string{"../../docs/running.md", "../../docs/operations.md"} {
		page, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, page...)
	}
	return text
}

// TestManualDescribesAllFlags compares the manual with the flags of kpng and of commands
// that app.Main makes.
func TestManualDescribesAllFlags(t *testing.T) {
	described := map[string]bool{"help": true}
	for _, flag := range regexp.MustCompile(`--([a-z][a-z-]*[a-z])`).FindAllStringSubmatch(string(manual(t)), -1) {
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
					t.Errorf("neither docs/running.md nor docs/operations.md describes --%s of %s", f.Name, cmd.CommandPath())
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
	// The commands of newRoot include these two backends only on Windows.
	for _, b := range []*program.Backend{program.Kernelspace(nil), program.WindowsUserspace()} {
		cmd := &cobra.Command{Use: b.Name}
		b.Register(cmd.Flags())
		walk(cmd)
	}
	for name := range described {
		if !exist[name] {
			t.Errorf("docs/running.md or docs/operations.md describes --%s, which no command has", name)
		}
	}
}

// TestCommandsInDocsHaveTheirFlags parses the commands in the documentation without
// running them. A line in an sh block is a command if it begins with kpng.
func TestCommandsInDocsHaveTheirFlags(t *testing.T) {
	var pages []string
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../examples/*/README.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	commands := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
			for line := range strings.Lines(strings.ReplaceAll(block[1], "\\\n", " ")) {
				args, ok := strings.CutPrefix(line, "kpng ")
				if !ok {
					continue
				}
				commands++
				args = regexp.MustCompile(`\s[#|>&;].*`).ReplaceAllString(args, "")
				if err := parse(strings.Fields(args)); err != nil {
					t.Errorf("%s: %s: %v", page, strings.TrimSpace(line), err)
				}
			}
		}
	}
	if commands == 0 {
		t.Error("no page has a line that begins with kpng")
	}
}

// parse parses the arguments of kpng.
func parse(args []string) error {
	cmd, rest, err := newRoot().Find(args)
	if err != nil {
		return err
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	return cmd.ValidateArgs(cmd.Flags().Args())
}
