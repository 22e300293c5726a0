// SPDX-License-Identifier: Apache-2.0

package nodeaddrs

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestSelection(t *testing.T) {
	machine := []string{"127.0.0.1", "10.0.0.1", "10.1.0.1", "169.254.1.1", "::1", "fd00::1", "fe80::1"}
	primary := []string{"10.0.0.1", "fd00::1"}
	for name, test := range map[string]struct {
		list []string
		want []string
	}{
		"no selection means primary": {nil, primary},
		"primary":                    {[]string{"primary"}, primary},
		"all excludes loopback and link-local addresses":                            {[]string{"all"}, []string{"10.0.0.1", "10.1.0.1", "fd00::1"}},
		"a CIDR selects the addresses in it":                                        {[]string{"10.1.0.0/16"}, []string{"10.1.0.1"}},
		"several CIDRs select the addresses in any of them":                         {[]string{"10.1.0.0/16", "fd00::/8"}, []string{"10.1.0.1", "fd00::1"}},
		"a CIDR of all addresses selects neither loopback nor link-local addresses": {[]string{"0.0.0.0/0", "::/0"}, []string{"10.0.0.1", "10.1.0.1", "fd00::1"}},
		"loopback addresses are selected by a CIDR of them":                         {[]string{"127.0.0.0/8", "::1/128"}, []string{"127.0.0.1", "::1"}},
		"localhost selects the loopback addresses":                                  {[]string{"localhost"}, []string{"127.0.0.1", "::1"}},
		"link-local addresses are selected by a CIDR of them":                       {[]string{"fe80::/10", "169.254.0.0/16"}, []string{"169.254.1.1", "fe80::1"}},
		"all and a CIDR select both":                                                {[]string{"all", "fe80::/10"}, []string{"10.0.0.1", "10.1.0.1", "fd00::1", "fe80::1"}},
		"primary and a CIDR select both":                                            {[]string{"primary", "10.1.0.0/16"}, []string{"10.0.0.1", "fd00::1", "10.1.0.1"}},
		"the address in a CIDR need not be the first of its network":                {[]string{"10.1.2.3/16"}, []string{"10.1.0.1"}},
		"a CIDR without addresses selects nothing, also not primary":                {[]string{"192.168.0.0/16"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := parseSelection(test.list)
			if err != nil {
				t.Fatal(err)
			}
			got := s.of(parse(machine), parse(primary))
			if diff := cmp.Diff(parse(test.want), got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("selected (-want +got):\n%s", diff)
			}
		})
	}
}

func TestInvalidSelectionsAreErrors(t *testing.T) {
	for _, item := range []string{"", "10.0.0.1", "eth0", "10.0.0.0/33", "Primary"} {
		if s, err := parseSelection([]string{item}); err == nil {
			t.Errorf("%q is parsed as %+v", item, s)
		} else if !strings.Contains(err.Error(), `"`+item+`"`) {
			t.Errorf("the error does not name %q: %v", item, err)
		}
	}
}

func parse(list []string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}
