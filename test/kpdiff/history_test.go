// SPDX-License-Identifier: Apache-2.0

package kpdiff

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/kubetest"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
	netutils "k8s.io/utils/net"
)

var (
	histories = flag.Int("histories", 300, "the `number` of random histories to play")
	firstSeed = flag.Uint64("seed", 0, "the `seed` of the first history; the others follow")
)

// TestHistories plays random histories of a cluster to a whole kpng, from the watcher to
// the objects of a dataplane, and to the trackers of kube-proxy. Whenever the cluster and
// its connections have been quiet for some time, both must have made the same decisions.
//
// The seed determines the steps of a history. If a history fails, the test reduces it to the
// steps that the failure needs.
func TestHistories(t *testing.T) {
	discardLogs()
	found := playAll(t, *firstSeed, *histories, faults{})
	for _, verdict := range []string{"to", "drop", "reject"} {
		if *histories >= 100 && found.verdicts[verdict] == 0 {
			t.Errorf("no frontend has the verdict %q", verdict)
		}
	}
	t.Logf("%d histories, %d comparisons, frontends by verdict %v, declared differences %v", found.histories, found.comparisons, found.verdicts, found.declared)
	if found.err != nil {
		t.Fatal(found.err)
	}
}

// discardLogs discards the logs. In these logs, kube-proxy and kpng report lost watches and
// rejected objects. It also removes the error handlers of client-go, because one of them
// sleeps until a time that another bubble has set.
func discardLogs() {
	klog.SetLogger(klog.New(nil))
	utilruntime.ErrorHandlers = nil
}

// found has the findings of histories.
type found struct {
	histories, comparisons int
	verdicts, declared     map[string]int
	err                    error // of the first history that failed
}

// playAll plays n histories. It ends at the first history that fails.
func playAll(t *testing.T, seed uint64, n int, faults faults) found {
	f := found{verdicts: map[string]int{}, declared: map[string]int{}}
	for ; f.histories < n && f.err == nil; f.histories, seed = f.histories+1, seed+1 {
		if f.histories > 0 && f.histories%1000 == 0 {
			t.Logf("%d histories, up to seed %d", f.histories, seed-1)
		}
		random := rand.New(rand.NewPCG(seed, 42))
		steps := []step{{"start", random.Uint64()}}
		for range 10 + random.IntN(50) {
			steps = append(steps, step{pick(chance{random}, kinds...), random.Uint64()})
		}
		var log []string
		if log, f.err = play(t, steps, faults, &f); f.err == nil {
			continue
		}
		if *reduceHistories {
			ignored := found{verdicts: map[string]int{}, declared: map[string]int{}}
			steps = apitest.Reduce(steps, func(steps []step) bool {
				_, err := play(t, steps, faults, &ignored)
				return err != nil
			})
			if fewer, err := play(t, steps, faults, &ignored); err != nil {
				log, f.err = fewer, err
			}
		}
		f.err = fmt.Errorf("history of seed %d: %w\n%s", seed, f.err, strings.Join(log, "\n"))
	}
	return f
}

var reduceHistories = flag.Bool("reduce", true, "reduce a history that fails")

// step is a step of a history. Its result depends only on its kind and seed, and on the
// steps before.
type step struct {
	kind string
	seed uint64
}

// kinds has the kinds of steps. A kind occurs more often if it is here several times.
var kinds = []string{
	"service", "service", "service", "slice", "slice", "slice", "slice", "slice", "delete service", "delete slice", "label", "node", "wait", "wait",
	"lose watches", "expire watches", "compact", "bookmark", "unplug", "refuse", "plug", "fail",
	"restart", "back up", "restore", "quiet", "quiet", "quiet",
}

// world is a cluster, a kpng that follows it, and the state of kube-proxy's trackers.
type world struct {
	*process
	t         *testing.T
	server    *kubetest.Server
	kubeProxy kubeProxyState
	found     *found
	random    chance
	log       []string

	services map[string]*corev1.Service
	places   map[string]int // the places of the services
	slices   map[string]*discoveryv1.EndpointSlice
	node     *corev1.Node // nil if it does not exist
	created  int
	// restore restores the last backup.
	restore func()
}

// play plays a history in a synctest bubble. It returns what happened, and the first
// difference.
func play(t *testing.T, steps []step, faults faults, found *found) (log []string, err error) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, faults, found)
		for i, s := range append(slices.Clip(steps), step{kind: "quiet"}) {
			w.random = chanceOf(s.seed)
			w.logf("%s", s.kind)
			if err = w.step(s.kind); err != nil {
				err = fmt.Errorf("step %d (%s): %w", i, s.kind, err)
				break
			}
			if w.random.oneIn(2) {
				synctest.Wait()
			}
		}
		w.stop()
		log = w.log
	})
	return log, err
}

// newWorld returns an empty cluster, and a process that does not run.
func newWorld(t *testing.T, faults faults, found *found) *world {
	server := kubetest.Start(t)
	return &world{
		process: &process{dataplane: newDataplane(), server: server, faults: faults},
		t:       t, server: server, kubeProxy: newKubeProxyState(), found: found,
		services: map[string]*corev1.Service{}, places: map[string]int{}, slices: map[string]*discoveryv1.EndpointSlice{},
	}
}

func chanceOf(seed uint64) chance { return chance{rand.New(rand.NewPCG(seed, 0))} }

func (w *world) logf(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

func (w *world) step(kind string) error {
	switch kind {
	case "start":
		w.configure(w.random)
		w.logf("  %+v", w.settings)
		w.setNode()
		for range w.random.IntN(4) {
			w.setService()
			w.setSlice()
		}
		w.start()
	case "service":
		w.setService()
	case "slice":
		w.setSlice()
	case "delete service":
		w.deleteService(w.name())
	case "delete slice":
		if all := keysOf(w.slices, nil); len(all) > 0 {
			w.deleteSlice(pick(w.random, all...))
		}
	case "label":
		w.label()
	case "node":
		w.setNode()
	case "wait":
		time.Sleep(time.Duration(w.random.Int64N(int64(pick(w.random, 10*time.Millisecond, time.Second, 30*time.Second)))))
	case "lose watches":
		w.server.Drop(nil)
	case "expire watches":
		w.server.Compact()
		w.server.Drop(apierrors.NewResourceExpired("too old resource version"))
	case "compact":
		w.server.Compact()
	case "bookmark":
		w.server.Bookmark()
	case "unplug":
		w.server.Unplug(true)
	case "refuse":
		w.refuse()
	case "plug":
		w.calm()
	case "fail":
		w.dataplane.disturb(w.random)
	case "restart":
		w.stop()
		w.start()
	case "back up":
		if !w.settings.Informers { // client-go's informers do not notice a restore
			w.backUp()
		}
	case "restore":
		if w.restore != nil {
			// A watcher cannot notice a restore between its list and its first watch. It
			// also cannot notice a restore if the server soon has the watcher's resource
			// versions again.
			synctest.Wait()
			w.restore()
			w.calm()
			time.Sleep(5 * time.Minute)
			return w.quiet()
		}
	case "quiet":
		return w.quiet()
	}
	return nil
}

// refuse makes the server refuse some requests until the next "plug".
func (w *world) refuse() {
	resource, verb := pick(w.random, "services", "endpointslices", "nodes"), pick(w.random, "list", "watch", "")
	err := pick(w.random, apierrors.NewTooManyRequests("later", 1), apierrors.NewInternalError(errors.New("etcd")),
		apierrors.NewUnauthorized("expired token"), apierrors.NewTimeoutError("slow", 1))
	w.logf("  %s %s: %v", verb, resource, err)
	w.server.Mu.Lock()
	defer w.server.Mu.Unlock()
	w.server.Refuse = func(r kubetest.Request) *apierrors.StatusError {
		if r.Resource == resource && (verb == "" || r.Verb == verb) {
			return err
		}
		return nil
	}
}

// calm ends all failures.
func (w *world) calm() {
	w.server.Unplug(false)
	w.server.Mu.Lock()
	w.server.Refuse = nil
	w.server.Mu.Unlock()
	w.dataplane.calm()
}

// quiet ends all failures, and waits until both proxies agree. It returns an error if they do
// not agree in time.
func (w *world) quiet() (err error) {
	w.calm()
	w.label()
	for range 8 {
		time.Sleep(time.Minute)
		synctest.Wait()
		if err = w.compare(); err == nil {
			break
		}
	}
	return err
}

func (w *world) compare() error {
	w.found.comparisons++
	var errs []error
	if err := w.failure(); err != nil {
		errs = append(errs, err)
	}
	labels := map[string]string{}
	if w.node != nil {
		labels = w.node.Labels
	}
	want, got := w.kubeProxy.decisions(labels), w.dataplane.decisions()
	for _, key := range keysOf(want, got) {
		compare(orEmpty(want[key]), orEmpty(got[key]), w.hasOtherPorts(key), w.found.verdicts, w.found.declared, func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("%s: "+format, append([]any{key}, args...)...))
		})
	}
	return errors.Join(errs...)
}

func orEmpty(d decided) decided {
	if d.frontends == nil {
		return newDecided()
	}
	return d
}

// hasOtherPorts reports whether a slice of a service in the namespace ns has other ports.
func (w *world) hasOtherPorts(key string) bool {
	name := strings.TrimPrefix(key, "ns/")
	c := clusterState{service: w.services[name]}
	for _, slice := range w.slices {
		if slice.Labels[discoveryv1.LabelServiceName] == name {
			c.slices = append(c.slices, slice)
		}
	}
	return c.service != nil && c.hasOtherPorts()
}

// name returns the name of a service. The service may not exist.
func (w *world) name() string { return fmt.Sprint("svc", w.random.IntN(4)) }

// wanted returns the service if the proxy has to serve it, and otherwise nil.
func (w *world) wanted(s *corev1.Service) *corev1.Service {
	if s == nil || s.Labels[labelProxy] != w.settings.ServiceProxyName {
		return nil
	}
	return s
}

const labelProxy = "service.kubernetes.io/service-proxy-name"

// setService creates or changes a service. Only one service at a time has a place.
func (w *world) setService() {
	name := w.name()
	place, exists := w.places[name]
	if !exists {
		for place = 1 + w.random.IntN(6); slices.Contains(valuesOf(w.places), place); {
			place = 1 + place%6
		}
	}
	s := w.random.service(name, place, w.portNames(name))
	if w.random.oneIn(8) {
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.ExternalIPs, s.Status = "None", []string{"None"}, nil, corev1.ServiceStatus{}
		s.Spec.Type, s.Spec.HealthCheckNodePort = corev1.ServiceTypeClusterIP, 0
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = 0
		}
	}
	if proxy := pick(w.random, w.settings.ServiceProxyName, w.settings.ServiceProxyName, w.settings.ServiceProxyName, "", "other"); proxy != "" {
		s.Labels = map[string]string{labelProxy: proxy}
	}
	if !w.random.oneIn(3) {
		s.Spec.Selector = map[string]string{"app": name}
	}
	w.writeService(s, place)
}

func (w *world) writeService(s *corev1.Service, place int) {
	old := w.services[s.Name]
	if old == nil {
		w.created++
		s.CreationTimestamp, s.UID = metav1.Unix(int64(w.created), 0), types.UID(fmt.Sprint(w.created))
	} else {
		s.CreationTimestamp, s.UID = old.CreationTimestamp, old.UID
	}
	w.logf("  %s at place %d: labels %v %s", s.Name, place, s.Labels, inJSON([]any{s.Spec, s.Status.LoadBalancer}))
	w.services[s.Name], w.places[s.Name] = s, place
	w.server.Set(s)
	w.kubeProxy.service(w.wanted(old), w.wanted(s))
}

func inJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func valuesOf(m map[string]int) (all []int) {
	for _, v := range m {
		all = append(all, v)
	}
	return all
}

func (w *world) deleteService(name string) {
	old := w.services[name]
	if old == nil {
		return
	}
	w.logf("  %s", name)
	delete(w.services, name)
	delete(w.places, name)
	w.server.Delete(old)
	w.kubeProxy.service(w.wanted(old), nil)
}

// portNames returns the names of the ports of a service.
func (w *world) portNames(name string) []string {
	if s := w.services[name]; s != nil && !w.random.oneIn(6) {
		var names []string
		for _, p := range s.Spec.Ports {
			names = append(names, p.Name)
		}
		return names
	}
	if w.random.oneIn(4) {
		return []string{""}
	}
	return []string{"http", "dns", "dns-tcp"}[:1+w.random.IntN(3)]
}

// setSlice creates or changes a slice. Endpoints of other slices of the service move as with
// the controller: for some time, they may be in both slices or in none.
func (w *world) setSlice() {
	name, service := w.name(), ""
	if service = name; w.random.oneIn(8) {
		service = w.name()
	}
	e := w.random.endpointMaker(service)
	numbers := w.random.Perm(8)
	e.next = func() int {
		n := numbers[0]
		numbers = numbers[1:]
		return 1 + n
	}
	s := e.slice(fmt.Sprint(name, "-", w.random.IntN(3)), w.portNames(service))
	if proxy := w.settings.ServiceProxyName; proxy != "" {
		s.Labels[discoveryv1.LabelManagedBy] = "endpointslice-controller.k8s.io"
		if w.random.oneIn(2) {
			s.Labels[labelProxy] = proxy
		}
	}
	if w.random.oneIn(2) {
		w.writeSlice(s)
		w.moveAway(s)
	} else {
		w.moveAway(s)
		w.writeSlice(s)
	}
}

// label labels the slices of services with a selector, as the controller does.
func (w *world) label() {
	for _, name := range keysOf(w.slices, nil) {
		s := w.slices[name].DeepCopy()
		of := w.wanted(w.services[s.Labels[discoveryv1.LabelServiceName]])
		if of == nil || of.Spec.Selector == nil || of.Labels[labelProxy] == s.Labels[labelProxy] {
			continue
		}
		s.Labels[labelProxy] = of.Labels[labelProxy]
		w.writeSlice(s)
	}
}

// moveAway removes the endpoints of a slice from the other slices of its service.
func (w *world) moveAway(s *discoveryv1.EndpointSlice) {
	has := map[string]bool{}
	for _, e := range s.Endpoints {
		has[addressOf(e)] = true
	}
	for _, name := range keysOf(w.slices, nil) {
		other := w.slices[name]
		if name == s.Name || other.Labels[discoveryv1.LabelServiceName] != s.Labels[discoveryv1.LabelServiceName] {
			continue
		}
		if !slices.ContainsFunc(other.Endpoints, func(e discoveryv1.Endpoint) bool { return has[addressOf(e)] }) {
			continue
		}
		other = other.DeepCopy()
		other.Endpoints = slices.DeleteFunc(other.Endpoints, func(e discoveryv1.Endpoint) bool { return has[addressOf(e)] })
		w.writeSlice(other)
	}
}

func addressOf(e discoveryv1.Endpoint) string {
	return netutils.ParseIPSloppy(e.Addresses[0]).String()
}

func (w *world) writeSlice(s *discoveryv1.EndpointSlice) {
	w.logf("  %s: labels %v %s", s.Name, s.Labels, inJSON([]any{s.AddressType, s.Ports, s.Endpoints}))
	if old := w.slices[s.Name]; old != nil {
		if old.AddressType != s.AddressType { // the type is immutable
			w.server.Delete(old)
			w.kubeProxy.slice(old, true)
		} else if old.Labels[discoveryv1.LabelServiceName] != s.Labels[discoveryv1.LabelServiceName] {
			w.kubeProxy.slice(old, true) // otherwise kube-proxy would keep the slice for the old service, too
		}
	}
	w.slices[s.Name] = s
	w.server.Set(s)
	w.kubeProxy.slice(s, false)
}

func (w *world) deleteSlice(name string) {
	w.logf("  %s", name)
	old := w.slices[name]
	delete(w.slices, name)
	w.server.Delete(old)
	w.kubeProxy.slice(old, true)
}

// setNode creates, changes or deletes the Node object.
func (w *world) setNode() {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode, Labels: map[string]string{}}}
	if zone := pick(w.random, "", "a", "b"); zone != "" {
		node.Labels[corev1.LabelTopologyZone] = zone
	}
	if w.random.oneIn(6) {
		w.server.Set(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2", Labels: node.Labels}})
		return
	}
	w.writeNode(pick(w.random, node, node, node, nil))
}

func (w *world) writeNode(node *corev1.Node) {
	if node == nil && w.node == nil {
		return
	}
	if node == nil {
		w.logf("  deleted")
		w.server.Delete(w.node)
	} else {
		w.logf("  %v", node.Labels)
		w.server.Set(node)
	}
	w.node = node
}

// backUp makes a backup, which a later step may restore.
func (w *world) backUp() {
	services, places, created, node := maps.Clone(w.services), maps.Clone(w.places), w.created, w.node
	backedUp, restore := maps.Clone(w.slices), w.server.Backup()
	w.restore = func() {
		restore()
		for name, old := range w.services {
			w.kubeProxy.service(w.wanted(old), w.wanted(services[name]))
		}
		for name, new := range services {
			if w.services[name] == nil {
				w.kubeProxy.service(nil, w.wanted(new))
			}
		}
		for _, old := range w.slices {
			w.kubeProxy.slice(old, true)
		}
		for _, new := range backedUp {
			w.kubeProxy.slice(new, false)
		}
		w.services, w.places, w.slices = maps.Clone(services), maps.Clone(places), maps.Clone(backedUp)
		w.created, w.node = max(w.created, created), node
	}
}
