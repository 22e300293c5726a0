// SPDX-License-Identifier: Apache-2.0

package statuspage

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"html"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/kpng-project/kpng/internal/report"
)

// head is the beginning of each page, up to the title.
//
//go:embed head.html
var head string

// page collects the HTML of a page. It does not use html/template. That package needs
// text/template, with which the linker keeps all exported methods of a program.
type page struct {
	bytes.Buffer
	now time.Time
}

// markup is text that is HTML already.
type markup string

// add appends a formatted text. It escapes all arguments except numbers and markup.
func (p *page) add(format string, args ...any) {
	for i, arg := range args {
		switch arg := arg.(type) {
		case string:
			args[i] = html.EscapeString(arg)
		case time.Time:
			args[i] = html.EscapeString(report.Age(p.now, arg))
		case markup, int, uint64, float64:
		default:
			args[i] = html.EscapeString(fmt.Sprint(arg))
		}
	}
	fmt.Fprintf(p, format, args...)
}

func newPage(title string, now time.Time) *page {
	p := &page{now: now}
	p.WriteString(head)
	p.add("<title>%s</title>\n</head>\n<body>\n", title)
	return p
}

func (p *page) end() []byte {
	p.WriteString("</body>\n</html>\n")
	return p.Bytes()
}

// table begins a section with a table. The section has no heading if heading is "".
func (p *page) table(heading, id string, columns ...string) {
	if heading != "" {
		p.add("<h2>%s</h2>\n", heading)
	}
	p.add("<table id=\"%s\">\n<tr>", id)
	for _, c := range columns {
		p.add("<th>%s", c)
	}
	p.WriteByte('\n')
}

func (p *page) endTable() { p.WriteString("</table>\n") }

// bad returns text in the colour of errors.
func bad(text string) markup {
	return markup(`<span class="bad">` + html.EscapeString(text) + "</span>")
}

// count returns a number as text. Unless the number is 0, the text has the colour of
// errors.
func count(n int) markup {
	if n > 0 {
		return bad(fmt.Sprint(n))
	}
	return "0"
}

// link returns a link to the page with the given query. The query is a list of
// alternating keys and values. It omits keys whose value is "".
func link(text string, query ...string) markup {
	values := url.Values{}
	for i := 0; i < len(query); i += 2 {
		if query[i+1] != "" {
			values.Set(query[i], query[i+1])
		}
	}
	return markup(`<a href="?` + html.EscapeString(values.Encode()) + `">` + html.EscapeString(text) + "</a>")
}

func serviceLink(name string) markup { return link(name, "service", name) }

// brief returns text, cut to at most n characters.
func brief(n int, text string) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:n]) + " …"
	}
	return text
}

// join returns the elements of list as one text, cut to 120 characters.
func join(list []string) string { return brief(120, strings.Join(list, ", ")) }

// pageOf returns the page of a report. The argument match is the text that has selected
// the services.
func pageOf(r *report.Report, match string) []byte {
	heading := "kpng"
	if r.Node != "" {
		heading = "kpng on node " + r.Node
	}
	title := heading
	if n := len(r.Problems); n > 0 {
		title = fmt.Sprintf("%s: problems: %d", heading, n)
	}
	p := newPage(title, r.Time)
	p.add("<h1>%s</h1>\n<p class=\"dim\">", heading)
	if r.Program != "" {
		p.add("%s · ", r.Program)
	}
	p.add("%s UTC · %s\n", r.Time.UTC().Format(time.DateTime), link("JSON", "output", "json"))
	p.problems(r.Problems)
	p.source(&r.Source)
	if len(r.Sinks) > 0 {
		p.sinks(r.Sinks)
		p.failing(r.Sinks)
	}
	if r.Clients != nil {
		p.clients(r.Clients)
	}
	if len(r.Changes) > 0 {
		p.table("Recent changes", "changes", "service", "revision", "time")
		for _, c := range r.Changes {
			name := serviceLink(c.Service)
			if c.Deleted {
				name = markup(html.EscapeString(c.Service) + " (deleted)")
			}
			p.add("<tr><td>%s<td>%d<td>%s\n", name, c.Revision, c.Time)
		}
		p.endTable()
	}
	p.services(r, match)
	return p.end()
}

func (p *page) problems(problems []string) {
	if len(problems) == 0 {
		p.add("<p id=\"problems\" class=\"ok\">No problems.\n")
		return
	}
	p.add("<ul id=\"problems\" class=\"bad\">")
	for _, problem := range problems {
		p.add("<li>%s</li>", brief(500, problem))
	}
	p.add("</ul>\n")
}

func (p *page) source(s *report.Source) {
	synced := markup(`<span class="ok">yes</span>`)
	switch {
	case !s.Synced:
		synced = bad("no")
	case s.Stale:
		synced = bad("stale")
	}
	p.table("Source", "source", "source", "synced", "revision", "last change", "services", "slices", "nodes", "refused services")
	p.add("<tr><td>%s<td>%s<td>%d<td>%s<td>%d<td>%d<td>%d<td>%s\n", cmp.Or(s.Name, "–"), synced, s.Revision, s.LastChange, s.Services, s.Slices, s.Nodes, count(s.Refused))
	p.endTable()
}

func (p *page) sinks(sinks []report.Sink) {
	p.table("Sinks", "sinks", "sink", "revision", "all programmed", "last sync", "last progress", "syncs", "pending", "failing", "error")
	for i := range sinks {
		s := &sinks[i]
		p.add("<tr><td>%s<td>%d<td>", cmp.Or(s.Name, "–"), s.Revision)
		if s.Passes > 0 {
			p.add("%s", s.LastPass)
		} else {
			p.add("%s", bad("not yet"))
		}
		p.add("<td>%s<td>%s", s.LastSync, s.LastProgress)
		if !s.SyncingSince.IsZero() {
			p.add(", syncing since %s", s.SyncingSince)
		} else if !s.WaitingSince.IsZero() {
			p.add(", work waits since %s", s.WaitingSince)
		}
		p.add("<td>%d<td>%d", s.Syncs, s.Pending)
		if len(s.PendingServices) > 0 {
			p.add(": %s", join(s.PendingServices))
		}
		p.add("<td>%s<td>", count(s.Failing))
		if s.Error != "" {
			p.add("%s, %d times, next attempt %s", bad(brief(500, s.Error)), s.Failures, s.NextAttempt)
		}
		p.WriteByte('\n')
	}
	p.endTable()
}

// failing shows at most 100 failing services of each sink.
func (p *page) failing(sinks []report.Sink) {
	if !slices.ContainsFunc(sinks, func(s report.Sink) bool { return s.Failing > 0 }) {
		return
	}
	p.table("Failing services", "failing", "sink", "service", "error", "failures", "next retry")
	for i := range sinks {
		s := &sinks[i]
		for _, f := range s.FailingServices[:min(100, len(s.FailingServices))] {
			p.add("<tr><td>%s<td>%s<td>%s<td>%d<td>%s\n", s.Name, serviceLink(f.Service), brief(300, f.Error), f.Failures, f.NextRetry)
		}
		if s.Failing > 100 {
			p.add("<tr><td>%s<td colspan=\"4\">and others: %d services fail in this sink. The %s has the first 1,000\n", s.Name, s.Failing, link("JSON", "output", "json"))
		}
	}
	p.endTable()
}

func (p *page) clients(c *report.Clients) {
	p.add("<h2>Clients</h2>\n<p>%s served on %s. ", report.Number(c.Nodes, "node is", "nodes are"), report.Number(c.Streams, "stream", "streams"))
	if c.Behind > 0 {
		p.add("%s not have all changes; the oldest missing change was %.1f s ago.\n", report.Number(c.Behind, "stream does", "streams do"), c.BehindSeconds)
	} else {
		p.add("All have all changes.\n")
	}
	if len(c.Slowest) == 0 {
		return
	}
	p.table("", "clients", "node", "client", "connected", "revision", "behind")
	for _, client := range c.Slowest {
		node, behind := cmp.Or(client.Node, "whole cluster"), "–"
		if client.BehindSeconds > 0 {
			behind = fmt.Sprintf("%.1f s", client.BehindSeconds)
		}
		p.add("<tr><td>%s<td>%s<td>%s<td>%d<td>%s\n", brief(253, node), brief(253, client.Peer), client.Since, client.Revision, behind)
	}
	p.endTable()
}

func (p *page) services(r *report.Report, match string) {
	p.add("<h2>Services</h2>\n<form><input name=\"match\" value=\"%s\" placeholder=\"namespace or name\" aria-label=\"namespace or name\"> <button>Find</button></form>\n", match)
	p.table("", "services", "service", "type", "addresses", "ports", "endpoints", "remarks")
	for i := range r.Services {
		s := &r.Services[i]
		p.add("<tr><td>%s<td>%s<td>%s<td>%s<td>%d", serviceLink(s.Service), s.Type, join(s.Addresses), join(s.Ports), s.Endpoints)
		if s.Local > 0 {
			p.add(" (%d local)", s.Local)
		}
		p.add("<td>")
		if s.Failing {
			p.add("%s ", bad("failing"))
		}
		if s.Refused {
			p.add("%s ", bad("not as written"))
		}
		if s.Lost > 0 {
			p.add("lost %s ", report.Number(s.Lost, "claim", "claims"))
		}
		if s.Draining > 0 {
			p.add("%d draining", s.Draining)
		}
		p.WriteByte('\n')
	}
	p.endTable()
	if r.Stats {
		p.table("Traffic", "traffic", slices.Concat([]string{"service"}, trafficColumns)...)
		rows := 0
		for i := range r.Services {
			s := &r.Services[i]
			for _, t := range s.Traffic[:min(len(s.Traffic), maxServices-rows)] {
				rows++
				p.add("<tr><td>%s", serviceLink(s.Service))
				p.traffic(&t)
			}
		}
		p.endTable()
		if rows == maxServices {
			p.add("<p>The %s has the traffic of all these services.\n", link("JSON", "output", "json"))
		}
	}
	if r.Next != "" {
		p.add("<p id=\"next\">%s\n", link("Next services", "match", match, "after", r.Next))
	}
}

var trafficColumns = []string{"port", "connections", "active", "bytes from clients", "bytes to clients"}

// traffic adds the trafficColumns, and ends the row of the table.
func (p *page) traffic(t *report.Traffic) {
	for _, cell := range t.Row() {
		p.add("<td>%s", cell)
	}
	p.WriteByte('\n')
}

// servicePage returns the page of a service. The argument node is the node in the
// query. If anyNode is true, the reader may select another node.
func servicePage(s *report.ServiceReport, node string, anyNode bool) []byte {
	p := newPage(s.Service, time.Now())
	p.add("<p>%s · %s\n<h1>%s</h1>\n", link("All services"), link("JSON", "service", s.Service, "node", node, "output", "json"), s.Service)
	if s.Refused != "" {
		p.add("<p id=\"refused\" class=\"bad\">This service is not served as written: %s\n", s.Refused)
	}
	if s.NodeError != "" {
		p.add("<p id=\"node\" class=\"bad\">%s\n", s.NodeError)
	}
	if len(s.Failures) > 0 {
		p.table("Failures", "failing", "sink", "error", "failures", "next retry")
		for _, f := range s.Failures {
			p.add("<tr><td>%s<td class=\"bad\">%s<td>%d<td>%s UTC\n", f.Sink, f.Error, f.Failures, f.NextRetry.UTC().Format(time.TimeOnly))
		}
		p.endTable()
	}
	if anyNode {
		p.add("<form><input type=\"hidden\" name=\"service\" value=\"%s\"><input name=\"node\" value=\"%s\" placeholder=\"node\" aria-label=\"node\"> <button>Explain for this node</button></form>\n", s.Service, node)
	}
	if s.StatsError != "" {
		p.add("<p class=\"bad\">The counters of the dataplane cannot be read: %s\n", s.StatsError)
	} else if s.Stats {
		p.table("Traffic", "traffic", slices.Concat([]string{"endpoint"}, trafficColumns)...)
		for _, t := range s.Traffic {
			p.add("<tr><td>%s", t.Endpoint)
			p.traffic(&t)
		}
		p.endTable()
	}
	switch {
	case s.Text != "":
		p.add("<pre id=\"explanation\">%s</pre>\n", s.Text)
	case s.Refused == "":
		p.add("<p class=\"bad\">No such service is known. It may have been deleted, or the source does not select it.\n")
	}
	return p.end()
}
