// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"slices"
	"strconv"
	"testing"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

func TestPassForgetsDeletedServices(t *testing.T) {
	var p Pass
	begin := func(c Changes, services ...Change) {
		c.Services = slices.Values(services)
		p.Begin(&c)
	}
	key := func(name string) types.NamespacedName { return types.NamespacedName{Name: name} }
	begin(Changes{First: true}, Change{Key: key("kept"), New: &api.View{}})
	for i := range 1000 {
		begin(Changes{}, Change{Key: key(strconv.Itoa(i)), New: &api.View{}})
		begin(Changes{}, Change{Key: key(strconv.Itoa(i))})
	}
	if n := len(p.delivered); n != 1 {
		t.Errorf("a pass holds %d keys, want 1", n)
	}
	begin(Changes{Last: true, Failing: []types.NamespacedName{key("failing")}}, Change{Key: key("deleted last")})
	for name, stale := range map[string]bool{"kept": false, "deleted last": false, "failing": false, "never delivered": true} {
		if p.Stale(key(name)) != stale {
			t.Errorf("%s is stale: %t", name, !stale)
		}
	}
}

func TestPassNeedsNoMemoryBetweenPasses(t *testing.T) {
	var p Pass
	for _, c := range []Changes{{First: true, Last: true}, {}, {}} {
		c.Services = slices.Values([]Change{{Key: types.NamespacedName{Name: "a"}, New: &api.View{}}})
		p.Begin(&c)
	}
	if len(p.delivered) > 0 || p.Stale(types.NamespacedName{Name: "b"}) {
		t.Errorf("after the pass: %v is delivered", p.delivered)
	}
}
