// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/elements"
	"k8s.io/apimachinery/pkg/types"
)

// sliceOf returns a slice with a number of endpoints.
func sliceOf(name, service string, endpoints int) *api.EndpointSlice {
	s := slice(name, service)
	for i := range endpoints {
		s.Endpoints = append(s.Endpoints, api.SliceEndpoint{Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(i)})})
	}
	return s
}

// served returns the joined states in the form "service [ports] slice=endpoints", and the
// refused services in the form "refused service".
func served(state *cluster.State) []string {
	list := []string{}
	snapshot := state.Snapshot()
	for key, s := range snapshot.States.All() {
		line := key.Name
		if s.Service != nil {
			var ports []int32
			for _, p := range s.Service.Ports {
				ports = append(ports, p.Port)
			}
			line += fmt.Sprint(" ", ports)
		}
		for _, slice := range s.Slices {
			line += fmt.Sprintf(" %s=%d", slice.Name, len(slice.Endpoints))
		}
		list = append(list, line)
	}
	for key := range snapshot.Refused.All() {
		list = append(list, "refused "+key.Name)
	}
	return list
}

// In each step, a port costs one element for its frontend, and one for each slice and
// endpoint.
func TestTooLargeServiceKeepsItsLastAcceptedVersion(t *testing.T) {
	a := func(ports ...int32) *api.Service { return service("a", 1, "10.0.0.1", ports...) }
	recreated := with(a(1, 2, 3, 4, 5), func(s *api.Service) { s.UID = "other" })
	setService := func(s *api.Service) func(*cluster.Tx) {
		return func(tx *cluster.Tx) { tx.SetService(s) }
	}
	setSlice := func(name string, endpoints int) func(*cluster.Tx) {
		return func(tx *cluster.Tx) { tx.SetSlice(sliceOf(name, "a", endpoints)) }
	}
	steps := []struct {
		name  string
		write func(tx *cluster.Tx)
		want  []string
	}{
		{"a service that never was small enough is absent, and others are served",
			func(tx *cluster.Tx) {
				tx.SetService(service("a", 1, "10.0.0.1", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))
				tx.SetService(service("b", 1, "10.0.0.2", 1))
			},
			[]string{"b [1]", "refused a"}},
		{"its slices wait for it",
			setSlice("a-1", 1),
			[]string{"a a-1=1", "b [1]", "refused a"}},
		{"a service that becomes small enough is served",
			setService(a(1, 2)),
			[]string{"a [1 2] a-1=1", "b [1]"}},
		{"ports too many are refused, and the last accepted version stays",
			setService(a(1, 2, 3, 4, 5)),
			[]string{"a [1 2] a-1=1", "b [1]", "refused a"}},
		{"the last accepted version gets the present slices",
			setSlice("a-1", 3),
			[]string{"a [1 2] a-1=3", "b [1]", "refused a"}},
		{"and as many of their endpoints as fit",
			setSlice("a-2", 3),
			[]string{"a [1 2] a-1=3", "b [1]", "refused a"}},
		{"a listing of services that still has the service changes nothing",
			func(tx *cluster.Tx) {
				tx.ReplaceServices(slices.Values([]*api.Service{service("b", 1, "10.0.0.2", 1), a(1, 2, 3, 4, 5)}))
			},
			[]string{"a [1 2] a-1=3", "b [1]", "refused a"}},
		{"an update of several objects counts as a whole",
			func(tx *cluster.Tx) {
				tx.DeleteSlice(key("a-2"))
				tx.SetService(a(1))
				tx.SetSlice(sliceOf("a-1", "a", 1))
				tx.SetSlice(sliceOf("a-2", "a", 20))
			},
			[]string{"a [1] a-1=1 a-2=7", "b [1]", "refused a"}},
		{"and the objects of a refused update count for the next one",
			func(tx *cluster.Tx) { tx.SetSlice(sliceOf("a-2", "a", 2)) },
			[]string{"a [1] a-1=1 a-2=2", "b [1]"}},
		{"the state before an update stays, also if a part of the update is small enough",
			func(tx *cluster.Tx) {
				tx.SetSlice(sliceOf("a-1", "a", 3))
				tx.SetSlice(sliceOf("a-2", "a", 3))
				tx.SetService(a(1, 2, 3))
			},
			[]string{"a [1] a-1=3 a-2=3", "b [1]", "refused a"}},
		{"a smaller service is accepted",
			setService(a(1)),
			[]string{"a [1] a-1=3 a-2=3", "b [1]"}},
		{"of too many endpoints, the first ones are used",
			setSlice("a-3", 5),
			[]string{"a [1] a-1=3 a-2=3 a-3=1", "b [1]", "refused a"}},
		{"and all of them when others end",
			func(tx *cluster.Tx) { tx.DeleteSlice(key("a-1")) },
			[]string{"a [1] a-2=3 a-3=5", "b [1]"}},
		{"a new version of the same size is accepted",
			func(tx *cluster.Tx) { tx.SetSlice(sliceOf("a-1", "a", 3)); tx.SetService(a(9)) },
			[]string{"a [9] a-1=3 a-2=3 a-3=1", "b [1]", "refused a"}},
		{"a slice without room for an endpoint is left out",
			func(tx *cluster.Tx) { tx.DeleteSlice(key("a-1")); tx.SetSlice(sliceOf("a-2", "a", 8)) },
			[]string{"a [9] a-2=8", "b [1]", "refused a"}},
		{"and comes back",
			setSlice("a-2", 3),
			[]string{"a [9] a-2=3 a-3=5", "b [1]"}},
		{"a new object of the same name does not get the state of the old one",
			setService(recreated),
			[]string{"a a-2=3 a-3=5", "b [1]", "refused a"}},
		{"a listing without the refused service deletes it",
			func(tx *cluster.Tx) {
				tx.ReplaceServices(slices.Values([]*api.Service{service("b", 1, "10.0.0.2", 1)}))
			},
			[]string{"a a-2=3 a-3=5", "b [1]"}},
	}
	state := cluster.New(cluster.Options{Resumable: true, MaxElements: 11})
	state.SetSynced()
	for _, step := range steps {
		state.Update(step.write)
		if diff := gocmp.Diff(step.want, served(state)); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", step.name, diff)
		}
		compareObjects(t, step.name, state)
	}
}

// compareObjects fails the test if the separate objects differ from those of the joined
// states.
func compareObjects(t *testing.T, step string, state *cluster.State) {
	t.Helper()
	var want, got []string
	objects := state.Objects()
	for key, s := range objects.States.All() {
		if s.Service != nil {
			want = append(want, fmt.Sprint(key, " ", len(s.Service.Ports)))
		}
		for _, slice := range s.Slices {
			want = append(want, fmt.Sprint(slice.Key(), " ", len(slice.Endpoints)))
		}
	}
	for key, s := range objects.Services.All() {
		got = append(got, fmt.Sprint(key, " ", len(s.Ports)))
	}
	for key, s := range objects.Slices.All() {
		got = append(got, fmt.Sprint(key, " ", len(s.Endpoints)))
	}
	less := cmpopts.SortSlices(func(a, b string) bool { return a < b })
	if diff := gocmp.Diff(want, got, less); diff != "" {
		t.Fatalf("%s: objects (-joined states +objects):\n%s", step, diff)
	}
}

// Until the state is synced, no version of a Service is accepted, so that the result does
// not depend on the order of the objects.
func TestOrderOfListingDoesNotMatter(t *testing.T) {
	small, large := service("a", 1, "10.0.0.1", 1), service("a", 1, "10.0.0.1", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
	setService := func(s *api.Service) func(tx *cluster.Tx) {
		return func(tx *cluster.Tx) { tx.SetService(s) }
	}
	first := func(tx *cluster.Tx) { tx.SetSlice(sliceOf("a-1", "a", 3)) }
	second := func(tx *cluster.Tx) { tx.SetSlice(sliceOf("a-2", "a", 20)) }
	for _, test := range []struct {
		order []func(tx *cluster.Tx)
		want  string
	}{
		{[]func(tx *cluster.Tx){setService(small), first, second}, "a [1] a-1=3 a-2=5"},
		{[]func(tx *cluster.Tx){second, setService(small), first}, "a [1] a-1=3 a-2=5"},
		{[]func(tx *cluster.Tx){first, setService(small), setService(large), second}, "a a-1=3 a-2=20"},
	} {
		state := cluster.New(cluster.Options{Resumable: true, MaxElements: 11})
		for _, write := range test.order {
			state.Update(write)
		}
		state.SetSynced()
		if diff := gocmp.Diff([]string{test.want, "refused a"}, served(state)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		compareObjects(t, test.want, state)
	}
}

// A slice of a refused service may move to another service.
func TestSliceMovesAwayFromRefusedService(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true, MaxElements: 11})
	state.SetSynced()
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a", 1, "10.0.0.1", 1))
		tx.SetService(service("b", 1, "10.0.0.2", 1))
		tx.SetSlice(sliceOf("one", "a", 3))
		tx.SetSlice(sliceOf("two", "a", 3))
	})
	state.Update(func(tx *cluster.Tx) { tx.SetSlice(sliceOf("three", "a", 20)) })
	state.Update(func(tx *cluster.Tx) { tx.SetSlice(sliceOf("two", "b", 3)) })
	state.Update(func(tx *cluster.Tx) { tx.SetSlice(sliceOf("three", "a", 1)) })
	if diff := gocmp.Diff([]string{"a [1] one=3 three=1", "b [1] two=3"}, served(state)); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	compareObjects(t, "the slice has moved", state)
}

// TestRefusedAndAcceptedServicesAgree makes random updates and compares the state with all
// objects of the source.
func TestRefusedAndAcceptedServicesAgree(t *testing.T) {
	const limit = 20
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 1))
		state := cluster.New(cluster.Options{Resumable: seed%2 == 0, MaxElements: limit})
		source := map[string]*api.ServiceState{}
		for _, name := range []string{"a", "b", "c"} {
			source[name] = &api.ServiceState{}
		}
		slicesOf := map[string]*api.EndpointSlice{}
		for step := range 60 {
			if step == int(seed%7) {
				state.SetSynced()
			}
			state.Update(func(tx *cluster.Tx) {
				for range 1 + random.IntN(3) {
					name := string(rune('a' + random.IntN(3)))
					svc := service(name, 1, "10.0.0.1", []int32{1, 2, 3, 4, 5, 6}[:1+random.IntN(6)]...)
					slice := sliceOf(fmt.Sprint("e", random.IntN(6)), name, random.IntN(8))
					switch random.IntN(6) {
					case 0:
						tx.DeleteService(svc.Key())
						source[name].Service = nil
					case 1:
						tx.DeleteSlice(slice.Key())
						delete(slicesOf, slice.Name)
					case 2:
						tx.ReplaceServices(slices.Values([]*api.Service{svc}))
						for _, s := range source {
							s.Service = nil
						}
						source[name].Service = svc
					case 3:
						tx.SetService(svc)
						source[name].Service = svc
					default:
						tx.SetSlice(slice)
						slicesOf[slice.Name] = slice
					}
				}
			})
			snapshot := state.Snapshot()
			for name, want := range source {
				want.Slices = nil
				for _, slice := range slicesOf {
					if slice.ServiceName == name {
						want.Slices = append(want.Slices, slice)
					}
				}
				slices.SortFunc(want.Slices, func(a, b *api.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
				got, ok := snapshot.States.Get(key(name))
				if !ok {
					got = &api.ServiceState{}
				}
				_, refused := snapshot.Refused.Get(key(name))
				if large := elements.OfState(want).Total() > limit; large != refused {
					t.Fatalf("seed %d, step %d: %s with %v is refused: %v", seed, step, name, elements.OfState(want), refused)
				}
				if elements.OfState(got).Total() > limit {
					t.Fatalf("seed %d, step %d: %s has %v", seed, step, name, elements.OfState(got))
				}
				if !refused && (!got.Service.Equal(want.Service) || !slices.EqualFunc(got.Slices, want.Slices, (*api.EndpointSlice).Equal)) {
					t.Fatalf("seed %d, step %d: %s is %v, want %v", seed, step, name, got, want)
				}
			}
			if diff := gocmp.Diff(grantInOrder(state), lostByService(state.Snapshot()), equateAddrs); diff != "" {
				t.Fatalf("seed %d, step %d: lost claims (-want +got):\n%s", seed, step, diff)
			}
			compareObjects(t, fmt.Sprintf("seed %d, step %d", seed, step), state)
		}
	}
}

// A service that keeps its last accepted version keeps the claims of this version only.
func TestRefusedVersionsHaveNoClaims(t *testing.T) {
	state := cluster.New(cluster.Options{MaxElements: 11})
	state.SetSynced()
	state.Update(func(tx *cluster.Tx) { tx.SetService(service("a", 9, "10.0.0.1", 1, 2)) })
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a", 9, "10.0.0.1", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))
		tx.SetService(service("b", 1, "10.0.0.1", 2, 3))
	})
	if diff := gocmp.Diff([]string{"b 10.0.0.1:2/TCP a"}, lost(state)); diff != "" {
		t.Errorf("lost claims (-want +got):\n%s", diff)
	}
}

func TestRefusalsAreReportedOnce(t *testing.T) {
	var reports []string
	var state *cluster.State
	state = cluster.New(cluster.Options{MaxElements: 11, OnRefused: func(key types.NamespacedName, reason error) {
		_, refused := state.Snapshot().Refused.Get(key) // no lock is held
		reports = append(reports, fmt.Sprint(key.Name, " ", refused, ": ", reason))
	}})
	large := with(service("a", 1, "10.0.0.1", 1, 2, 3), func(s *api.Service) {
		for i := range byte(4) {
			s.IPs.LoadBalancerIPs.Add(netip.AddrFrom4([4]byte{192, 0, 2, i}))
		}
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
	})
	small := service("a", 1, "10.0.0.1", 1)
	update := func(write ...*api.Service) {
		state.Update(func(tx *cluster.Tx) {
			for _, s := range write {
				tx.SetService(s)
			}
		})
	}
	update(large, small) // accepted at the end
	update(large)
	state.Update(func(tx *cluster.Tx) { tx.SetSlice(sliceOf("a-1", "a", 2)) }) // another reason
	update(small, large)                                                       // as before
	update(small)
	update(large)
	state.Update(func(tx *cluster.Tx) { tx.DeleteService(key("a")) })
	want := []string{
		"a true: too large: it needs 16 elements, more than the limit of 11: 15 of addresses × ports, 0 of endpoints × ports, 1 source ranges; it is not served",
		"a true: too large: it needs 25 elements, more than the limit of 11: 15 of addresses × ports, 9 of endpoints × ports, 1 source ranges; it is not served",
	}
	if diff := gocmp.Diff(want, reports); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := state.Snapshot().Refused.Len(); n != 0 {
		t.Errorf("%d services are refused after the deletion", n)
	}
}

func TestReasonsSayWhatIsServed(t *testing.T) {
	ports := func(n int32) *api.Service {
		s := service("a", 1, "10.0.0.1")
		for i := range n {
			s.Ports = append(s.Ports, api.PortMapping{Name: fmt.Sprint(i), Protocol: api.TCP, Port: i + 1})
		}
		return s
	}
	for want, writes := range map[string][]func(*cluster.Tx){
		"; it is not served": {func(tx *cluster.Tx) { tx.SetService(ports(12)) }},
		"; its last accepted version is served": {
			func(tx *cluster.Tx) { tx.SetService(ports(2)) },
			func(tx *cluster.Tx) { tx.SetService(ports(12)) },
		},
		"; it is served with a part of its endpoints": {
			func(tx *cluster.Tx) { tx.SetService(ports(2)); tx.SetSlice(sliceOf("a-1", "a", 20)) },
		},
	} {
		state := cluster.New(cluster.Options{MaxElements: 11})
		state.SetSynced()
		for _, write := range writes {
			state.Update(write)
		}
		if reason, _ := state.Snapshot().Refused.Get(key("a")); !strings.HasSuffix(reason, " source ranges"+want) {
			t.Errorf("reason %q, want one that ends with %q", reason, want)
		}
	}
}

// TestSeveralVersionsOfASliceInOneUpdate has a slice that is too large for some time.
func TestSeveralVersionsOfASliceInOneUpdate(t *testing.T) {
	state := cluster.New(cluster.Options{MaxElements: 11})
	state.SetSynced()
	state.Update(func(tx *cluster.Tx) { tx.SetService(service("a", 1, "10.0.0.1", 1)) })
	state.Update(func(tx *cluster.Tx) {
		tx.SetSlice(sliceOf("a-1", "a", 1))
		tx.SetSlice(sliceOf("a-2", "a", 20))
		tx.SetSlice(sliceOf("a-2", "a", 4))
		tx.SetSlice(sliceOf("a-3", "a", 4))
	})
	if diff := gocmp.Diff([]string{"a [1] a-1=1 a-2=4 a-3=2", "refused a"}, served(state)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A service with many slices is too large for a moment. The next slice counts with the
// others.
func TestManySlicesAfterARefusal(t *testing.T) {
	for last, refused := range map[int]int{7: 0, 8: 1} {
		state := cluster.New(cluster.Options{MaxElements: 40})
		state.SetSynced()
		state.Update(func(tx *cluster.Tx) {
			tx.SetService(service("a", 1, "10.0.0.1", 1))
			for i := range 10 {
				tx.SetSlice(sliceOf(fmt.Sprint("a-", i), "a", 1))
			}
			tx.SetSlice(sliceOf("b", "a", 30))
			tx.SetSlice(sliceOf("b", "a", 10))
			tx.SetSlice(sliceOf("c", "a", last))
		})
		if n := state.Snapshot().Refused.Len(); n != refused {
			t.Errorf("a last slice of %d endpoints: %d refused services, want %d", last, n, refused)
		}
	}
}

// In one Update, a long list of slices becomes short, and then its slices become large.
func TestLargeSlicesOfAListThatWasLong(t *testing.T) {
	state := cluster.New(cluster.Options{MaxElements: 40})
	state.SetSynced()
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a", 1, "10.0.0.1", 1))
		for i := range 9 {
			tx.SetSlice(sliceOf(fmt.Sprint("a-", i), "a", 0))
		}
		tx.DeleteSlice(key("a-8"))
		for i := range 8 {
			tx.SetSlice(sliceOf(fmt.Sprint("a-", i), "a", 5))
		}
	})
	want := []string{"a [1] a-0=5 a-1=5 a-2=5 a-3=5 a-4=5 a-5=5 a-6=2", "refused a"}
	if diff := gocmp.Diff(want, served(state)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestReportsAreSorted refuses several services in one Update.
func TestReportsAreSorted(t *testing.T) {
	var reports []string
	state := cluster.New(cluster.Options{MaxElements: 1, OnRefused: func(key types.NamespacedName, _ error) {
		reports = append(reports, key.Name)
	}})
	names := strings.Split("a b c d e f g h i j", " ")
	state.Update(func(tx *cluster.Tx) {
		for _, name := range names {
			tx.SetService(service(name, 1, "10.0.0.1", 1, 2))
		}
	})
	if !slices.Equal(reports, names) {
		t.Errorf("reports %v", reports)
	}
}

// A listing omits two services that were never small enough.
func TestListingDeletesRefusedServices(t *testing.T) {
	state := cluster.New(cluster.Options{MaxElements: 1})
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(service("a", 1, "10.0.0.1", 1, 2))
		tx.SetService(service("b", 1, "10.0.0.2", 1, 2))
	})
	if diff := gocmp.Diff([]string{"refused a", "refused b"}, served(state)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	state.Update(func(tx *cluster.Tx) { tx.ReplaceServices(slices.Values([]*api.Service{})) })
	if diff := gocmp.Diff([]string{}, served(state)); diff != "" {
		t.Errorf("after the listing (-want +got):\n%s", diff)
	}
}

// TestListingWithoutChanges lists the same objects again, in another order.
func TestListingWithoutChanges(t *testing.T) {
	state := cluster.New(cluster.Options{MaxElements: 2})
	services := []*api.Service{
		service("c", 1, "10.0.0.1", 1), service("b", 1, "10.0.0.1", 2),
		service("a", 1, "10.0.0.1", 3, 4, 5), service("d", 1, "10.0.0.1", 7), // a is refused
	}
	list := []*api.EndpointSlice{sliceOf("y", "c", 0), sliceOf("x", "c", 0), sliceOf("z", "b", 0)}
	write := func(tx *cluster.Tx) {
		tx.ReplaceServices(slices.Values(services))
		tx.ReplaceSlices(slices.Values(list))
		for _, s := range services {
			tx.SetServiceProblems(s.Key(), nil)
		}
	}
	state.Update(write)
	state.SetSynced()
	before := state.Snapshot()
	slices.Reverse(services)
	slices.Reverse(list)
	state.Update(write)
	if after := state.Snapshot(); after.Revision != before.Revision {
		t.Errorf("revision %d after %d", after.Revision, before.Revision)
	}
}

// Refusing a service builds nothing: the memory does not depend on the size of the
// service.
func TestRefusingCostsNothing(t *testing.T) {
	const n = 60_000
	large := service("a", 1, "10.0.0.1")
	var ips []netip.Addr
	for i := range n {
		large.Ports = append(large.Ports, api.PortMapping{Name: fmt.Sprint(i), Protocol: api.TCP, Port: int32(i + 1)})
		ips = append(ips, netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}))
	}
	large.IPs.ExternalIPs = api.NewIPSet(ips...)
	state := cluster.New(cluster.Options{})
	allocated := testing.AllocsPerRun(1, func() {
		state.Update(func(tx *cluster.Tx) { tx.SetService(large) })
		state.Update(func(tx *cluster.Tx) { tx.DeleteService(large.Key()) })
	})
	if allocated > 500 {
		t.Errorf("%v allocations", allocated)
	}
	state.Update(func(tx *cluster.Tx) { tx.SetService(large) })
	if reason, _ := state.Snapshot().Refused.Get(large.Key()); !strings.Contains(reason, "3600060000 of addresses × ports") {
		t.Errorf("reason %q", reason)
	}
}
