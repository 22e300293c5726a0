// SPDX-License-Identifier: Apache-2.0

// Command nightly runs the tests that take too long for every change, in parts:
//
//	.ci/nightly              run each part that has no result for this code
//	.ci/nightly PATTERN...   run these parts, also those with a result
//	.ci/nightly --list       list the parts with their last result and usual duration
//	.ci/nightly --docs       write the results into the documentation
//
// A PATTERN is the name of a part, or a pattern such as 'bench-*'. Parts that are long run
// only if a pattern names them. With --jobs N, N parts run at the same time (default 2). A
// part runs alone, after the others, if it measures durations or needs something that exists
// only once on the host.
//
// The result of a part is a line of JSON at the end of results/PART.jsonl. A result applies
// to the code of a commit: all files except the folders results and docs, and Markdown
// files beside these folders. So a run that was killed continues where it stopped, even if
// its results were committed meanwhile. A part that fails does not stop the others. The
// command fails if a part that it selected has no result "passed".
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "nightly:", err)
		os.Exit(1)
	}
}

func run() error {
	list := flag.Bool("list", false, "list the parts")
	docs := flag.Bool("docs", false, "write the results into the documentation")
	jobs := flag.Int("jobs", 2, "how many `parts` run at the same time, without those that run alone")
	root := flag.String("root", ".", "`folder` of the repository")
	flag.Parse()
	if *jobs < 1 {
		return errors.New("--jobs must be at least 1")
	}
	if err := os.Chdir(*root); err != nil {
		return err
	}
	store := store{dir: "results"}
	if *docs {
		return writeDocs(allParts(), store)
	}
	patterns := flag.Args()
	if *list && len(patterns) == 0 {
		patterns = []string{"*"}
	}
	selected, err := selectParts(allParts(), patterns)
	if err != nil {
		return err
	}
	commit, err := currentCommit()
	if err != nil {
		return err
	}
	if *list {
		return printList(selected, store, commit.Code)
	}
	if len(commit.Changed) > 0 {
		return fmt.Errorf("commit these files first, because a result names a commit: %s", strings.Join(commit.Changed, ", "))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	logs := filepath.Join(os.TempDir(), "kpng-nightly")
	fmt.Printf("outputs of the parts: %s/PART.log\n", logs)
	r := runner{store: store, commit: commit, logs: logs, out: os.Stdout, jobs: *jobs, grace: time.Minute}
	err = r.runAll(ctx, selected, flag.NArg() > 0)
	return errors.Join(err, writeDocs(allParts(), store))
}

// selectParts returns the parts that match one of the patterns. Without patterns, these are
// all parts that are not long.
func selectParts(parts []part, patterns []string) ([]part, error) {
	used := map[string]bool{}
	var selected []part
	for _, p := range parts {
		matches := len(patterns) == 0 && !p.Long
		for _, pattern := range patterns {
			ok, err := path.Match(pattern, p.Name)
			if err != nil {
				return nil, fmt.Errorf("pattern %q: %w", pattern, err)
			}
			if ok {
				matches, used[pattern] = true, true
			}
		}
		if matches {
			selected = append(selected, p)
		}
	}
	for _, pattern := range patterns {
		if !used[pattern] {
			return nil, fmt.Errorf("no part has the name %q; see --list", pattern)
		}
	}
	return selected, nil
}

// printList prints the parts with their last results.
func printList(parts []part, store store, code string) error {
	for _, p := range parts {
		results, err := store.read(p.Name)
		if err != nil {
			return err
		}
		last := "not run"
		if len(results) > 0 {
			r := results[len(results)-1]
			last = fmt.Sprintf("%s %s", r.Date.Format(time.DateOnly), r.Outcome)
			if r.Code != code {
				last += ", other code"
			}
		}
		usual := "unknown"
		if d := usualDuration(results); d > 0 {
			usual = d.String()
		}
		limit := p.Limit.String()
		if p.Long {
			limit += ", long"
		}
		if p.Alone {
			limit += ", alone"
		}
		fmt.Printf("%-34s %-34s usually %-10s limit %s\n", p.Name, last, usual, limit)
	}
	return nil
}

// commit is the checked-out commit.
type commit struct {
	// Hash is the abbreviated hash of the commit. Code is the hash of its code, see the
	// package comment.
	Hash, Code string
	// Changed has the files of the code that differ from the commit.
	Changed []string
}

func currentCommit() (commit, error) {
	hash, err := git("rev-parse", "--short=12", "HEAD")
	if err != nil {
		return commit{}, err
	}
	tree, err := git("ls-tree", "HEAD")
	if err != nil {
		return commit{}, err
	}
	c := commit{Hash: strings.TrimSpace(hash), Code: codeHash(tree)}
	status, err := git("status", "--porcelain", "--no-renames")
	if err != nil {
		return commit{}, err
	}
	for line := range strings.Lines(status) {
		file := strings.TrimSpace(line[3:])
		first, _, _ := strings.Cut(file, "/")
		if isCode(first) {
			c.Changed = append(c.Changed, file)
		}
	}
	return c, nil
}

func git(args ...string) (string, error) {
	out, err := exec.Command("git", args...).Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}
