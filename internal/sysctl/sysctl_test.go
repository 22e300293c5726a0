// SPDX-License-Identifier: Apache-2.0

package sysctl_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/sysctl"
	"k8s.io/klog/v2"
)

func TestSettingsAreReportedOrSet(t *testing.T) {
	settings := []sysctl.Setting{
		{Name: "net.right", Value: 1},
		{Name: "net.wrong", Value: 1},
		{Name: "net.larger", Value: 5, AtLeast: true},
		{Name: "net.smaller", Value: 5, AtLeast: true},
		{Name: "net.absent", Value: 1},
		{Name: "net.text", Value: 1},
		{Name: "net.folder", Value: 1},
	}
	before := map[string]string{"right": "1\n", "wrong": "0\n", "larger": "6\n", "smaller": "4\n", "text": "on\n"}
	for name, test := range map[string]struct {
		set    bool
		values map[string]string
		logged []string
		wrong  []string
	}{
		"reported": {false, before, []string{
			`"sysctl"="net.wrong" "wanted"=1 "reason"="" "value"=0`,
			`"sysctl"="net.smaller" "wanted"=5 "reason"="" "value"=4`,
			"net.text", "net.folder",
		}, []string{"net.wrong", "net.smaller", "net.text", "net.folder"}},
		"set": {true, map[string]string{"right": "1\n", "wrong": "1", "larger": "6\n", "smaller": "5", "text": "on\n"}, []string{
			`"sysctl"="net.wrong" "wanted"=1 "reason"="" "before"=0`,
			`"sysctl"="net.smaller" "wanted"=5 "reason"="" "before"=4`,
			"net.text", "net.folder",
		}, []string{"net.text", "net.folder"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.MkdirAll(filepath.Join(root, "net/folder"), 0o700); err != nil {
				t.Fatal(err)
			}
			for name, value := range before {
				if err := os.WriteFile(filepath.Join(root, "net", name), []byte(value), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var logged []string
			log := funcr.New(func(_, line string) { logged = append(logged, line) }, funcr.Options{})
			wrong := sysctl.Root(root).Apply(klog.NewContext(context.Background(), log), settings, test.set)
			if len(logged) != len(test.logged) {
				t.Fatalf("logged %d lines, want %d: %q", len(logged), len(test.logged), logged)
			}
			for i, want := range test.logged {
				if !strings.Contains(logged[i], want) {
					t.Errorf("logged %q, want %q", logged[i], want)
				}
			}
			if diff := cmp.Diff(test.wrong, wrong); diff != "" {
				t.Errorf("settings with wrong values (-want +got):\n%s", diff)
			}
			got := map[string]string{}
			for name := range before {
				text, err := os.ReadFile(filepath.Join(root, "net", name))
				if err != nil {
					t.Fatal(err)
				}
				got[name] = string(text)
			}
			if diff := cmp.Diff(test.values, got); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
		})
	}
}
