// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/url"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// withTraffic adds the flags --stats and --address to kpng get services. With --stats, the
// command lists the traffic that a running program counts.
func withTraffic(cmd *cobra.Command) *cobra.Command {
	fs, run := cmd.Flags(), cmd.RunE
	stats := fs.Bool("stats", false, "list the connections and bytes that a running kpng with the flag --stats counts: by service port or, with the name of a service, by port and endpoint")
	address := fs.String("address", defaultStatusAddress, "with --stats: `host:port` of the program, its --healthz-bind-address")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !*stats {
			if fs.Changed("address") {
				return usage.Errorf("--address needs --stats")
			}
			return run(cmd, args)
		}
		var err error
		cmd.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
			if f.Changed && !slices.Contains([]string{"stats", "address", "output"}, f.Name) {
				err = usage.Errorf("--stats excludes --%s, because it reads a running program", f.Name)
			}
		})
		output, _ := fs.GetString("output") // ignore the error: the flag exists
		switch {
		case err != nil:
			return err
		case output != "" && output != "json" && output != "yaml":
			return usage.Errorf("--output %q with --stats is not json or yaml", output)
		}
		l := list{head: []string{"NAMESPACE", "NAME", "PORT", "CONNECTIONS", "ACTIVE", "FROM-CLIENTS", "TO-CLIENTS"}}
		traffic := trafficOfAll(cmd.Context(), *address)
		if len(args) > 0 {
			l.head = append(l.head, "ENDPOINT")
			traffic = trafficOfService(cmd.Context(), *address, args[0])
		}
		found, err := l.print(cmd.OutOrStdout(), traffic, output)
		if err == nil && !found {
			cmd.PrintErrln("Nothing found.")
		}
		return err
	}
	return cmd
}

// trafficOfAll reads the traffic by service port.
func trafficOfAll(ctx context.Context, address string) iter.Seq2[object, error] {
	return func(yield func(object, error) bool) {
		for query := (url.Values{"output": {"json"}}); ; {
			var r report.Report
			if err := fetchTraffic(ctx, address, query, &r); err != nil {
				yield(object{}, err)
				return
			}
			if err := countsTraffic(address, r.Stats, r.StatsError); err != nil {
				yield(object{}, err)
				return
			}
			for _, s := range r.Services {
				for _, t := range s.Traffic {
					if !yield(trafficObject(s.Service, t), nil) {
						return
					}
				}
			}
			if r.Next == "" {
				return
			}
			query.Set("after", r.Next)
		}
	}
}

// trafficOfService reads the traffic of a service by port and endpoint.
func trafficOfService(ctx context.Context, address, name string) iter.Seq2[object, error] {
	return func(yield func(object, error) bool) {
		about, err := parseServiceName(name)
		if err != nil {
			yield(object{}, err)
			return
		}
		var s struct { // the other fields of a report.ServiceReport cannot be decoded
			Service, StatsError string
			Stats               bool
			Traffic             []report.Traffic
		}
		err = fetchTraffic(ctx, address, url.Values{"output": {"json"}, "service": {about.Service().String()}}, &s)
		if err == nil {
			err = countsTraffic(address, s.Stats, s.StatsError)
		}
		if err != nil {
			yield(object{}, err)
			return
		}
		for _, t := range s.Traffic {
			if !yield(trafficObject(s.Service, t), nil) {
				return
			}
		}
	}
}

func fetchTraffic(ctx context.Context, address string, query url.Values, into any) error {
	body, err := fetchStatus(ctx, address, query)
	if err == nil {
		if err = json.Unmarshal(body, into); err != nil {
			err = fmt.Errorf("decode the status: %w", err)
		}
	}
	return err
}

// countsTraffic returns an error if a status report has no traffic.
func countsTraffic(address string, stats bool, statsError string) error {
	switch {
	case !stats:
		return fmt.Errorf("the program at %s does not count traffic; start it with --stats", address)
	case statsError != "":
		return errors.New("read the counters of the dataplane: " + statsError)
	}
	return nil
}

func trafficObject(service string, t report.Traffic) object {
	namespace, name, _ := strings.Cut(service, "/")
	value := struct {
		Service string `json:"service"`
		report.Traffic
	}{service, t}
	return object{value: value, row: slices.Concat([]string{namespace, name}, t.Row(), []string{t.Endpoint.String()})}
}
