// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// page is a Markdown file of the project.
type page struct {
	name string // the path relative to the repository's root
	text string
}

// fence is a fenced block of code.
type fence struct {
	page string
	line int // the number of the opening line
	// language is the first word after the opening backticks, and file is the second word.
	language, file string
	text           string
}

// where returns the page and the line of the block.
func (f *fence) where() string { return fmt.Sprintf("%s:%d", f.page, f.line) }

func pages(t *testing.T) []page {
	t.Helper()
	root := checkout(t)
	var all []page
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "examples/*/README.md"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			name, err := filepath.Rel(root, file)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, page{name, string(text)})
		}
	}
	return all
}

// fences returns the fenced blocks of a page in order.
func (p *page) fences(t *testing.T) []fence {
	t.Helper()
	var all []fence
	open := false
	number := 0
	for line := range strings.Lines(p.text) {
		number++
		info, isFence := strings.CutPrefix(line, "```")
		switch {
		case isFence && open:
			open = false
		case isFence:
			words := append(strings.Fields(info), "", "")
			all = append(all, fence{page: p.name, line: number, language: words[0], file: words[1]})
			open = true
		case open:
			all[len(all)-1].text += line
		}
	}
	if open {
		t.Errorf("%s: the last code block has no end", p.name)
	}
	return all
}

// A Go block without a file name is a whole file, which must compile in another module.
// If the opening line names a file of the repository, the block must be an excerpt of the
// file.
func TestGoCodeInDocsCompiles(t *testing.T) {
	files := map[string]string{}
	origin := map[string]string{}
	for _, p := range pages(t) {
		for _, f := range p.fences(t) {
			switch {
			case f.language != "go":
			case f.file != "":
				code, err := os.ReadFile(filepath.Join(checkout(t), f.file))
				if err != nil {
					t.Errorf("%s: %v", f.where(), err)
				} else if !strings.Contains(trimLines(string(code)), trimLines(f.text)) {
					t.Errorf("%s: %s does not contain this code", f.where(), f.file)
				}
			case regexp.MustCompile(`(?m)^package `).MatchString(f.text):
				dir := fmt.Sprintf("block%d", len(files))
				files[dir+"/file.go"] = f.text
				origin[dir] = f.where()
			default:
				t.Errorf("%s: the block is not a whole Go file and does not name its file: begin it with ```go FILE", f.where())
			}
		}
	}
	if len(files) == 0 {
		t.Fatal("no page has a whole Go file")
	}
	m := newImporter(t, files)
	cmd := exec.CommandContext(t.Context(), "go", "vet", "./...")
	cmd.Dir = m.dir
	cmd.Env = append(cmd.Environ(), m.env...)
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("go vet: %v\n%s\nThe blocks are:\n%v", err, output, origin)
	}
}

// A program imports kpng and modules of Kubernetes. The go mod commands of the pages make its
// module.
func TestModulesInDocsBuild(t *testing.T) {
	files := map[string]string{}
	for _, name := range []string{"main.go", "table.nft"} {
		text, err := os.ReadFile(filepath.Join(checkout(t), "examples/port-range", name))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = string(text)
	}
	for _, p := range pages(t) {
		commands := regexp.MustCompile(`(?m)^go (mod [^#\n]*)`).FindAllStringSubmatch(p.text, -1)
		if wanted := p.name == "docs/start/first-proxy.md" || p.name == "docs/build/specialised.md"; wanted != (len(commands) == 3) {
			t.Errorf("%s has the commands %q, want go mod init, edit and tidy only in first-proxy.md and specialised.md", p.name, commands)
		} else if !wanted {
			continue
		}
		m := &module{dir: t.TempDir(), env: []string{"GOWORK=off"}}
		for name, text := range files {
			m.write(t, name, text)
		}
		for _, command := range commands {
			m.goCommand(t, strings.Fields(strings.ReplaceAll(command[1], "../kpng", checkout(t)))...)
		}
		m.build(t)
	}
}

// trimLines returns text without white space at the beginning and the end of each line.
func trimLines(text string) string {
	var trimmed strings.Builder
	for line := range strings.Lines(text) {
		trimmed.WriteString(strings.TrimSpace(line) + "\n")
	}
	return trimmed.String()
}

// In console blocks, a command begins with "$ ". The test runs it in the repository's
// root. The output must equal the lines below the command, except white space. "…" stands
// for any text.
func TestOutputOfCommandsInDocsIsCorrect(t *testing.T) {
	commands := 0
	for _, p := range pages(t) {
		for _, f := range p.fences(t) {
			if f.language != "console" {
				continue
			}
			for i, part := range strings.Split("\n"+f.text, "\n$ ") {
				if i == 0 {
					if strings.TrimSpace(part) != "" {
						t.Errorf("%s: the block does not begin with a command", f.where())
					}
					continue
				}
				commands++
				command, want := cutCommand(part)
				if got := run(t, f.where(), command); !matches(want, got) {
					t.Errorf("%s: %s (-docs +command):\n%s", f.where(), command, cmp.Diff(want, got))
				}
			}
		}
	}
	if commands == 0 {
		t.Error("no page has a console block")
	}
}

// cutCommand separates a command from its output. All lines of the command except the last
// end with a backslash.
func cutCommand(text string) (command, output string) {
	for line := range strings.Lines(text) {
		command += line
		if !strings.HasSuffix(line, "\\\n") {
			break
		}
	}
	return strings.TrimSpace(command), strings.TrimPrefix(text, command)
}

// run runs a command with bash and returns its standard output.
func run(t *testing.T, where, command string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", command)
	cmd.Dir = checkout(t)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Errorf("%s: %s: %v\n%s", where, command, err, stderr.Bytes())
	}
	return stdout.String()
}

// matches reports whether the text got equals the text want. White space is ignored, and
// "…" in want stands for any text.
func matches(want, got string) bool {
	pattern := strings.ReplaceAll(regexp.QuoteMeta(withoutSpace(want)), "…", ".*")
	return regexp.MustCompile("^" + pattern + "$").MatchString(withoutSpace(got))
}

func withoutSpace(text string) string { return strings.Join(strings.Fields(text), "") }

func TestLinksInDocsExist(t *testing.T) {
	root := checkout(t)
	sections := map[string]map[string]bool{}
	for _, p := range pages(t) {
		sections[p.name] = p.sections()
	}
	for _, p := range pages(t) {
		text := regexp.MustCompile("(?ms)^```.*?^```|`[^`\n]*`").ReplaceAllString(p.text, "") // Go code may look like a link
		for _, link := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(text, -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			path, section, _ := strings.Cut(link[1], "#")
			name := p.name
			if path != "" {
				name = filepath.Join(filepath.Dir(p.name), path)
			}
			if _, err := os.Stat(filepath.Join(root, name)); err != nil {
				t.Errorf("%s links to %s: %v", p.name, link[1], err)
			} else if section != "" && sections[name] != nil && !sections[name][section] {
				t.Errorf("%s links to %s, but %s has no such section", p.name, link[1], name)
			}
		}
	}
}

// sections returns the anchors that GitHub gives the headings of a page.
func (p *page) sections() map[string]bool {
	anchors := map[string]bool{}
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(p.text, -1) {
		anchor := strings.ToLower(regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(heading[1], ""))
		anchors[strings.ReplaceAll(anchor, " ", "-")] = true
	}
	return anchors
}
