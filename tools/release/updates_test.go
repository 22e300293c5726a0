// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestNewestPatch(t *testing.T) {
	versions := []string{"v0.9.0", "v1.2.0", "v1.2.10", "v1.2.9", "v1.2.11-rc.1", "v1.3.0", "v2.0.0"}
	for present, want := range map[string]string{
		"v1.2.0":                               "v1.2.10",
		"v1.2.9":                               "v1.2.10",
		"v1.2.10":                              "",
		"v1.3.0":                               "",
		"v1.1.0":                               "",
		"v1.2.1-0.20260101000000-0123456789ab": "v1.2.10",
		"v0.0.0-20260101000000-0123456789ab":   "",
	} {
		if got := newestPatch(present, versions); got != want {
			t.Errorf("newest patch of %s: %q, want %q", present, got, want)
		}
	}
}
