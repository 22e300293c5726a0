// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/randfill"
)

// FuzzDecoders fills objects with values from the fuzzer's bytes, encodes them in protobuf
// with unknown fields, and compares what the proxy gets from decoders and from the API's
// own decoding.
func FuzzDecoders(f *testing.F) {
	f.Add([]byte("some bytes to begin with"))
	f.Add([]byte{})
	options := []watcher.Options{{}, {
		ServiceProxyName: "x", ServiceNameLabel: "y", KeepLabels: []string{"a*"}, KeepAnnotations: []string{"a", "*/*"},
		KeepSliceLabels: []string{"*"}, KeepTargets: true,
	}, {
		AllPorts: watcher.AllPortsAnnotated("a"),
		Skip:     func(s *corev1.Service) bool { return len(s.Finalizers) > 2 || len(s.OwnerReferences) > 2 },
	}}
	f.Fuzz(func(t *testing.T, data []byte) {
		filler := randfill.NewFromGoFuzz(data).NilChance(0.3).NumElements(0, 4).Funcs(
			func(s *string, c randfill.Continue) {
				typical := []string{"", "a", "x", "a/b", "10.0.0.1", "::1", "10.0.0.0/8", watcher.LabelServiceProxyName, watcher.LabelHeadless, discoveryv1.LabelServiceName, corev1.EndpointsLastChangeTriggerTime}
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
		for _, o := range options {
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
	})
}

// compareDecoded encodes o, and compares the result of convert for the object that decode
// returns with the result for the object that the API's own decoder returns.
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
	for n := range message { // a part of a message must not cause a panic
		if n < 300 || n%97 == 0 {
			_, _ = decode(message[:n])
		}
	}
}

// encoded returns an object in Kubernetes' content type protobuf.
func encoded(t testing.TB, kind string, raw []byte, err error) []byte {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	message, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: kind}, Raw: raw}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte(magic), message...)
}

func TestReadList(t *testing.T) {
	list := &discoveryv1.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: "more"}}
	for i := range 3 {
		list.Items = append(list.Items, *benchSlice(i, 3, 0))
	}
	raw, err := list.Marshal()
	all := encoded(t, "EndpointSliceList", raw, err)
	var meta metav1.ListMeta
	var names []string
	decode := newDecoders(watcher.Options{}).slice()
	read := func(message []byte) error {
		meta, names = metav1.ListMeta{}, nil
		return readList(bufio.NewReader(iotest.OneByteReader(bytes.NewReader(message))), &meta, func(object []byte) {
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
		// The list ends with an optional field of four bytes.
		if err := read(all[:n]); err == nil && n != len(all)-4 && n != len(all)-2 {
			t.Errorf("no error for the first %d of %d bytes", n, len(all))
		}
	}
	huge := append([]byte(magic), 2<<3|byte(delimited), 0xff, 0xff, 0xff, 0xff, 0x7f, 2<<3|byte(delimited), 0xff, 0xff, 0xff, 0xff, 0x7f)
	if err := read(huge); err == nil || !strings.Contains(err.Error(), "the limit is") {
		t.Errorf("error %v for an object of 32 GiB", err)
	}
}

// An API server sends services that cannot be decoded: one in a list and one in an event.
func TestObjectsThatCannotBeDecodedAreIgnored(t *testing.T) {
	wire := func(name string) []byte {
		s := benchService(1)
		s.Name = name
		message, err := s.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		return message
	}
	var list []byte // of the type ServiceList
	broken := wire("broken")
	broken = append(broken[:len(broken)-1], 0x80) // the last field has no end
	for _, item := range [][]byte{wire("a"), broken, wire("b")} {
		list = protowire.AppendBytes(protowire.AppendTag(list, 2, protowire.BytesType), item)
	}
	var events []byte
	for _, object := range [][]byte{broken, wire("c")} {
		event := &metav1.WatchEvent{Type: "ADDED", Object: runtime.RawExtension{Raw: encoded(t, "Service", object, nil)}}
		message, err := event.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		events = append(binary.BigEndian.AppendUint32(events, uint32(len(message))), message...)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resource := path.Base(r.URL.Path)
		switch {
		case !r.URL.Query().Has("watch"):
			kinds := map[string]string{services: "ServiceList", endpointSlices: "EndpointSliceList", nodes: "NodeList"}
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
			w.Write(encoded(t, kinds[resource], map[string][]byte{services: list, endpointSlices: {}, nodes: {}}[resource], nil))
		case r.URL.Query().Has("sendInitialEvents"):
			w.WriteHeader(http.StatusBadRequest) // no streaming lists
		default:
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
			if resource == services {
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
		for key := range state.Snapshot().Services.All() {
			all = append(all, key.Name)
		}
		return all
	}
	for deadline := time.Now().Add(time.Minute); !slices.Equal(names(), []string{"a", "b", "c"}); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("services %q, want a, b and c", names())
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
