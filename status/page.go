// SPDX-License-Identifier: Apache-2.0

package status

import (
	_ "embed"
	"fmt"
	"html/template"
	"net/url"
	"slices"
	"strings"
	"time"
)

//go:embed page.html
var pageText string

var (
	pages       = template.Must(template.New("").Funcs(functions).Parse(pageText))
	reportPage  = pages.Lookup("report")
	servicePage = pages.Lookup("service")
)

var functions = template.FuncMap{
	"age":   Age,
	"brief": brief,
	"first": func(n int, list []Failure) []Failure { return list[:min(n, len(list))] },
	"join":  func(list []string) string { return brief(120, strings.Join(list, ", ")) },
	"query": func(pairs ...string) template.URL {
		values := url.Values{}
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i+1] != "" {
				values.Set(pairs[i], pairs[i+1])
			}
		}
		return template.URL("?" + values.Encode())
	},
}

// Age describes the time t relative to now in a few words.
func Age(now, t time.Time) string {
	d := now.Sub(t)
	switch {
	case t.IsZero():
		return "–"
	case d <= -time.Second:
		return "in " + (-d).Round(time.Second).String()
	case d < time.Second:
		return "now"
	case d < time.Hour:
		return d.Truncate(time.Second).String() + " ago"
	default:
		return t.UTC().Format(time.DateTime) + " UTC"
	}
}

// brief returns text, cut to at most n characters.
func brief(n int, text string) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:n]) + " …"
	}
	return text
}

// reportData is the data of the template "report".
type reportData struct {
	*Report
	Match string // the text by which services were selected
}

// Title returns the title of the page, which also appears in the tab of a browser.
func (r reportData) Title() string {
	if n := len(r.Problems); n > 0 {
		return fmt.Sprintf("%s: problems: %d", r.Heading(), n)
	}
	return r.Heading()
}

// Heading names the node.
func (r reportData) Heading() string {
	if r.Node == "" {
		return "kpng"
	}
	return "kpng on node " + r.Node
}

// HasFailures reports whether a service fails in a sink.
func (r reportData) HasFailures() bool {
	return slices.ContainsFunc(r.Sinks, func(s Sink) bool { return s.Failing > 0 })
}

// serviceData is the data of the template "service".
type serviceData struct {
	*ServiceReport
	Node    string // the node that the request selects
	AnyNode bool   // whether a request may select a node
}
