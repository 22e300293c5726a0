// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"cmp"

	"github.com/kpng-project/kpng/watcher/objects"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

const group = "gateway.networking.k8s.io"

// resources are the resources that Watch reads, by kind.
var resources = map[string]schema.GroupVersionResource{
	"Namespace":      {Version: "v1", Resource: "namespaces"},
	"GatewayClass":   {Group: group, Version: "v1", Resource: "gatewayclasses"},
	"Gateway":        {Group: group, Version: "v1", Resource: "gateways"},
	"TCPRoute":       {Group: group, Version: "v1", Resource: "tcproutes"},
	"UDPRoute":       {Group: group, Version: "v1", Resource: "udproutes"},
	"ReferenceGrant": {Group: group, Version: "v1", Resource: "referencegrants"},
}

// object has the fields that this package needs, for all kinds of objects.
type object struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		ControllerName   string // of a GatewayClass
		GatewayClassName string // of a Gateway, like the next two
		Addresses        []address
		Listeners        []listener
		ParentRefs       []parentRef // of a route, like the next one
		Rules            []struct{ BackendRefs []backendRef }
		From, To         []struct{ Group, Kind, Namespace, Name string } // of a ReferenceGrant
	}
	Status status
}

type listener struct {
	Name, Protocol string
	Port           int32
	AllowedRoutes  struct {
		Kinds      []metav1.GroupKind
		Namespaces struct {
			From     string
			Selector *metav1.LabelSelector
		}
	}
}

type backendRef struct {
	Group, Kind, Namespace, Name string
	Port                         int32
	Weight                       int64
}

type status struct {
	Addresses  []address          `json:"addresses"`
	Conditions []metav1.Condition `json:"conditions"`
	Listeners  []listenerStatus   `json:"listeners"`
	Parents    []parentStatus     `json:"parents"`
}

type address struct {
	Type  string `json:"type"`
	Value string `json:"value"`
}

type listenerStatus struct {
	Name           string             `json:"name"`
	SupportedKinds []metav1.GroupKind `json:"supportedKinds"`
	AttachedRoutes int32              `json:"attachedRoutes"`
	Conditions     []metav1.Condition `json:"conditions"`
}

type parentStatus struct {
	ParentRef      parentRef          `json:"parentRef"`
	ControllerName string             `json:"controllerName"`
	Conditions     []metav1.Condition `json:"conditions"`
}

type parentRef struct {
	metav1.GroupKind
	Namespace   string `json:"namespace,omitempty"`
	Name        string `json:"name"`
	SectionName string `json:"sectionName,omitempty"`
	Port        int32  `json:"port,omitempty"`
}

func (o *object) key() types.NamespacedName {
	return types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
}

// service returns the key of the Service from which a Gateway has its addresses.
func (o *object) service() objects.Key {
	return objects.NewKey("Service", o.Namespace, o.Name+"-"+o.Spec.GatewayClassName)
}

// gateway returns the key of the Gateway to which a route refers, or the zero value.
func (p *parentRef) gateway(r *object) objects.Key {
	if p.Group != group || p.Kind != "Gateway" {
		return objects.Key{}
	}
	return objects.NewKey("Gateway", cmp.Or(p.Namespace, r.Namespace), p.Name)
}

// service returns the key of the Service to which a route refers.
func (b *backendRef) service(r *object) objects.Key {
	return objects.NewKey("Service", cmp.Or(b.Namespace, r.Namespace), b.Name)
}

// thisNode stands for the Node of this process.
var thisNode = objects.Key{Kind: "Node"}

// references returns the keys of the objects on which an object depends.
func references(o *object) (all []objects.Key) {
	if o.Kind == "Gateway" {
		all = append(all, objects.NewKey("GatewayClass", "", o.Spec.GatewayClassName), o.service(), thisNode)
	}
	for _, p := range o.Spec.ParentRefs {
		all = append(all, p.gateway(o), objects.NewKey("Namespace", "", o.Namespace))
	}
	for _, rule := range o.Spec.Rules {
		for _, b := range rule.BackendRefs {
			all = append(all, b.service(o), objects.NewKey("ReferenceGrant", b.service(o).Namespace, ""))
		}
	}
	return all
}
