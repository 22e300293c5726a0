// SPDX-License-Identifier: Apache-2.0

package allip

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/kubeproxy"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	allow  = "all-ip.kpng.io/allow"
	egress = "all-ip.kpng.io/egress"

	sctp    = 132
	unnamed = 99 // a protocol without ports
	// Machines answer this question over the protocol unnamed.
	question = "Who am I?"
	// echoPort is the UDP port at which machines send received packets back.
	echoPort = 7
)

// The addresses of the client, and of the machine "far" behind the client.
var (
	near = []string{"10.1.0.2", "fd01::2"}
	far  = []string{"10.9.0.2", "fd09::2"}
)

// TestWholeAddresses checks filters, load-balancer IPs, and the connections that pods begin, on a
// node that also runs kube-proxy.
func TestWholeAddresses(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) { testWholeAddresses(t, mode) })
	}
}

func testWholeAddresses(t *testing.T, mode string) {
	need(t, "ip", "setpriv", "nft", "iptables", "ip6tables", "ping")
	server := shared.Get(t)
	c := newCluster(t, server)
	n := newNetwork(t)
	pod := n.pods["pod1"]
	distant := n.extend(t)
	api := strings.TrimPrefix(server.Config().Host, "https://")
	netnstest.Relay(t, n.node.Do, api, "tcp", api)
	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	ordinary := c.ordinary("ordinary", "pod2")
	n.startKubeProxy(t, c, kubeproxy.Options{Kubeconfig: kubeconfig, Node: c.name, Mode: mode})
	served := func() error {
		for _, ip := range ordinary {
			if got, err := n.client.ask("tcp", ip, 80); got != "pod2" {
				return fmt.Errorf("kube-proxy's service %s leads to %q, error %v", ip, got, err)
			}
		}
		return nil
	}
	eventually(t, "kube-proxy", served)
	others := foreign(t, n.node)

	for _, machine := range []namespace{pod, n.client} {
		for _, network := range []string{"ip4", "ip6"} {
			machine.echoRaw(t, network, unnamed, func(b []byte, from string) []byte {
				if string(b) != question {
					return nil
				}
				return []byte(from)
			})
			machine.echoRaw(t, network, sctp, acknowledge)
		}
	}
	for i := range externalIPs {
		pod.echo(t, podIPs["pod1"][i])
		n.client.echo(t, near[i])
		n.client.listen(t, near[i])
	}

	p := subjects[0].start(t, n.node, c.name, kubeconfig, "--keep-source", "11.0.2.0/24,1100::/64")
	p.ready(t)
	c.create("example", c.name)
	c.lead("example", "pod1")
	all := []string{"tcp/80", "tcp/5000", "tcp/6000", "udp/5353", "fragments", "ping", "sctp", "unnamed", "large tcp"}
	check := func(what, value string, blocked ...string) {
		t.Helper()
		c.annotate("example", allow, value)
		eventually(t, what, func() error {
			for _, kind := range all {
				for _, ip := range externalIPs {
					client := n.client
					if kind == "large tcp" {
						client = distant
					}
					err := client.try(kind, ip)
					if isBlocked := strings.Contains(strings.Join(blocked, ","), kind); isBlocked != (err != nil) {
						return fmt.Errorf("%s to %s: error %v, want an error: %t", kind, ip, err, isBlocked)
					}
				}
			}
			return nil
		})
	}
	check("there is no filter", "")
	check("some protocols, and ranges of ports", "80/tcp, 5000-5999/tcp, 5353/udp, 99", "tcp/6000", "fragments", "ping", "sctp")
	check("the rest", "6000/tcp,7/udp,icmp,5-9/sctp", "tcp/80", "tcp/5000", "udp/5353", "unnamed", "large tcp")
	check("the ports of the service", "ports, icmp", "tcp/80", "tcp/5000", "udp/5353", "fragments", "sctp", "unnamed", "large tcp")
	check("whole protocols", "tcp,udp,sctp,99", "ping")
	// The pod has received ICMP errors for connections to the machine "far". No filter blocks
	// ICMP errors.
	for i, addr := range far {
		if route := pod.Run(t, "ip", "-"+[]string{"4", "6"}[i], "route", "get", addr); !strings.Contains(route, "mtu 1280") {
			t.Errorf("the pod has not received the path MTU: %s", route)
		}
	}
	c.annotate("example", allow, "80/tcp")
	eventually(t, "one port", func() error {
		if n.client.ping(externalIPs[0]) == nil {
			return errors.New("pings are still allowed")
		}
		return nil
	})
	// An invalid filter changes nothing.
	c.annotate("example", allow, "80/tcp, what")
	time.Sleep(time.Second)
	for _, ip := range externalIPs {
		if err := n.client.try("tcp/80", ip); err != nil {
			t.Error(err)
		}
		if n.client.try("tcp/6000", ip) == nil {
			t.Errorf("after an invalid filter, %s is open", ip)
		}
	}

	c.annotate("example", allow, "80/tcp")

	// The pod begins connections. Its own filter does not matter.
	begins := func(what string, from func(i int) string, kinds ...string) {
		t.Helper()
		eventually(t, what, func() error {
			for i := range near {
				for _, kind := range kinds {
					if got, err := pod.begin(kind, netip.MustParseAddr(near[i])); got != from(i) || err != nil {
						return fmt.Errorf("%s to %s has the source %s, error %v, want %s", kind, near[i], got, err, from(i))
					}
				}
			}
			return nil
		})
	}
	kinds := []string{"tcp", "udp", "fragments", "sctp", "unnamed"}
	begins("without annotation egress", func(i int) string { return podIPs["pod1"][i] }, "tcp")
	// The client ignores pings of the pod's own addresses.
	n.client.RunWith(t, `table inet own {
	chain input {
		type filter hook input priority 0;
		ip saddr 11.0.2.0/24 icmp type echo-request drop
		ip6 saddr 1100::/64 icmpv6 type echo-request drop
	}
}`, "nft", "-f", "-")
	for _, addr := range near {
		if pod.ping(netip.MustParseAddr(addr)) == nil {
			t.Errorf("without annotation egress, a ping to %s has another source than the pod", addr)
		}
	}
	c.annotate("example", egress, "true")
	begins("with annotation egress", func(i int) string { return externalIPs[i].String() }, kinds...)
	distant.serve(t, "far")
	for i := range far {
		family := []string{"-4", "-6"}[i]
		if err := pod.ping(netip.MustParseAddr(near[i])); err != nil {
			t.Error(err)
		}
		// An ICMP error to the external IP says that a packet of the pod's own connection is too large.
		pod.Run(t, "ip", family, "route", "flush", "cache")
		if route := pod.Run(t, "ip", family, "route", "get", far[i]); strings.Contains(route, "mtu 1280") {
			t.Fatalf("the pod still has the path MTU: %s", route)
		}
		if err := pod.large(netip.MustParseAddr(far[i])); err != nil {
			t.Error(err)
		}
		if route := pod.Run(t, "ip", family, "route", "get", far[i]); !strings.Contains(route, "mtu 1280") {
			t.Errorf("the pod has not received the path MTU of its own connection: %s", route)
		}
		pod2 := netip.MustParseAddr(podIPs["pod2"][i])
		if got, err := pod.ask("tcp", pod2, tcpPorts[0]); got != "pod2" || err != nil {
			t.Errorf("the pod reaches %q at %s: %v", got, pod2, err)
		}
	}
	if table := n.node.Run(t, "nft", "list", "table", "ip", "kpng-all-ip"); !strings.Contains(table, "11.0.2.0/24") {
		t.Errorf("no rule has the destinations of --keep-source:\n%s", table)
	}
	eventually(t, "the pod reaches its own address", func() error { return n.mustReach(pod, "pod1", "tcp", tcpPorts[0]) })
	c.annotate("example", egress, "")
	begins("annotation egress is removed", func(i int) string { return podIPs["pod1"][i] }, "tcp")

	// A load balancer with source ranges.
	c.balance("balanced", c.name, []string{"10.0.0.56", "1000::56"}, "10.1.0.0/16", "fd01::/64")
	c.lead("balanced", "pod1")
	for _, ip := range []string{"10.0.0.56", "1000::56"} {
		addr := netip.MustParseAddr(ip)
		eventually(t, "a load-balancer IP", func() error { return n.client.try("tcp/5000", addr) })
		if err := distant.try("tcp/5000", addr); !isTimeout(err) {
			t.Errorf("a client outside of the source ranges gets %v", err)
		}
	}
	if now := foreign(t, n.node); now != others {
		t.Errorf("rules of kube-proxy changed:\n%s", cmp.Diff(others, now))
	}
	if err := served(); err != nil {
		t.Error(err)
	}
	p.end(t, syscall.SIGTERM)
}

// ordinary makes a service for kube-proxy with a pod as endpoint. It returns the cluster IPs.
func (c *cluster) ordinary(name, pod string) (ips []netip.Addr) {
	c.t.Helper()
	dualStack := corev1.IPFamilyPolicyRequireDualStack
	s, err := c.client.CoreV1().Services(c.name).Create(c.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}, IPFamilyPolicy: &dualStack},
	}, metav1.CreateOptions{})
	c.check(err)
	for i, family := range s.Spec.IPFamilies {
		ips = append(ips, netip.MustParseAddr(s.Spec.ClusterIPs[i]))
		_, err = c.client.DiscoveryV1().EndpointSlices(c.name).Create(c.t.Context(), &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: sliceName(name, discoveryv1.AddressType(family)), Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressType(family),
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{podIPs[pod][i]}}},
			Ports:       []discoveryv1.EndpointPort{{Name: new(string), Port: new(int32(80))}},
		}, metav1.CreateOptions{})
		c.check(err)
	}
	return ips
}

// startKubeProxy runs kube-proxy on the node. kube-proxy needs the node's address.
func (n *network) startKubeProxy(t *testing.T, c *cluster, o kubeproxy.Options) {
	t.Helper()
	node, err := c.client.CoreV1().Nodes().Get(t.Context(), o.Node, metav1.GetOptions{})
	c.check(err)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.1.0.1"}, {Type: corev1.NodeInternalIP, Address: "fd01::1"}}
	_, err = c.client.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	c.check(err)
	args := kubeproxy.Command(t, o)
	var log bytes.Buffer
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &log, &log
	ended, err := n.node.Start(cmd)
	c.check(err)
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("kube-proxy logged:\n%s", &log)
		}
	})
}

// extend adds the machine "far" behind the client. The path to this machine has a smaller MTU
// than the two ends of the path. So the client sends ICMP errors to senders of large packets.
func (n *network) extend(t *testing.T) namespace {
	t.Helper()
	m := newNamespace(t)
	n.client.Join(t, "far", m.Namespace, "eth0")
	n.client.Set(t, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1", "ipv4/icmp_ratelimit=0", "ipv6/icmp/ratelimit=0")
	for i, gateway := range []string{"10.9.0.1", "fd09::1"} {
		bits := []string{"/24", "/64"}[i]
		n.client.Add(t, "far", gateway+bits)
		m.Add(t, "eth0", far[i]+bits)
		m.Route(t, "default", gateway, "eth0")
		n.node.Route(t, []string{"10.9.0.0/24", "fd09::/64"}[i], []string{"10.1.0.2", "fd01::2"}[i], "side0")
	}
	n.client.Run(t, "ip", "link", "set", "far", "mtu", "1280")
	return m
}

// listen accepts TCP connections at an address. Over each connection, it sends the peer's
// address.
func (n namespace) listen(t *testing.T, ip string) {
	netnstest.Listen(t, n.Do, net.JoinHostPort(ip, "80"), func(c net.Conn) {
		host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		io.WriteString(c, host+"\n")
	})
}

// echo answers a UDP packet with the peer's address, a line feed and the packet.
func (n namespace) echo(t *testing.T, ip string) {
	t.Helper()
	var c net.PacketConn
	if err := n.Do(func() (err error) {
		c, err = net.ListenPacket("udp", net.JoinHostPort(ip, strconv.Itoa(echoPort)))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	answer(t, c, func(b []byte, from net.Addr) []byte {
		return append([]byte(from.(*net.UDPAddr).IP.String()+"\n"), b...)
	})
}

// echoRaw answers packets of a protocol.
func (n namespace) echoRaw(t *testing.T, network string, protocol int, reply func(packet []byte, from string) []byte) {
	t.Helper()
	c, err := n.raw(network, protocol)
	if err != nil {
		t.Fatal(err)
	}
	answer(t, c, func(b []byte, from net.Addr) []byte { return reply(b, from.String()) })
}

func answer(t *testing.T, c net.PacketConn, reply func([]byte, net.Addr) []byte) {
	t.Cleanup(func() { c.Close() })
	go func() {
		buffer := make([]byte, 1<<16)
		for {
			read, from, err := c.ReadFrom(buffer)
			if err != nil {
				return
			}
			if b := reply(buffer[:read], from); b != nil {
				c.WriteTo(b, from)
			}
		}
	}()
}

func (n namespace) raw(network string, protocol int) (c net.PacketConn, err error) {
	err = n.Do(func() (err error) {
		c, err = net.ListenPacket(fmt.Sprintf("%s:%d", network, protocol), "")
		return err
	})
	return c, err
}

// exchange sends a packet of a protocol without a socket type. It returns the first answer
// that differs from the packet.
func (n namespace) exchange(protocol int, ip netip.Addr, packet []byte) ([]byte, error) {
	network := "ip4"
	if ip.Is6() {
		network = "ip6"
	}
	c, err := n.raw(network, protocol)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(brief))
	if _, err := c.WriteTo(packet, &net.IPAddr{IP: ip.AsSlice()}); err != nil {
		return nil, err
	}
	buffer := make([]byte, 1500)
	for {
		read, from, err := c.ReadFrom(buffer)
		if err != nil {
			return nil, err
		}
		if from.String() == ip.String() {
			return buffer[:read], nil
		}
	}
}

// try sends traffic of a kind to an external IP, and waits for the answer.
func (n namespace) try(kind string, ip netip.Addr) error {
	network, text, _ := strings.Cut(kind, "/")
	port, _ := strconv.Atoi(text)
	switch kind {
	case "ping":
		return n.ping(ip)
	case "fragments", "sctp", "unnamed":
		_, err := n.begin(kind, ip)
		return err
	case "large tcp":
		return n.large(ip)
	}
	_, err := n.ask(network, ip, port)
	return err
}

// large receives more data over one connection than a packet can hold.
func (n namespace) large(ip netip.Addr) error {
	c, err := n.dial("tcp", ip, 80)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	data := make([]byte, 100_000)
	go c.Write(data)
	if read, err := io.ReadFull(c, make([]byte, len(data))); err != nil {
		return fmt.Errorf("%d bytes arrived: %w", read, err)
	}
	return nil
}

// begin begins a connection. It returns the source address that the other machine sees.
func (n namespace) begin(kind string, ip netip.Addr) (string, error) {
	switch kind {
	case "tcp":
		return n.ask("tcp", ip, 80)
	case "udp", "fragments":
		c, err := n.dial("udp", ip, echoPort)
		if err != nil {
			return "", err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(brief))
		data := make([]byte, map[string]int{"udp": 10, "fragments": 5000}[kind])
		if _, err := c.Write(data); err != nil {
			return "", err
		}
		buffer := make([]byte, 1<<16)
		read, err := c.Read(buffer)
		source, echo, _ := strings.Cut(string(buffer[:read]), "\n")
		if err == nil && len(echo) != len(data) {
			err = fmt.Errorf("%d bytes arrived", len(echo))
		}
		return source, err
	case "sctp":
		b, err := n.exchange(sctp, ip, sctpPacket(uint16(1024+rand.IntN(60000)), 7, 0, initChunk, nil))
		if err == nil && b[12] != initAckChunk {
			err = fmt.Errorf("the answer is a chunk of type %d", b[12])
		}
		if err != nil {
			return "", err
		}
		return string(b[sctpHeaders:]), nil
	default:
		b, err := n.exchange(unnamed, ip, []byte(question))
		return string(b), err
	}
}

// This kernel has connection tracking for SCTP, but no SCTP sockets. So the test writes the
// first two packets of an association itself.
const (
	initChunk, initAckChunk = 1, 2
	sctpHeaders             = 32 // the length of the headers of both packets
	tag                     = "\x01\x02\x03\x04"
)

// sctpPacket returns an INIT or INIT ACK.
func sctpPacket(from, to uint16, verification uint32, chunk byte, parameters []byte) []byte {
	b := make([]byte, sctpHeaders, sctpHeaders+len(parameters))
	binary.BigEndian.PutUint16(b, from)
	binary.BigEndian.PutUint16(b[2:], to)
	binary.BigEndian.PutUint32(b[4:], verification)
	b[12] = chunk
	binary.BigEndian.PutUint16(b[14:], uint16(sctpHeaders-12+len(parameters)))
	copy(b[16:], tag)
	binary.BigEndian.PutUint32(b[20:], 1500) // window
	binary.BigEndian.PutUint16(b[24:], 1)    // streams
	binary.BigEndian.PutUint16(b[26:], 1)
	b = append(b, parameters...)
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// acknowledge answers an INIT. The answer ends with the peer's address.
func acknowledge(b []byte, from string) []byte {
	if len(b) < sctpHeaders || b[12] != initChunk {
		return nil
	}
	return sctpPacket(binary.BigEndian.Uint16(b[2:]), binary.BigEndian.Uint16(b), binary.BigEndian.Uint32(b[16:]), initAckChunk, []byte(from))
}

// annotate sets an annotation of a service, or removes it if the value is empty.
func (c *cluster) annotate(service, name, value string) {
	c.t.Helper()
	var v any
	if value != "" {
		v = value
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{name: v}}})
	c.check(err)
	_, err = c.client.CoreV1().Services(c.name).Patch(c.t.Context(), service, types.MergePatchType, patch, metav1.PatchOptions{})
	c.check(err)
}

// balance makes a service with load-balancer IPs and source ranges.
func (c *cluster) balance(name, proxy string, ips []string, sources ...string) {
	c.t.Helper()
	c.create(name, proxy)
	services := c.client.CoreV1().Services(c.name)
	c.check(services.Delete(c.t.Context(), name, metav1.DeleteOptions{}))
	dualStack := corev1.IPFamilyPolicyRequireDualStack
	s, err := services.Create(c.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{watcher.LabelServiceProxyName: proxy}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilyPolicy: &dualStack,
			Ports: []corev1.ServicePort{{Port: 6000}}, LoadBalancerSourceRanges: sources,
		},
	}, metav1.CreateOptions{})
	c.check(err)
	for _, ip := range ips {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
	}
	_, err = services.UpdateStatus(c.t.Context(), s, metav1.UpdateOptions{})
	c.check(err)
}
