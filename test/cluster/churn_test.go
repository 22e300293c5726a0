// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/traffic"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/watch"
)

var (
	pods     = flag.Int("pods", 200, "the number of pods of TestChurn")
	rollouts = flag.Int("rollouts", 10, "how often TestChurn replaces all pods")
)

// TestChurn replaces the pods of a service again and again, and counts the failed
// requests to the service and to DNS. Meanwhile it measures the time from the readiness
// of a pod until connections to the service reach the pod. Use the results to compare two
// proxies in the same cluster.
func TestChurn(t *testing.T) {
	c := connect(t)
	apply(t, c.namespace, deployment("churn", *pods, ""))
	service := c.service(t, "churn")
	probes := c.startProbes(t, 5)
	c.rollout(t, c.namespace, "deployment/churn")

	tr := traffic.New(t)
	for i := 1; i <= c.nodes; i++ {
		node := onNode(t, i)
		tr.Start(fmt.Sprintf("node-%d to a cluster IP", i), node, dial(clusterIP(service)))
		tr.Start(fmt.Sprintf("node-%d to DNS", i), node, lookup())
		tr.Start(fmt.Sprintf("node port of node-%d", i), outside(t), dial(nodePort(service, i)))
	}
	for i := 1; i <= c.nodes; i++ {
		lib(t, "reset_peak", strconv.Itoa(i))
	}
	before := c.usageByNode(t)
	ctx, stop := context.WithCancel(t.Context())
	var latencies []time.Duration
	var probing sync.WaitGroup
	var mu sync.Mutex
	for _, p := range probes {
		probing.Go(func() {
			for ctx.Err() == nil {
				took, err := p.measure(ctx)
				if ctx.Err() != nil {
					return
				}
				mu.Lock()
				if err != nil {
					t.Errorf("probe %s: %v", p.name, err)
				} else {
					latencies = append(latencies, took)
				}
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	began := time.Now()
	for i := range *rollouts {
		kubectl(t, "rollout", "restart", "--namespace", c.namespace, "deployment/churn")
		c.rollout(t, c.namespace, "deployment/churn")
		t.Logf("rollout %d of %d done after %v", i+1, *rollouts, time.Since(began).Round(time.Second))
	}
	stop()
	probing.Wait()
	after := c.usageByNode(t)
	tr.End()
	tr.Report(t, fmt.Sprintf("%d pods replaced %d times", *pods, *rollouts))
	t.Logf("from ready to reachable, %d times: p50 %v, p99 %v, at most %v", len(latencies),
		quantile(latencies, 0.5).Round(time.Millisecond), quantile(latencies, 0.99).Round(time.Millisecond), quantile(latencies, 1).Round(time.Millisecond))
	for i, u := range after {
		t.Logf("proxy of node-%d: %.1f s of CPU time, at most %d MB resident", i+1, u.cpu-before[i].cpu, u.peak)
	}
	if len(latencies) == 0 {
		t.Error("no pod was probed")
	}
}

// probe is a pod behind a service of its own. A readiness gate decides whether the pod is
// ready.
type probe struct {
	c       *cluster
	name    string
	from    *netnstest.Namespace
	address netip.AddrPort
	changes <-chan readiness
}

// readiness says whether a pod was ready at a certain time.
type readiness struct {
	ready bool
	at    time.Time
}

const readinessGate = "kpng.dev/test"

// startProbes starts n probes.
func (c *cluster) startProbes(t *testing.T, n int) []*probe {
	t.Helper()
	var probes []*probe
	channels := map[string]chan readiness{}
	node := onNode(t, 1)
	for i := range n {
		name := fmt.Sprintf("probe-%d", i)
		apply(t, c.namespace, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: %[1]s, probe: ""}}
spec:
  readinessGates: [{conditionType: %[3]s}]
  containers: [{name: web, image: %[2]s, args: [netexec]}]
`, name, agnhost, readinessGate))
		address := clusterIP(c.service(t, name))
		channels[name] = make(chan readiness, 100)
		probes = append(probes, &probe{c: c, name: name, from: node, address: address, changes: channels[name]})
	}
	kubectl(t, "wait", "--namespace", c.namespace, "--for", "condition=ContainersReady", "--timeout", "5m", "--selector", "probe", "pods")
	pods := c.CoreV1().Pods(c.namespace)
	list, err := pods.List(t.Context(), metav1.ListOptions{LabelSelector: "probe"})
	if err != nil {
		t.Fatal(err)
	}
	// The API server ends each watch after some time. A RetryWatcher then begins the
	// next.
	watcher, err := watch.NewRetryWatcherWithContext(t.Context(), list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (apiwatch.Interface, error) {
			options.LabelSelector = "probe"
			return pods.Watch(ctx, options)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watcher.Stop)
	go func() {
		last := map[string]bool{}
		for event := range watcher.ResultChan() {
			pod, ok := event.Object.(*corev1.Pod)
			if !ok {
				continue
			}
			ready := false
			for _, condition := range pod.Status.Conditions {
				ready = ready || condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue
			}
			if ready != last[pod.Name] {
				last[pod.Name] = ready
				channels[pod.Name] <- readiness{ready, time.Now()}
			}
		}
	}()
	return probes
}

// measure makes the pod unready and then ready. It returns the time from the API server's
// report that the pod is ready until the service's address accepts a connection.
func (p *probe) measure(ctx context.Context) (time.Duration, error) {
	if err := p.set(ctx, false); err != nil {
		return 0, err
	}
	if err := p.await(ctx, func() bool { return !p.connects() }); err != nil {
		return 0, fmt.Errorf("not ready, but still reachable: %w", err)
	}
	for len(p.changes) > 0 {
		<-p.changes
	}
	if err := p.set(ctx, true); err != nil {
		return 0, err
	}
	var reached time.Time
	if err := p.await(ctx, func() bool {
		connects := p.connects()
		reached = time.Now()
		return connects
	}); err != nil {
		return 0, fmt.Errorf("ready, but not reachable: %w", err)
	}
	for {
		select {
		case change := <-p.changes:
			if change.ready {
				return reached.Sub(change.at), nil
			}
		case <-time.After(time.Minute):
			return 0, fmt.Errorf("reachable, but the API server did not report it as ready")
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// set writes the condition of the pod's readiness gate.
func (p *probe) set(ctx context.Context, ready bool) error {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{
		"conditions": []corev1.PodCondition{{Type: readinessGate, Status: status}},
	}})
	if err != nil {
		return err
	}
	_, err = p.c.CoreV1().Pods(p.c.namespace).Patch(ctx, p.name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// connects reports whether a new connection from a node to the service succeeds.
func (p *probe) connects() bool {
	return p.from.Do(func() error {
		conn, err := net.DialTimeout("tcp", p.address.String(), traffic.LossDelay)
		if err != nil {
			return err
		}
		return conn.Close()
	}) == nil
}

// await waits at most a minute until a condition holds.
func (p *probe) await(ctx context.Context, condition func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for !condition() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
	}
	return nil
}

// usage has the CPU time and the memory that a service proxy has used.
type usage struct {
	cpu  float64 // seconds, including ended child processes
	peak int     // maximum of resident memory since the last call of reset_peak, in MB
}

// usageByNode returns the usage of each node's service proxy.
func (c *cluster) usageByNode(t *testing.T) []usage {
	t.Helper()
	all := make([]usage, c.nodes)
	for i := range all {
		out := lib(t, "usage", strconv.Itoa(i+1))
		if _, err := fmt.Sscan(out, &all[i].cpu, &all[i].peak); err != nil {
			t.Fatalf("usage of the proxy of node-%d: %q: %v", i+1, out, err)
		}
	}
	return all
}
