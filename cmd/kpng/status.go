// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

const defaultStatusAddress = "127.0.0.1:10256"

// statusCommand returns the command that prints the status page of a running program.
func statusCommand() *cobra.Command {
	var address, output string
	cmd := &cobra.Command{
		Use:   "status [[NAMESPACE/]NAME]",
		Short: "Print the state of a running kpng, or what it does with a service",
		Long: `Print the state of a running kpng: its source, sinks, failing services, clients and recent changes.
With the name of a service, print what the program does with this service, and why.

The command reads the status page of the program, which needs the flag --healthz-bind-address. The
program answers only clients on the same machine, unless it has the flag --expose-status.`,
		Example: `  kpng status
  kpng status default/web
  kpng status --address 127.0.0.1:10257 -o json | jq .sinks`,
		Args: usage.AtMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			if output != "text" && output != "json" && output != "yaml" {
				return usage.Errorf("--output %q is not text, json or yaml", output)
			}
			query := url.Values{"output": {"json"}}
			if len(args) > 0 {
				about, err := parseServiceName(args[0])
				if err != nil {
					return err
				}
				query.Set("service", about.Service().String())
			} else if output == "text" {
				query.Set("limit", "0") // the text does not list services
			}
			body, err := fetchStatus(cmd.Context(), address, query)
			if err != nil {
				return err
			}
			return printStatus(cmd.OutOrStdout(), body, output, len(args) > 0)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringVar(&address, "address", defaultStatusAddress, "`host:port` of the program, its --healthz-bind-address")
	fs.StringVarP(&output, "output", "o", "text", "print `text, json or yaml`")
	completeOutput(cmd, "text", "json", "yaml")
	return cmd
}

// request requests a page of a program on this machine.
func request(ctx context.Context, address, page string) (*http.Response, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, usage.Errorf("parse --address %q, want host:port: %w", address, err)
	}
	if host == "" || host == "0.0.0.0" || host == "::" {
		host = "127.0.0.1" // the program may listen at such an address
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+page, nil)
	if err != nil {
		return nil, usage.Errorf("parse --address: %w", err)
	}
	transport := &http.Transport{Proxy: nil, DisableKeepAlives: true}
	return (&http.Client{Transport: transport}).Do(req)
}

// fetchStatus requests the status page. If the request fails, the error says what to do.
func fetchStatus(ctx context.Context, address string, query url.Values) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := request(ctx, address, "/status?"+query.Encode())
	var netErr *net.OpError
	switch {
	case errors.As(err, &netErr) && netErr.Op == "dial":
		return nil, fmt.Errorf("no program answers at %s; start kpng with --healthz-bind-address=%s, or give its address with --address: %w", address, address, netErr.Err)
	case usage.ExitStatus(err) == 2:
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("read the status: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	isJSON := strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json")
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the status: %w", err)
	case resp.StatusCode == http.StatusNotFound && isJSON:
		return nil, fmt.Errorf("the program at %s knows no service %s; kpng explain may say why it is not served", address, query.Get("service"))
	case resp.StatusCode == http.StatusForbidden:
		return nil, fmt.Errorf("the program at %s refuses to answer: run kpng status on the machine of the program with a loopback address, or start the program with --expose-status", address)
	case resp.StatusCode != http.StatusOK || !isJSON:
		return nil, fmt.Errorf("the program at %s has no status page at /status (HTTP status %d): it may be kube-proxy or an older kpng; --address selects another program", address, resp.StatusCode)
	}
	return body, nil
}

func printStatus(w io.Writer, body []byte, output string, isService bool) error {
	switch {
	case output == "json":
		_, err := plain.Writer(w).Write(body)
		return err
	case output == "yaml":
		text, err := yaml.JSONToYAML(plain.YAML(body))
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	case isService:
		w := plain.Writer(w)
		var s struct {
			Text, Refused, NodeError string
			Failures                 []report.Failure
		}
		if err := json.Unmarshal(body, &s); err != nil {
			return fmt.Errorf("decode the status: %w", err)
		}
		if s.Refused != "" {
			fmt.Fprintf(w, "this service is not served as written: %s\n\n", s.Refused)
		}
		if s.NodeError != "" {
			fmt.Fprintf(w, "%s\n\n", s.NodeError)
		}
		for _, f := range s.Failures {
			fmt.Fprintf(w, "sink %s failed %s: %s\n\n", f.Sink, number(f.Failures, "time"), f.Error)
		}
		_, err := io.WriteString(w, s.Text)
		return err
	}
	var r report.Report
	if err := json.Unmarshal(body, &r); err != nil {
		return fmt.Errorf("decode the status: %w", err)
	}
	return printReport(w, &r)
}

// Limits of lists in the text.
const (
	maxFailingShown = 20
	maxPendingShown = 10
	maxChangesShown = 10
	maxClientsShown = 20
)

func printReport(to io.Writer, r *report.Report) error {
	w := newTable(to)
	ago := func(t time.Time) string { return report.Age(r.Time, t) }
	if r.Node != "" {
		fmt.Fprintf(w, "node\t%s\n", r.Node)
	}
	fmt.Fprintf(w, "program\t%s\n", orDash(r.Program))
	state := "synced"
	switch {
	case !r.Source.Synced:
		state = "not synced"
	case r.Source.Stale:
		state = "stale"
	}
	if r.Source.Name != "" {
		state = r.Source.Name + ": " + state
	}
	fmt.Fprintf(w, "source\t%s, revision %d, last change %s\n", state, r.Source.Revision, ago(r.Source.LastChange))
	fmt.Fprintf(w, "objects\t%s, %s, %s\n", number(r.Source.Services, "service"), number(r.Source.Slices, "slice"), number(r.Source.Nodes, "node"))
	if c := r.Clients; c != nil {
		behind := "none behind"
		if c.Behind > 0 {
			behind = fmt.Sprintf("%d behind, by at most %.1f s", c.Behind, c.BehindSeconds)
		}
		fmt.Fprintf(w, "clients\t%s, %s; %s\n", number(c.Nodes, "node"), number(c.Streams, "stream"), behind)
	}
	if len(r.Problems) == 0 {
		fmt.Fprintf(w, "problems\tnone\n")
	}
	for _, p := range r.Problems {
		fmt.Fprintf(w, "problem\t%s\n", p)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(r.Sinks) > 0 {
		fmt.Fprintln(w, "\nSINK\tREVISION\tALL PROGRAMMED\tLAST SYNC\tPENDING\tFAILING\tREFUSED")
		for _, s := range r.Sinks {
			fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%d\t%d\t%d\n", orDash(s.Name), s.Revision, ago(s.LastPass), ago(s.LastSync), s.Pending, s.Failing, r.Source.Refused)
		}
	}
	for _, s := range r.Sinks {
		if names := s.PendingServices; len(names) > 0 {
			w.Flush()
			fmt.Fprintf(w, "\nPENDING IN %s, NEXT FIRST\n%s\n", orDash(s.Name), strings.Join(names[:min(len(names), maxPendingShown)], "\n"))
		}
	}
	if c := r.Clients; c != nil && len(c.Slowest) > 0 && (c.Behind > 0 || c.Streams <= maxClientsShown) {
		fmt.Fprintln(w, "\nCLIENT'S NODE\tCLIENT\tCONNECTED\tREVISION\tBEHIND")
		for _, client := range c.Slowest[:min(len(c.Slowest), maxClientsShown)] {
			behind := "-"
			if client.BehindSeconds > 0 {
				behind = fmt.Sprintf("%.1f s", client.BehindSeconds)
			}
			// Clients choose these names.
			fmt.Fprintf(w, "%.253s\t%.253s\t%s\t%d\t%s\n", orDash(plain.Line(client.Node)), plain.Line(client.Peer), ago(client.Since), client.Revision, behind)
		}
		if more := c.Streams - maxClientsShown; more > 0 {
			w.Flush()
			fmt.Fprintf(w, "%s\n", number(more, "more client"))
		}
	}
	printFailures(w, r)
	if len(r.Changes) > 0 {
		fmt.Fprintln(w, "\nCHANGED SERVICE\tREVISION\tTIME")
	}
	for _, c := range r.Changes[:min(len(r.Changes), maxChangesShown)] {
		deleted := ""
		if c.Deleted {
			deleted = " (deleted)"
		}
		fmt.Fprintf(w, "%s%s\t%d\t%s\n", c.Service, deleted, c.Revision, ago(c.Time))
	}
	return w.Flush()
}

// printFailures prints the failing services. It prints a note if there are too many.
func printFailures(w *tabwriter.Writer, r *report.Report) {
	shown, all := 0, 0
	for _, s := range r.Sinks {
		all += s.Failing
		for _, f := range s.FailingServices[:min(len(s.FailingServices), maxFailingShown-shown)] {
			if shown++; shown == 1 {
				fmt.Fprintln(w, "\nFAILING SERVICE\tSINK\tFAILURES\tNEXT RETRY\tERROR")
			}
			fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", f.Service, orDash(s.Name), f.Failures, report.Age(r.Time, f.NextRetry), strings.ReplaceAll(f.Error, "\n", " "))
		}
	}
	if all > shown {
		w.Flush()
		fmt.Fprintf(w, "%s: kpng status -o json lists up to 1,000 of each sink\n", number(all-shown, "more failure"))
	}
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
