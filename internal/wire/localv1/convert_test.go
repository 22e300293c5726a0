// SPDX-License-Identifier: Apache-2.0

package localv1_test

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/protobuf/proto"
)

var equateAddrs = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

// roundTrip marshals m and returns the unmarshalled message.
func roundTrip[M proto.Message](t *testing.T, m M) M {
	t.Helper()
	sent := localv1.Marshal(m)
	arrived := m.ProtoReflect().New().Interface().(M)
	if err := proto.Unmarshal(sent, arrived); err != nil {
		t.Fatal(err)
	}
	if again := localv1.Marshal(arrived); !bytes.Equal(sent, again) {
		t.Errorf("marshalled twice:\n%x\n%x", sent, again)
	}
	return arrived
}

// FuzzConversions checks that values stay the same after conversion to messages and back.
func FuzzConversions(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 0))
		view := apitest.Random[api.View](r)
		if view.Service == nil {
			view.Service = new(api.Service)
		}
		got, err := roundTrip(t, localv1.FromView(&view)).ToView()
		if err != nil {
			t.Fatal(err)
		}
		for _, list := range []struct {
			from     []api.Endpoint
			to       *[]api.Endpoint
			draining bool
		}{{view.Endpoints, &got.Endpoints, false}, {view.Draining, &got.Draining, true}} {
			for i := range list.from {
				e, draining, err := roundTrip(t, localv1.FromEndpoint(&list.from[i], list.draining)).ToEndpoint()
				if err != nil {
					t.Fatal(err)
				}
				if draining != list.draining {
					t.Errorf("draining is %t", draining)
				}
				*list.to = append(*list.to, e)
			}
		}
		if !view.Equal(got) {
			t.Errorf("the view differs (- sent, + arrived):\n%s", cmp.Diff(&view, got, equateAddrs))
		}

		service, err := roundTrip(t, localv1.FromService(view.Service)).ToService()
		if err != nil {
			t.Fatal(err)
		}
		if !view.Service.Equal(service) {
			t.Errorf("the service differs (- sent, + arrived):\n%s", cmp.Diff(view.Service, service, equateAddrs))
		}

		node := apitest.Random[api.Node](r)
		arrived, err := roundTrip(t, localv1.FromNode(&node)).ToNode()
		if err != nil {
			t.Fatal(err)
		}
		if !node.Equal(arrived) {
			t.Errorf("the node differs (- sent, + arrived):\n%s", cmp.Diff(&node, arrived, equateAddrs))
		}
	})
}

// FuzzUnmarshal converts messages with arbitrary content. The conversion may return an
// error, but must not panic. The resulting values must stay the same after encoding and
// decoding.
func FuzzUnmarshal(f *testing.F) {
	for seed := range uint64(5) {
		r := rand.New(rand.NewPCG(seed, 1))
		service, endpoint, node := apitest.Random[api.Service](r), apitest.Random[api.Endpoint](r), apitest.Random[api.Node](r)
		f.Add(localv1.Marshal(localv1.FromService(&service)))
		f.Add(localv1.Marshal(localv1.FromEndpoint(&endpoint, true)))
		f.Add(localv1.Marshal(localv1.FromNode(&node)))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var service localv1.Service
		if proto.Unmarshal(b, &service) == nil {
			if v, err := service.ToView(); err == nil {
				if again, err := roundTrip(t, localv1.FromView(v)).ToView(); err != nil || !again.Equal(v) {
					t.Errorf("error %v (- received, + sent on):\n%s", err, cmp.Diff(v, again, equateAddrs))
				}
			}
		}
		var endpoint localv1.Endpoint
		if proto.Unmarshal(b, &endpoint) == nil {
			if e, draining, err := endpoint.ToEndpoint(); err == nil {
				if again, _, err := roundTrip(t, localv1.FromEndpoint(&e, draining)).ToEndpoint(); err != nil || !again.Equal(&e) {
					t.Errorf("error %v (- received, + sent on):\n%s", err, cmp.Diff(e, again, equateAddrs))
				}
			}
		}
		var node localv1.Node
		if proto.Unmarshal(b, &node) == nil {
			if n, err := node.ToNode(); err == nil {
				if again, err := roundTrip(t, localv1.FromNode(n)).ToNode(); err != nil || !again.Equal(n) {
					t.Errorf("error %v (- received, + sent on):\n%s", err, cmp.Diff(n, again, equateAddrs))
				}
			}
		}
	})
}

func TestFieldsThatOldServersOmit(t *testing.T) {
	e, draining, err := (&localv1.Endpoint{IPs: &localv1.IPSet{V4: []string{"10.0.0.1"}}}).ToEndpoint()
	if err != nil || draining || !e.Ready || !e.Serving || e.Terminating {
		t.Errorf("an endpoint without conditions is %+v, draining %t, error %v; want it ready and serving", e, draining, err)
	}
}

func TestInvalidMessagesAreErrors(t *testing.T) {
	ips := func(v4, v6 string) *localv1.IPSet { return &localv1.IPSet{V4: []string{v4}, V6: []string{v6}} }
	for _, test := range []struct {
		name string
		do   func() error
		want string
	}{
		{"an invalid address", func() error {
			_, err := (&localv1.Service{Namespace: "ns", Name: "s", IPs: &localv1.ServiceIPs{ClusterIPs: ips("x", "::1")}}).ToService()
			return err
		}, "service ns/s: "},
		{"an address of the other family", func() error {
			_, err := (&localv1.Service{IPs: &localv1.ServiceIPs{ExternalIPs: ips("::1", "::1")}}).ToService()
			return err
		}, "::1 is not an IPv4 address"},
		{"an invalid source range", func() error {
			_, err := (&localv1.Service{IPFilters: []*localv1.IPFilter{{SourceRanges: []string{"10.0.0.1"}}}}).ToService()
			return err
		}, `"10.0.0.1"`},
		{"a lost claim without an address", func() error {
			_, err := (&localv1.Service{Lost: []*localv1.LostClaim{{IP: "x"}}}).ToView()
			return err
		}, "lost claim"},
		{"an endpoint without an address", func() error {
			_, _, err := (&localv1.Endpoint{}).ToEndpoint()
			return err
		}, "0 addresses"},
		{"a node with an invalid CIDR", func() error {
			_, err := (&localv1.Node{Name: "n", PodCIDRs: []string{"x"}}).ToNode()
			return err
		}, "node n: pod CIDR"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if err := test.do(); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestInvalidUTF8IsRepaired(t *testing.T) {
	const bad, good = "a\xff", "a\uFFFD"
	newService := func(text string) *api.Service {
		return &api.Service{
			Name:        "s",
			Annotations: map[string]string{text: text, "fine": "fine"},
			Ports:       []api.PortMapping{{Name: "p", AppProtocol: text}},
		}
	}
	service := newService(bad)
	got, err := roundTrip(t, localv1.FromService(service)).ToService()
	if err != nil {
		t.Fatal(err)
	}
	if want := newService(good); !got.Equal(want) {
		t.Error(cmp.Diff(want, got, equateAddrs))
	}
	if want := newService(bad); !service.Equal(want) {
		t.Errorf("the sent message was modified:\n%s", cmp.Diff(want, service, equateAddrs))
	}
	if b := localv1.Marshal(&localv1.IPSet{V4: []string{"ok", bad}}); !slices.Equal(b[len(b)-4:], []byte(good)) {
		t.Errorf("the list was decoded as %q", b)
	}
}

// TestRandomFillsEverything checks that each field is set by at least one seed of
// FuzzConversions.
func TestRandomFillsEverything(t *testing.T) {
	never := map[string]bool{}
	for seed := range uint64(200) {
		v := apitest.Random[api.View](rand.New(rand.NewPCG(seed, 0)))
		zeroFields(reflect.ValueOf(v), "", func(path string, zero bool) {
			if before, seen := never[path]; !seen || before {
				never[path] = zero
			}
		})
	}
	for path, n := range never {
		if n {
			t.Errorf("%s is never set", path)
		}
	}
}

func zeroFields(v reflect.Value, path string, visit func(path string, zero bool)) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type().PkgPath() != reflect.TypeFor[api.Service]().PkgPath() {
			visit(path, v.IsZero())
			return
		}
		for i := range v.NumField() {
			zeroFields(v.Field(i), path+"."+v.Type().Field(i).Name, visit)
		}
	case reflect.Pointer:
		if !v.IsNil() {
			zeroFields(v.Elem(), path, visit)
		}
	case reflect.Slice:
		for i := range v.Len() {
			zeroFields(v.Index(i), path+"[]", visit)
		}
	default:
		visit(path, v.IsZero())
	}
}
