// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestManPages(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	dir := filepath.Join(t.TempDir(), "man1")
	mustExecute(t, "man", dir)
	for page, texts := range map[string][]string{
		"kpng.1":                         {`kpng-explain(1)`, "Nov 2023"},
		"kpng-explain.1":                 {`--node-name`, `kpng explain --node-name worker-1 web`},
		"kpng-get-services.1":            {`--output`},
		"kpng-status.1":                  {`--address`, "127.0.0.1:10256"},
		"kpng-kube-to-local-userspace.1": {`--drain-timeout`},
		"kpng-file-to-api.1":             {`--listen`},
	} {
		text, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, want := range texts {
			if !strings.Contains(strings.ReplaceAll(string(text), `\-`, "-"), want) {
				t.Errorf("%s lacks %q:\n%s", page, want, text)
			}
		}
	}
}
