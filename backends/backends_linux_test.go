// SPDX-License-Identifier: Apache-2.0

package backends_test

import (
	"context"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ebpf"
	"github.com/kpng-project/kpng/backends/iptables"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/backends/ovs"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

var nothing = sink.Func(func(context.Context, *sink.Changes) error { return nil })

// constructors has the function New of each backend.
var constructors = map[string]func(backends.Options) (backends.Dataplane, error){
	"nftables": func(o backends.Options) (backends.Dataplane, error) {
		return nftables.New(nftables.Options{Options: o})
	},
	"iptables": func(o backends.Options) (backends.Dataplane, error) {
		return iptables.New(iptables.Options{Options: o})
	},
	"ipvs": func(o backends.Options) (backends.Dataplane, error) { return ipvs.New(ipvs.Options{Options: o}) },
	"ebpf": func(o backends.Options) (backends.Dataplane, error) {
		return ebpf.New(nothing, ebpf.Options{Options: o})
	},
	"ovs": func(o backends.Options) (backends.Dataplane, error) {
		return ovs.New(ovs.Options{Options: o, Bridge: "br0"})
	},
}

// unsupported has the options that a backend refuses.
var unsupported = map[string][]string{
	"ipvs": {"NodePodCIDRs", "AcceptUnknownPorts"},
	"ebpf": {"MasqueradeMark", "MasqueradeAll", "MasqueradeOutsiders", "ClusterCIDRs", "NodePodCIDRs", "PodInterfaces", "AcceptUnknownPorts", "Conntrack", "Sysctls", "NetNS"},
	"ovs":  {"MasqueradeMark", "NodePodCIDRs", "PodInterfaces", "AcceptUnknownPorts", "NetNS"},
}

type observer struct{ backends.Observer }

// TestUnsupportedOptionsAreRefused sets each option, alone, for each backend. A backend
// either supports an option or refuses it by name.
func TestUnsupportedOptionsAreRefused(t *testing.T) {
	pods := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	for i := range reflect.TypeFor[backends.Options]().NumField() {
		name := reflect.TypeFor[backends.Options]().Field(i).Name
		o := backends.Options{
			Instance: "1", MasqueradeMark: 0x8000, MasqueradeAll: true, MasqueradeOutsiders: true, ClusterCIDRs: pods, NodePodCIDRs: true,
			PodInterfaces: []string{"cni0"}, AcceptUnknownPorts: true, NodeAddresses: nodeaddr.Of(), Conntrack: nothing,
			Sysctls: backends.SetSysctls, Observer: observer{}, NetNS: 1, Stats: true,
		}
		for j := range reflect.TypeFor[backends.Options]().NumField() {
			if field := reflect.ValueOf(&o).Elem().Field(j); field.IsZero() {
				t.Fatalf("the test has no value for the option %s", reflect.TypeFor[backends.Options]().Field(j).Name)
			} else if i != j {
				field.SetZero()
			}
		}
		if name == "MasqueradeOutsiders" { // this option also needs a pod network
			o.ClusterCIDRs = pods
		}
		for backend, construct := range constructors {
			_, err := construct(o)
			switch {
			case !slices.Contains(unsupported[backend], name):
				if err != nil {
					t.Errorf("%s: option %s: %v", backend, name, err)
				}
			case err == nil || !strings.Contains(err.Error(), "does not support the option "+name):
				t.Errorf("%s: error %v, want the refused option %s", backend, err, name)
			}
		}
	}
}

// TestZeroOptions checks that no backend requires one of the shared options.
func TestZeroOptions(t *testing.T) {
	for backend, construct := range constructors {
		if b, err := construct(backends.Options{ClusterCIDRs: []netip.Prefix{}}); err != nil || b == nil {
			t.Errorf("%s: %v, %v", backend, b, err)
		}
	}
}
