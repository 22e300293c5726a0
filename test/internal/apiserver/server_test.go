// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

var shared Shared

func TestMain(m *testing.M) {
	if way := os.Getenv(endingEnv); way != "" {
		startAndEnd(way)
	}
	os.Exit(shared.Run(m))
}

// endingEnv is an environment variable. If it is set, the test binary calls startAndEnd.
const endingEnv = "KPNG_TEST_ENDING"

// startAndEnd starts a server and prints its process ids. Then it panics if ending is
// "panic", and blocks otherwise.
func startAndEnd(ending string) {
	s, err := start(context.Background(), Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(s.Etcd.cmd.Process.Pid, s.APIServer.cmd.Process.Pid)
	if ending == "panic" {
		panic("requested by the test")
	}
	select {}
}

func TestServicesGetClusterIPsOfBothFamilies(t *testing.T) {
	s := shared.Get(t)
	policy := corev1.IPFamilyPolicyRequireDualStack
	service := create(t, s, s.Namespace(t), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "dual"},
		Spec:       corev1.ServiceSpec{IPFamilyPolicy: &policy, Ports: []corev1.ServicePort{{Port: 80}}},
	})
	if n := len(service.Spec.ClusterIPs); n != 2 {
		t.Fatalf("%d cluster IPs (%v), want 2", n, service.Spec.ClusterIPs)
	}
	for i, cidr := range []string{ServiceCIDRv4, ServiceCIDRv6} {
		if ip := service.Spec.ClusterIPs[i]; !netip.MustParsePrefix(cidr).Contains(netip.MustParseAddr(ip)) {
			t.Errorf("cluster IP %s is outside %s", ip, cidr)
		}
	}
}

func TestHeadlessServicesMayHaveExternalIPs(t *testing.T) {
	s := shared.Get(t)
	want := []string{"10.0.0.55", "1000::55"}
	policy := corev1.IPFamilyPolicyRequireDualStack
	service := create(t, s, s.Namespace(t), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "headless"},
		Spec: corev1.ServiceSpec{
			ClusterIP:      corev1.ClusterIPNone,
			IPFamilyPolicy: &policy,
			ExternalIPs:    want,
			Ports:          []corev1.ServicePort{{Port: 6000}},
		},
	})
	if diff := cmp.Diff(want, service.Spec.ExternalIPs); diff != "" {
		t.Errorf("external IPs (-want +got):\n%s", diff)
	}
}

func TestNodesAndSlicesAreWrittenByHand(t *testing.T) {
	s := shared.Get(t)
	ns := s.Namespace(t)
	node := "vm-002"
	_, err := s.Client().CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Client().CoreV1().Nodes().Delete(context.Background(), node, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	_, err = s.Client().DiscoveryV1().EndpointSlices(ns).Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "slice", Labels: map[string]string{discoveryv1.LabelServiceName: "any"}},
		AddressType: discoveryv1.AddressTypeIPv6,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"1100::202"}, NodeName: &node}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Client().DiscoveryV1().EndpointSlices(ns).Get(t.Context(), "slice", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if c := got.Endpoints[0].Conditions; c.Ready != nil {
		t.Errorf("the API server changed nil conditions to %v", c)
	}
}

func TestListsAreStreamed(t *testing.T) {
	s := shared.Get(t)
	ns := s.Namespace(t)
	create(t, s, ns, clusterIP("a"))
	w, err := s.Client().CoreV1().Services(ns).Watch(t.Context(), metav1.ListOptions{
		SendInitialEvents:    new(true),
		ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
		AllowWatchBookmarks:  true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if e := next(t, w); e.Type != watch.Added || e.Object.(*corev1.Service).Name != "a" {
		t.Errorf("first event is %v, want service a added", e)
	}
	e := next(t, w)
	if e.Type != watch.Bookmark || e.Object.(*corev1.Service).Annotations[metav1.InitialEventsAnnotationKey] != "true" {
		t.Errorf("second event is %v, want the bookmark that ends the list", e)
	}
}

func TestObjectsSurvive(t *testing.T) {
	for name, downAndUp := range map[string]func(*testing.T, *Server){
		"a graceful restart of the API server": func(t *testing.T, s *Server) {
			s.APIServer.Stop(t)
			s.APIServer.Start(t)
		},
		"a kill of the API server": func(t *testing.T, s *Server) {
			s.APIServer.Kill(t)
			s.APIServer.Start(t)
		},
		"a kill of etcd": func(t *testing.T, s *Server) {
			s.Etcd.Kill(t)
			s.Etcd.Start(t)
			s.WaitReady(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := shared.Get(t)
			ns := s.Namespace(t)
			before := create(t, s, ns, clusterIP("a"))
			downAndUp(t, s)
			after, err := s.Client().CoreV1().Services(ns).Get(t.Context(), "a", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("service (-before +after):\n%s", diff)
			}
		})
	}
}

func TestStoppedServerKeepsItsAddress(t *testing.T) {
	s := shared.Get(t)
	address := strings.TrimPrefix(s.Config().Host, "https://")
	s.APIServer.Kill(t)
	if _, err := net.Dial("tcp", address); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("connect: %v, want connection refused", err)
	}
	if l, err := net.Listen("tcp", address); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("listen: %v, %v, want address in use", l, err)
	}
	s.APIServer.Start(t)
}

func TestCompactionDropsOldVersions(t *testing.T) {
	s := shared.Get(t)
	ns := s.Namespace(t)
	services := s.Client().CoreV1().Services(ns)
	old := create(t, s, ns, clusterIP("a")).ResourceVersion
	create(t, s, ns, clusterIP("b"))

	// Restart the API server, so that it reads the old version from etcd, not from memory.
	s.APIServer.Kill(t)
	s.APIServer.Start(t)
	exactly := metav1.ListOptions{ResourceVersion: old, ResourceVersionMatch: metav1.ResourceVersionMatchExact}
	list, err := services.List(t.Context(), exactly)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(list.Items); n != 1 {
		t.Errorf("before compaction, %d services at the old version, want 1", n)
	}

	s.APIServer.Kill(t)
	s.Compact(t)
	s.APIServer.Start(t)
	if _, err := services.List(t.Context(), exactly); !apierrors.IsResourceExpired(err) {
		t.Errorf("after compaction, listing the old version: %v, want 410 Gone", err)
	}
	w, err := services.Watch(t.Context(), metav1.ListOptions{ResourceVersion: old})
	if err == nil {
		defer w.Stop()
		err = apierrors.FromObject(next(t, w).Object)
	}
	if !apierrors.IsResourceExpired(err) {
		t.Errorf("after compaction, watching from the old version: %v, want 410 Gone", err)
	}
}

func TestReplicaWritesWhileServerIsDown(t *testing.T) {
	s := shared.Get(t)
	ns := s.Namespace(t)
	replica := s.Replica(t)
	s.APIServer.Kill(t)
	create(t, replica, ns, clusterIP("meanwhile"))
	s.APIServer.Start(t)
	if _, err := s.Client().CoreV1().Services(ns).Get(t.Context(), "meanwhile", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
}

func TestUserHasOnlyGrantedPermissions(t *testing.T) {
	s := shared.Get(t)
	config := s.User(t, rbacv1.PolicyRule{
		APIGroups: []string{""}, Resources: []string{"services"}, Verbs: []string{"list", "watch"},
	})
	loaded, err := clientcmd.BuildConfigFromFlags("", Kubeconfig(t, config))
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(loaded)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("list services: %v, want no error", err)
	}
	if _, err := client.DiscoveryV1().EndpointSlices("").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("list endpoint slices: %v, want 403 Forbidden", err)
	}
	if _, err := client.CoreV1().Services("default").Get(t.Context(), "kubernetes", metav1.GetOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("get a service: %v, want 403 Forbidden", err)
	}
}

func TestServersAreIndependent(t *testing.T) {
	a, b := shared.Get(t), Start(t, Options{})
	create(t, a, metav1.NamespaceDefault, clusterIP("only-in-a"))
	t.Cleanup(func() {
		if err := a.Client().CoreV1().Services(metav1.NamespaceDefault).Delete(context.Background(), "only-in-a", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	if _, err := b.Client().CoreV1().Services(metav1.NamespaceDefault).Get(t.Context(), "only-in-a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a's service in b: %v, want not found", err)
	}
	config := a.Config()
	config.Host = b.Config().Host
	if _, err := kubernetes.NewForConfigOrDie(config).Discovery().ServerVersion(); err == nil {
		t.Error("a's administrator was served by b")
	}
}

func TestNamespacesEndWithTheirTest(t *testing.T) {
	s := shared.Get(t)
	var ns string
	t.Run("test", func(t *testing.T) {
		ns = s.Namespace(t)
		create(t, s, ns, clusterIP("a"))
	})
	if _, err := s.Client().CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("namespace: %v, want not found", err)
	}
	list, err := s.Client().CoreV1().Services(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(list.Items); n != 0 {
		t.Errorf("%d services remain, want none", n)
	}
}

func TestStartErrorHasItsCause(t *testing.T) {
	s, err := start(t.Context(), Options{Flags: []string{"--no-such-flag"}})
	if err == nil {
		s.close()
		t.Fatal("the server started")
	}
	for _, want := range []string{"start kube-apiserver", "exit status 1", "unknown flag: --no-such-flag"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error does not contain %q:\n%v", want, err)
		}
	}
}

func TestLogTailBeginsWithWholeLine(t *testing.T) {
	p := &Process{name: "p", logPath: t.TempDir() + "/log"}
	var log strings.Builder
	for i := range tailBytes / 8 {
		log.WriteString("line " + strconv.Itoa(i) + "\n")
	}
	if err := os.WriteFile(p.logPath, []byte(log.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if tail := p.logTail(0); !strings.HasPrefix(tail, "p logged:\n…\nline ") || !strings.HasSuffix(tail, log.String()[log.Len()-100:]) {
		t.Errorf("tail %q", tail)
	}
	from := int64(log.Len() - len("line 1023\n"))
	if got, want := p.logTail(from), "p logged:\nline 1023\n"; got != want {
		t.Errorf("tail after %d is %q, want %q", from, got, want)
	}
}

func clusterIP(name string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}
}

func create(t *testing.T, s *Server, ns string, service *corev1.Service) *corev1.Service {
	t.Helper()
	service, err := s.Client().CoreV1().Services(ns).Create(t.Context(), service, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return service
}

func next(t *testing.T, w watch.Interface) watch.Event {
	t.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			t.Fatal("the watch ended")
		}
		return e
	case <-time.After(startPatience):
		t.Fatal("no event")
		panic("unreachable")
	}
}
