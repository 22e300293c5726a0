// SPDX-License-Identifier: Apache-2.0

package command

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestSourceMetrics(t *testing.T) {
	synced, stale := false, false
	c := SourceMetrics(func() (bool, bool, int) { return synced, stale, 3 })
	for _, now := range []struct{ synced, stale bool }{{false, false}, {true, false}, {true, true}} {
		synced, stale = now.synced, now.stale
		number := map[bool]string{false: "0", true: "1"}
		want := `
# HELP kpng_source_services_refused Services that are too large, or have invalid fields.
# TYPE kpng_source_services_refused gauge
kpng_source_services_refused 3
# HELP kpng_source_stale 1 if the source has had no connection for more than three minutes.
# TYPE kpng_source_stale gauge
kpng_source_stale ` + number[stale] + `
# HELP kpng_source_synced 1 if the source has delivered the whole state once.
# TYPE kpng_source_synced gauge
kpng_source_synced ` + number[synced] + "\n"
		if err := testutil.CollectAndCompare(c, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
	}
}
