// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

const group = "gateway.networking.k8s.io"

// object has those fields of all kinds of objects that this program needs.
type object struct {
	metav1.TypeMeta   `json:",inline"`
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
		Namespaces struct {
			From     string
			Selector *metav1.LabelSelector
		}
		Kinds []routeKind
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

type listenerStatus struct {
	Name           string             `json:"name"`
	SupportedKinds []routeKind        `json:"supportedKinds"`
	AttachedRoutes int32              `json:"attachedRoutes"`
	Conditions     []metav1.Condition `json:"conditions"`
}

type parentStatus struct {
	ParentRef      parentRef          `json:"parentRef"`
	ControllerName string             `json:"controllerName"`
	Conditions     []metav1.Condition `json:"conditions"`
}

type parentRef struct {
	Group       string `json:"group"`
	Kind        string `json:"kind"`
	Namespace   string `json:"namespace,omitempty"`
	Name        string `json:"name"`
	SectionName string `json:"sectionName,omitempty"`
	Port        int32  `json:"port,omitempty"`
}

type routeKind struct {
	Group string `json:"group"`
	Kind  string `json:"kind"`
}

type address struct {
	Type  string `json:"type"`
	Value string `json:"value"`
}

// resources are the resources that the program reads, by kind.
var resources = map[string]schema.GroupVersionResource{
	"Namespace":      {Version: "v1", Resource: "namespaces"},
	"GatewayClass":   {Group: group, Version: "v1", Resource: "gatewayclasses"},
	"Gateway":        {Group: group, Version: "v1", Resource: "gateways"},
	"TCPRoute":       {Group: group, Version: "v1", Resource: "tcproutes"},
	"UDPRoute":       {Group: group, Version: "v1", Resource: "udproutes"},
	"ReferenceGrant": {Group: group, Version: "v1", Resource: "referencegrants"},
}

// decode returns an unstructured object as an *object.
func decode(o any) (any, error) {
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return o, nil
	}
	text, err := u.MarshalJSON()
	if err != nil {
		return nil, err
	}
	to := new(object)
	return to, json.Unmarshal(text, to)
}

func (o *object) key() types.NamespacedName {
	return types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
}

// references returns the objects on which o depends. When one of them changes, an index
// finds o.
func references(o any) (all []string, _ error) {
	r := o.(*object)
	all = append(all, "GatewayClass /"+r.Spec.GatewayClassName)
	for _, p := range r.Spec.ParentRefs {
		all = append(all, "Gateway "+p.gateway(r).String(), "Namespace /"+r.Namespace)
	}
	for _, rule := range r.Spec.Rules {
		for _, b := range rule.BackendRefs {
			all = append(all, "Service "+b.key(r).String(), "ReferenceGrant "+b.key(r).Namespace)
		}
	}
	return all, nil
}

// reference returns the reference of the objects that depend on o.
func (o *object) reference() string {
	if o.Kind == "ReferenceGrant" {
		return o.Kind + " " + o.Namespace
	}
	return o.Kind + " " + o.key().String()
}
