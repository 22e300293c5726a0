// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"os"
	"runtime"
	"testing"
)

// NeedRoot skips a test unless root runs it. On other systems than Linux, it does nothing.
func NeedRoot(t testing.TB) {
	t.Helper()
	if runtime.GOOS == "linux" && os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}
