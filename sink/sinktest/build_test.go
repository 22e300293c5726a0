// SPDX-License-Identifier: Apache-2.0

package sinktest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink/sinktest"
)

func ExampleView() {
	node := sinktest.Node("node-1", "192.168.0.1")
	local := func(s *api.Service) { s.ExternalTrafficToLocal = true }
	dns := sinktest.Service("kube-system/dns", "10.96.0.10 dns=53:30053>5353/UDP", local)
	view := sinktest.View(node, dns, "10.1.0.1@node-1 10.1.0.2@node-2 10.1.0.3@node-1~draining")

	fmt.Println(view.Key(), view.Service.Type, "draining:", view.Draining[0].Addr)
	for f := range nodeview.Frontends(view) {
		fmt.Println(f.Kind, f.Addr, f.Port, f.Protocol)
		for _, e := range f.Elsewhere.Endpoints {
			fmt.Println("  to", e.Addr, e.Port)
		}
	}
	// Output:
	// kube-system/dns NodePort draining: 10.1.0.3
	// ClusterIP 10.96.0.10 53 UDP
	//   to 10.1.0.1 5353
	//   to 10.1.0.2 5353
	// NodePort invalid IP 30053 UDP
	//   to 10.1.0.1 5353
}

func TestBuildersReadText(t *testing.T) {
	s := sinktest.Service("web", "10.96.0.1 fd00::1 80 https=443>8443 53:30053/SCTP")
	if got := fmt.Sprintln(s.Key(), s.Type, s.IPFamilies, s.IPs.ClusterIPs.Len()); got != "default/web NodePort [IPv4 IPv6] 2\n" {
		t.Error(got)
	}
	var ports []string
	for _, p := range s.Ports {
		ports = append(ports, fmt.Sprint(p.Name, p.Port, ":", p.NodePort, ">", p.TargetPort, "/", p.Protocol))
	}
	if got := strings.Join(ports, " "); got != "80:0>80/TCP https443:0>8443/TCP 53:30053>53/SCTP" {
		t.Error(got)
	}
	slices := sinktest.Slices(s, "10.1.0.1 fd01::1@n 10.1.0.2~unready 10.1.0.3~ended")
	if len(slices) != 2 || len(slices[0].Endpoints) != 3 || len(slices[1].Endpoints) != 1 || len(slices[0].Ports) != 3 {
		t.Errorf("slices %+v", slices)
	}
	if e := slices[0].Endpoints; !e[0].Ready || e[1].Ready || e[1].Terminating || e[2].Serving || !e[2].Terminating {
		t.Errorf("endpoints %+v", e)
	}
}

func TestBuildersPanicWithInvalidWord(t *testing.T) {
	for word, build := range map[string]func(word string){
		"80/QUIC":   func(w string) { sinktest.Service("web", w) },
		"10.96.0":   func(w string) { sinktest.Service("web", w) },
		"70000":     func(w string) { sinktest.Service("web", w) },
		"1.1.1.1~x": func(w string) { sinktest.Slices(&api.Service{}, w) },
		"1.1.1":     func(w string) { sinktest.Slices(&api.Service{}, w) },
	} {
		func() {
			defer func() {
				if r := fmt.Sprint(recover()); !strings.Contains(r, word) {
					t.Errorf("%s: panic %q, want one that names the word", word, r)
				}
			}()
			build(word)
		}()
	}
}
