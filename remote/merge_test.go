// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// A node's buckets have the services as they are at other nodes, but some services are
// replaced, added or absent. Many services have the same order, as if a tenant had chosen
// their names.
func TestBucketsOfANode(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 0))
	for range 300 {
		all, n := map[types.NamespacedName]digested{}, &nodeSums{}
		sum := func(i int) digested {
			return digested{types.NamespacedName{Name: fmt.Sprint(i)}, uint32(i%7) << 29, [32]byte{byte(r.Uint32())}}
		}
		for i := range 40 {
			if s := sum(i); r.IntN(2) == 0 {
				all[s.key], n.services = s, append(n.services, s)
			}
		}
		sortDigested(n.services)
		for i := range 50 {
			switch s := sum(i); r.IntN(4) {
			case 0:
				delete(all, s.key)
				n.different = append(n.different, differentSum{s, true})
			case 1:
				all[s.key] = s
				n.different = append(n.different, differentSum{digested: s})
			}
		}
		slices.SortFunc(n.different, func(a, b differentSum) int { return a.compare(b.digested) })
		before := slices.Clone(n.services)
		for count := 1; count <= 16; count *= 2 {
			want := make([][]digested, count)
			for _, s := range all {
				bucket := bucketOf(s.order, count)
				want[bucket] = append(want[bucket], s)
			}
			for bucket, services := range n.buckets(count) {
				sortDigested(want[bucket])
				if got := slices.Clone(services); len(got) != len(want[bucket]) || !equalSums(got, want[bucket]) {
					t.Fatalf("bucket %d of %d: %v, want %v", bucket, count, got, want[bucket])
				}
			}
		}
		if !reflect.DeepEqual(before, n.services) {
			t.Fatal("the shared services have changed")
		}
	}
}

// equalSums compares the fields that affect a digest.
func equalSums(a, b []digested) bool {
	return slices.EqualFunc(a, b, func(a, b digested) bool { return a.order == b.order && a.content == b.content })
}
