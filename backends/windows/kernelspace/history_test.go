// SPDX-License-Identifier: Apache-2.0

package kernelspace_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

var histories = flag.Int("histories", 20, "how many random `histories` to test")

func TestHistories(t *testing.T) {
	sinktest.TestHistories(t, *histories, func(tb testing.TB) *sinktest.Subject {
		fake := fakehns.New(fakehns.AllFeatures())
		network := fake.AddNetwork(hns.Network{Name: "pods"})
		fake.SetHost(addr("192.0.2.1"), addr("192.0.2.2"))
		for _, i := range []int{1, 3, 5} {
			e := hns.Endpoint{
				MAC: "00-15-5d-00-00-01", Network: network,
				Addrs: []netip.Addr{addr(fmt.Sprint("10.244.0.", i)), addr(fmt.Sprint("fd44::", i))},
			}
			if _, err := fake.CreateEndpoint(e); err != nil {
				tb.Fatalf("create endpoint: %v", err)
			}
		}
		opts := kernelspace.Options{Network: "pods", StateFile: filepath.Join(tb.TempDir(), "state.json")}
		return &sinktest.Subject{
			Open: func() sink.Sink {
				fakehns.Use(tb, fake)
				b, err := kernelspace.New(opts)
				if err != nil {
					tb.Fatalf("make the backend: %v", err)
				}
				return b
			},
			Objects: func() []string { return strings.Split(fake.Dump(), "\n") },
			Disturb: func(random *rand.Rand) func() {
				refused := errors.New("HNS says no")
				fake.SetHook(func(call string) error {
					switch n := random.IntN(20); {
					case n < 2:
						return refused
					case n == 2 && !strings.HasPrefix(call, "LoadBalancers") && strings.Contains(call, "LoadBalancer"):
						return fakehns.ErrAnswerLost
					default:
						return nil
					}
				})
				return func() { fake.SetHook(nil) }
			},
			Drift: func(random *rand.Rand) {
				all, _ := fake.LoadBalancers()
				if len(all) > 0 {
					fake.DeleteLoadBalancer(all[random.IntN(len(all))].ID)
				}
			},
			Usable: func(s *api.Service) bool { return len(s.SourceRanges) == 0 },
		}
	})
}
