// SPDX-License-Identifier: Apache-2.0

package file

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/watcher"
)

func TestDemoIsSplitByServiceProxyName(t *testing.T) {
	for name, want := range map[string][]string{
		"kpng-example": {
			"service default/kpng-example",
			"slice default/kpng-example-ipv4", "slice default/kpng-example-ipv6",
			"node vm-002", "node vm-003",
		},
		"": {
			"service default/web",
			"slice default/kpng-example-ipv4", "slice default/kpng-example-ipv6", "slice default/web-ipv4",
			"node vm-002", "node vm-003",
		},
		"another": {"node vm-002", "node vm-003"},
	} {
		t.Run("name "+name, func(t *testing.T) {
			m, err := load(t.Context(), "../../examples/demo.yaml", watcher.Options{ServiceProxyName: name})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, names(m)); diff != "" {
				t.Errorf("objects (-want +got):\n%s", diff)
			}
			if len(m.warnings) > 0 {
				t.Errorf("warnings: %v", m.warnings)
			}
		})
	}
}
