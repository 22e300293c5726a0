// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

const group = "gateway.networking.k8s.io"

// The CRDs have the names, the subresource and the defaults of those of the Gateway API v1.6.
// They do not check values.
const crd = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: %[1]s.gateway.networking.k8s.io
  annotations: {api-approved.kubernetes.io: "https://github.com/kubernetes-sigs/gateway-api"}
spec:
  group: gateway.networking.k8s.io
  scope: %[3]s
  names: {kind: %[2]s, listKind: %[2]sList, plural: %[1]s, singular: %[4]s}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          status: {type: object, x-kubernetes-preserve-unknown-fields: true}
          spec:
            type: object
            x-kubernetes-preserve-unknown-fields: true
            properties:
              addresses: {type: array, items: {type: object, properties: {type: {type: string, default: IPAddress}, value: {type: string}}}}
              listeners:
                type: array
                items:
                  type: object
                  x-kubernetes-preserve-unknown-fields: true
                  properties:
                    allowedRoutes:
                      type: object
                      x-kubernetes-preserve-unknown-fields: true
                      default: {namespaces: {from: Same}}
                      properties:
                        namespaces: {type: object, x-kubernetes-preserve-unknown-fields: true, default: {from: Same}, properties: {from: {type: string, default: Same}}}
                        kinds: {type: array, items: {type: object, properties: {group: {type: string, default: gateway.networking.k8s.io}, kind: {type: string}}}}
              parentRefs:
                type: array
                items:
                  type: object
                  x-kubernetes-preserve-unknown-fields: true
                  properties: {group: {type: string, default: gateway.networking.k8s.io}, kind: {type: string, default: Gateway}}
              rules:
                type: array
                items:
                  type: object
                  properties:
                    backendRefs:
                      type: array
                      items:
                        type: object
                        x-kubernetes-preserve-unknown-fields: true
                        properties: {group: {type: string, default: ""}, kind: {type: string, default: Service}, weight: {type: integer, default: 1}}
`

func resource(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: group, Version: "v1", Resource: name}
}

// crds creates the CRDs, and waits until the API server serves them.
func (w *world) crds() {
	w.t.Helper()
	crds := w.client.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	for _, kind := range []string{"GatewayClass", "Gateway", "TCPRoute", "UDPRoute", "ReferenceGrant"} {
		plural, scope := strings.ToLower(kind)+"s", "Namespaced"
		if kind == "GatewayClass" {
			plural, scope = "gatewayclasses", "Cluster"
		}
		var o unstructured.Unstructured
		w.check(yaml.Unmarshal(fmt.Appendf(nil, crd, plural, kind, scope, strings.ToLower(kind)), &o.Object))
		_, err := crds.Create(w.t.Context(), &o, metav1.CreateOptions{})
		w.check(err)
		w.await(func() string {
			_, err := w.client.Resource(resource(plural)).List(w.t.Context(), metav1.ListOptions{})
			if err != nil {
				time.Sleep(100 * time.Millisecond)
				return err.Error()
			}
			return ""
		})
	}
}
