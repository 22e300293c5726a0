// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/traffic"
	corev1 "k8s.io/api/core/v1"
)

// TestAllIP runs examples/all-ip as a DaemonSet beside the service proxy. The service
// proxy must not change its rules when a service for all-ip exists, and no request to an
// ordinary service may fail.
func TestAllIP(t *testing.T) {
	c := connect(t)
	apply(t, c.namespace, deployment("web", c.nodes, spread("web")))
	apply(t, c.namespace, deployment("client", c.nodes, spread("client")))
	ordinary := c.service(t, "web")
	c.rollout(t, c.namespace, "deployment/web")
	c.rollout(t, c.namespace, "deployment/client")
	waitFor(t, "the service proxy", func() (bool, string) {
		rules := rulesOfProxy(t)
		for _, pod := range c.pods(t, "web") {
			if !strings.Contains(rules, pod.Status.PodIP) {
				return false, "no rule for " + pod.Status.PodIP
			}
		}
		return true, ""
	})
	before := rulesOfProxy(t)
	tr := traffic.New(t)
	c.startClients(t, tr, ordinary, false)

	c.startAllIP(t)
	t.Run("each node", func(t *testing.T) { testAllIPOfEachNode(t, c) })
	t.Run("whole address", func(t *testing.T) { testWholeAddress(t, c, ordinary) })

	tr.End()
	if failed, _ := tr.Report(t, "requests to an ordinary service"); failed > 0 {
		t.Errorf("%d requests to an ordinary service failed", failed)
	}
	if after := rulesOfProxy(t); after != before {
		t.Errorf("the rules of the service proxy have changed: before\n%s\nafter\n%s", before, after)
	}
}

// startAllIP runs all-ip on all nodes until the test ends.
func (c *cluster) startAllIP(t *testing.T) {
	t.Helper()
	c.addImage(t, "docker.io/library/all-ip:latest", "/all-ip", filepath.Join(*state, "../bin/all-ip"), "nft")
	content, err := os.ReadFile("../../examples/all-ip/deploy/all-ip.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const flag = "        - --service-proxy-name=kpng-example\n"
	manifest := strings.Replace(string(content), flag, flag+
		"        - --keep-source=10.244.0.0/16,10.254.0.0/24,fd00:10:244::/56,fd00:254::/64 # networks of pods and nodes\n", 1)
	if manifest == string(content) {
		t.Fatalf("the manifest of all-ip has no line %q", flag)
	}
	apply(t, "kube-system", manifest)
	t.Cleanup(func() {
		kubectl(t, "delete", "--namespace", "kube-system", "daemonset/all-ip")
		for i := 1; i <= c.nodes; i++ {
			lib(t, "in_node", strconv.Itoa(i), "all-ip", "--cleanup")
		}
	})
	c.rollout(t, "kube-system", "daemonset/all-ip")
}

// testAllIPOfEachNode connects to the external IPs of a service through each node.
func testAllIPOfEachNode(t *testing.T, c *cluster) {
	// The pods run on all nodes except the last.
	apply(t, c.namespace, deployment("example", c.nodes-1, spread("example")+fmt.Sprintf(`
      affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
        {matchExpressions: [{key: kubernetes.io/hostname, operator: NotIn, values: [node-%d]}]}]}}}
`, c.nodes))+wholeAddress("example", "192.0.2.55", "2001:db8::55"))
	c.rollout(t, c.namespace, "deployment/example")
	podOf := map[string]string{}
	for _, pod := range c.pods(t, "example") {
		podOf[pod.Spec.NodeName] = pod.Name
	}
	for i := 1; i <= c.nodes; i++ {
		name := fmt.Sprintf("node-%d", i)
		for _, addr := range routeTo(t, i, "192.0.2.55", "2001:db8::55") {
			if i == c.nodes { // the last node has no pod, so it drops the packets
				conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(addr, 8080).String(), 2*time.Second)
				if err == nil {
					conn.Close()
					t.Errorf("%v answers on %s, which has no pod", addr, name)
				}
				continue
			}
			// The service has the port 6000, but all ports lead to the pod.
			waitFor(t, fmt.Sprintf("%v through %s", addr, name), func() (bool, string) {
				pod, err := hostname(netip.AddrPortFrom(addr, 8080))
				var op *net.OpError
				if errors.As(err, &op) {
					err = op.Err // without the client's port, which differs each time
				}
				return err == nil && pod == podOf[name], fmt.Sprint(pod, err)
			})
			lib(t, "ping", "-c", "1", "-W", "5", addr.String())
		}
	}
}

// testWholeAddress checks filters and the connections of a pod that has a whole address of
// each family.
func testWholeAddress(t *testing.T, c *cluster, ordinary *corev1.Service) {
	// The first server in the pod has the ports 8080/tcp and 8081/udp, the second 9000/tcp and
	// 9001/udp.
	apply(t, c.namespace, deployment("machine", 1, fmt.Sprintf(`
      - name: more
        image: %s
        args: [netexec, --http-port=9000, --udp-port=9001]
`, agnhost))+wholeAddress("machine", "192.0.2.56", "2001:db8::56"))
	c.rollout(t, c.namespace, "deployment/machine")
	pod := c.pods(t, "machine")[0]
	external := routeTo(t, atoi(t, strings.TrimPrefix(pod.Spec.NodeName, "node-")), "192.0.2.56", "2001:db8::56")
	annotate := func(annotation string) {
		t.Helper()
		kubectl(t, "annotate", "--overwrite", "--namespace", c.namespace, "service", "machine", "all-ip.kpng.io/"+annotation)
	}

	kinds := []string{"tcp/8080", "tcp/9000", "udp/8081", "udp/9001", "icmp"}
	for _, test := range []struct {
		annotation string
		allowed    []string
	}{
		{"allow-", kinds},
		{"allow=8080/tcp, 8081-9000/udp, icmp", []string{"tcp/8080", "udp/8081", "icmp"}},
		{"allow=8081-9000/tcp, udp", []string{"tcp/9000", "udp/8081", "udp/9001"}},
		{"allow=ports, icmp", []string{"icmp"}}, // the service has the port 6000
	} {
		annotate(test.annotation)
		waitFor(t, test.annotation, func() (bool, string) {
			var wrong []string
			for _, addr := range external {
				for _, kind := range kinds {
					if err := reach(addr, kind); (err == nil) != slices.Contains(test.allowed, kind) {
						wrong = append(wrong, fmt.Sprintf("%s to %s: error %t", kind, addr, err != nil))
					}
				}
			}
			return wrong == nil, strings.Join(wrong, ", ")
		})
	}

	// This server outside of the cluster answers with the address that it sees.
	listener, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.RemoteAddr) })}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	port := uint16(listener.Addr().(*net.TCPAddr).Port)
	begins := func(what, url string, want netip.Addr) {
		t.Helper()
		waitFor(t, fmt.Sprintf("%s: source of connections to %s", what, url), func() (bool, string) {
			out := kubectl(t, "exec", "--namespace", c.namespace, pod.Name, "--container", "web", "--", "sh", "-c", "curl -sg --max-time 10 "+url+" || true")
			source, err := netip.ParseAddrPort(out)
			return err == nil && source.Addr().Unmap() == want, "source " + source.Addr().String()
		})
	}
	check := func(what string, outside func(family int) netip.Addr) {
		t.Helper()
		for i, ip := range pod.Status.PodIPs {
			own := netip.MustParseAddr(ip.IP)
			for addr, want := range map[string]netip.Addr{
				[]string{"203.0.113.1", "2001:db8:52::1"}[i]: outside(i),
				[]string{"10.254.0.1", "fd00:254::1"}[i]:     own, // a network of --keep-source
			} {
				begins(what, "http://"+netip.AddrPortFrom(netip.MustParseAddr(addr), port).String(), want)
			}
		}
		begins(what, "http://"+clusterIP(ordinary).String()+"/clientip", netip.MustParseAddr(pod.Status.PodIP))
	}
	own := func(family int) netip.Addr { return netip.MustParseAddr(pod.Status.PodIPs[family].IP) }
	check("without egress", own)
	annotate("egress=true")
	check("egress", func(family int) netip.Addr { return external[family] })
	annotate("egress-")
	check("egress is removed", own)
}

// wholeAddress returns the manifest of a service for all-ip, with two external IPs.
func wholeAddress(name, ip4, ip6 string) string {
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Service
metadata:
  name: %[1]s
  labels: {service.kubernetes.io/service-proxy-name: kpng-example}
spec:
  clusterIP: None
  ipFamilyPolicy: RequireDualStack
  externalIPs: [%[2]s, "%[3]s"]
  selector: {app: %[1]s}
  ports: [{port: 6000}]
`, name, ip4, ip6)
}

// routeTo routes two addresses from the control plane to node i, and returns them.
func routeTo(t *testing.T, i int, ip4, ip6 string) []netip.Addr {
	t.Helper()
	for ip, gateway := range map[string]string{ip4: nodeAddr(i).String(), ip6: fmt.Sprintf("fd00:254::%d", 10+i)} {
		lib(t, "in_cp", "ip", "route", "replace", ip, "via", gateway)
	}
	return []netip.Addr{netip.MustParseAddr(ip4), netip.MustParseAddr(ip6)}
}

// reach sends a request, such as tcp/8080, udp/8081 or icmp, and waits briefly for the answer.
func reach(addr netip.Addr, kind string) error {
	const timeout = 2 * time.Second
	network, port, _ := strings.Cut(kind, "/")
	if network == "icmp" {
		return exec.Command("ping", "-c", "1", "-W", "2", addr.String()).Run()
	}
	conn, err := net.DialTimeout(network, net.JoinHostPort(addr.String(), port), timeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	if network == "tcp" {
		_, err = get(conn, bufio.NewReader(conn))
		return err
	}
	conn.SetDeadline(time.Now().Add(timeout))
	if _, err = io.WriteString(conn, "hostname"); err == nil {
		_, err = conn.Read(make([]byte, 1500))
	}
	return err
}

// rulesOfProxy returns the nftables tables of the first node, except those of all-ip.
func rulesOfProxy(t *testing.T) string {
	t.Helper()
	return lib(t, "in_node", "1", "sh", "-c", "nft list tables | grep -v all-ip | while read -r table; do nft -s list $table; done")
}
