// SPDX-License-Identifier: Apache-2.0

package growth

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/cgroup"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var (
	nodeIP = netip.MustParseAddr("192.168.99.1")
	// podCIDR has the pod addresses. A local route for this prefix lets the node accept
	// connections.
	podCIDR = netip.MustParsePrefix("10.128.0.0/9")
)

const (
	podPort = 8080
	// innocents is the namespace of the innocent service, and of the marker. The harness
	// changes the innocent service while the proxy works on the objects of the shape. It
	// changes the marker after these objects. A proxy that has applied the change of the
	// marker has read all earlier changes.
	innocents = "innocents"
	// patience limits the time in which the proxy uses no CPU time. Then the harness gives up.
	patience = 20 * time.Second
	// kubeProxyPatience limits the time for one phase, because kube-proxy retries for ever.
	kubeProxyPatience = 5 * time.Minute
	// pause is the least time between two changes of the innocent service.
	pause = 20 * time.Millisecond
)

// phase has the figures of one phase.
type phase struct {
	usage
	wait wait // the longest wait of an innocent change
	// single is true if the phase changes only one service.
	single bool
}

// wait describes how long a change of the innocent service waits.
type wait struct {
	time time.Duration // from the write of the object until the dataplane has the change
	cpu  time.Duration // the proxy's CPU time during the wait; it depends less on other programs
}

// longer returns a wait with the maximum of each field.
func (w wait) longer(o wait) wait { return wait{max(w.time, o.time), max(w.cpu, o.cpu)} }

// The phases of a measurement.
const (
	load    = iota // all objects are written at once
	changes        // the steps of the shape
	restart        // the proxy is killed and started
	remove         // all objects are deleted at once
	phases
)

var phaseNames = [phases]string{"load", "changes", "restart", "delete"}

// figures are the results for one size.
type figures struct {
	phases [phases]phase
	// start is the usage of a start without objects.
	start usage
	// alone is the longest of several waits of innocent changes while nothing else happens.
	alone wait
	// memory is the peak of the resident memory, minus the memory of a start without
	// objects. kernel is the memory of the kernel's tables after the load, minus the memory
	// of the tables for the innocent service alone.
	memory, kernel int64
}

// harness measures one proxy. The proxy has a network namespace and an API server of its
// own.
type harness struct {
	node
	server  *server
	group   *cgroup.Group
	flipped int // number of changes of the innocent service
	marked  int // number of changes of the marker
	start   usage
	memory  struct{ resident, kernel int64 } // without objects
}

func newHarness(t testing.TB, proxy string, environment ...string) *harness {
	t.Helper()
	h := &harness{
		node:   node{TB: t, proxy: proxy, environment: environment, dir: t.TempDir(), ns: netnstest.New(t)},
		server: newServer(), group: cgroup.New(t),
	}
	h.configure()
	var listener net.Listener
	if err := h.ns.Do(func() (err error) { listener, err = net.Listen("tcp", "127.0.0.1:0"); return err }); err != nil {
		t.Fatal(err)
	}
	api := &http.Server{Handler: h.server}
	go api.Serve(listener)
	t.Cleanup(func() { api.Close() })
	// Each pod answers with its address.
	netnstest.Listen(t, h.ns.Do, fmt.Sprint("0.0.0.0:", podPort), func(c net.Conn) {
		fmt.Fprint(c, c.LocalAddr().(*net.TCPAddr).IP)
	})
	h.prepare("http://" + listener.Addr().String())
	t.Cleanup(h.kill)
	h.server.write([]object{&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelTopologyZone: "zone0"}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeIP.String()}}},
	}}, nil)
	h.server.write(innocent(0), nil)
	h.restart()
	if !h.converge() {
		t.Fatalf("%s does not start\n%s", proxy, h.logged())
	}
	h.start = h.usage()
	h.memory.resident, h.memory.kernel = h.peakMemory(), h.group.KernelMemory()
	return h
}

// configure makes the namespace a node on which all pods run.
func (h *harness) configure() {
	h.ns.Stub(h, "eth0")
	h.ns.Add(h, "eth0", netip.PrefixFrom(nodeIP, 24).String())
	h.ns.Route(h, "default", nodeIP.Next().String(), "eth0")
	pods := &net.IPNet{IP: podCIDR.Addr().AsSlice(), Mask: net.CIDRMask(podCIDR.Bits(), 32)}
	if err := h.ns.Links.RouteAdd(&netlink.Route{
		LinkIndex: 1, Dst: pods, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	}); err != nil {
		h.Fatalf("add route to pods: %v", err)
	}
}

// restart kills the running proxy and starts a new one.
func (h *harness) restart() {
	h.kill()
	h.node.start(h.group)
}

// innocent returns the objects of the innocent service and of the marker. The innocent
// service has a trigger time, so kpng reports when the dataplane has a change.
func innocent(flip int) []object {
	s := service(0, nil)
	s.Namespace, s.Name, s.Spec.ClusterIP = innocents, "innocent", innocentIP
	s.Spec.ClusterIPs = []string{innocentIP}
	e := slice(s, 0, 0, []string{innocentPod(flip)})
	e.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().UTC().Format(time.RFC3339Nano)}
	return []object{s, e}
}

const innocentIP, markerIP = "10.96.0.10", "10.96.0.11"

// innocentPod returns the endpoint of the innocent service after a number of changes.
// Endpoints repeat only after 200 changes. So merged changes also change the endpoint.
func innocentPod(flip int) string { return offset("10.128.0.10", flip%200).String() }

// marker returns the port and the endpoint of the marker with this number.
func marker(number int) (port int32, pod string) {
	return int32(1000 + number%10_000), offset("10.128.1.0", number%200).String()
}

// converge writes the marker and waits until the proxy has applied everything. It reports
// false if the proxy made no progress for long.
func (h *harness) converge() bool {
	h.Helper()
	h.marked++
	port, pod := marker(h.marked)
	s := service(0, nil)
	s.Namespace, s.Name, s.Spec.ClusterIP = innocents, "marker", markerIP
	s.Spec.ClusterIPs, s.Spec.Ports[0].Port = []string{markerIP}, port
	h.server.write([]object{s, slice(s, 0, 0, []string{pod})}, nil)
	if h.isKubeProxy() {
		return h.reaches(fmt.Sprintf("%s:%d", markerIP, port), pod)
	}
	fmt.Fprintln(h.stdin, "wait", h.marked)
	return h.receive(h.done, patience)
}

// receive waits for a line of the proxy. It reports false if the proxy ends, or uses no CPU
// time for long.
func (h *harness) receive(lines <-chan struct{}, patience time.Duration) bool {
	h.Helper()
	used, since := time.Duration(0), time.Now()
	for {
		select {
		case <-lines:
			return true
		case <-h.ended:
			h.Fatalf("%s ended\n%s", h.proxy, h.logged())
		case <-time.After(time.Second):
		}
		if now := h.usage().all; now > used+50*time.Millisecond {
			used, since = now, time.Now()
		}
		if time.Since(since) > patience {
			return false
		}
	}
}

// reaches waits until a connection to an address of a service reaches a pod.
func (h *harness) reaches(address, pod string) bool {
	for deadline := time.Now().Add(kubeProxyPatience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		var answer []byte
		h.ns.Do(func() error {
			c, err := net.DialTimeout("tcp", address, 100*time.Millisecond)
			if err != nil {
				return err
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(time.Second))
			answer, err = io.ReadAll(c)
			return err
		})
		if string(answer) == pod {
			return true
		}
	}
	return false
}

// flip changes the innocent service and waits until the dataplane has the change.
func (h *harness) flip() (w wait, ok bool) {
	h.Helper()
	h.flipped++
	if !h.isKubeProxy() {
		for len(h.applied) > 0 {
			<-h.applied
		}
	}
	used, begin := h.usage().all, time.Now()
	h.server.write(innocent(h.flipped)[1:], nil)
	if h.isKubeProxy() {
		ok = h.reaches(innocentIP+":80", innocentPod(h.flipped))
	} else {
		// If the proxy misses more than 10,000 changes, a pass delivers the state. A pass does
		// not report when a change is applied, so repeat the change.
		for try := 0; !ok && try < 10; try++ {
			if ok = h.receive(h.applied, 2*time.Second); !ok {
				h.flipped++
				h.server.write(innocent(h.flipped)[1:], nil)
			}
		}
	}
	return wait{time.Since(begin), h.usage().all - used}, ok
}

// phase writes the given differences, and measures what the proxy uses until it has applied
// all of them. Meanwhile it changes the innocent service. If burst is false, it writes a
// difference when the proxy has applied the previous difference.
func (h *harness) phase(burst bool, writes ...difference) (p phase, ok bool) {
	h.Helper()
	services := map[string]bool{}
	for _, d := range writes {
		for _, o := range slices.Concat(d.set, d.gone) {
			name := o.GetLabels()[discoveryv1.LabelServiceName]
			services[o.GetNamespace()+"/"+cmp.Or(name, o.GetName())] = true
		}
	}
	p.single = len(services) == 1
	used := h.usage()
	converged := make(chan bool, 1)
	stop := make(chan struct{})
	written := make(chan struct{})
	go func() {
		defer close(stop)
		ok := true
		for i, d := range writes {
			h.server.write(d.set, d.gone)
			if i == 0 {
				close(written)
			}
			if ok && (!burst || i == len(writes)-1) {
				ok = h.converge()
			}
		}
		converged <- ok
	}()
	<-written
	for {
		w, ok := h.flip()
		p.wait = p.wait.longer(w)
		if !ok {
			<-stop
			return p, false
		}
		select {
		case <-stop:
			now := h.usage()
			p.usage = usage{now.all - used.all, now.kernel - used.kernel}
			return p, <-converged
		case <-time.After(max(pause, w.time)):
		}
	}
}

// measure measures a shape in one size. It reports false if the proxy does not program the
// shape.
func (h *harness) measure(s *shape, n int) (f figures, ok bool) {
	h.Helper()
	before := s.objects(n, 0)
	first := difference{set: before}
	var steps []difference
	number := 4
	if s.steps != nil {
		number = s.steps(n)
	}
	for step := range number {
		after := s.objects(n, step+1)
		steps = append(steps, newDifference(before, after))
		before = after
	}

	for range 5 {
		w, ok := h.flip()
		if !ok {
			h.Fatalf("%s does not apply the change of a service\n%s", h.proxy, h.logged())
		}
		f.alone = f.alone.longer(w)
	}
	h.collect()
	if f.phases[load], ok = h.phase(false, first); !ok {
		return f, false
	}
	f.kernel = h.group.KernelMemory() - h.memory.kernel
	if f.phases[changes], ok = h.phase(s.burst, steps...); !ok {
		return f, false
	}
	f.memory = h.peakMemory() - h.memory.resident
	h.restart()
	if !h.converge() {
		return f, false
	}
	f.phases[restart].usage, f.start = h.usage(), h.start
	f.memory = max(f.memory, h.peakMemory()-h.memory.resident)
	f.phases[remove], ok = h.phase(false, difference{gone: before})
	return f, ok
}

// difference has the writes that turn one list of objects into another.
type difference struct{ set, gone []object }

func newDifference(before, after []object) (d difference) {
	old := map[string]object{}
	for _, o := range before {
		old[resourceOf(o)+keyOf(o)] = o
	}
	for _, o := range after {
		key := resourceOf(o) + keyOf(o)
		was := old[key]
		delete(old, key)
		if was == nil || !bytes.Equal(must(o.Marshal()), must(was.Marshal())) {
			d.set = append(d.set, o)
		}
	}
	for _, o := range before {
		if old[resourceOf(o)+keyOf(o)] != nil {
			d.gone = append(d.gone, o)
		}
	}
	return d
}
