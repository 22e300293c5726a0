// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSplit(t *testing.T) {
	for _, test := range []struct {
		name, line string
		want       []string
	}{
		{"only a program", "jq", []string{"jq"}},
		{"arguments between any white space", "  jq \t-r\n.Service ", []string{"jq", "-r", ".Service"}},
		{"single quotes keep all characters", `jq '.a|"\b"'`, []string{"jq", `.a|"\b"`}},
		{"double quotes keep white space and single quotes", `sh -c "echo  'a'"`, []string{"sh", "-c", "echo  'a'"}},
		{"a backslash in double quotes escapes only quotes and backslashes", `echo "\"\\\n"`, []string{"echo", `"\\n`}},
		{"a backslash escapes one character", `echo a\ b \' \\`, []string{"echo", "a b", "'", `\`}},
		{"quoted parts join", `e"ch"'o' a"b c"d`, []string{"echo", "ab cd"}},
		{"quotes make empty arguments", `echo '' ""`, []string{"echo", "", ""}},
		{"operators, variables and patterns are words", "echo $HOME;rm * | `a` $(b) >c", []string{"echo", "$HOME;rm", "*", "|", "`a`", "$(b)", ">c"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := split(test.line)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("words (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSplitErrors(t *testing.T) {
	for _, test := range []struct{ name, line, want string }{
		{"nothing", "", "names no program"},
		{"white space", " \n", "names no program"},
		{"an empty program", "'' a", "names no program"},
		{"a single quote left open", "echo 'a", "' is not closed"},
		{"a double quote left open", `echo "a\"`, `" is not closed`},
		{"a backslash at the end", `echo \`, "nothing after the last"},
	} {
		t.Run(test.name, func(t *testing.T) {
			words, err := split(test.line)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("words %q, error %v, want one with %q", words, err, test.want)
			}
		})
	}
}
