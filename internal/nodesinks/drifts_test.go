// SPDX-License-Identifier: Apache-2.0

package nodesinks

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/internal/backendoptions"
)

func TestRepeatedDriftIsAProblemForAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drifts{Observer: backendoptions.Observe(nil), backend: "nftables"}
		n := &Node{drifts: []*drifts{d, {Observer: backendoptions.Observe(nil), backend: "ebpf"}}}
		for _, step := range []struct {
			drifts int
			then   time.Duration
			want   string
		}{
			{0, 0, ""},
			{1, 59 * time.Minute, ""},
			{1, 0, "the nftables rules 2 times in the last hour"},
			{1, time.Minute, "the nftables rules 2 times in the last hour"}, // the first one was an hour ago
			{0, 59 * time.Minute, ""},
			{maxDrifts - 1, 0, "the nftables rules 99 times in the last hour"},
			{50, 0, "the nftables rules at least 100 times in the last hour"},
			{0, time.Hour, ""},
		} {
			for range step.drifts {
				d.Drifted(true)
				d.Drifted(false)
			}
			time.Sleep(step.then)
			if got := n.Problems(); len(got) > 1 || (step.want == "") != (len(got) == 0) || !strings.Contains(strings.Join(got, ""), step.want) {
				t.Errorf("after %+v: problems %q", step, got)
			}
		}
	})
}
