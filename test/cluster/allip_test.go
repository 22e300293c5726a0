// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestAllIP runs examples/all-ip as a DaemonSet beside the service proxy. The service
// proxy must not change its rules when a service for all-ip exists.
func TestAllIP(t *testing.T) {
	c := connect(t)
	c.addImage(t, "all-ip:latest", filepath.Join(*state, "../bin/all-ip"), "nft")
	manifest, err := os.ReadFile("../../examples/all-ip/deploy/all-ip.yaml")
	if err != nil {
		t.Fatal(err)
	}
	before := rulesOfProxy(t)
	apply(t, "kube-system", string(manifest))
	t.Cleanup(func() {
		kubectl(t, "delete", "--namespace", "kube-system", "daemonset/all-ip")
		for i := 1; i <= c.nodes; i++ {
			lib(t, "in_node", fmt.Sprint(i), "all-ip", "--cleanup")
		}
	})
	c.rollout(t, "kube-system", "daemonset/all-ip")
	// The pods run on all nodes except the last.
	apply(t, c.namespace, deployment("example", c.nodes-1, spread("example")+fmt.Sprintf(`
      affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
        {matchExpressions: [{key: kubernetes.io/hostname, operator: NotIn, values: [node-%d]}]}]}}}
`, c.nodes))+`
---
apiVersion: v1
kind: Service
metadata:
  name: example
  labels: {service.kubernetes.io/service-proxy-name: kpng-example}
spec:
  clusterIP: None
  ipFamilyPolicy: RequireDualStack
  externalIPs: [192.0.2.55, "2001:db8::55"]
  selector: {app: example}
  ports: [{port: 6000}]
`)
	c.rollout(t, c.namespace, "deployment/example")
	pods, err := c.CoreV1().Pods(c.namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=example"})
	if err != nil {
		t.Fatal(err)
	}
	onNode := map[string]string{}
	for _, pod := range pods.Items {
		onNode[pod.Spec.NodeName] = pod.Name
	}

	for i := 1; i <= c.nodes; i++ {
		name := fmt.Sprintf("node-%d", i)
		lib(t, "in_cp", "ip", "route", "replace", "192.0.2.55", "via", nodeAddr(i).String())
		lib(t, "in_cp", "ip", "route", "replace", "2001:db8::55", "via", fmt.Sprintf("fd00:254::%d", 10+i))
		for _, addr := range []netip.Addr{netip.MustParseAddr("192.0.2.55"), netip.MustParseAddr("2001:db8::55")} {
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
				return err == nil && pod == onNode[name], fmt.Sprint(pod, err)
			})
			lib(t, "ping", "-c", "1", "-W", "5", addr.String())
		}
	}
	if after := rulesOfProxy(t); after != before {
		t.Errorf("the rules of the service proxy have changed: before\n%s\nafter\n%s", before, after)
	}
}

// rulesOfProxy returns the nftables tables of the first node, except those of all-ip.
func rulesOfProxy(t *testing.T) string {
	t.Helper()
	return lib(t, "in_node", "1", "sh", "-c", "nft list tables | grep -v all-ip | while read -r table; do nft -s list $table; done")
}
