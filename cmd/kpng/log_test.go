// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"
)

// TestFirstLogLineNamesTheSource runs commands that log something: the source has an
// unknown field, or a configuration file has a setting that the command ignores.
func TestFirstLogLineNamesTheSource(t *testing.T) {
	dir := t.TempDir()
	manifests, config := filepath.Join(dir, "state.yaml"), filepath.Join(dir, "config.conf")
	for file, text := range map[string]string{
		manifests: "apiVersion: v1\nkind: Service\nmetadata: {name: new, namespace: default, uid: u}\nspec: {clusterIP: 10.0.0.1, ports: [{port: 80}], newField: 1}\n",
		config:    "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\noomScoreAdj: 5\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	source := []string{"file", "-i", manifests}
	for _, args := range [][]string{
		{"get", "services", "-i", manifests},
		{"explain", "-i", manifests},
		joinArgs(source, "to-file", "-"),
		joinArgs(source, "to-file", "/does/not/exist/out.yaml"),
		joinArgs(source, "to-local", "json", "--once"),
		joinArgs(source, "to-api", "--listen=unix:///does/not/exist/s"),
		joinArgs(source, "to-local", "userspace", "--config", config, "--healthz-bind-address=nowhere"),
	} {
		var mu sync.Mutex
		first := ""
		log := funcr.New(func(_, line string) {
			mu.Lock()
			defer mu.Unlock()
			if first == "" {
				first = line
			}
		}, funcr.Options{})
		_, err := execute(klog.NewContext(t.Context(), log), args...)
		if mu.Lock(); !strings.Contains(first, `"source"="manifests `+manifests) {
			t.Errorf("kpng %q: error %v; the first line of the log is\n%s", args, err, first)
		}
		mu.Unlock()
	}
}
