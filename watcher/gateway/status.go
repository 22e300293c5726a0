// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/objects"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// process writes the service of a gateway, and the status of an object.
func (s *source) process(ctx context.Context, key objects.Key) (err error) {
	o := s.objects.Get(key)
	if key.Kind == "Gateway" && (o == nil || !s.serves(o)) {
		s.out.Update(func(tx *cluster.Tx) {
			tx.DeleteService(key.NamespacedName)
			tx.ReplaceSlicesOf(key.NamespacedName, slices.Values([]*api.EndpointSlice(nil)))
		})
	}
	if o == nil {
		return nil
	}
	now := o.Status
	now.Conditions = slices.Clone(now.Conditions)
	switch {
	case key.Kind == "GatewayClass" && o.Spec.ControllerName == s.Controller:
		set(&now.Conditions, o, "Accepted", true, "", "")
	case key.Kind == "Gateway" && s.serves(o):
		err = s.serve(ctx, o, &now)
	case key.Kind == "TCPRoute" || key.Kind == "UDPRoute":
		s.report(o, &now)
	}
	if !s.WriteStatus || equality.Semantic.DeepEqual(o.Status, now) {
		return err
	}
	body, failed := json.Marshal(map[string]any{"metadata": map[string]string{"resourceVersion": o.ResourceVersion}, "status": now})
	if failed == nil {
		_, failed = s.client.Resource(resources[key.Kind]).Namespace(o.Namespace).Patch(ctx, o.Name, types.MergePatchType, body, metav1.PatchOptions{}, "status")
	}
	if apierrors.IsConflict(failed) || apierrors.IsNotFound(failed) {
		failed = nil // not an error: the watch delivers the change, and process runs again
	}
	return errors.Join(err, failed)
}

// serves reports whether a gateway has a class of this controller.
func (s *source) serves(g *object) bool {
	class := s.objects.Get(objects.NewKey("GatewayClass", "", g.Spec.GatewayClassName))
	return class != nil && class.Spec.ControllerName == s.Controller
}

// serve writes the service of a gateway to the state, and sets the gateway's status in the
// argument now.
func (s *source) serve(ctx context.Context, g *object, now *status) (err error) {
	service, list, attached := s.translate(g)
	s.out.Update(func(tx *cluster.Tx) {
		tx.SetService(service)
		tx.ReplaceSlicesOf(g.key(), slices.Values(list))
	})
	reason, message := "AddressNotAssigned", ""
	if service.IPs.ClusterIPs.IsZero() && s.WriteStatus && len(service.Ports) > 0 && g.DeletionTimestamp == nil {
		if err = s.create(ctx, g, service); err != nil {
			message = err.Error()
		}
		if apierrors.IsAlreadyExists(err) {
			// The Service is new or belongs to another program. serve runs again when it changes.
			err = nil
		}
	}
	now.Addresses, now.Listeners = nil, nil
	for addr := range service.IPs.ClusterIPs.All() {
		now.Addresses = append(now.Addresses, address{"IPAddress", addr.String()})
	}
	for _, want := range g.Spec.Addresses {
		if len(now.Addresses) > 0 && !slices.Contains(now.Addresses, want) {
			reason, message = "AddressNotUsable", want.Value+" is no address of "+g.service().String()
		}
	}
	ready := len(now.Addresses) > 0 && message == ""
	for i := range g.Spec.Listeners {
		l := &g.Spec.Listeners[i]
		next := listenerStatus{Name: l.Name, SupportedKinds: []metav1.GroupKind{}, AttachedRoutes: attached[i]}
		for _, last := range g.Status.Listeners {
			if last.Name == l.Name {
				next.Conditions = slices.Clone(last.Conditions)
			}
		}
		if l.admitsKind(l.kind().Kind) {
			next.SupportedKinds = append(next.SupportedKinds, l.kind())
		}
		supported := protocols[l.Protocol] != api.UnknownProtocol
		resolved := supported && !slices.ContainsFunc(l.AllowedRoutes.Kinds, func(k metav1.GroupKind) bool { return k != l.kind() })
		set(&next.Conditions, g, "Accepted", supported, "UnsupportedProtocol", "")
		set(&next.Conditions, g, "ResolvedRefs", resolved, "InvalidRouteKinds", "")
		set(&next.Conditions, g, "Programmed", supported && ready, "Invalid", message)
		set(&next.Conditions, g, "Conflicted", false, "NoConflicts", "")
		now.Listeners = append(now.Listeners, next)
	}
	set(&now.Conditions, g, "Accepted", len(service.Ports) > 0, "ListenersNotValid", "")
	set(&now.Conditions, g, "Programmed", ready, reason, message)
	return err
}

// create creates the Service of a gateway. The API server gives it addresses, and the
// cluster's DNS a name. Kubernetes deletes it with the gateway.
func (s *source) create(ctx context.Context, g *object, service *api.Service) error {
	resource := schema.GroupVersionResource{Version: "v1", Resource: "services"}
	services := s.client.Resource(resource)
	// The API server gives out addresses before it notices that a Service exists.
	if _, err := services.Namespace(g.Namespace).Get(ctx, g.service().Name, metav1.GetOptions{}); err == nil {
		return apierrors.NewAlreadyExists(resource.GroupResource(), g.service().Name)
	}
	o := unstructured.Unstructured{Object: map[string]any{}}
	o.SetKind("Service")
	o.SetName(g.service().Name)
	o.SetLabels(map[string]string{watcher.LabelServiceProxyName: proxyName, group + "/gateway-name": g.Name})
	o.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: g.APIVersion, Kind: g.Kind, Name: g.Name, UID: g.UID}})
	var ports []any
	for _, p := range service.Ports {
		ports = append(ports, map[string]any{"name": strings.ToLower(p.Name), "protocol": p.Protocol.String(), "port": int64(p.Port)})
	}
	spec := map[string]any{"ports": ports, "ipFamilyPolicy": "PreferDualStack"}
	if len(g.Spec.Addresses) > 0 {
		spec["clusterIP"] = g.Spec.Addresses[0].Value
	}
	o.Object["spec"] = spec
	_, err := services.Namespace(g.Namespace).Create(ctx, &o, metav1.CreateOptions{})
	return err
}

// report sets the status of a route in the argument now. It keeps the entries of other
// controllers.
func (s *source) report(r *object, now *status) {
	_, reason, message := s.resolve(r)
	now.Parents = []parentStatus{}
	entries := slices.Clone(r.Status.Parents) // and an entry for each new parent
	for _, p := range r.Spec.ParentRefs {
		if !slices.ContainsFunc(entries, func(e parentStatus) bool { return e.ControllerName == s.Controller && e.ParentRef == p }) {
			entries = append(entries, parentStatus{ParentRef: p, ControllerName: s.Controller})
		}
	}
	for _, e := range entries {
		if e.ControllerName == s.Controller {
			g := s.objects.Get(e.ParentRef.gateway(r))
			if g == nil || !s.serves(g) || !slices.Contains(r.Spec.ParentRefs, e.ParentRef) {
				continue
			}
			accepted := "NoMatchingParent"
			for i := range g.Spec.Listeners {
				if l := &g.Spec.Listeners[i]; accepted != "Accepted" && e.ParentRef.selects(l) {
					accepted = map[bool]string{true: "Accepted", false: "NotAllowedByListeners"}[s.admits(g, l, r)]
				}
			}
			e.Conditions = slices.Clone(e.Conditions)
			set(&e.Conditions, r, "Accepted", accepted == "Accepted", accepted, "")
			set(&e.Conditions, r, "ResolvedRefs", reason == "ResolvedRefs", reason, message)
		}
		now.Parents = append(now.Parents, e)
	}
}

// set sets a condition. The reason of a true condition is its type.
func set(list *[]metav1.Condition, o *object, kind string, ok bool, reason, message string) {
	c := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, ObservedGeneration: o.Generation, Reason: reason, Message: message}
	if ok {
		c.Status, c.Reason = metav1.ConditionTrue, kind
	}
	meta.SetStatusCondition(list, c)
}
