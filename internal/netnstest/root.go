// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"os"
	"runtime"
	"testing"
)

// NeedRoot skips a test that needs root on Linux, unless root runs the test.
func NeedRoot(t testing.TB) {
	t.Helper()
	if runtime.GOOS == "linux" && os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}
