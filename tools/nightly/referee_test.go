// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRefereePage(t *testing.T) {
	s := store{t.TempDir()}
	file := filepath.Join(s.dir, "referee", "kube-proxy-1.37-ipvs.json")
	if err := os.Mkdir(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"proxy":"kube-proxy-ipvs","date":"2026-11-27T00:00:00Z","seconds":61,"kernel":"6.1","ok":7,"notCompared":2,"failed":[
		{"section":"Source ranges","case":"source ranges apply to clients on this node","family":"IPv4","reason":"text"},
		{"section":"Source ranges","case":"source ranges apply to clients on this node","family":"IPv6","reason":"text"}]}`)
	page, err := refereePage(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| kube-proxy-1.37-ipvs | 7 | 2 | 2 | 6.1 | 2026-11-27 | 1m1s |",
		"| kpng-nftables | not run |",
		"([Source ranges](semantics.md#source-ranges)) | ❌ kube-proxy-1.37-ipvs, IPv4 and IPv6 ([kubernetes#119656](https://github.com/kubernetes/kubernetes/issues/119656));",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	write("no JSON")
	if _, err := refereePage(s); err == nil || !strings.Contains(err.Error(), "kube-proxy-1.37-ipvs") {
		t.Errorf("error %v, want one that names the proxy", err)
	}
}

// TestRulesExist compares the links to rules with the headings of docs/reference/semantics.md.
func TestRulesExist(t *testing.T) {
	text, err := os.ReadFile("../../docs/reference/semantics.md")
	if err != nil {
		t.Fatal(err)
	}
	headings := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if title := strings.TrimLeft(line, "#"); title != line {
			headings[strings.ReplaceAll(strings.ToLower(strings.TrimSpace(title)), " ", "-")] = true
		}
	}
	for section, rule := range rules {
		if !headings[rule] {
			t.Errorf("section %q links to the missing heading %q", section, rule)
		}
	}
}
