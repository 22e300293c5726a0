// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/app/program"
	"github.com/kpng-project/kpng/internal/usage"
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
	others := regexp.MustCompile(`(?m)^    (skopeo|ctr|ssh-keygen|sha256sum) .*$`)
	for _, flag := range regexp.MustCompile(`--([a-z][a-z-]*[a-z])`).FindAllStringSubmatch(others.ReplaceAllString(string(manual(t)), ""), -1) {
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
	walk(app.Command(app.Options{Name: "any", Sink: cleaner{}}))
	// The commands of newRoot include this backend only on Windows.
	for _, b := range descriptions(program.Kernelspace()) {
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

// TestHelpTexts checks that help texts fit a terminal, and that the examples of each command
// are command lines that it accepts.
func TestHelpTexts(t *testing.T) {
	root := newRoot()
	usage.Prepare(root)
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		var out strings.Builder
		cmd.SetOut(&out)
		if err := cmd.Help(); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(out.String()) {
			if utf8.RuneCountInString(line) > 101 { // with the newline
				t.Errorf("help of %s: line is too long: %s", cmd.CommandPath(), line)
			}
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
		if !cmd.HasSubCommands() && cmd.Example == "" {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		for line := range strings.Lines(cmd.Example) {
			line, _, _ = strings.Cut(line, " #")
			line, _, _ = strings.Cut(line, " |")
			args, isCommand := strings.CutPrefix(strings.TrimSpace(line), "kpng ")
			if !isCommand {
				t.Errorf("%s: example is not a command: %s", cmd.CommandPath(), line)
			} else if err := parse(strings.Fields(args)); err != nil {
				t.Errorf("%s: example %s: %v", cmd.CommandPath(), line, err)
			}
		}
	}
	walk(root)
}

// TestCommandsInDocsHaveTheirFlags parses the commands in the documentation without
// running them.
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
		for _, args := range kpngCommands(string(text)) {
			commands++
			if err := parse(strings.Fields(args)); err != nil {
				t.Errorf("%s: kpng %s: %v", page, args, err)
			}
		}
	}
	if commands == 0 {
		t.Error("no page has a line that begins with kpng")
	}
}

// kpngCommands returns the arguments of the commands on a page. A command is a line that
// begins with kpng, in an sh block or after four spaces. The function skips lines after
// four spaces that contain "…".
func kpngCommands(page string) []string {
	var commands []string
	add := func(line string, rest *regexp.Regexp) {
		if args, ok := strings.CutPrefix(line, "kpng "); ok {
			commands = append(commands, strings.TrimSpace(rest.ReplaceAllString(args, "")))
		}
	}
	block := regexp.MustCompile("(?ms)^```(\\S*).*?\n(.*?)^```$")
	for _, b := range block.FindAllStringSubmatch(page, -1) {
		if b[1] != "sh" {
			continue
		}
		for line := range strings.Lines(strings.ReplaceAll(b[2], "\\\n", " ")) {
			add(line, regexp.MustCompile(`\s[#|>&;].*`))
		}
	}
	for line := range strings.Lines(block.ReplaceAllString(page, "")) {
		if line, ok := strings.CutPrefix(line, "    "); ok && !strings.Contains(line, "…") {
			add(line, regexp.MustCompile(`\s[#|>&;].*|   .*`)) // explanations follow three spaces
		}
	}
	return commands
}

func TestCommandsAreFoundInDocs(t *testing.T) {
	page := "Text.\n\n    kpng kube to-api   explanation\n    kpng file …\n\n" +
		"```sh\nkpng a --b \\\n    --c d    # comment\nother\n```\n\n```console\nkpng e\n```\n"
	got := kpngCommands(page)
	if want := []string{"a --b      --c d", "kube to-api"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
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
