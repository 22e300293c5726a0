// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bufio"
	"bytes"
	"context"
	"math"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/kubetest"
	"github.com/kpng-project/kpng/watcher"
	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/randfill"
)

// decoderOptions make decoders keep different parts of objects.
var decoderOptions = []watcher.Options{{}, {
	ServiceProxyName: "x", ServiceNameLabel: "y", KeepLabels: []string{"a*"}, KeepAnnotations: []string{"a", "*/*"},
	KeepSliceLabels: []string{"*"}, KeepTargets: true,
}, {
	AllPorts: watcher.AllPortsAnnotated("a"),
	Skip:     func(s *corev1.Service) bool { return len(s.Finalizers) > 2 || len(s.OwnerReferences) > 2 },
}}

func TestDecodersOfTypicalObjects(t *testing.T) {
	service, slice, node := benchService(1), benchSlice(1, 3, 2), &corev1.Node{}
	service.Annotations = map[string]string{"a": "true", "x/y": "z", "b": "dropped", "kpng.io/algorithm": "hash-client"}
	service.Labels["app2"] = "x"
	service.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "x"}}
	service.Spec.LoadBalancerClass = ptr.To("class")
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	slice.Labels["y"], slice.Labels[discoveryv1.LabelManagedBy] = "web", managedByController
	slice.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05Z", "kpng.io/weight": "7"}
	slice.Endpoints[0].Hostname = ptr.To("host")
	slice.Endpoints[1].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "zone-1"}}}
	node.Name, node.Labels = "node-1", map[string]string{corev1.LabelTopologyZone: "zone-1"}
	node.Spec.PodCIDRs = []string{"10.1.0.0/16"}
	node.Spec.Taints = []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoExecute}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.2"}}
	node.Status.Images = []corev1.ContainerImage{{Names: []string{"image"}}}
	compareAll(t, service, []*discoveryv1.EndpointSlice{slice, benchSlice(2, 1, 0)}, node)
}

// FuzzDecoders fills objects with values from the fuzzer's bytes, and passes them to
// compareAll.
func FuzzDecoders(f *testing.F) {
	f.Add([]byte("some bytes to begin with"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		filler := randfill.NewFromGoFuzz(data).NilChance(0.3).NumElements(0, 4).Funcs(
			func(s *string, c randfill.Continue) {
				typical := []string{
					"", "a", "x", "y", "a/b", "10.0.0.1", "::1", "10.0.0.0/8", watcher.LabelServiceProxyName, corev1.IsHeadlessService,
					discoveryv1.LabelServiceName, discoveryv1.LabelManagedBy, corev1.EndpointsLastChangeTriggerTime,
				}
				if *s = c.String(8); c.Intn(3) > 0 {
					*s = typical[c.Intn(len(typical))]
				}
			},
			func(a *discoveryv1.AddressType, c randfill.Continue) {
				*a = []discoveryv1.AddressType{"IPv4", "IPv6", "FQDN", ""}[c.Intn(4)]
			},
			func(r *runtime.RawExtension, c randfill.Continue) {},
		)
		service, slices, node := &corev1.Service{}, []*discoveryv1.EndpointSlice{{}, {}}, &corev1.Node{}
		filler.Fill(service)
		for _, s := range slices {
			filler.Fill(s)
		}
		filler.Fill(node)
		compareAll(t, service, slices, node)
	})
}

// compareAll encodes objects in protobuf, with unknown fields. It checks that the proxy
// gets the same values from decoders and from the API's own decoding.
func compareAll(t *testing.T, service *corev1.Service, slices []*discoveryv1.EndpointSlice, node *corev1.Node) {
	t.Helper()
	for _, o := range decoderOptions {
		c, err := watcher.New(o)
		if err != nil {
			t.Fatal(err)
		}
		d := newDecoders(o)
		compareDecoded(t, service, d.service(), func(s *corev1.Service) any {
			out, problems := c.Service(s)
			return []any{c.WantsService(s), watcher.Selectorless(s), out, problems}
		})
		slice := d.slice()
		for _, s := range slices {
			compareDecoded(t, s, slice, func(s *discoveryv1.EndpointSlice) any {
				out, problems := c.EndpointSlice(s)
				return []any{c.WantsSlice(s), s.Labels[discoveryv1.LabelManagedBy], out, problems}
			})
		}
		compareDecoded(t, node, d.node(), func(n *corev1.Node) any {
			out, problems := c.Node(n)
			return []any{out, problems}
		})
	}
}

// compareDecoded encodes o, and decodes the message with decode and with the API's own
// decoder. For both decoded objects, convert must return the same result.
func compareDecoded[O any, P interface {
	*O
	metav1.Object
	Marshal() ([]byte, error)
	Unmarshal([]byte) error
}](t *testing.T, o P, decode decoder[P], convert func(P) any) {
	t.Helper()
	message, err := o.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	message = protowire.AppendTag(message, 1000, protowire.BytesType)
	message = protowire.AppendString(message, "an unknown field")
	whole := P(new(O))
	if err := whole.Unmarshal(message); err != nil {
		t.Fatal(err)
	}
	got, err := decode(message)
	if err != nil {
		t.Fatal(err)
	}
	if got.GetResourceVersion() != whole.GetResourceVersion() || got.GetNamespace() != whole.GetNamespace() || got.GetName() != whole.GetName() {
		t.Errorf("decoded %s/%s %s, want %s/%s %s", got.GetNamespace(), got.GetName(), got.GetResourceVersion(), whole.GetNamespace(), whole.GetName(), whole.GetResourceVersion())
	}
	if diff := cmp.Diff(convert(whole), convert(got)); diff != "" {
		t.Errorf("decoded %T (-whole +parts):\n%s", o, diff)
	}
	for n := range message { // an incomplete message must not cause a panic
		if n < 300 || n%97 == 0 {
			_, _ = decode(message[:n])
		}
	}
}

func TestReadList(t *testing.T) {
	list := &discoveryv1.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: "more"}}
	for i := range 3 {
		list.Items = append(list.Items, *benchSlice(i, 3, 0))
	}
	all := kubetest.Encoded(kubetest.KindOf(endpointSlices, "List"), kubetest.Marshalled(list))
	var meta metav1.ListMeta
	var names []string
	decode := newDecoders(watcher.Options{}).slice()
	read := func(message []byte) error {
		meta, names = metav1.ListMeta{}, nil
		return readList(bufio.NewReader(iotest.OneByteReader(bytes.NewReader(message))), "EndpointSlice", &meta, func(object []byte) {
			s, err := decode(object)
			if err != nil {
				t.Error(err)
			}
			names = append(names, s.Name)
		})
	}
	if err := read(all); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(list.ListMeta, meta); diff != "" {
		t.Errorf("metadata (-want +got):\n%s", diff)
	}
	if want := []string{list.Items[0].Name, list.Items[1].Name, list.Items[2].Name}; !slices.Equal(names, want) {
		t.Errorf("read %q, want %q", names, want)
	}
	for n := range all {
		// The last two fields have two bytes each. The message is valid without the last field,
		// and without both fields.
		if err := read(all[:n]); err == nil && n != len(all)-4 && n != len(all)-2 {
			t.Errorf("no error for the first %d of %d bytes", n, len(all))
		}
	}
	length := []byte{2<<3 | byte(delimited), 0xff, 0xff, 0xff, 0xff, 0x7f}
	huge := slices.Concat(kubetest.Encoded(kubetest.KindOf(endpointSlices, "List"), nil), length, length)
	if err := read(huge); err == nil || !strings.Contains(err.Error(), "the limit is") {
		t.Errorf("error %v for an object of 32 GiB", err)
	}
	overflow := slices.Concat(kubetest.Encoded(kubetest.KindOf(endpointSlices, "List"), nil), protowire.AppendVarint([]byte{2<<3 | byte(delimited)}, math.MaxUint64-20))
	if err := read(overflow); err == nil {
		t.Error("no error for a list of 2^64 bytes")
	}
}

func TestListOfUnexpectedKindIsRefused(t *testing.T) {
	status := &metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonTooManyRequests, Code: http.StatusTooManyRequests}
	kind := schema.GroupVersionKind{Version: "v1", Kind: "Status"}
	var meta metav1.ListMeta
	add := func([]byte) { t.Error("an object was found") }
	err := readList(bufio.NewReader(bytes.NewReader(kubetest.Encoded(kind, kubetest.Marshalled(status)))), "EndpointSlice", &meta, add)
	if !apierrors.IsTooManyRequests(err) {
		t.Errorf("error %v for a Status", err)
	}
	err = readList(bufio.NewReader(bytes.NewReader(kubetest.Encoded(kubetest.KindOf(services, "List"), []byte{}))), "EndpointSlice", &meta, add)
	if err == nil || !strings.Contains(err.Error(), "ServiceList") {
		t.Errorf("error %v for a list of services", err)
	}
}

// An API server sends services that cannot be decoded, in a list and in events.
func TestObjectsThatCannotBeDecodedAreIgnored(t *testing.T) {
	message := func(name, version string) []byte {
		s := benchService(1)
		s.Name, s.ResourceVersion = name, version
		return kubetest.Marshalled(s)
	}
	broken := func(name, version string) []byte {
		m := message(name, version)
		return append(m[:len(m)-1], 0x80) // the last field is incomplete
	}
	list := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), kubetest.Marshalled(&metav1.ListMeta{ResourceVersion: "10"}))
	for _, item := range [][]byte{message("a", "1"), broken("b", "2"), message("c", "3")} {
		list = protowire.AppendBytes(protowire.AppendTag(list, 2, protowire.BytesType), item)
	}
	var events []byte
	for _, event := range []struct {
		kind   string
		object []byte
	}{
		{"ADDED", []byte{0x80}}, {"MODIFIED", broken("a", "11")}, {"DELETED", broken("c", "12")}, {"ADDED", message("d", "13")},
	} {
		raw := kubetest.Encoded(kubetest.KindOf(services, ""), event.object)
		events = append(events, kubetest.Framed(kubetest.Marshalled(&metav1.WatchEvent{Type: event.kind, Object: runtime.RawExtension{Raw: raw}}))...)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resource := path.Base(r.URL.Path)
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		switch {
		case !r.URL.Query().Has("watch"):
			w.Write(kubetest.Encoded(kubetest.KindOf(resource, "List"), append([]byte{}, map[string][]byte{services: list}[resource]...)))
		default:
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
			if resource == services && r.URL.Query().Get("resourceVersion") == "10" {
				w.Write(events)
			}
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	}))
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	state := cluster.New(cluster.Options{})
	ended := make(chan error, 1)
	go func() { ended <- Watch(ctx, state, Options{Config: &rest.Config{Host: server.URL}}) }()
	names := func() (all []string) {
		for key := range state.Objects().Services.All() {
			all = append(all, key.Name)
		}
		return all
	}
	for deadline := time.Now().Add(time.Minute); !slices.Equal(names(), []string{"a", "d"}); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("services %q, want a and d", names())
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The first connection breaks before the server answers.
func TestListIsRepeatedAfterABrokenConnection(t *testing.T) {
	var requests atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) == 1 {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		w.Write(kubetest.Encoded(kubetest.KindOf(nodes, "List"), []byte{}))
	}))
	defer server.Close()
	converter, err := watcher.New(watcher.Options{})
	if err != nil {
		t.Fatal(err)
	}
	w := &watch{converter: converter}
	s := w.newStores(nil, 0)
	c, err := newClient(t.Context(), &rest.Config{Host: server.URL}, s.byKind())
	if err != nil {
		t.Fatal(err)
	}
	w.client = c
	defer c.connections.CloseAll()
	if _, err := w.nodeSource().list(t.Context(), &metav1.ListOptions{}, c.decoder, s.nodes); err != nil || requests.Load() != 2 {
		t.Errorf("error %v after %d requests", err, requests.Load())
	}
}

func TestLoggedNamesAreOneLine(t *testing.T) {
	for want, key := range map[string][2]string{"n": {"", "n"}, "ns/n": {"ns", "n"}, `ns/n\u000aE1126 forged\u001b`: {"ns", "n\nE1126 forged\x1b"}} {
		if got := objectName(key[0], key[1]); got != want {
			t.Errorf("name %q, want %q", got, want)
		}
	}
}
