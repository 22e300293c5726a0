// SPDX-License-Identifier: Apache-2.0

package clusterv1_test

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
)

// FuzzConversions checks that encoding and decoding an EndpointSlice preserves all fields
// except TriggerTime.
func FuzzConversions(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		want := apitest.Random[api.EndpointSlice](rand.New(rand.NewPCG(seed, 0)))
		var x clusterv1.EndpointSlice
		if err := proto.Unmarshal(localv1.Marshal(clusterv1.FromSlice(&want)), &x); err != nil {
			t.Fatal(err)
		}
		got, err := x.ToSlice()
		if err != nil {
			t.Fatal(err)
		}
		if !got.Equal(&want) {
			t.Errorf("the slice differs (- sent, + arrived):\n%s", cmp.Diff(&want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })))
		}
		if !got.TriggerTime.IsZero() {
			t.Error("the trigger time was transmitted")
		}
	})
}

func TestSliceWithInvalidAddress(t *testing.T) {
	x := &clusterv1.EndpointSlice{Namespace: "ns", Name: "s", Endpoints: []*clusterv1.SliceEndpoint{{Addr: "x"}}}
	if _, err := x.ToSlice(); err == nil {
		t.Error("no error")
	}
}

func TestKeys(t *testing.T) {
	want := types.NamespacedName{Namespace: "ns", Name: "s"}
	if got := clusterv1.FromKey(want).ToKey(); got != want {
		t.Errorf("got %s", got)
	}
}
