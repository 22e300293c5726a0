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

	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// cleaner is a sink with the method Cleanup, so app.Command adds the flag --cleanup.
type cleaner struct {
	sink.Sink
	sink.Cleaner
}

// docPages returns the text of each page of documentation.
func docPages(t *testing.T) map[string]string {
	t.Helper()
	pages := map[string]string{}
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../docs/*/*.md", "../../examples/*/README.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, page := range found {
			text, err := os.ReadFile(page)
			if err != nil {
				t.Fatal(err)
			}
			pages[page] = string(text)
		}
	}
	return pages
}

// otherFlags are flags in the documentation that kpng on Linux does not have.
var otherFlags = []string{"--cgroup-root", "--detect-local-mode", "--frontends", "--help", "--nft", "--no-install", "--node", "--proxy-mode", "--table", "--target", "--windows-service"}

// TestNamesInDocsExist finds flags and metrics in the manual that kpng does not have.
// Parts of names are allowed, such as --conntrack-…
func TestNamesInDocsExist(t *testing.T) {
	pages := docPages(t)
	known := "`" + strings.Join(otherFlags, "`")
	for _, file := range []string{"flags.md", "metrics.md"} {
		known += pages["../../docs/reference/"+file]
	}
	names := regexp.MustCompile("(?:`(?:kpng [^`\n]*?)?)(--[a-z][a-z-]*[a-z])|\\b(kpng_[a-z_]*[a-z])")
	for page, text := range pages {
		if !strings.Contains(page, "/docs/") && !strings.HasSuffix(page, "/README.md") || strings.Contains(page, "/examples/") {
			continue // examples have flags of their own, and CHANGELOG.md has flags of the past
		}
		for _, name := range names.FindAllStringSubmatch(text, -1) {
			name := strings.TrimSuffix(name[1]+name[2], "_bucket")
			if !strings.Contains(known, "`"+name) {
				t.Errorf("%s has the name %s, which is neither in docs/reference/flags.md nor in metrics.md", page, name)
			}
		}
	}
}

// TestHelpTexts checks that help texts fit a terminal, and that each command accepts its
// examples.
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
	commands := 0
	for page, text := range docPages(t) {
		for _, args := range kpngCommands(text) {
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
	cmd.InitDefaultVersionFlag() // Execute does this, too
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	return cmd.ValidateArgs(cmd.Flags().Args())
}
