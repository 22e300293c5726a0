// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/kube"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
)

var seed = flag.Uint64("seed", 0, "seed of the random tests; 0 means random")

const (
	rounds             = 8
	operationsPerRound = 50
)

// TestPrintsMatchAPIServer changes a namespace at random while three proxies run, two
// with a proxy name and one without. Each proxy runs twice: as kpng-json, and in this
// process with informers. The test compares the views of each proxy with the expected
// views, which it computes from the API server's objects.
func TestPrintsMatchAPIServer(t *testing.T) {
	for _, test := range []struct {
		name string
		// byHand is the number of additional services without a selector.
		byHand int
		// network is the prefix of external addresses. It differs between tests, so that
		// services of different tests do not conflict.
		network string
	}{
		{"with few services without a selector", 0, "198.51.100"},
		{"with more of them than have a watch of their own", 33, "203.0.113"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			random := newRandom(t)
			server := shared.Get(t)
			n := newTenant(t, server)
			r := &randomizer{n, random, []string{"", n.name + "-a", n.name + "-b"}, test.network, 10, 16}
			for i := range test.byHand {
				s := newService(fmt.Sprintf("by-hand-%d", i), r.proxies[1], servicePort("", 80, 80))
				s.Spec.Selector = nil
				n.put(s)
			}

			kubeconfig := apiserver.Kubeconfig(t, server.Config())
			own := startInformers(t, server)
			var screens []*screen
			for _, proxy := range r.proxies {
				screens = append(screens, startScreen(n, kubeconfig, proxy),
					runScreen(n, kpng.Options{Informers: own, Services: watcher.Options{ServiceProxyName: proxy}}))
			}
			for round := range rounds {
				for range operationsPerRound {
					r.operate()
				}
				manifest := n.manifest(filepath.Join(t.TempDir(), "list.json"), n.list())
				for _, s := range screens {
					want := viewOf(t, manifest, s)
					s.await(func() string { return cmp.Diff(want, s.shown, equate) })
				}
				if t.Failed() {
					t.Fatalf("round %d", round)
				}
			}
		})
	}
}

// equate makes cmp compare views as JSON, without the winners of lost claims. JSON omits
// empty fields.
var equate = cmp.Transformer("JSON", func(views []*api.View) []any {
	var out []any
	for _, v := range views {
		text, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		var printed any
		if err := json.Unmarshal(withoutWinners(text), &printed); err != nil {
			panic(err)
		}
		out = append(out, printed)
	}
	return out
})

func startInformers(t testing.TB, server *apiserver.Server) *kube.Informers {
	t.Helper()
	factory := informers.NewSharedInformerFactory(server.Client(), 0)
	own := &kube.Informers{
		Services:       factory.Core().V1().Services().Informer(),
		EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
		Nodes:          factory.Core().V1().Nodes().Informer(),
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	factory.StartWithContext(ctx)
	t.Cleanup(func() {
		cancel()
		factory.Shutdown()
	})
	return own
}

type objects struct {
	services []*corev1.Service
	slices   []*discoveryv1.EndpointSlice
	nodes    []*corev1.Node
}

// list returns the tenant's objects from the API server.
func (n *tenant) list() objects {
	n.t.Helper()
	ctx := n.t.Context()
	allServices, err := n.client.CoreV1().Services(n.name).List(ctx, metav1.ListOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	allSlices, err := n.client.DiscoveryV1().EndpointSlices(n.name).List(ctx, metav1.ListOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	allNodes, err := n.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + n.name})
	if err != nil {
		n.t.Fatal(err)
	}
	return objects{pointers(allServices.Items), pointers(allSlices.Items), pointers(allNodes.Items)}
}

func pointers[T any](list []T) []*T {
	var out []*T
	for i := range list {
		out = append(out, &list[i])
	}
	return out
}

// manifest atomically writes a manifest of all objects to the file at path, and returns
// path.
func (n *tenant) manifest(path string, all objects) string {
	n.t.Helper()
	var items [][]byte
	add := func(o object) {
		n.setKind(o)
		o.SetManagedFields(nil) // omit managed fields, like kubectl
		text, err := json.Marshal(o)
		if err != nil {
			n.t.Fatal(err)
		}
		items = append(items, text)
	}
	for _, s := range all.services {
		add(s)
	}
	for _, s := range all.slices {
		add(s)
	}
	for _, node := range all.nodes {
		add(node)
	}
	text := fmt.Appendf(nil, `{"apiVersion":"v1","kind":"List","items":[%s]}`, bytes.Join(items, []byte(",\n")))
	if err := os.WriteFile(path+"~", text, 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Rename(path+"~", path); err != nil {
		n.t.Fatal(err)
	}
	return path
}

// print returns the expected output of a kpng-json process on a node. The process uses
// the tenant's name as its proxy name.
func (n *tenant) print(node string, all objects) []byte {
	n.t.Helper()
	convert, err := watcher.New(watcher.Options{ServiceProxyName: n.name})
	if err != nil {
		n.t.Fatal(err)
	}
	state := cluster.New(cluster.Options{})
	selectorless := map[string]bool{}
	state.Update(func(tx *cluster.Tx) {
		for _, o := range all.services {
			if convert.WantsService(o) {
				s, _ := convert.Service(o)
				tx.SetService(s)
				selectorless[o.Name] = watcher.Selectorless(o)
			}
		}
		for _, o := range all.slices {
			if s, _ := convert.EndpointSlice(o); s != nil && (convert.WantsSlice(o) || selectorless[s.ServiceName]) {
				tx.SetSlice(s)
			}
		}
		for _, o := range all.nodes {
			node, _ := convert.Node(o)
			tx.SetNode(node)
		}
	})
	state.SetSynced()
	source := feed.New(state, node)
	defer source.Close()
	update, err := source.Next()
	if err != nil {
		n.t.Fatal(err)
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	for _, v := range update.After(types.NamespacedName{}) {
		if err := encoder.Encode(v.Get()); err != nil {
			n.t.Fatal(err)
		}
	}
	return out.Bytes()
}

// viewOf returns the views that the proxy of the screen s should have. It reads the
// objects of the cluster from the file at the path manifest.
func viewOf(t testing.TB, manifest string, s *screen) []*api.View {
	t.Helper()
	var views []*api.View
	printer := sink.FullState(func(_ context.Context, services []*api.View) error {
		for _, v := range services {
			if v.Service.Name != s.stamp.Name {
				views = append(views, v)
			}
		}
		return nil
	})
	err := kpng.Run(t.Context(), kpng.Options{
		Manifests: manifest,
		NodeName:  s.tenant.name,
		Services:  watcher.Options{ServiceProxyName: s.proxy, KeepLabels: []string{watcher.LabelServiceProxyName}},
		Sinks:     []kpng.Sink{{Sink: printer, Options: sink.Options{Once: true}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return views
}

// newRandom returns a random source and logs its seed.
func newRandom(t testing.TB) *rand.Rand {
	number := *seed
	if number == 0 {
		number = rand.Uint64()
	}
	t.Logf("-seed %d", number)
	return rand.New(rand.NewPCG(number, 0))
}

// randomizer changes a tenant at random.
type randomizer struct {
	*tenant
	*rand.Rand
	proxies []string
	network string
	// The maximum numbers of Services and of EndpointSlices.
	services, slices int
}

// pick returns one of its arguments.
func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// operate makes one random change.
func (r *randomizer) operate() {
	r.t.Helper()
	node := r.node(pick(r.Rand, "", "a", "b"))
	var err error
	switch {
	case r.IntN(40) == 0:
		err = r.tryRemove(node)
	case r.IntN(20) == 0:
		err = r.tryPut(node)
	case r.IntN(2) == 0:
		slice := r.slice()
		if r.IntN(8) == 0 {
			err = r.tryRemove(slice)
		} else {
			err = r.tryPut(slice)
		}
	default:
		service := r.service(r.IntN(r.services))
		switch r.IntN(8) {
		case 0:
			err = r.tryRemove(service)
		case 1:
			err = r.admit(service.Name)
		default:
			err = r.tryPut(service)
			if apierrors.IsInvalid(err) { // because an immutable field differs
				r.remove(service)
				err = r.tryPut(service)
			}
		}
	}
	if err != nil && !apierrors.IsNotFound(err) {
		r.t.Fatal(err)
	}
}

func serviceName(i int) string { return fmt.Sprintf("r%03d", i) }

// service returns a random service with number i. It uses so few different external IPs
// and ports that services conflict.
func (r *randomizer) service(i int) *corev1.Service {
	s := newService(serviceName(i), r.proxies[i%len(r.proxies)])
	if r.IntN(5) == 0 {
		s.Labels = proxyLabel(pick(r.Rand, append(r.proxies, "somebody-else")...))
	}
	s.Spec.Ports = []corev1.ServicePort{servicePort("", pick[int32](r.Rand, 80, 81), pick[any](r.Rand, 8080, "web"))}
	if r.IntN(2) == 0 {
		s.Spec.Ports = []corev1.ServicePort{servicePort("web", 80, pick[any](r.Rand, 8080, "web")), servicePort("admin", 81, 9090)}
		s.Spec.Ports[1].Protocol = pick(r.Rand, corev1.ProtocolTCP, corev1.ProtocolUDP)
	}
	if r.IntN(2) == 0 {
		s.Spec.Selector = nil
	}
	s.Spec.Type = pick(r.Rand, corev1.ServiceTypeClusterIP, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer)
	s.Spec.IPFamilyPolicy = new(pick(r.Rand, corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyRequireDualStack))
	s.Spec.InternalTrafficPolicy = new(pick(r.Rand, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal))
	s.Spec.SessionAffinity = pick(r.Rand, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	if r.IntN(2) == 0 {
		s.Spec.ExternalIPs = pick(r.Rand, []string{r.network + ".1"}, []string{r.network + ".1", "2001:db8::" + r.network + ".1"}, []string{r.network + ".2"})
	}
	if s.Spec.Type == corev1.ServiceTypeClusterIP {
		if r.IntN(4) == 0 {
			s.Spec.ClusterIP = corev1.ClusterIPNone
		}
	} else {
		s.Spec.ExternalTrafficPolicy = pick(r.Rand, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer && r.IntN(2) == 0 {
		s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"}
	}
	if r.IntN(12) == 0 {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.org"}
	}
	return s
}

// admit sets random load-balancer addresses in a service's status.
func (r *randomizer) admit(name string) error {
	ingress := pick(r.Rand,
		`{"ip":%q,"ipMode":"VIP"}`,
		`{"ip":%q,"ipMode":"VIP"},{"ip":"192.0.2.2","ipMode":"Proxy"}`,
		`{"ip":%q,"ipMode":"Proxy"},{"hostname":"example.org"}`)
	patch := fmt.Sprintf(`{"status":{"loadBalancer":{"ingress":[`+ingress+`]}}}`, r.network+".3")
	_, err := r.client.CoreV1().Services(r.name).Patch(r.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	if apierrors.IsInvalid(err) {
		return nil // the service is not of type LoadBalancer
	}
	return err
}

// slice returns a random EndpointSlice of a random service. It usually has the labels
// that the EndpointSlice controller would set.
func (r *randomizer) slice() *discoveryv1.EndpointSlice {
	of := newService(serviceName(r.IntN(r.services)), pick(r.Rand, r.proxies...))
	if stored, err := r.client.CoreV1().Services(r.name).Get(r.t.Context(), of.Name, metav1.GetOptions{}); err == nil && r.IntN(8) > 0 {
		of = stored
	}
	ports := slices.Concat(slicePorts("", 8080), slicePorts("web", pick[int32](r.Rand, 8080, 8081)), slicePorts("admin", 9090))
	ports[2].Protocol = new(pick(r.Rand, corev1.ProtocolTCP, corev1.ProtocolUDP))
	if r.IntN(3) == 0 {
		ports = ports[:r.IntN(3)]
	}
	number := r.IntN(r.slices)
	s := newSlice(fmt.Sprintf("s%03d", number), of, ports)
	network := "10.9.0.%d"
	if number%2 == 1 {
		s.AddressType, network = discoveryv1.AddressTypeIPv6, "fd00:9::%d"
	}
	for _, i := range r.Perm(6)[:r.IntN(6)] {
		e := newEndpoint(fmt.Sprintf(network, i+1), pick(r.Rand, "", r.name, "elsewhere"))
		e.Conditions = pick(r.Rand, conditions(true, true, false), conditions(true, true, false), conditions(false, true, true),
			conditions(false, false, true), conditions(false, true, false), discoveryv1.EndpointConditions{})
		if r.IntN(2) == 0 {
			e.Zone = new(pick(r.Rand, "a", "b"))
			e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: *e.Zone}}}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	if of.Spec.ClusterIP == corev1.ClusterIPNone {
		s.Labels[corev1.IsHeadlessService] = ""
	}
	if r.IntN(5) == 0 {
		delete(s.Labels, watcher.LabelServiceProxyName)
	}
	if r.IntN(15) == 0 {
		delete(s.Labels, discoveryv1.LabelServiceName)
	}
	return s
}
