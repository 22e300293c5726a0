// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"iter"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/test/internal/cgroup"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var (
	soakFor  = flag.Duration("soak", 20*time.Second, "the `duration` of TestSoak")
	soakEBPF = flag.Bool("soak-ebpf", false, "TestSoak runs kpng-ebpf instead of kpng")
	soakSeed = flag.Uint64("seed", 0, "seed of TestSoak; 0 means random")
)

const (
	// writers is the number of goroutines that change services.
	writers = 16
	// stable is the number of the service that receives traffic and does not change.
	stable = 0
	// marker is the number of the service that changeMarker changes.
	marker = 1
	// churned is the maximum number of services that change at random.
	churned = 400
	// metricsAddr is the address at which the proxy serves metrics.
	metricsAddr = "127.0.0.1:10249"
	// changeRate and connectRate are intended numbers of changes and connections per second.
	changeRate  = 200
	connectRate = 300
	// memoryGrowth is the allowed growth of the proxy's memory, including garbage, in the
	// second half of the test.
	memoryGrowth = 12 << 20
)

// TestSoak changes services and endpoints at random. No connection to an unchanged
// service may fail. At the end, the kernel's rules must equal the rules of a proxy that
// starts without old rules.
func TestSoak(t *testing.T) {
	seed := *soakSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	answer(t)
	c := newCluster(t, shape{services: 2, endpoints: 3})
	c.join(t)
	chosen := kpngProxy
	if *soakEBPF {
		chosen = ebpfProxy
	}
	soaked := proxy{chosen.name, func(t testing.TB, c *cluster, interval time.Duration) []string {
		return append(chosen.command(t, c, interval), "--metrics-bind-address", metricsAddr)
	}}
	proxy := c.start(t, soaked, time.Millisecond)
	proxy.wait(t)

	ctx, stop := context.WithTimeout(t.Context(), *soakFor)
	defer stop()
	var group errgroup.Group
	traffic := traffic{}
	group.Go(func() error { return traffic.run(ctx) })
	churn := &churn{cluster: c, rate: rate.NewLimiter(changeRate, 1)}
	for worker := range uint64(writers) {
		group.Go(func() error { return churn.run(ctx, rand.New(rand.NewPCG(seed, worker))) })
	}
	var halfway int64
	group.Go(func() error {
		select {
		case <-time.After(*soakFor / 2):
			halfway = cgroup.Status(t, proxy.cmd.Process.Pid, "VmRSS")
		case <-ctx.Done():
		}
		return nil
	})
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	perSecond := float64(churn.made.Load()) / soakFor.Seconds()
	t.Logf("%d changes, %.0f/s; %d connections", churn.made.Load(), perSecond, traffic.made.Load())
	// A busy machine may be slower than changeRate, so require only half of changeRate.
	if perSecond < changeRate/2 {
		t.Errorf("%.0f changes per second, want %d", perSecond, changeRate)
	}

	marked := c.changeMarker(t)
	if found := metric(t, "kpng_nftables_drift_found_total"); found != 0 {
		t.Errorf("%g verifications found a difference in the table, want none", found)
	}
	if *soakEBPF {
		translated, changed := metric(t, `kpng_ebpf_translated_total{hook="connect4"}`), metric(t, `kpng_ebpf_left_total{reason="list_changed"}`)
		t.Logf("%.0f connections were translated; %.0f were not, because the list changed", translated, changed)
		if made := float64(traffic.made.Load()); translated < made*0.99 {
			t.Errorf("only %.0f of %.0f connections were translated", translated, made)
		}
	}
	end := cgroup.Status(t, proxy.cmd.Process.Pid, "VmRSS")
	t.Logf("memory: %d KiB halfway, %d KiB at the end", halfway>>10, end>>10)
	if end > halfway+memoryGrowth {
		t.Errorf("resident memory grew from %d to %d KiB", halfway>>10, end>>10)
	}
	waitVerified(t)
	after := slices.Concat(ruleset(t, marked), c.lists(t, marked))
	proxy.kill(t)
	flush(t)
	fresh := c.start(t, chosen, time.Millisecond)
	fresh.wait(t)
	marked = c.changeMarker(t)
	if diff := cmp.Diff(slices.Concat(ruleset(t, marked), c.lists(t, marked)), after); diff != "" {
		t.Errorf("the kernel differs from a fresh start (-fresh +got):\n%s", diff)
	}
}

// metric returns the value of one of the proxy's metrics.
func metric(t testing.TB, name string) float64 {
	t.Helper()
	answer, err := http.Get("http://" + metricsAddr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		if text, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			value, err := strconv.ParseFloat(text, 64)
			if err != nil {
				t.Fatalf("metric %s: %v", name, err)
			}
			return value
		}
	}
	t.Fatalf("found no metric %s", name)
	return 0
}

// traffic makes and counts connections to the service whose number is the
// constant stable.
type traffic struct{ made atomic.Int64 }

func (tr *traffic) run(ctx context.Context) error {
	limit := rate.NewLimiter(connectRate, 1)
	for limit.Wait(ctx) == nil {
		if _, err := connect(stable, 5*time.Second); err != nil {
			return fmt.Errorf("connection %d to the stable service: %w", tr.made.Load(), err)
		}
		tr.made.Add(1)
	}
	return nil
}

// churn makes random changes to all services, except the services whose numbers are the
// constants stable and marker.
type churn struct {
	*cluster
	made atomic.Int64
	rate *rate.Limiter
}

func (c *churn) run(ctx context.Context, random *rand.Rand) error {
	for c.rate.Wait(ctx) == nil {
		for ctx.Err() == nil {
			err := c.change(ctx, random, 2+random.IntN(churned))
			if err == nil {
				c.made.Add(1)
				break
			}
			// Try again if another writer was faster or the cluster IP is not free yet.
			lost := apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) || apierrors.IsInvalid(err)
			// On a busy machine, a request of the API server to etcd may time out.
			slow := apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || strings.Contains(err.Error(), "etcdserver: request timed out")
			if !lost && !slow && ctx.Err() == nil {
				return fmt.Errorf("change service: %w", err)
			}
		}
	}
	return nil
}

// change creates, deletes or updates a service, or updates its endpoints.
func (c *churn) change(ctx context.Context, random *rand.Rand, service int) error {
	services := c.client.CoreV1().Services(namespace)
	old, err := services.Get(ctx, name(service), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err := services.Create(ctx, c.random(random, service), metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	switch random.IntN(10) {
	case 0:
		return services.Delete(ctx, name(service), metav1.DeleteOptions{})
	case 1, 2:
		new := c.random(random, service)
		new.ResourceVersion, new.Spec.ClusterIPs = old.ResourceVersion, old.Spec.ClusterIPs
		_, err := services.Update(ctx, new, metav1.UpdateOptions{})
		return err
	case 3:
		old.Status.LoadBalancer.Ingress = nil
		if old.Spec.Type == corev1.ServiceTypeLoadBalancer && random.IntN(2) == 0 {
			old.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: c.elsewhere(random, 98)}}
		}
		_, err := services.UpdateStatus(ctx, old, metav1.UpdateOptions{})
		return err
	default:
		return c.endpoints(ctx, random, service)
	}
}

// endpoints replaces the endpoints of a service by random endpoints.
func (c *churn) endpoints(ctx context.Context, random *rand.Rand, service int) error {
	slices := c.client.DiscoveryV1().EndpointSlices(namespace)
	slice := c.slice(service)
	slice.Endpoints = someOf(random, slice.Endpoints)
	// With the same port number, both service ports may share a list.
	slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: ptr.To("dns"), Port: ptr.To[int32](podPort), Protocol: ptr.To(corev1.ProtocolUDP)})
	_, err := slices.Update(ctx, slice, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = slices.Create(ctx, slice, metav1.CreateOptions{})
	}
	return err
}

// someOf returns up to four random variants of each given endpoint.
func someOf(random *rand.Rand, from []discoveryv1.Endpoint) []discoveryv1.Endpoint {
	var all []discoveryv1.Endpoint
	for range random.IntN(5) {
		for _, e := range from {
			e.Addresses = []string{offset(podCIDR.Addr(), 1<<20+random.IntN(1<<20)).String()}
			if random.IntN(3) == 0 {
				e.NodeName = ptr.To("another")
			}
			if random.IntN(5) == 0 {
				e.Conditions = discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(random.IntN(2) == 0), Terminating: ptr.To(true)}
			}
			all = append(all, e)
		}
	}
	return all
}

// elsewhere returns one of 200 external addresses. With so few addresses, some
// services claim the same address.
func (c *churn) elsewhere(random *rand.Rand, network byte) string {
	return netip.AddrFrom4([4]byte{10, network, 0, byte(random.IntN(200))}).String()
}

// random returns a service with random properties.
func (c *churn) random(random *rand.Rand, service int) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name(service), Labels: map[string]string{"app": name(service)}},
		Spec: corev1.ServiceSpec{
			ClusterIP: vip(service).String(),
			Selector:  map[string]string{"app": name(service)},
			Ports:     []corev1.ServicePort{{Name: "http", Port: servicePort}},
		},
	}
	if random.IntN(3) == 0 {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP})
	}
	if random.IntN(4) == 0 {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(60 + random.IntN(2)))}}
	}
	if random.IntN(4) == 0 {
		s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if random.IntN(2) == 0 {
		s.Spec.ExternalIPs = []string{c.elsewhere(random, 97)}
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		if random.IntN(2) == 0 {
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}
		if random.IntN(2) == 0 {
			s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24", "198.51.100.7/32"}[:1+random.IntN(2)]
		}
	}
	return s
}

// changeMarker changes an endpoint of the service whose number is the constant marker,
// waits until the change reaches the kernel, and returns the new address. All earlier
// changes have then reached the kernel too.
func (c *cluster) changeMarker(t testing.TB) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), loadPatience)
	defer cancel()
	seen, expect := c.programmed(t, ctx)
	pod := c.newPodIP()
	expect(marker, netip.MustParseAddr(pod))
	if err := c.change(ctx, marker, 0, pod); err != nil {
		t.Fatal(err)
	}
	for {
		if _, ok := seen.of(netip.MustParseAddr(pod)); ok {
			return pod
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("the marker's endpoint %s is not in the kernel: %v", pod, ctx.Err())
		}
	}
}

// waitVerified waits until the proxy has completed two more verifications of the table.
// They also remove unused parts of the table.
func waitVerified(t testing.TB) {
	t.Helper()
	verified := `kpng_sink_verify_total{result="ok",sink="nftables"}`
	if *soakEBPF {
		verified = `kpng_sink_verify_total{result="ok",sink="ebpf"}`
	}
	before := metric(t, verified)
	for deadline := time.Now().Add(loadPatience); metric(t, verified) < before+2; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the proxy did not verify the table twice in %v", loadPatience)
		}
	}
}

// ruleset returns the kernel's tables as sorted lines. It replaces the numbers of lists with
// the content of the lists, because a fresh start assigns other numbers. It replaces random
// seeds and markerIP with fixed texts. It omits handles, and the unused chains that stay
// until the next pass.
func ruleset(t testing.TB, markerIP string) []string {
	t.Helper()
	out, err := exec.Command("nft", "-j", "list", "ruleset").Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("nft -j list ruleset: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var list struct{ Nftables []map[string]map[string]any }
	out = bytes.ReplaceAll(out, []byte(strconv.Quote(markerIP)), []byte(`"marked"`))
	out = randomSeed.ReplaceAll(out, []byte("${1}0"))
	if err := json.Unmarshal(out, &list); err != nil {
		t.Fatalf("nft -j list ruleset: %v", err)
	}
	all := elements{}
	for _, object := range list.Nftables {
		for _, o := range object {
			if of, ok := o["elem"].([]any); ok {
				all[o["name"].(string)] = of
				delete(o, "elem")
			}
		}
	}
	lines, used := all.lines(t)
	for _, object := range list.Nftables {
		for kind, o := range object {
			chain, isRule := o["chain"].(string)
			if !isRule {
				chain, _ = o["name"].(string)
			}
			if kind == "metainfo" || staysUnused.MatchString(chain) && !used[chain] {
				continue
			}
			delete(o, "handle")
			lines = append(lines, kind+" "+text(t, o))
		}
	}
	slices.Sort(lines)
	return lines
}

// randomSeed matches the seed of the hash of clients. nft prints some statements as text.
var randomSeed = regexp.MustCompile(`("seed": *| seed 0x)[0-9a-f]+`)

// staysUnused matches the chains that stay until the next pass if no list uses them.
var staysUnused = regexp.MustCompile(`^(list|slot)[46]-\d+$`)

// elements has the elements of maps and sets, by the name of the map or set.
// docs/operate/nftables.md describes them. There are no all-ports services.
type elements map[string][]any

// take yields the keys and values of a map, and removes the map from m. The elements of a
// set have no value.
func (m elements) take(name string) iter.Seq2[any, any] {
	all := m[name]
	delete(m, name)
	return func(yield func(key, value any) bool) {
		for _, e := range all {
			pair, ok := e.([]any)
			if !ok {
				pair = []any{e, nil}
			}
			if !yield(pair[0], pair[1]) {
				return
			}
		}
	}
}

// parts returns the parts of a concatenation.
func parts(v any) []any { return v.(map[string]any)["concat"].([]any) }

// lines returns a line for each frontend with its list, and for each element of the other
// maps. Each list has a line of its own too, so that a list without a frontend is visible.
// The result used has the chains that lists use.
func (m elements) lines(t testing.TB) (lines []string, used map[string]bool) {
	t.Helper()
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	used = map[string]bool{}
	for _, family := range []string{"4", "6"} {
		lists := contents{} // includes the endpoints with numbers
		for key, endpoint := range m.take("numbers" + family) {
			p := parts(key)
			lists.add(p[0], "%v %s", p[1], text(t, endpoint))
		}
		// The endpoints of a list may be in any order, but there must be no gap between slots.
		for key, number := range m.take("slots" + family) {
			p := parts(key)
			lists.add(p[0], "slot %v", p[1])
			lists.add(p[0], "%s", lists.of(t, number))
		}
		for key, endpoint := range m.take("endpoints" + family) {
			p := parts(key)
			lists.add(p[0], "slot %v", p[2])
			lists.add(p[0], "%v %s", p[1], text(t, endpoint))
		}
		chains := map[any]string{}
		for class, verdict := range m.take("classes" + family) {
			chains[class] = verdict.(map[string]any)["goto"].(map[string]any)["target"].(string)
		}
		for list, class := range m.take("lists" + family) {
			chain := chains[class]
			lists.add(list, "chain %s", chain)
			used[chain] = true
			if rest, affine := strings.CutPrefix(chain, "affinity"); affine {
				used["slot"+rest[:strings.LastIndex(rest, "-")]] = true
			}
		}
		for list, other := range m.take("shortcuts" + family) {
			lists.add(list, "from this node %s", lists.of(t, other))
		}
		for number := range lists {
			add("list of IPv%s: %s", family, lists.of(t, number))
		}
		for _, name := range []string{"services", "nodeports"} {
			for key, value := range m.take(name + family) {
				list, handling := splitHandling(value.(string))
				add("element of %s%s: %s: handling %s, %s", name, family, text(t, key), handling, lists.of(t, list))
			}
		}

		sources := contents{}
		for key := range m.take("sources" + family) {
			p := parts(key)
			list, length := splitLength(p[0].(string))
			sources.add(list, "%v/0x%s", p[1], length)
		}
		for number := range sources {
			add("source ranges of IPv%s: %s", family, sources.of(t, number))
		}
		for key, value := range m.take("restricted-services" + family) {
			list, _ := splitLength(value.(string))
			add("element of restricted-services%s: %s: %s", family, text(t, key), sources.of(t, list))
		}
	}
	for name, all := range m {
		for _, e := range all {
			add("element of %s: %s", name, text(t, e))
		}
	}
	return lines, used
}

// contents has the content of lists, by the number of the list.
type contents map[string][]string

func (c contents) add(number any, format string, args ...any) {
	c[number.(string)] = append(c[number.(string)], fmt.Sprintf(format, args...))
}

// of returns the content of a list. The list must exist.
func (c contents) of(t testing.TB, number any) string {
	t.Helper()
	lines := c[number.(string)]
	if lines == nil {
		t.Errorf("number %s is in no map", number)
	}
	slices.Sort(lines)
	return "[" + strings.Join(lines, ", ") + "]"
}

// splitHandling divides the value of a frontend into the number of its list and its
// handling.
func splitHandling(value string) (list, handling string) {
	digits := 1
	if value < "7" { // with session affinity
		digits = 3
	}
	n := len(value) - digits
	return value[:n] + strings.Repeat("0", digits), value[n:]
}

// splitLength splits a number of source ranges. All ranges of a list share the first part. The
// second part is the length of one range.
func splitLength(number string) (list, length string) {
	n := len(number) - 2
	return number[:n], number[n:]
}

func text(t testing.TB, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
