// SPDX-License-Identifier: Apache-2.0

package main

import (
	"runtime"
	"strings"
	"testing"
)

func TestVersion(t *testing.T) {
	for _, args := range [][]string{{"version"}, {"--version"}} {
		if got := mustExecute(t, args...); !strings.HasPrefix(got, "kpng ") || !strings.Contains(got, runtime.Version()) {
			t.Errorf("%s: %q does not name kpng and %s", args, got, runtime.Version())
		}
	}
}
