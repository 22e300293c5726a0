// SPDX-License-Identifier: Apache-2.0

package kpdiff

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/kubetest"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// situation is a history that the test wrote down. Its objects belong to any namespace.
type situation struct {
	*world
	objects map[string]kubetest.Object
}

// set creates or replaces objects, without a pause.
func (s *situation) set(objects ...kubetest.Object) {
	for _, o := range objects {
		s.change(o, o)
	}
}

// remove deletes objects, without a pause.
func (s *situation) remove(objects ...kubetest.Object) {
	for _, o := range objects {
		s.change(o, nil)
	}
}

// change replaces the object with the kind and name of id.
func (s *situation) change(id, new kubetest.Object) {
	key := fmt.Sprintf("%T %s/%s", id, id.GetNamespace(), id.GetName())
	old := s.objects[key]
	if new == nil {
		delete(s.objects, key)
		s.server.Delete(old)
	} else {
		s.objects[key] = new
		s.server.Set(new)
	}
	switch id := id.(type) {
	case *corev1.Service:
		oldService, _ := old.(*corev1.Service)
		newService, _ := new.(*corev1.Service)
		s.kubeProxy.service(s.wanted(oldService), s.wanted(newService))
	case *discoveryv1.EndpointSlice:
		s.kubeProxy.slice(id, new == nil)
	case *corev1.Node:
		s.node, _ = new.(*corev1.Node)
	}
}

// expect waits until kpng agrees with kube-proxy, and compares the frontends of all services.
func (s *situation) expect(want ...string) {
	s.t.Helper()
	if err := s.quiet(); err != nil {
		s.t.Errorf("kpng differs from kube-proxy: %v", err)
	}
	var got []string
	for _, is := range s.dataplane.decisions() {
		for at, text := range is.frontends {
			text, _, _ = strings.Cut(text, " |")
			got = append(got, at+" "+strings.TrimSuffix(text, stickiness(0)))
		}
		for family, n := range is.health {
			got = append(got, fmt.Sprintf("health %s %d", family, n))
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(strings.Join(want, "\n"), strings.Join(got, "\n")); diff != "" {
		s.t.Errorf("frontends (-want +got):\n%s", diff)
	}
}

// webAt returns the service ns/web with a cluster IP and the port 80.
func webAt(ip string, edits ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "1", CreationTimestamp: metav1.Unix(1000, 0)}}
	s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies = corev1.ServiceTypeClusterIP, ip, []string{ip}, []corev1.IPFamily{corev1.IPv4Protocol}
	s.Spec.Ports = []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(8080)}}
	for _, edit := range edits {
		edit(s)
	}
	return s
}

func named(namespace, name, uid string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Namespace, s.Name, s.UID = namespace, name, types.UID(uid) }
}

func nodePort(s *corev1.Service) {
	s.Spec.Type = corev1.ServiceTypeNodePort
	s.Spec.Ports[0].NodePort = 30080
}

func loadBalancer(ips ...string) func(*corev1.Service) {
	return func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		for _, ip := range ips {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
		}
	}
}

func externalLocal(s *corev1.Service) {
	s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	s.Spec.HealthCheckNodePort = 31000
}

// sliceOf returns a slice in the namespace ns. Each endpoint has the form
// "address node word...". The words are the conditions "terminating" and "unready", and the
// hints "for-zone=…" and "for-node=…".
func sliceOf(name, service string, endpoints ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}
	for _, text := range endpoints {
		words := strings.Fields(text)
		e := discoveryv1.Endpoint{Addresses: words[:1], NodeName: &words[1]}
		e.Conditions = discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)}
		hints := &discoveryv1.EndpointHints{}
		for _, word := range words[2:] {
			switch name, value, _ := strings.Cut(word, "="); name {
			case "terminating":
				e.Conditions.Ready, e.Conditions.Terminating = new(false), new(true)
			case "unready":
				e.Conditions.Ready, e.Conditions.Serving = new(false), new(false)
			case "for-zone":
				hints.ForZones, e.Hints = []discoveryv1.ForZone{{Name: value}}, hints
			case "for-node":
				hints.ForNodes, e.Hints = []discoveryv1.ForNode{{Name: value}}, hints
			}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

func inZone(zone string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode, Labels: map[string]string{corev1.LabelTopologyZone: zone}}}
}

// situations has histories that other proxies found worth a test. The test begins with a
// process that runs, and an empty cluster.
var situations = map[string]func(s *situation){
	"endpoints move to a new slice": func(s *situation) {
		s.set(webAt("10.96.0.1"), sliceOf("web-a", "web", "172.16.0.1 n1", "172.16.0.2 n2"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080 172.16.0.2:8080")
		s.remove(sliceOf("web-a", "web"))
		s.set(sliceOf("web-b", "web", "172.16.0.2 n2", "172.16.0.3 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080 172.16.0.3:8080")
		s.set(sliceOf("web-c", "web", "172.16.0.2 n2", "172.16.0.4 n1")) // in both slices for some time
		s.set(sliceOf("web-b", "web", "172.16.0.3 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080 172.16.0.3:8080 172.16.0.4:8080")
	},
	"one of several slices is deleted": func(s *situation) {
		s.set(sliceOf("web-a", "web", "172.16.0.1 n1"), sliceOf("web-b", "web", "172.16.0.2 n1"), sliceOf("web-c", "web", "172.16.0.3 n1"), webAt("10.96.0.1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080 172.16.0.2:8080 172.16.0.3:8080")
		s.remove(sliceOf("web-b", "web"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080 172.16.0.3:8080")
		s.remove(sliceOf("web-a", "web"), sliceOf("web-c", "web"))
		s.expect("10.96.0.1/TCP/80 reject")
	},
	"objects of two namespaces have the same names": func(s *situation) {
		other := sliceOf("web-a", "web", "172.16.1.1 n1", "172.16.1.2 n1")
		other.Namespace = "other"
		s.set(webAt("10.96.0.1"), sliceOf("web-a", "web", "172.16.0.1 n1", "172.16.0.2 n1"), webAt("10.96.0.2", named("other", "web", "2")), other)
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080 172.16.0.2:8080", "10.96.0.2/TCP/80 to 172.16.1.1:8080 172.16.1.2:8080")
		s.set(sliceOf("web-a", "web", "172.16.0.2 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080", "10.96.0.2/TCP/80 to 172.16.1.1:8080 172.16.1.2:8080")
		s.remove(sliceOf("web-a", "web"))
		s.remove(webAt("", named("other", "web", "2")))
		s.expect("10.96.0.1/TCP/80 reject")
	},
	"a service is deleted while the dataplane refuses it": func(s *situation) {
		for seed := range uint64(20) {
			s.dataplane.disturb(chanceOf(seed))
			s.set(webAt("10.96.0.1", nodePort), sliceOf("web-a", "web", "172.16.0.1 n1", "172.16.0.2 n2"))
			time.Sleep(200 * time.Millisecond)
			s.remove(webAt(""))
			s.expect()
		}
	},
	"a service is deleted while the process is stopped": func(s *situation) {
		s.set(webAt("10.96.0.1", nodePort, loadBalancer("5.5.5.1")), sliceOf("web-a", "web", "172.16.0.1 n1"), webAt("10.96.0.2", named("ns", "other", "2")))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "5.5.5.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080", "10.96.0.2/TCP/80 reject")
		s.stop()
		s.remove(webAt("")) // its slice stays
		s.start()
		s.expect("10.96.0.2/TCP/80 reject")
	},
	"a service is scaled to zero while the process is stopped": func(s *situation) {
		s.set(webAt("10.96.0.1"), sliceOf("web-a", "web", "172.16.0.1 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
		s.stop()
		s.set(sliceOf("web-a", "web"))
		s.start()
		s.expect("10.96.0.1/TCP/80 reject")
	},
	"a restart while endpoints terminate": func(s *situation) {
		s.set(webAt("10.96.0.1"), sliceOf("web-a", "web", "172.16.0.1 n1", "172.16.0.2 n1 terminating"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
		s.stop()
		s.set(sliceOf("web-a", "web", "172.16.0.1 n1 terminating", "172.16.0.2 n1 terminating"))
		s.start()
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080 172.16.0.2:8080")
		s.set(sliceOf("web-a", "web", "172.16.0.1 n1 terminating", "172.16.0.3 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.3:8080")
	},
	"a cluster IP moves to another service and back": func(s *situation) {
		s.set(sliceOf("web-a", "web", "172.16.0.1 n1"), sliceOf("next-a", "next", "172.16.0.2 n1"), webAt("10.96.0.1"))
		for range 3 {
			s.remove(webAt(""))
			s.set(webAt("10.96.0.1", named("ns", "next", "2")))
			s.remove(webAt("", named("ns", "next", "2")))
			s.set(webAt("10.96.0.1"))
		}
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
		s.remove(webAt(""))
		s.set(webAt("10.96.0.1", named("ns", "next", "2")))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080")
	},
	"a service is replaced by another one of the same name": func(s *situation) {
		s.set(webAt("10.96.0.1", nodePort), sliceOf("web-a", "web", "172.16.0.1 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080")
		s.remove(webAt(""))
		s.set(webAt("10.96.0.9", named("ns", "web", "2")))
		s.expect("10.96.0.9/TCP/80 to 172.16.0.1:8080")
	},
	"objects disappear while watches are lost": func(s *situation) {
		s.set(webAt("10.96.0.1"), sliceOf("web-a", "web", "172.16.0.1 n1"), webAt("10.96.0.2", named("ns", "other", "2")))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "10.96.0.2/TCP/80 reject")
		lost := func(change func()) {
			s.server.Unplug(true)
			change()
			s.server.Compact()
			s.server.Drop(apierrors.NewResourceExpired("too old resource version"))
		}
		lost(func() { s.remove(sliceOf("web-a", "web")) })
		s.expect("10.96.0.1/TCP/80 reject", "10.96.0.2/TCP/80 reject")
		s.set(sliceOf("web-a", "web", "172.16.0.2 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080", "10.96.0.2/TCP/80 reject")
		lost(func() { s.remove(webAt(""), webAt("", named("ns", "other", "2"))) })
		s.expect()
		s.set(webAt("10.96.0.3")) // its slice is still known
		s.expect("10.96.0.3/TCP/80 to 172.16.0.2:8080")
	},
	"an endpoint of the preferred node is replaced": func(s *situation) {
		const here, there = "172.16.0.1 n1 for-node=n1 ", "172.16.0.2 n2 for-node=n2"
		s.set(webAt("10.96.0.1"), inZone("a"))
		for _, step := range [][2]string{
			{"", "172.16.0.1:8080"}, {"terminating", "172.16.0.2:8080"}, {"unready", "172.16.0.2:8080"}, {"", "172.16.0.1:8080"},
		} {
			s.set(sliceOf("web-a", "web", here+step[0]), sliceOf("web-b", "web", there))
			s.expect("10.96.0.1/TCP/80 to " + step[1])
		}
		s.set(sliceOf("web-a", "web", "172.16.0.1 n1")) // without a hint, all endpoints are used
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080 172.16.0.2:8080")
	},
	"the preferred zone has no endpoint": func(s *situation) {
		s.set(webAt("10.96.0.1"), inZone("a"), sliceOf("web-a", "web", "172.16.0.1 n1 for-zone=a", "172.16.0.2 n2 for-zone=b"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
		s.set(sliceOf("web-a", "web", "172.16.0.1 n1 for-zone=a unready", "172.16.0.2 n2 for-zone=b", "172.16.0.3 n2 for-zone=c"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080 172.16.0.3:8080")
		s.set(inZone("c"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.3:8080")
		s.remove(inZone(""))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080 172.16.0.3:8080")
	},
	"the type of a service changes": func(s *situation) {
		s.set(sliceOf("web-a", "web", "172.16.0.1 n1"), webAt("10.96.0.1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
		s.set(webAt("10.96.0.1", nodePort, loadBalancer("5.5.5.1")))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "5.5.5.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080")
		s.set(webAt("10.96.0.1", nodePort))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080")
		s.set(webAt("", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName, s.Spec.ClusterIPs = corev1.ServiceTypeExternalName, "example.com", nil
		}))
		s.expect()
		s.set(webAt("None"))
		s.expect()
		s.set(webAt("10.96.0.2"))
		s.expect("10.96.0.2/TCP/80 to 172.16.0.1:8080")
	},
	"a second IP family is added and removed": func(s *situation) {
		v6 := sliceOf("web-b", "web", "fd10::1 n1")
		v6.AddressType = discoveryv1.AddressTypeIPv6
		dual := func(s *corev1.Service) {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "fd00::1")
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPv6Protocol)
		}
		s.set(webAt("10.96.0.1", nodePort), sliceOf("web-a", "web", "172.16.0.1 n1"), v6)
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080")
		s.set(webAt("10.96.0.1", nodePort, dual))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080",
			"fd00::1/TCP/80 to [fd10::1]:8080", "nodeIPv6/TCP/30080 to [fd10::1]:8080")
		s.set(webAt("10.96.0.1", nodePort))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080")
	},
	"a load balancer gets another IP": func(s *situation) {
		s.set(webAt("10.96.0.1", loadBalancer()), sliceOf("web-a", "web", "172.16.0.1 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
		s.set(webAt("10.96.0.1", loadBalancer("5.5.5.1", "5.5.5.2")))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "5.5.5.1/TCP/80 to 172.16.0.1:8080", "5.5.5.2/TCP/80 to 172.16.0.1:8080")
		s.set(webAt("10.96.0.1", loadBalancer("5.5.5.2", "5.5.5.3")))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "5.5.5.2/TCP/80 to 172.16.0.1:8080", "5.5.5.3/TCP/80 to 172.16.0.1:8080")
	},
	"two protocols have the same port number": func(s *situation) {
		udp := func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "quic", Protocol: corev1.ProtocolUDP, Port: 80})
		}
		slice := sliceOf("web-a", "web", "172.16.0.1 n1")
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: new("quic"), Protocol: new(corev1.ProtocolUDP), Port: new(int32(9090))})
		s.set(webAt("10.96.0.1", udp), slice)
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080", "10.96.0.1/UDP/80 to 172.16.0.1:9090")
		s.set(webAt("10.96.0.1", udp, func(s *corev1.Service) { s.Spec.Ports = s.Spec.Ports[1:] }))
		s.expect("10.96.0.1/UDP/80 to 172.16.0.1:9090")
	},
	"a port gets another protocol": func(s *situation) {
		s.set(webAt("10.96.0.1"), sliceOf("web-a", "web", "172.16.0.1 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
		udp := sliceOf("web-a", "web", "172.16.0.1 n1")
		udp.Ports[0].Protocol = new(corev1.ProtocolUDP)
		s.set(webAt("10.96.0.1", func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolUDP }))
		synctest.Wait()
		s.set(udp)
		s.expect("10.96.0.1/UDP/80 to 172.16.0.1:8080")
	},
	"the last local endpoint leaves": func(s *situation) {
		service := webAt("10.96.0.1", nodePort, loadBalancer("5.5.5.1"), externalLocal)
		s.set(service, sliceOf("web-a", "web", "172.16.0.1 n1", "172.16.0.2 n2"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080 172.16.0.2:8080", "5.5.5.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080", "health IPv4 1")
		s.set(sliceOf("web-a", "web", "172.16.0.1 n1 terminating", "172.16.0.2 n2"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080", "5.5.5.1/TCP/80 to 172.16.0.1:8080", "nodeIPv4/TCP/30080 to 172.16.0.1:8080", "health IPv4 0")
		s.set(sliceOf("web-a", "web", "172.16.0.2 n2"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.2:8080", "5.5.5.1/TCP/80 drop", "nodeIPv4/TCP/30080 drop", "health IPv4 0")
	},
	"a service is given to another proxy and back": func(s *situation) {
		other := func(s *corev1.Service) { s.Labels = map[string]string{labelProxy: "other"} }
		s.set(webAt("10.96.0.1"), sliceOf("web-a", "web", "172.16.0.1 n1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
		s.set(webAt("10.96.0.1", other))
		s.expect()
		s.set(webAt("10.96.0.1"))
		s.expect("10.96.0.1/TCP/80 to 172.16.0.1:8080")
	},
}

// TestSituations plays fixed histories with both watchers and both kinds of sinks. The result
// must be as expected, and equal to the result of kube-proxy's trackers.
func TestSituations(t *testing.T) {
	discardLogs()
	for name, play := range situations {
		for with, settings := range map[string]settings{"default": {}, "informers": {Informers: true}, "full state": {FullState: true, BatchSize: 1}} {
			t.Run(name+"/"+with, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, faults{}, &found{verdicts: map[string]int{}, declared: map[string]int{}})
					w.settings = settings
					w.start()
					defer w.stop()
					synctest.Wait()
					play(&situation{w, map[string]kubetest.Object{}})
				})
			})
		}
	}
}
