// SPDX-License-Identifier: Apache-2.0

package explain_test

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/explain"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

var node = sinktest.Node("here", "192.0.2.1")

// newState returns the services default/dns, default/web and kube-system/dns, and an
// EndpointSlice of an unknown service.
func newState() *cluster.State {
	state := cluster.New(cluster.Options{MaxElements: 20})
	state.Update(func(tx *cluster.Tx) {
		tx.SetNode(node)
		for i, name := range []string{"default/dns", "default/web", "kube-system/dns"} {
			service := sinktest.Service(name, fmt.Sprintf("10.0.0.%d a=53:%d b=53/UDP", i+1, 30000+i))
			tx.SetService(service)
			for _, slice := range sinktest.Slices(service, "10.5.0.1@here "+fmt.Sprintf("10.5.1.%d@here", i)) {
				tx.SetSlice(slice)
			}
		}
		tx.SetSlice(&api.EndpointSlice{Namespace: "default", Name: "lone-1", ServiceName: "lone", Family: api.IPv4})
		large := &api.Service{Namespace: "default", Name: "large", Type: api.ClusterIP}
		for i := range 21 {
			large.IPs.ClusterIPs.Add(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}))
		}
		tx.SetService(large)
	})
	state.SetSynced()
	return state
}

// text describes answers in one line: services with their numbers of frontends, or an
// error.
func text(answers iter.Seq2[*nodeview.Explanation, error]) string {
	var list []string
	for e, err := range answers {
		if err != nil {
			list = append(list, err.Error())
			continue
		}
		list = append(list, fmt.Sprint(e.Service, " ", len(e.Frontends)))
	}
	return strings.Join(list, ", ")
}

func TestAnswers(t *testing.T) {
	state := newState()
	f := feed.New(state, node.Name)
	defer f.Close()
	views, err := f.Next()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ question, want string }{
		{"", "default/dns 3, default/lone 0, default/web 3, kube-system/dns 3"},
		{"web", "default/web 3"},
		{"kube-system/dns", "kube-system/dns 3"},
		{"10.0.0.1", "default/dns 2"},
		{"::ffff:10.0.0.1", "default/dns 2"},
		{"10.0.0.1:53", "default/dns 2"},
		{"10.0.0.1:53/UDP", "default/dns 1"},
		{"192.0.2.1", "default/dns 1, default/web 1, kube-system/dns 1"},
		{"192.0.2.1:30001", "default/web 1"},
		{"127.0.0.1:30001", "default/web 1"},
		{"[::1]:30001", "no service is served at ::1"},
		{"IPv4:30001/tcp", "default/web 1"},
		{"IPv4:30001/udp", "no service is served at IPv4:30001/udp"},
		{"IPv6:30001", "no service is served at IPv6:30001"},
		{"10.0.0.1:54", "no service is served at 10.0.0.1:54; the address has: ClusterIP 10.0.0.1:53/TCP of default/dns, ClusterIP 10.0.0.1:53/UDP of default/dns"},
		{"10.0.0.9:53", "no service is served at 10.0.0.9"},
		{"fd00::1:53", "no service is served at fd00::1:53, which is an address without a port; with a port, write [fd00::1]:53"},
		{"10.5.1.1:8080", "no service is served at 10.5.1.1:8080; the address is an endpoint of: default/web"},
		{"10.5.0.1", "no service is served at 10.5.0.1; the address is an endpoint of: default/dns, default/web, kube-system/dns"},
		{"missing", "service default/missing not found"},
		{"lone", "service default/lone not found"},
		{"large", "service default/large is refused: too large: it needs 21 elements, more than the limit of 20: 21 of addresses × ports, 0 of endpoints × ports, 0 source ranges; it is not served"},
	} {
		var q explain.Question
		if test.question != "" {
			if q, err = explain.Parse(test.question); err != nil {
				t.Fatal(err)
			}
		}
		if got := text(q.Explain(state.Snapshot(), node)); got != test.want {
			t.Errorf("%q: %s, want %s", test.question, got, test.want)
		}
		want := strings.Replace(test.want, "default/lone 0, ", "", 1) // a view has a service
		if test.question == "large" {
			want = "service default/large not found" // only the server knows why the service is refused
		}
		if got := text(q.ExplainViews(views, node)); got != want {
			t.Errorf("%q from views: %s, want %s", test.question, got, want)
		}
	}
}

// The error for an unknown service wraps ErrNotFound, because the caller may know why the
// service is unknown.
func TestNotFound(t *testing.T) {
	for question, want := range map[string]bool{"missing": true, "lone": true, "large": false, "10.9.9.9": false} {
		q, err := explain.Parse(question)
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range q.Explain(newState().Snapshot(), node) {
			if errors.Is(err, explain.ErrNotFound) != want {
				t.Errorf("%s: error %v", question, err)
			}
		}
	}
}

func TestUnknownNodeAddresses(t *testing.T) {
	q, err := explain.Parse("192.0.2.1:30001/tcp")
	if err != nil {
		t.Fatal(err)
	}
	got := text(q.Explain(newState().Snapshot(), &api.Node{Name: "unknown"}))
	if want := "no service is served at 192.0.2.1:30001/tcp; addresses of node unknown are unknown, and default/web has node port 30001/TCP"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestParse(t *testing.T) {
	for _, test := range []struct {
		text    string
		service types.NamespacedName
		addr    string
		err     string
	}{
		{text: "web", service: types.NamespacedName{Namespace: "default", Name: "web"}},
		{text: "a/b", service: types.NamespacedName{Namespace: "a", Name: "b"}},
		{text: "::ffff:10.0.0.1", addr: "10.0.0.1"},
		{text: "[fd00::1]:80/sctp", addr: "fd00::1"},
		{text: "IPv4:80", addr: "invalid IP"},
		{text: "", err: `"" is neither`},
		{text: "a/", err: `"a/" is neither`},
		{text: "/a", err: `"/a" is neither`},
		{text: "a/b/c", err: `"a/b/c" is neither`},
		{text: "10.0.0.1/tcp", err: `"10.0.0.1/tcp" is neither`},
		{text: "10.0.0.1:0", err: `"10.0.0.1:0" is neither`},
		{text: "10.0.0.1:80/icmp", err: `"10.0.0.1:80/icmp": the protocol is not tcp, udp or sctp`},
		{text: "fd00::1:80/tcp", err: `"fd00::1:80/tcp": write an IPv6 address with a port as [fd00::1]:80`},
	} {
		q, err := explain.Parse(test.text)
		switch {
		case test.err != "":
			if err == nil || !strings.HasPrefix(err.Error(), test.err) {
				t.Errorf("%q: error %v, want %s", test.text, err, test.err)
			}
		case err != nil || q.Service() != test.service || test.addr != "" && q.Addr().String() != test.addr:
			t.Errorf("%q: service %s, address %s, error %v", test.text, q.Service(), q.Addr(), err)
		}
	}
}

// The name of a frontend must select this frontend, and no other frontend of the
// service.
func TestNamesOfFrontendsAreQuestions(t *testing.T) {
	s := newState().Snapshot()
	for e := range (explain.Question{}).Explain(s, node) {
		for _, f := range e.Frontends {
			q, err := explain.Parse(explain.Name(f.FrontendKey))
			if err != nil {
				t.Fatal(err)
			}
			if got, want := text(q.Explain(s, node)), e.Service.String()+" 1"; got != want {
				t.Errorf("%s: %s, want %s", f.FrontendKey, got, want)
			}
		}
	}
}
