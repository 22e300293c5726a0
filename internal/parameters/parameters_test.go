// SPDX-License-Identifier: Apache-2.0

package parameters_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/parameters"
)

func TestServiceAnnotations(t *testing.T) {
	type m = map[string]string
	hash := parameters.Service{Algorithm: api.HashConnection}
	client := parameters.Service{Algorithm: api.HashClient}
	for _, test := range []struct {
		name     string
		others   []string
		in       m
		want     parameters.Service
		problems []string
	}{
		{"all of kpng's own", nil, m{
			"kpng.io/algorithm": " Hash-Client", "kpng.io/connections": "reset", "kpng.io/source-ranges": "deny", "kpng.io/source-ranges-scope": "all",
		}, parameters.Service{Algorithm: api.HashClient, ResetConnections: true, Deny: true, Everywhere: true}, nil},
		{"defaults can be written", nil, m{
			"kpng.io/algorithm": "random", "kpng.io/connections": "keep", "kpng.io/source-ranges": "allow", "kpng.io/source-ranges-scope": "load-balancer",
		}, parameters.Service{}, nil},
		{"a wrong value does not affect the others", nil, m{"kpng.io/algorithm": "fastest\n", "kpng.io/connections": "reset"},
			parameters.Service{ResetConnections: true}, []string{`metadata.annotations[kpng.io/algorithm]: "fastest\n" is not a value that kpng knows; ignoring it`}},
		{"a long value is cut", nil, m{"kpng.io/algorithm": strings.Repeat("x", 1000)}, parameters.Service{},
			[]string{`metadata.annotations[kpng.io/algorithm]: "` + strings.Repeat("x", 64) + `" is not a value that kpng knows; ignoring it`}},
		{"others only on request", nil, m{"service.cilium.io/lb-algorithm": "maglev"}, parameters.Service{}, nil},
		{"Cilium", []string{"cilium"}, m{"service.cilium.io/lb-algorithm": "maglev", "service.cilium.io/src-ranges-policy": "deny"},
			parameters.Service{Algorithm: api.HashConnection, Deny: true}, nil},
		{"kube-router by address", []string{"kube-router"}, m{"kube-router.io/service.scheduler": "mh", "kube-router.io/service.schedflags": "flag-1"}, client, nil},
		{"kube-router by port", []string{"kube-router"}, m{"kube-router.io/service.scheduler": "mh", "kube-router.io/service.schedflags": "flag-1,flag-2"}, hash, nil},
		{"kube-router's other schedulers", []string{"kube-router"}, m{"kube-router.io/service.scheduler": "lc"}, parameters.Service{},
			[]string{`metadata.annotations[kube-router.io/service.scheduler]: "lc" is not a value that kpng knows; ignoring it`}},
		{"Calico", []string{"calico"}, m{"lb.projectcalico.org/external-traffic-strategy": "maglev"}, hash, nil},
		{"kpng's own come first", []string{"cilium", "calico"}, m{"kpng.io/algorithm": "random", "service.cilium.io/lb-algorithm": "maglev"}, parameters.Service{}, nil},
		{"a wrong value does not hide a later one", []string{"cilium"}, m{"kpng.io/algorithm": "x", "service.cilium.io/lb-algorithm": "maglev"}, hash,
			[]string{`metadata.annotations[kpng.io/algorithm]: "x" is not a value that kpng knows; ignoring it`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, err := parameters.NewReader(test.others)
			if err != nil {
				t.Fatal(err)
			}
			var problems []string
			got := r.OfService(test.in, func(field, format string, args ...any) {
				problems = append(problems, field+": "+fmt.Sprintf(format, args...))
			})
			if got != test.want || !slices.Equal(problems, test.problems) {
				t.Errorf("got %+v and the problems %q, want %+v and %q", got, problems, test.want, test.problems)
			}
		})
	}
}

func TestWeightAnnotations(t *testing.T) {
	r, err := parameters.NewReader([]string{"cilium"})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		in     map[string]string
		weight int32
		drain  bool
		wrong  bool
	}{
		{nil, 0, false, false},
		{map[string]string{"kpng.io/weight": "65535"}, 65535, false, false},
		{map[string]string{"kpng.io/weight": "0"}, 0, true, false},
		{map[string]string{"kpng.io/weight": "65536"}, 0, false, true},
		{map[string]string{"kpng.io/weight": "-1"}, 0, false, true},
		{map[string]string{"kpng.io/weight": "many"}, 0, false, true},
		{map[string]string{"service.cilium.io/weight": "7"}, 7, false, false},
	} {
		wrong := false
		weight, drain := r.WeightOf(test.in, func(string, string, ...any) { wrong = true })
		if weight != test.weight || drain != test.drain || wrong != test.wrong {
			t.Errorf("%v: weight %d, drain %t, wrong %t, want %d, %t, %t", test.in, weight, drain, wrong, test.weight, test.drain, test.wrong)
		}
	}
}

func TestUnknownNamesAreErrors(t *testing.T) {
	if _, err := parameters.NewReader([]string{"cilium", "x"}); err == nil || !strings.Contains(err.Error(), `"x"`) {
		t.Errorf("error %v, want one with the name", err)
	}
}

func TestAllExceptContainsTheOtherAddresses(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		var denied []netip.Prefix
		for range random.IntN(6) {
			a := netip.AddrFrom4([4]byte{10, byte(random.IntN(4)), byte(random.IntN(256)), byte(random.IntN(256))})
			if random.IntN(2) == 0 {
				a = netip.AddrFrom16([16]byte{0xfd, 15: byte(random.IntN(8))})
			}
			denied = append(denied, netip.PrefixFrom(a, random.IntN(a.BitLen()+1)))
		}
		got, ok := parameters.AllExcept(denied)
		if !ok {
			t.Fatal("too many")
		}
		contains := func(list []netip.Prefix, a netip.Addr) bool {
			return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
		}
		for _, p := range denied { // the addresses at both ends, and their neighbours
			first := p.Masked().Addr()
			for _, a := range []netip.Addr{first, first.Prev(), first.Next(), p.Addr(), netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fd00::3")} {
				if a.IsValid() && contains(got, a) == contains(denied, a) {
					t.Fatalf("denied %v: %v contains %s: %t", denied, got, a, contains(got, a))
				}
			}
		}
	}
	if got, ok := parameters.AllExcept(nil); !ok || len(got) != 2 {
		t.Errorf("without denied sources, the ranges are %v", got)
	}
	if _, ok := parameters.AllExcept(make([]netip.Prefix, 5000)); ok {
		t.Error("5000 denied sources are not too many")
	}
}
