// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"flag"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	"github.com/kpng-project/kpng/test/internal/publisher"
	"github.com/kpng-project/kpng/test/kubeproxy"
)

var matrix = flag.String("matrix", "", "`file` to which the matrix is written as Markdown")

var report = flag.String("report", "", "`file` to which the results are written as YAML")

// TestKubeProxy expects kube-proxy to pass every case except those that
// docs/reference/conformance.md explains.
func TestKubeProxy(t *testing.T) {
	run(t, conformance.Options{Matrix: *matrix, Report: *report, Proxy: "kube-proxy, mode nftables", Unsupported: lacking, Exceptions: exceptions}, kubeproxy.Options{})
}

// TestKubeProxyOnLocalhost runs the cases of node ports on localhost over TCP with
// kube-proxy's alpha feature gate. kube-proxy does not serve UDP there.
func TestKubeProxyOnLocalhost(t *testing.T) {
	run(t, conformance.Options{
		Cases:       regexp.MustCompile("localhost"),
		Unsupported: map[conformance.Feature]string{conformance.UDP: "it serves node ports on localhost only over TCP"},
		Exceptions:  localhostExceptions,
	}, kubeproxy.Options{LocalhostNodePorts: true})
}

// run runs cases of the kit against kube-proxy with the options o and the settings of each
// site.
func run(t *testing.T, opts conformance.Options, o kubeproxy.Options) {
	server := apiserver.Start(t, apiserver.Options{})
	o.Kubeconfig, o.MinSyncPeriod = apiserver.Kubeconfig(t, server.Config()), time.Millisecond
	command := func(site conformance.Site, args ...string) *exec.Cmd {
		o := o
		o.Node = site.NodeName
		o.ClusterCIDR, o.NodePortAddresses = join(site.ClusterCIDRs), list(site.NodePortCIDRs)
		o.MasqueradeAll = site.Masquerade == conformance.MasqueradeAll
		args = append(kubeproxy.Command(t, o), args...)
		return exec.Command(args[0], args[1:]...)
	}
	subject := &conformance.Command{
		Publisher: publisher.New(server.Client()),
		Proxy:     func(site conformance.Site) *exec.Cmd { return command(site) },
		Clean:     func(site conformance.Site) *exec.Cmd { return command(site, "--cleanup") },
	}
	opts.Setup = func(t *testing.T, site conformance.Site) { relay(t, server, site) }
	conformance.RunSubject(t, subject, opts)
}

// TestKpngWithConfigOfKubeProxy runs kpng with the ConfigMaps of kubeadm and kind. It
// omits cases that depend on flags for the test world.
func TestKpngWithConfigOfKubeProxy(t *testing.T) {
	kpng := gotool.BuildOwn(t, "./cmd/kpng")
	for _, name := range []string{"kubeadm", "kind"} {
		t.Run(name, func(t *testing.T) {
			server := apiserver.Start(t, apiserver.Options{})
			config := kubeproxy.ConfigFile(t, name, apiserver.Kubeconfig(t, server.Config()))
			subject := &conformance.Command{
				Publisher: publisher.New(server.Client()),
				Proxy: func(site conformance.Site) *exec.Cmd {
					cmd := exec.Command(kpng, "kube", "to-local", "nftables", "--config", config)
					cmd.Env = append(os.Environ(), "NODE_NAME="+site.NodeName)
					return cmd
				},
				Clean: func(conformance.Site) *exec.Cmd { return exec.Command(kpng, "cleanup", "nftables") },
			}
			conformance.RunSubject(t, subject, conformance.Options{
				Cases: regexp.MustCompile(strings.Join([]string{
					"^a cluster IP leads to every ready endpoint",
					"^a service without endpoints refuses connections$",
					"^an added endpoint gets connections",
					"^each port has its own endpoints",
					"^a UDP flow to a removed endpoint moves",
					"^a node port is served at every node address",
					"^clients outside the source ranges",
					"^a health-check node port reports",
					"^if no endpoint is ready",
					"^external policy Local uses only",
					"^a client keeps its endpoint",
				}, "|")),
				Setup: func(t *testing.T, site conformance.Site) { relay(t, server, site) },
			})
		})
	}
}

// relay makes the API server reachable from the node.
func relay(t *testing.T, server *apiserver.Server, site conformance.Site) {
	t.Helper()
	address, err := url.Parse(server.Config().Host)
	if err != nil {
		t.Fatal(err)
	}
	netnstest.Relay(t, site.Do, address.Host, "tcp", address.Host)
}

// lacking contains the features that kube-proxy lacks, with the reason for each failure.
var lacking = map[conformance.Feature]string{
	conformance.FamilyOnlyRanges:   "source ranges of only the other family admit all clients",
	conformance.AllPorts:           "it has no all-ports services",
	conformance.Claims:             "if two services claim an address, either may get it",
	conformance.LocalhostNodePorts: "it serves them only over TCP with an alpha feature gate (TestKubeProxyOnLocalhost)",
	conformance.RangeOptions:       "source ranges have no options",
	conformance.NodePortRanges:     "source ranges have no options",
	conformance.Weights:            "endpoints have no weights",
	conformance.StableHashing:      "it chooses endpoints at random",
	conformance.Resets:             "it resets no connections",
	conformance.Instances:          "the name of its table and the value of the proxy-name label are fixed",
}

// dropReason explains failures of cases that use an address without a service.
const dropReason = "it drops packets to addresses of a ServiceCIDR that belong to none of its services"

// exceptions contains the other cases that kube-proxy fails, with reasons.
var exceptions = map[string]string{
	"traffic to a deleted service passes unchanged":                                                            dropReason,
	"traffic to a service of another proxy passes unchanged":                                                   dropReason,
	"a service that becomes dual-stack is served in both families":                                             dropReason,
	"a UDP flow that bypassed a service moves to its first endpoint":                                           dropReason,
	"when the proxy is killed while it programs many services and then restarted, no connection fails":         dropReason,
	"a restarted proxy applies the changes that it missed":                                                     dropReason,
	"a UDP flow through a deleted service no longer reaches its endpoints":                                     "it cleans up only flows of existing services",
	"a UDP flow stops when its service loses its last endpoint, and resumes when the service gets an endpoint": "it identifies node-port flows by their port alone, and keeps them if the service has no endpoint",
	"a health-check node port that is in use affects no other service and is opened when it is free":           "it does not retry",
}

// localhostExceptions contains the cases of node ports on localhost that kube-proxy fails.
var localhostExceptions = map[string]string{
	"connections to localhost ignore external policy Local":                                      "it uses only endpoints on the node, unlike its own mode iptables",
	"a port on localhost that is in use disturbs no other service and is served when it is free": "it tries again only when services change",
}

func list(prefixes []netip.Prefix) []string {
	var all []string
	for _, p := range prefixes {
		all = append(all, p.String())
	}
	return all
}

func join(prefixes []netip.Prefix) string { return strings.Join(list(prefixes), ",") }
