// SPDX-License-Identifier: Apache-2.0

package manifest_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/manifest"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
	"k8s.io/apimachinery/pkg/types"
)

// scoped is a Tx for generated services. It clears fields that no manifest can express.
type scoped struct{ *cluster.Tx }

func (w scoped) SetService(s *api.Service) {
	if s.Type == api.ExternalName {
		s.IPs, s.SourceRanges = api.ServiceIPs{}, nil
	}
	if s.Type != api.LoadBalancer || !s.ExternalTrafficToLocal {
		s.HealthCheckNodePort = 0
	}
	w.Tx.SetService(s)
}

func (w scoped) DeleteService(key types.NamespacedName) { w.Tx.DeleteService(key) }
func (w scoped) SetSlice(s *api.EndpointSlice)          { w.Tx.SetSlice(s) }
func (w scoped) DeleteSlice(key types.NamespacedName)   { w.Tx.DeleteSlice(key) }
func (w scoped) SetNode(n *api.Node)                    { w.Tx.SetNode(n) }
func (w scoped) DeleteNode(name string)                 { w.Tx.DeleteNode(name) }

// readBack writes s to a file, and returns the state that results from reading the file.
func readBack(t *testing.T, s *cluster.Objects, opts manifest.WriteOptions) *cluster.Objects {
	t.Helper()
	var text bytes.Buffer
	if err := manifest.Write(&text, s, opts); err != nil {
		t.Fatal(err)
	}
	name := "state.yaml"
	if opts.JSON {
		name = "state.json"
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	annotation := opts.AllPortsAnnotation
	if annotation == "" {
		annotation = manifest.DefaultAllPortsAnnotation
	}
	state := cluster.New(cluster.Options{})
	err := file.Watch(t.Context(), state, file.Options{Path: path, Once: true, Options: watcher.Options{
		ServiceProxyName: opts.ServiceProxyName,
		KeepLabels:       []string{"app", "tier", "example.com/*"},
		KeepAnnotations:  []string{"example.com/*"},
		KeepSliceLabels:  []string{"tier", "example.com/*"},
		KeepTargets:      true,
		AllPorts:         watcher.AllPortsAnnotated(annotation),
	}})
	if err != nil {
		t.Fatalf("%v, reading\n%s", err, text.Bytes())
	}
	return state.Objects()
}

// contents returns the objects of a state. Trigger times have separate entries, because
// comparisons of EndpointSlices ignore trigger times.
func contents(s *cluster.Objects) map[string]any {
	all := map[string]any{}
	for key, service := range s.Services.All() {
		all["Service "+key.String()] = service
	}
	for key, slice := range s.Slices.All() {
		all["EndpointSlice "+key.String()] = slice
		all["trigger time of "+key.String()] = slice.TriggerTime.UTC().String()
	}
	for name, node := range s.Nodes.All() {
		all["Node "+name] = node
	}
	return all
}

func TestWrittenStateIsReadBack(t *testing.T) {
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 0))
		state := cluster.New(cluster.Options{})
		world := apitest.NewWorld(r, 5, 20)
		state.Update(func(tx *cluster.Tx) {
			world.WriteAll(scoped{tx})
			for range 40 {
				world.Change(scoped{tx})
			}
		})
		opts := manifest.WriteOptions{
			JSON:               seed%2 > 0,
			ServiceProxyName:   []string{"", "example"}[seed/2%2],
			AllPortsAnnotation: []string{"", "example.org/all"}[seed/4%2],
		}
		t.Run(fmt.Sprintf("%+v, seed %d", opts, seed), func(t *testing.T) {
			want := state.Objects()
			if diff := cmp.Diff(contents(want), contents(readBack(t, want, opts))); diff != "" {
				t.Errorf("state (-written +read):\n%s", diff)
			}
		})
	}
}

// everything returns objects that together have a nonzero value in every field.
func everything() (services []*api.Service, slices []*api.EndpointSlice, nodes []*api.Node) {
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	lb := api.NewIPSet(addr("203.0.113.2"), addr("203.0.113.1"), addr("fd02::1"))
	all := api.NewIPSet(addr("10.0.0.1"), addr("fd00::1"), addr("203.0.113.2"), addr("203.0.113.1"), addr("fd02::1"), addr("198.51.100.2"), addr("198.51.100.1"), addr("fd01::1"))
	return []*api.Service{{
			Namespace: "a", Name: "full", Type: api.LoadBalancer, UID: "uid-1", Created: time.Unix(1_700_000_000, 0).UTC(),
			IPs: api.ServiceIPs{
				ClusterIPs:      api.NewIPSet(addr("10.0.0.1"), addr("fd00::1")),
				ExternalIPs:     api.NewIPSet(addr("198.51.100.2"), addr("198.51.100.1"), addr("fd01::1")),
				LoadBalancerIPs: lb,
				ProxiedIPs:      api.NewIPSet(addr("203.0.113.9"), addr("fd02::9")),
			},
			AllPorts: true,
			Ports: []api.PortMapping{
				{Name: "a", Protocol: api.TCP, Port: 80, NodePort: 30080, TargetPort: 8080, AppProtocol: "http"},
				{Name: "b", Protocol: api.SCTP, Port: 80, TargetPortName: "sctp"},
			},
			ExternalTrafficToLocal: true, InternalTrafficToLocal: true, HealthCheckNodePort: 32000,
			LoadBalancerClass: "example.com/lb",
			Labels:            map[string]string{"app": "", "example.com/x": "1"},
			Annotations:       map[string]string{"example.com/y": "ünïcode: \"{[\n"},
			SourceRanges:      []api.SourceRanges{{TargetIPs: all, NodePorts: true, Prefixes: []netip.Prefix{prefix("10.0.0.0/8"), prefix("::/0")}}},
			AffinitySeconds:   1,
			Algorithm:         api.HashConnection,
			ResetConnections:  true,
			IPFamilies:        []api.Family{api.IPv6, api.IPv4},
		}, {
			Namespace: "a", Name: "headless", Type: api.ClusterIP,
			IPs: api.ServiceIPs{Headless: true, ExternalIPs: api.NewIPSet(addr("10.0.0.55"))},
		}}, []*api.EndpointSlice{{
			Namespace: "a", Name: "full-1", ServiceName: "full", Family: api.IPv6, Labels: map[string]string{"example.com/z": "2"},
			TriggerTime: time.Unix(1_700_000_001, 123_000).UTC(),
			Ports:       []api.EndpointPort{{Name: "a", Protocol: api.TCP, Port: 8080, AppProtocol: "http"}, {Name: "b", Protocol: api.SCTP}},
			Endpoints: []api.SliceEndpoint{{
				Addr: addr("fd03::1"), Details: &api.EndpointDetails{
					Hostname: "h", NodeName: "n", Zone: "z",
					Hints:  &api.Hints{ForNodes: []string{"n", "m"}, ForZones: []string{"z", "y"}},
					Target: &types.NamespacedName{Namespace: "a", Name: "pod"},
				},
				Conditions: api.Conditions{Ready: true, Serving: true, Terminating: true}, Weight: 7,
			}, {Addr: addr("fd03::2"), Weight: 7}},
		}, {
			Namespace: "a", Name: "full-2", ServiceName: "full", Family: api.IPv4,
			Endpoints: []api.SliceEndpoint{{Addr: addr("10.0.3.1"), Conditions: api.Conditions{Drain: true}}},
		}, {Namespace: "a", Name: "of-nobody", ServiceName: "nobody", Family: api.IPv4}}, []*api.Node{{
			Name: "n", UID: "uid-2", Labels: map[string]string{"kubernetes.io/os": "linux", "empty": ""}, Deleting: true,
			Addresses: []api.NodeAddress{{Type: "InternalIP", IP: addr("192.0.2.1")}, {Type: "ExternalIP", IP: addr("fd04::1")}},
			PodCIDRs:  []netip.Prefix{prefix("10.1.0.0/24"), prefix("fd05::/64")},
			Taints:    []api.Taint{{Key: "k", Value: "v", Effect: "NoSchedule"}},
		}, {Name: "bare"}}
}

func TestEveryFieldIsWritten(t *testing.T) {
	services, slices, nodes := everything()
	zero := map[string]bool{}
	findZero(reflect.ValueOf([]any{services, slices, nodes}), "", zero)
	for field, isZero := range zero {
		if isZero {
			t.Errorf("the test has no value for %s", field)
		}
	}
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		for _, s := range services {
			tx.SetService(s)
		}
		for _, s := range slices {
			tx.SetSlice(s)
		}
		for _, n := range nodes {
			tx.SetNode(n)
		}
	})
	for _, json := range []bool{false, true} {
		opts := manifest.WriteOptions{JSON: json, ServiceProxyName: "example"}
		if diff := cmp.Diff(contents(state.Objects()), contents(readBack(t, state.Objects(), opts))); diff != "" {
			t.Errorf("%+v (-written +read):\n%s", opts, diff)
		}
	}
}

// findZero records which fields within v are always zero.
func findZero(v reflect.Value, field string, zero map[string]bool) {
	if field != "" {
		isZero, seen := zero[field]
		zero[field] = v.IsZero() && (isZero || !seen)
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			findZero(v.Elem(), "", zero)
		}
	case reflect.Slice:
		for i := range v.Len() {
			findZero(v.Index(i), "", zero)
		}
	case reflect.Struct:
		if v.Type().PkgPath() != reflect.TypeFor[api.Service]().PkgPath() {
			return
		}
		for i := range v.NumField() {
			findZero(v.Field(i), v.Type().Name()+"."+v.Type().Field(i).Name, zero)
		}
	}
}

func TestControlCharactersAreReadBack(t *testing.T) {
	for _, text := range []string{"\x00\x1b[31m", "\x7f", "\u0085\u009b", "\ufeff\ufffe\uffff", "\U0001f3f4\U000e0067\U000e007f", "a\r\nb\u2028\u202e"} {
		state := cluster.New(cluster.Options{})
		state.Update(func(tx *cluster.Tx) {
			tx.SetService(&api.Service{
				Namespace: "a", Name: "b", Type: api.ClusterIP, Annotations: map[string]string{"example.com/note": text},
				IPs:   api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.0.0.1"))},
				Ports: []api.PortMapping{{Port: 80, TargetPort: 80, Protocol: api.TCP}},
			})
		})
		want := state.Objects()
		for _, json := range []bool{false, true} {
			if diff := cmp.Diff(contents(want), contents(readBack(t, want, manifest.WriteOptions{JSON: json}))); diff != "" {
				t.Errorf("state with %q, JSON %t (-written +read):\n%s", text, json, diff)
			}
		}
	}
}

func TestEmptyStateIsReadBack(t *testing.T) {
	for _, json := range []bool{false, true} {
		if got := contents(readBack(t, cluster.New(cluster.Options{}).Objects(), manifest.WriteOptions{JSON: json})); len(got) > 0 {
			t.Errorf("read %v", got)
		}
	}
}

func TestInexpressibleObjectIsAnError(t *testing.T) {
	for _, test := range []struct {
		name    string
		service api.Service
		want    string
	}{
		{"an unknown protocol", api.Service{Type: api.ClusterIP, Ports: []api.PortMapping{{Port: 1, TargetPort: 1}}}, "protocol"},
		{"a filter of other addresses", api.Service{Type: api.ClusterIP, SourceRanges: []api.SourceRanges{{}}}, "different object"},
		{"a service with the annotation that is not an all-ports service",
			api.Service{Type: api.ClusterIP, Annotations: map[string]string{manifest.DefaultAllPortsAnnotation: "true"}}, "different object"},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.service.Namespace, test.service.Name = "ns", "svc"
			state := cluster.New(cluster.Options{})
			state.Update(func(tx *cluster.Tx) { tx.SetService(&test.service) })
			err := manifest.Write(&bytes.Buffer{}, state.Objects(), manifest.WriteOptions{})
			if err == nil || !strings.Contains(err.Error(), "Service ns/svc") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v does not contain the service and %q", err, test.want)
			}
		})
	}
}
