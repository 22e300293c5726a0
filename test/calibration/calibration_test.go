// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"flag"
	"net/netip"
	"net/url"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/backends/conformance"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/apiserver"
	"github.com/kpng-project/kpng/test/kubeproxy"
)

var matrix = flag.String("matrix", "", "`file` to which the matrix is written as Markdown")

// TestKubeProxy expects kube-proxy to pass every case except those that
// docs/conformance.md explains.
func TestKubeProxy(t *testing.T) {
	server := apiserver.Start(t, apiserver.Options{})
	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	command := func(site conformance.Site) []string {
		return kubeproxy.Command(t, kubeproxy.Options{
			Kubeconfig:        kubeconfig,
			Node:              site.NodeName,
			MinSyncPeriod:     time.Millisecond,
			ClusterCIDR:       join(site.ClusterCIDRs),
			NodePortAddresses: list(site.NodePortCIDRs),
			MasqueradeAll:     site.Masquerade == conformance.MasqueradeAll,
		})
	}
	subject := &conformance.Command{
		Publisher: newPublisher(server.Client()),
		Proxy: func(site conformance.Site) *exec.Cmd {
			args := command(site)
			return exec.Command(args[0], args[1:]...)
		},
		Clean: func(site conformance.Site) *exec.Cmd {
			args := append(command(site), "--cleanup")
			return exec.Command(args[0], args[1:]...)
		},
	}
	conformance.RunSubject(t, subject, conformance.Options{
		Matrix:      *matrix,
		Unsupported: lacking,
		Exceptions:  exceptions,
		Setup: func(t *testing.T, site conformance.Site) {
			address, err := url.Parse(server.Config().Host)
			if err != nil {
				t.Fatal(err)
			}
			netnstest.Relay(t, site.Do, address.Host, "tcp", address.Host)
		},
	})
}

// lacking are the features that kube-proxy lacks.
var lacking = map[conformance.Feature]string{
	conformance.FamilyOnlyRanges: "ranges of the other family only let everybody in",
	conformance.AllPorts:         "it has no all-ports services",
	conformance.Claims:           "which of two services has an address is left to chance",
	conformance.Instances:        "its table's name is fixed, and so is the label's value that it heeds",
}

// drops is the reason why kube-proxy handles an address that belongs to no service.
const drops = "it drops what goes to an address of a ServiceCIDR that no service of its own has"

// exceptions are the cases in which kube-proxy differs.
var exceptions = map[string]string{
	"a service that is deleted is left alone":                                                          drops,
	"a service of another proxy is left alone":                                                         drops,
	"a service that becomes dual-stack is served in both families":                                     drops,
	"a UDP flow that bypassed a service moves to it when it gets its first endpoint":                   drops,
	"a proxy that is killed while it programs many services, and started again, fails no connection":   drops,
	"what changes while no process runs is made up for by the next":                                    drops,
	"a UDP flow through a service that is deleted leads to its endpoints no more":                      "it looks for flows of services that there are",
	"a UDP flow ends when its service has no endpoint left, and goes on with the next":                 "it knows node-port flows by their port alone, and leaves them where there is no endpoint",
	"a health-check node port that is in use disturbs no other service, and is opened when it is free": "it does not try again",
}

func list(prefixes []netip.Prefix) []string {
	var all []string
	for _, p := range prefixes {
		all = append(all, p.String())
	}
	return all
}

func join(prefixes []netip.Prefix) string { return strings.Join(list(prefixes), ",") }
