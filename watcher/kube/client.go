// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	watchapi "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
)

// clients talk to the two API groups that matter here. client-go's typed clients
// are left alone: they come with the types of all groups, for every program.
type clients struct {
	http            *http.Client
	connections     *connections
	core, discovery rest.Interface
	parameters      runtime.ParameterCodec
}

func newClients(config *rest.Config, compression bool) (*clients, error) {
	scheme := runtime.NewScheme()
	for _, add := range [...]func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})

	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.DisableCompression = !compression
	config.Timeout = 0
	if config.QPS == 0 && config.RateLimiter == nil {
		// A handful of long requests needs no limit, and the server has its own.
		config.QPS = -1
	}
	if config.UserAgent == "" {
		config.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	c := &clients{connections: newConnections(config.Dial), parameters: runtime.NewParameterCodec(scheme)}
	config.Dial = c.connections.DialContext
	var err error
	if c.http, err = rest.HTTPClientFor(config); err != nil {
		return nil, err
	}
	if c.core, err = c.group(config, "/api", corev1.SchemeGroupVersion); err != nil {
		return nil, err
	}
	if c.discovery, err = c.group(config, "/apis", discoveryv1.SchemeGroupVersion); err != nil {
		return nil, err
	}
	return c, nil
}

// group returns a client of one API group.
func (c *clients) group(config *rest.Config, path string, version schema.GroupVersion) (rest.Interface, error) {
	config = rest.CopyConfig(config)
	config.APIPath = path
	config.GroupVersion = &version
	return rest.RESTClientForConfigAndClient(config, c.http)
}

func (c *clients) services() listWatcher[*corev1.ServiceList] {
	return gentype.NewClientWithList(services, c.core, c.parameters, "",
		newObject[corev1.Service], newObject[corev1.ServiceList], gentype.PrefersProtobuf[*corev1.Service]())
}

func (c *clients) nodes() listWatcher[*corev1.NodeList] {
	return gentype.NewClientWithList(nodes, c.core, c.parameters, "",
		newObject[corev1.Node], newObject[corev1.NodeList], gentype.PrefersProtobuf[*corev1.Node]())
}

func (c *clients) endpointSlices(namespace string) listWatcher[*discoveryv1.EndpointSliceList] {
	return gentype.NewClientWithList(endpointSlices, c.discovery, c.parameters, namespace,
		newObject[discoveryv1.EndpointSlice], newObject[discoveryv1.EndpointSliceList], gentype.PrefersProtobuf[*discoveryv1.EndpointSlice]())
}

func newObject[T any]() *T { return new(T) }

func (c *clients) close() { c.connections.close() }

// server returns the base URL of the API server.
func (c *clients) server() string {
	u := c.core.Get().URL()
	return u.Scheme + "://" + u.Host
}

// listWatcher lists and watches one resource.
type listWatcher[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watchapi.Interface, error)
}
