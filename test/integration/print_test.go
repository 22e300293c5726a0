// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// walk is the state of a test. The test changes a tenant in steps while two kpng-json
// processes watch the tenant. The first process has the tenant's name as its proxy name,
// and the second process has no proxy name.
type walk struct {
	*tenant
	// The output of the first and of the second process.
	named, general *screen
}

func newWalk(t *testing.T) *walk {
	t.Parallel()
	server := shared.Get(t)
	n := newTenant(t, server)
	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	return &walk{n, startScreen(n, kubeconfig, n.name), startScreen(n, kubeconfig, "")}
}

// step is a change, with the expected output of both processes after the change.
type step struct {
	name           string
	do             func()
	named, general []string
}

func (w *walk) run(t *testing.T, steps []step) {
	for _, s := range steps {
		ok := t.Run(s.name, func(t *testing.T) {
			defer func(before testing.TB) { w.t = before }(w.t)
			w.t = t
			s.do()
			w.named.expect(s.named...)
			w.general.expect(s.general...)
		})
		if !ok {
			return // each step depends on the previous steps
		}
	}
}

func TestPrintFollowsServicesAndSlices(t *testing.T) {
	w := newWalk(t)
	here := w.name
	web := newService("web", w.name, servicePort("", 80, 8080))
	one := newSlice("one", web, slicePorts("", 8080), newEndpoint("10.1.0.1", here), newEndpoint("10.1.0.2", "elsewhere"))
	two := newSlice("two", web, slicePorts("", 8080), newEndpoint("10.1.0.3", ""))
	six := newSlice("six", web, slicePorts("", 8080), newEndpoint("fd00::1", here))
	api := newService("api", w.name, servicePort("http", 443, "https"))
	apiOne := newSlice("api-one", api, slicePorts("http", 8443), newEndpoint("10.2.0.1", here))
	apiTwo := newSlice("api-two", api, slicePorts("http", 9443), newEndpoint("10.2.0.2", ""))

	w.run(t, []step{
		{"a service without endpoints", func() { w.put(web) },
			[]string{"web IPv4 80!"}, nil},
		{"a slice with a local and a remote endpoint", func() { w.put(one) },
			[]string{"web IPv4 80", "  10.1.0.1 8080 local", "  10.1.0.2 8080"}, nil},
		{"a second slice", func() { w.put(two) },
			[]string{"web IPv4 80", "  10.1.0.1 8080 local", "  10.1.0.2 8080", "  10.1.0.3 8080"}, nil},
		{"an endpoint that is in both slices", func() {
			two.Endpoints = append(two.Endpoints, one.Endpoints[1])
			w.put(two)
		}, []string{"web IPv4 80", "  10.1.0.1 8080 local", "  10.1.0.2 8080", "  10.1.0.3 8080"}, nil},
		{"the endpoint moves to the second slice", func() {
			one.Endpoints = one.Endpoints[:1]
			w.put(one)
		}, []string{"web IPv4 80", "  10.1.0.1 8080 local", "  10.1.0.2 8080", "  10.1.0.3 8080"}, nil},
		{"the second slice and its endpoints are deleted", func() { w.remove(two) },
			[]string{"web IPv4 80", "  10.1.0.1 8080 local"}, nil},
		{"an IPv6 slice of an IPv4 service", func() { w.put(six) },
			[]string{"web IPv4 80", "  10.1.0.1 8080 local"}, nil},
		{"the service becomes dual-stack", func() {
			web.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
			w.put(web)
		}, []string{"web IPv4 IPv6 80", "  10.1.0.1 8080 local", "  fd00::1 8080 local"}, nil},
		{"nil conditions, which mean ready", func() {
			six.Endpoints[0].Conditions = discoveryv1.EndpointConditions{}
			w.put(six)
		}, []string{"web IPv4 IPv6 80", "  10.1.0.1 8080 local", "  fd00::1 8080 local"}, nil},
		{"an endpoint that is not ready", func() {
			six.Endpoints[0].Conditions = conditions(false, false, false)
			w.put(six)
		}, []string{"web IPv4 IPv6 80!", "  10.1.0.1 8080 local"}, nil},
		{"the only endpoint terminates and serves", func() {
			six.Endpoints[0].Conditions = conditions(false, true, true)
			w.put(six)
		}, []string{"web IPv4 IPv6 80", "  10.1.0.1 8080 local", "  fd00::1 8080 local terminating"}, nil},
		{"another endpoint is ready", func() {
			six.Endpoints = append(six.Endpoints, newEndpoint("fd00::2", ""))
			w.put(six)
		}, []string{"web IPv4 IPv6 80", "  10.1.0.1 8080 local", "  fd00::2 8080", "  fd00::1 8080 local terminating draining"}, nil},
		{"the service's port changes", func() {
			web.Spec.Ports = []corev1.ServicePort{servicePort("", 81, 8081)}
			w.put(web)
		}, []string{"web IPv4 IPv6 81", "  10.1.0.1 8080 local", "  fd00::2 8080", "  fd00::1 8080 local terminating draining"}, nil},
		{"the slices have the new port", func() {
			one.Ports, six.Ports = slicePorts("", 8081), slicePorts("", 8081)
			w.put(one, six)
		}, []string{"web IPv4 IPv6 81", "  10.1.0.1 8081 local", "  fd00::2 8081", "  fd00::1 8081 local terminating draining"}, nil},
		{"the service is single-stack again, and the slice of the other family is deleted", func() {
			web.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
			w.put(web)
			w.remove(six)
		}, []string{"web IPv4 81", "  10.1.0.1 8081 local"}, nil},
		{"a target port by name, with other numbers in each slice", func() { w.put(api, apiOne, apiTwo) },
			[]string{"api IPv4 http=443", "  10.2.0.1 http=8443 local", "  10.2.0.2 http=9443", "web IPv4 81", "  10.1.0.1 8081 local"}, nil},
		{"a second port that only one slice serves", func() {
			api.Spec.Ports = append(api.Spec.Ports, servicePort("admin", 444, "admin"))
			apiOne.Ports = append(apiOne.Ports, slicePorts("admin", 8444)...)
			w.put(api, apiOne)
		}, []string{"api IPv4 http=443 admin=444", "  10.2.0.1 http=8443 admin=8444 local", "  10.2.0.2 http=9443 admin=0", "web IPv4 81", "  10.1.0.1 8081 local"}, nil},
		{"a slice moves to the other service", func() {
			one.Labels[discoveryv1.LabelServiceName] = "api"
			one.Ports = slicePorts("http", 7443)
			w.put(one)
		}, []string{"api IPv4 http=443 admin=444", "  10.1.0.1 http=7443 admin=0 local", "  10.2.0.1 http=8443 admin=8444 local", "  10.2.0.2 http=9443 admin=0", "web IPv4 81!"}, nil},
		{"the other service is deleted, its slices remain", func() { w.remove(api) },
			[]string{"web IPv4 81!"}, nil},
		{"the other service is created again", func() { w.put(api) },
			[]string{"api IPv4 http=443 admin=444", "  10.1.0.1 http=7443 admin=0 local", "  10.2.0.1 http=8443 admin=8444 local", "  10.2.0.2 http=9443 admin=0", "web IPv4 81!"}, nil},
		{"all its slices are deleted", func() { w.remove(one, apiOne, apiTwo) },
			[]string{"api IPv4 http=443! admin=444!", "web IPv4 81!"}, nil},
		{"the first service is deleted and created again, with another UID", func() {
			w.remove(web)
			w.put(web)
			w.named.await(func() string { return cmp.Diff(w.service("web").UID, shownUID(w.named, "web")) })
		}, []string{"api IPv4 http=443! admin=444!", "web IPv4 81!"}, nil},
		{"an ExternalName service is not printed", func() {
			alias := newService("alias", w.name)
			alias.Spec.Type, alias.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.org"
			w.put(alias)
		}, []string{"api IPv4 http=443! admin=444!", "web IPv4 81!"}, nil},
		{"both services are deleted", func() { w.remove(web, api) }, nil, nil},
	})
}

// shownUID returns a service's UID in the output that the screen s has processed.
func shownUID(s *screen, name string) types.UID {
	for _, view := range s.shown {
		if view.Service.Name == name {
			return view.Service.UID
		}
	}
	return ""
}

func TestServicesArePrintedByProxyInTheirLabel(t *testing.T) {
	w := newWalk(t)
	add := func(name, proxy, addr string) (*corev1.Service, *discoveryv1.EndpointSlice) {
		service := newService(name, proxy, servicePort("", 80, 80))
		slice := newSlice(name, service, slicePorts("", 80), newEndpoint(addr, ""))
		return service, slice
	}
	mine, mineSlice := add("mine", w.name, "10.1.0.1")
	plain, plainSlice := add("plain", "", "10.1.0.2")
	other, otherSlice := add("other", "somebody-else", "10.1.0.3")
	headless, headlessSlice := add("headless", "", "10.1.0.4")
	headless.Spec.ClusterIP = corev1.ClusterIPNone
	headlessSlice.Labels[corev1.IsHeadlessService] = ""
	empty, emptySlice := add("empty", "", "10.1.0.5")
	empty.Labels = map[string]string{watcher.LabelServiceProxyName: ""}
	emptySlice.Labels[watcher.LabelServiceProxyName] = ""

	label := func(o object, proxy string) {
		labels := o.GetLabels()
		delete(labels, watcher.LabelServiceProxyName)
		for key, value := range proxyLabel(proxy) {
			labels[key] = value
		}
		w.put(o)
	}
	mineShown := []string{"mine IPv4 80", "  10.1.0.1 80"}
	plainShown := []string{"plain IPv4 80", "  10.1.0.2 80"}

	w.run(t, []step{
		{"services with the proxy's name", func() { w.put(mine, mineSlice) }, mineShown, nil},
		{"services without a name", func() { w.put(plain, plainSlice) }, mineShown, plainShown},
		{"services with another or an empty name, and a headless one without a name", func() {
			w.put(other, otherSlice, headless, headlessSlice, empty, emptySlice)
		}, mineShown, plainShown},
		{"these change", func() {
			for _, s := range []*corev1.Service{other, headless, empty} {
				s.Spec.Ports[0].Port = 81
				w.put(s)
			}
			for _, s := range []*discoveryv1.EndpointSlice{otherSlice, headlessSlice, emptySlice} {
				s.Endpoints = append(s.Endpoints, newEndpoint("10.1.0.9", w.name))
				w.put(s)
			}
		}, mineShown, plainShown},
		{"a service gets the name, and has no endpoints until its slices have the name", func() { label(plain, w.name) },
			append(slices.Clone(mineShown), "plain IPv4 80!"), nil},
		{"its slice gets the name", func() { label(plainSlice, w.name) },
			slices.Concat(mineShown, plainShown), nil},
		{"a service loses the name, and the general proxy uses its slices with the name", func() { label(mine, "") },
			plainShown, mineShown},
		{"its slice loses the name", func() { label(mineSlice, "") }, plainShown, mineShown},
		{"a slice changes the name before its service", func() { label(mineSlice, w.name) },
			plainShown, mineShown},
		{"then its service changes the name", func() { label(mine, w.name) }, slices.Concat(mineShown, plainShown), nil},
		{"a service changes to another name", func() { label(mine, "somebody-else"); label(mineSlice, "somebody-else") },
			plainShown, nil},
		{"a service of another name changes to this one", func() { label(other, w.name); label(otherSlice, w.name) },
			append([]string{"other IPv4 81", "  10.1.0.3 80", "  10.1.0.9 80 local"}, plainShown...), nil},
		{"a service changes its label", func() { label(empty, w.name); label(other, "somebody-else") },
			append([]string{"empty IPv4 81!"}, plainShown...), nil},
	})
}

func TestManualSlicesArePrintedWithoutLabel(t *testing.T) {
	w := newWalk(t)
	byHand := newService("by-hand", w.name, servicePort("", 80, 80))
	byHand.Spec.Selector = nil
	unlabelled := newSlice("by-hand", newService(byHand.Name, ""), slicePorts("", 80), newEndpoint("10.1.0.1", ""))
	late := newSlice("late", newService(byHand.Name, ""), slicePorts("", 80), newEndpoint("10.1.0.2", ""))

	w.run(t, []step{
		{"a slice without a service", func() { w.put(unlabelled) }, nil, nil},
		{"a service without a selector", func() { w.put(byHand) },
			[]string{"by-hand IPv4 80", "  10.1.0.1 80"}, nil},
		{"another slice", func() { w.put(late) },
			[]string{"by-hand IPv4 80", "  10.1.0.1 80", "  10.1.0.2 80"}, nil},
		{"one slice gets the label", func() {
			late.Labels[watcher.LabelServiceProxyName] = w.name
			w.put(late)
		}, []string{"by-hand IPv4 80", "  10.1.0.1 80", "  10.1.0.2 80"}, nil},
		{"it loses that again", func() {
			delete(late.Labels, watcher.LabelServiceProxyName)
			w.put(late)
		}, []string{"by-hand IPv4 80", "  10.1.0.1 80", "  10.1.0.2 80"}, nil},
		{"the service gets a selector", func() {
			byHand.Spec.Selector = map[string]string{"app": "web"}
			w.put(byHand)
		}, []string{"by-hand IPv4 80!"}, nil},
		{"it loses that again", func() {
			byHand.Spec.Selector = nil
			w.put(byHand)
		}, []string{"by-hand IPv4 80", "  10.1.0.1 80", "  10.1.0.2 80"}, nil},
		{"a slice is deleted", func() { w.remove(unlabelled) },
			[]string{"by-hand IPv4 80", "  10.1.0.2 80"}, nil},
		{"the service is deleted", func() { w.remove(byHand) }, nil, nil},
	})

	// Create many services without a selector. Then create the service by-hand again.
	var want []string
	for i := range 40 {
		s := newService(fmt.Sprintf("s%02d", i), w.name, servicePort("", 80, 80))
		s.Spec.Selector = nil
		addr := fmt.Sprintf("10.1.1.%d", i)
		w.put(s, newSlice(s.Name, newService(s.Name, ""), slicePorts("", 80), newEndpoint(addr, "")))
		want = append(want, s.Name+" IPv4 80", "  "+addr+" 80")
	}
	w.named.expect(want...)
	w.put(byHand)
	w.named.expect(append([]string{"by-hand IPv4 80", "  10.1.0.2 80"}, want...)...)
}

func TestZoneOfNodeSelectsEndpoints(t *testing.T) {
	w := newWalk(t)
	web := newService("web", w.name, servicePort("", 80, 80))
	slice := newSlice("web", web, slicePorts("", 80), newEndpoint("10.1.0.1", w.name), newEndpoint("10.1.0.2", ""), newEndpoint("10.1.0.3", ""))
	for i, zone := range []string{"a", "b", "b"} {
		slice.Endpoints[i].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
	}
	all := []string{"web IPv4 80", "  10.1.0.1 80 local", "  10.1.0.2 80", "  10.1.0.3 80"}
	a := []string{"web IPv4 80", "  10.1.0.1 80 local", "  10.1.0.2 80 draining", "  10.1.0.3 80 draining"}
	b := []string{"web IPv4 80", "  10.1.0.2 80", "  10.1.0.3 80", "  10.1.0.1 80 local draining"}

	w.run(t, []step{
		{"no Node object", func() { w.put(web, slice) }, all, nil},
		{"the node is in zone a", func() { w.put(w.node("a")) }, a, nil},
		{"the node is in zone b", func() { w.put(w.node("b")) }, b, nil},
		{"the node is in a zone without hints", func() { w.put(w.node("c")) }, all, nil},
		{"the node is in zone b again", func() { w.put(w.node("b")) }, b, nil},
		{"the node has no zone", func() { w.put(w.node("")) }, all, nil},
		{"the node is deleted while in zone a", func() {
			w.put(w.node("a"))
			w.remove(w.node("a"))
		}, all, nil},
		{"the node is created again", func() { w.put(w.node("a")) }, a, nil},
		{"another node changes", func() {
			other := w.node("b")
			other.Name += "-other"
			w.put(other)
			w.remove(other)
		}, a, nil},
	})
}

func TestUnusualObjectsArePrinted(t *testing.T) {
	w := newWalk(t)
	bare := newService("bare", w.name)
	bare.Spec.ClusterIP = corev1.ClusterIPNone
	noPorts := newSlice("no-ports", bare, nil, newEndpoint("10.1.0.1", ""))
	web := newService("web", w.name, servicePort("", 80, 80))
	nilPort := newSlice("nil-port", web, []discoveryv1.EndpointPort{{}}, newEndpoint("10.1.0.2", ""))
	nils := newSlice("nils", web, slicePorts("", 80), discoveryv1.Endpoint{Addresses: []string{"10.1.0.3"}})
	many := newSlice("many", web, slicePorts("", 80))
	for i := range 1000 {
		many.Endpoints = append(many.Endpoints, newEndpoint(fmt.Sprintf("10.3.%d.%d", i/250, i%250+1), ""))
	}
	name := newSlice("a-name", web, slicePorts("", 80))
	name.AddressType = discoveryv1.AddressTypeFQDN
	name.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"www.example.org"}}}
	nobodys := newSlice("nobodys", web, slicePorts("", 80), newEndpoint("10.1.0.4", ""))
	delete(nobodys.Labels, discoveryv1.LabelServiceName)

	bareShown := []string{"bare headless", "  10.1.0.1"}
	webShown := append(slices.Clone(bareShown), "web IPv4 80", "  10.1.0.3 80")
	manyShown := slices.Clone(webShown)
	for _, e := range many.Endpoints {
		manyShown = append(manyShown, "  "+e.Addresses[0]+" 80")
	}
	slices.SortFunc(manyShown[len(bareShown)+1:], compareAddresses)

	w.run(t, []step{
		{"a headless service without ports", func() { w.put(bare) }, []string{"bare headless"}, nil},
		{"a slice without ports", func() { w.put(noPorts) }, bareShown, nil},
		{"a slice with a port without a number", func() { w.put(web, nilPort) }, append(slices.Clone(bareShown), "web IPv4 80!"), nil},
		{"an endpoint with only an address", func() { w.put(nils) }, webShown, nil},
		{"a node without labels", func() { w.put(w.node("")) }, webShown, nil},
		{"a slice of host names", func() { w.put(name) }, webShown, nil},
		{"a slice without a service", func() { w.put(nobodys) }, webShown, nil},
		{"1,000 endpoints in a slice", func() { w.put(many) }, manyShown, nil},
		{"1,001 endpoints, which the API server rejects", func() {
			many.Endpoints = append(many.Endpoints, newEndpoint("10.3.9.9", ""))
			if err := w.tryPut(many); !apierrors.IsInvalid(err) {
				t.Errorf("1,001 endpoints: error %v, want Invalid", err)
			}
		}, manyShown, nil},
	})
}

// compareAddresses compares two endpoint lines by their addresses.
func compareAddresses(a, b string) int {
	address := func(line string) netip.Addr { return netip.MustParseAddr(strings.Fields(line)[0]) }
	return address(a).Compare(address(b))
}

func TestExampleIsPrinted(t *testing.T) {
	const example = "kpng-example"
	t.Parallel()
	server := shared.Get(t)
	n := newTenant(t, server)
	s := startScreen(n, apiserver.Kubeconfig(t, server.Config()), example)
	elsewhere := "elsewhere"
	service := newService(example, example, servicePort("", 6000, 6000))
	service.Spec.Selector = nil
	service.Spec.ClusterIP = corev1.ClusterIPNone
	service.Spec.ExternalIPs = []string{"10.0.0.55", "1000::55"}
	service.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
	v4 := newSlice("v4", service, slicePorts("", 6000), newEndpoint("11.0.2.2", n.name), newEndpoint("11.0.3.2", elsewhere))
	v6 := newSlice("v6", service, slicePorts("", 6000), newEndpoint("1100::202", n.name), newEndpoint("1100::302", elsewhere))
	n.put(service, v4, v6)
	s.expect("kpng-example headless 10.0.0.55 1000::55 6000",
		"  11.0.2.2 6000 local", "  11.0.3.2 6000", "  1100::202 6000 local", "  1100::302 6000")

	stored := n.service(service.Name)
	const endpoint = `{"IPs":{%q:[%q]},%s"Scopes":{"Internal":true,"External":true},"NodeName":%q,"Ready":true,"Serving":true}`
	want := fmt.Sprintf(`{"Service":{"Namespace":%q,"Name":"kpng-example","Type":"ClusterIP","IPs":{"ClusterIPs":{},`+
		`"ExternalIPs":{"V4":["10.0.0.55"],"V6":["1000::55"]},"Headless":true},"Ports":[{"Protocol":1,"Port":6000,"TargetPort":6000}],`+
		`"Labels":{"service.kubernetes.io/service-proxy-name":"kpng-example"},"UID":%q,"Created":%q,"IPFamilies":["IPv4","IPv6"]},"Endpoints":[%s]}`,
		n.name, stored.UID, stored.CreationTimestamp.UTC().Format("2006-01-02T15:04:05Z"), strings.Join([]string{
			fmt.Sprintf(endpoint, "V4", "11.0.2.2", `"Local":true,`, n.name),
			fmt.Sprintf(endpoint, "V4", "11.0.3.2", "", elsewhere),
			fmt.Sprintf(endpoint, "V6", "1100::202", `"Local":true,`, n.name),
			fmt.Sprintf(endpoint, "V6", "1100::302", "", elsewhere),
		}, ","))
	all, _ := s.out.since(0)
	got := all[len(all)-2] // the last line shows s.stamp, so take the line before it
	if diff := cmp.Diff(decode(t, want), decode(t, got)); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
}

func decode(t *testing.T, text string) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	return v
}
