// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"os"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// TestMain discards the log, which has a line for each failure of the random histories.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	os.Exit(m.Run())
}
