// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/explain"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// eventsWriter writes Events of Kubernetes. It is a sink that runs beside the backend. It
// writes Events for the claims that services lose. Other methods add Events of other
// kinds.
//
// The name of an Event depends on its content. So the API server refuses an equal Event
// while the first one exists, usually for an hour. Nodes that report the same claim make
// only one Event. If there are too many Events, some are omitted.
type eventsWriter struct {
	client rest.Interface
	node   string
	queue  chan *eventsv1.Event
	// honours are the traffic parameters that the dataplane honours.
	honours nodeview.Parameters
	stop    context.CancelFunc
	ended   chan struct{}
}

// newEventsWriter returns a writer that uses the API server and the node of the command
// with these flags.
func newEventsWriter(fs *pflag.FlagSet) (*eventsWriter, error) {
	config, err := apiServer(fs, "--events")
	if err != nil {
		return nil, err
	}
	node, err := kpng.NodeName(flagValue(fs, "node-name"))
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"}) // decodes errors
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.APIPath, config.GroupVersion = "/apis", &eventsv1.SchemeGroupVersion
	config.QPS, config.Burst = 1, 25
	config.Timeout = 30 * time.Second
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("make client for events: %w", err)
	}
	return &eventsWriter{client: client, node: node, queue: make(chan *eventsv1.Event, 100), ended: make(chan struct{})}, nil
}

// Start implements sink.Starter.
func (w *eventsWriter) Start(ctx context.Context) error {
	ctx, w.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(w.ended)
		w.run(ctx)
	}()
	return nil
}

// Stop implements sink.Stopper. It discards the Events that are not written yet.
func (w *eventsWriter) Stop(context.Context) error {
	w.stop()
	<-w.ended
	return nil
}

// Sync implements sink.Sink.
func (w *eventsWriter) Sync(_ context.Context, c *sink.Changes) error {
	for s := range c.Services {
		if s.New == nil {
			continue
		}
		w.claimsLost(s.Key, newlyLost(s.Old, s.New))
		w.parametersIgnored(s.Key, s.Old, s.New)
	}
	return nil
}

// maxClaims limits the Events about lost claims of one service, so that one service does
// not use up the queue.
const maxClaims = 10

// claimsLost adds Events for the lost claims of a service.
func (w *eventsWriter) claimsLost(key types.NamespacedName, lost []api.LostClaim) {
	for i, l := range lost {
		if i == maxClaims {
			w.add(serviceReference(key), "ClaimLost", "Proxy", fmt.Sprintf("%d more addresses and ports belong to other services", len(lost)-maxClaims))
			return
		}
		w.add(serviceReference(key), "ClaimLost", "Proxy", fmt.Sprintf("%s belongs to service %s, so this service does not get its traffic", explain.ClaimText(l.Claim), l.Winner))
	}
}

// newlyLost returns the claims that are lost in the new view, but not in the old view.
// The old view may be nil.
func newlyLost(old, new *api.View) []api.LostClaim {
	if old == nil || len(new.Lost) == 0 {
		return new.Lost
	}
	before := make(map[api.Claim]bool, len(old.Lost))
	for _, l := range old.Lost {
		before[l.Claim] = true
	}
	return slices.DeleteFunc(slices.Clone(new.Lost), func(l api.LostClaim) bool { return before[l.Claim] })
}

// parametersIgnored adds an Event if the dataplane ignores traffic parameters of a
// service, and the old view did not have them. The old view may be nil.
func (w *eventsWriter) parametersIgnored(key types.NamespacedName, old, new *api.View) {
	ignored := nodeview.ParametersOf(new).Without(w.honours)
	if old != nil {
		ignored = ignored.Without(nodeview.ParametersOf(old))
	}
	if ignored != (nodeview.Parameters{}) {
		w.add(serviceReference(key), "TrafficParametersIgnored", "Proxy", fmt.Sprintf("served without traffic parameters that this dataplane does not have: %s", ignored))
	}
}

// serviceRefused adds an Event for a service that is too large or has invalid fields.
func (w *eventsWriter) serviceRefused(key types.NamespacedName, reason error) {
	w.add(serviceReference(key), "ServiceRefused", "Proxy", reason.Error())
}

// healthCheckFailed adds an Event for a health-check node port that cannot be opened.
// The Event has the same reason as in kube-proxy.
func (w *eventsWriter) healthCheckFailed(service types.NamespacedName, at netip.AddrPort, err error) {
	w.add(serviceReference(service), "FailedToStartServiceHealthcheck", "Listen", fmt.Sprintf("node %s cannot serve health checks at %s: %v", w.node, at, err))
}

// drifted adds an Event for a change of the dataplane by another program.
func (w *eventsWriter) drifted(dataplane string) {
	w.add(corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: w.node}, "ServiceRulesChanged", "Repair",
		fmt.Sprintf("another program changed the %s rules for services on node %s; they are repaired", dataplane, w.node))
}

func serviceReference(key types.NamespacedName) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: key.Namespace, Name: key.Name}
}

// add queues an Event. It omits the Event if the queue is full.
func (w *eventsWriter) add(regarding corev1.ObjectReference, reason, action, note string) {
	hash := fnv.New64a()
	fmt.Fprint(hash, regarding.Kind, reason, note)
	namespace := regarding.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // required for objects without a namespace
	}
	select {
	case w.queue <- &eventsv1.Event{
		TypeMeta:            metav1.TypeMeta{APIVersion: eventsv1.SchemeGroupVersion.String(), Kind: "Event"},
		ObjectMeta:          metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%.200s.%016x", regarding.Name, hash.Sum64())},
		EventTime:           metav1.NowMicro(),
		ReportingController: "kpng",
		ReportingInstance:   fmt.Sprintf("%.128s", w.node),
		Type:                corev1.EventTypeWarning, Reason: reason, Action: action, Note: fmt.Sprintf("%.1024s", note),
		Regarding: regarding,
	}:
	default:
	}
}

// run writes the queued Events until ctx ends. It logs only the first of several errors.
func (w *eventsWriter) run(ctx context.Context) {
	log := klog.FromContext(ctx)
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-w.queue:
			err := w.write(ctx, event)
			if err != nil && !failing && ctx.Err() == nil {
				log.Error(err, "Cannot write an event; it needs the verb create for events of events.k8s.io", "event", klog.KObj(event), "reason", event.Reason)
			}
			failing = err != nil
		}
	}
}

func (w *eventsWriter) write(ctx context.Context, event *eventsv1.Event) error {
	body, err := json.Marshal(event)
	if err != nil {
		return err
	}
	err = w.client.Post().Namespace(event.Namespace).Resource("events").SetHeader("Content-Type", runtime.ContentTypeJSON).Body(body).Do(ctx).Error()
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// metricsWithEvents passes reports to metrics, and also writes Events for some of them.
type metricsWithEvents struct {
	*metrics.Metrics
	events *eventsWriter
}

// Backend implements [nodesinks.Metrics].
func (m metricsWithEvents) Backend(name string) backends.Observer {
	return driftEvents{m.Metrics.Backend(name), name, m.events}
}

// HealthChecks implements [nodesinks.Metrics].
func (m metricsWithEvents) HealthChecks() (func(open, failing int), func(types.NamespacedName, netip.AddrPort, error)) {
	ports, failed := m.Metrics.HealthChecks()
	return ports, func(service types.NamespacedName, at netip.AddrPort, err error) {
		failed(service, at, err)
		m.events.healthCheckFailed(service, at, err)
	}
}

// driftEvents is the observer of a backend. It also writes an Event for each drift.
type driftEvents struct {
	backends.Observer
	backend string
	events  *eventsWriter
}

// Drifted implements [backends.Observer].
func (d driftEvents) Drifted(now bool) {
	d.Observer.Drifted(now)
	if now {
		d.events.drifted(d.backend)
	}
}
