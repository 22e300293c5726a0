// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/internal/usage"
	"github.com/spf13/cobra"
)

// waitCommand returns the command that waits for the proxy of this node. An init container
// runs it before another container removes the rules of the earlier proxy.
func waitCommand() *cobra.Command {
	return group("wait", "Wait until the proxy of this node has programmed all services",
		wait("kpng", "--healthz-bind-address", defaultStatusAddress, "/readyz", func([]byte) error { return nil }),
		wait("kube-proxy", "metricsBindAddress", "127.0.0.1:10249", "/metrics", kubeProxySynced))
}

// wait returns the command that waits until a page of the proxy has status 200, and the
// function check accepts the page.
func wait(proxy, setting, defaultAddress, page string, check func(text []byte) error) *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   proxy,
		Short: "Wait until " + proxy + " has programmed all services of this node",
		Long: "Waits until " + proxy + " runs on this node and has programmed all services. After that, the rules of\n" +
			"another proxy can be removed without interruption. The command has no time limit.",
		Example: "  kpng wait " + proxy + "\n  kpng wait " + proxy + " --address " + defaultAddress,
		Args:    usage.None,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var last string
			for {
				err := checkPage(cmd.Context(), address, page, check)
				if err == nil {
					fmt.Fprintln(cmd.OutOrStdout(), proxy+" has programmed all services")
				}
				if err == nil || usage.ExitStatus(err) == 2 {
					return err
				}
				if text := err.Error(); text != last {
					fmt.Fprintf(cmd.ErrOrStderr(), "waiting for %s: %s\n", proxy, text)
					last = text
				}
				select {
				case <-cmd.Context().Done():
					return fmt.Errorf("wait for %s: %w", proxy, err)
				case <-time.After(time.Second):
				}
			}
		},
	}
	cmd.Flags().StringVar(&address, "address", defaultAddress, "`host:port` of "+proxy+", its "+setting)
	return cmd
}

func checkPage(ctx context.Context, address, page string, check func(text []byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	resp, err := request(ctx, address, page)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s has status %d", page, resp.StatusCode)
	}
	return check(text)
}

var (
	kpngMetric    = regexp.MustCompile(`(?m)^kpng_`)
	lastTimestamp = regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_(queued_)?timestamp_seconds(\S*) (\S+)$`)
)

// kubeProxySynced returns an error if kube-proxy's metrics do not show a sync of each
// IP family. The metrics of a family have a label, and a family has the queued
// timestamp even before its first sync. Before the first sync, versions of kube-proxy
// without this label have metrics with the value 0.
func kubeProxySynced(metrics []byte) error {
	if kpngMetric.Match(metrics) {
		return errors.New("kpng still runs: these are its metrics")
	}
	queued, synced := map[string]bool{}, map[string]bool{}
	for _, m := range lastTimestamp.FindAllSubmatch(metrics, -1) {
		if value, err := strconv.ParseFloat(string(m[3]), 64); err != nil || value <= 0 {
			continue
		}
		if labels := string(m[2]); len(m[1]) > 0 {
			queued[labels] = true
		} else {
			synced[labels] = true
		}
	}
	for labels := range queued {
		if !synced[labels] {
			return fmt.Errorf("no sync yet %s", labels)
		}
	}
	if len(synced) == 0 {
		return errors.New("no sync yet")
	}
	return nil
}
