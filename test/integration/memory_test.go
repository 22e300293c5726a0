// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"os/exec"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestForeignServicesUseNoMemory measures the heap of a proxy that has a proxy name. Then
// it adds 5,000 EndpointSlices of services that are not for this proxy, and measures
// again.
func TestForeignServicesUseNoMemory(t *testing.T) {
	t.Parallel()
	const (
		ownServices      = 10
		othersServices   = 500
		slicesPerService = 10
		most             = 1.1
	)
	server := apiserver.Start(t, apiserver.Options{})
	n := &tenant{t, server.Client(), metav1.NamespaceDefault} // the tenant needs no cleanup, because only this test uses the server
	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	for i := range ownServices {
		s := newService(fmt.Sprintf("own-%d", i), "kpng-example", servicePort("", 80, 80))
		if i == 0 {
			s.Spec.Selector = nil
		}
		n.put(s, newSlice(s.Name, s, slicePorts("", 80), newEndpoint(fmt.Sprintf("10.1.0.%d", i), "")))
	}
	// The second proxy has no name, so it sees only the service that the API server creates.
	alone := heap(t, kubeconfig, "kpng-example", ownServices)
	generalAlone := heap(t, kubeconfig, "", 1)

	var writers errgroup.Group
	writers.SetLimit(32)
	for i := range othersServices {
		writers.Go(func() error {
			s := newService(fmt.Sprintf("other-%d", i), []string{"", "somebody-else"}[i%2], servicePort("", 80, 80))
			if err := n.create(s); err != nil {
				return err
			}
			for j := range slicesPerService {
				slice := newSlice(fmt.Sprintf("%s-%d", s.Name, j), s, slicePorts("", 80))
				for k := range 4 {
					slice.Endpoints = append(slice.Endpoints, newEndpoint(fmt.Sprintf("10.%d.%d.%d", 10+i/250, i%250, j*4+k), "elsewhere"))
				}
				if err := n.create(slice); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := writers.Wait(); err != nil {
		t.Fatal(err)
	}

	crowded := heap(t, kubeconfig, "kpng-example", ownServices)
	t.Logf("heap with a name: %d KiB alone, %d KiB beside %d slices", alone>>10, crowded>>10, othersServices*slicesPerService)
	if ratio := float64(crowded) / float64(alone); ratio > most {
		t.Errorf("the heap is %.2f times as large, want at most %.2f", ratio, most)
	}
	// Half of the added services are for the proxy without a name. If the heap of this proxy
	// did not grow, the comparison above would prove nothing.
	general := heap(t, kubeconfig, "", 1+othersServices/2)
	t.Logf("heap without a name: %d KiB alone, %d KiB with half of them", generalAlone>>10, general>>10)
	if ratio := float64(general) / float64(generalAlone); ratio < most {
		t.Errorf("the heap of the general proxy is %.2f times as large: this measures nothing", ratio)
	}
}

// heap returns the size of a proxy's live heap in bytes, as the median of three
// processes. The proxy must see the given number of services.
func heap(t *testing.T, kubeconfig, proxy string, services int) uint64 {
	t.Helper()
	program := programs.build(t, ".", "./testdata/heap", raceDetector())
	var sizes []uint64
	for range 3 {
		out, err := exec.CommandContext(within(t), program, "-kubeconfig", kubeconfig, "-service-proxy-name", proxy, "-node-name", "node").Output()
		if err != nil {
			t.Fatalf("measure the heap: %v", err)
		}
		var got int
		var size uint64
		if _, err := fmt.Sscan(string(out), &got, &size); err != nil || got != services {
			t.Fatalf("measure the heap with %d services: %q, %v", services, out, err)
		}
		sizes = append(sizes, size)
	}
	slices.Sort(sizes)
	return sizes[1]
}
