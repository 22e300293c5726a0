// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	watchapi "k8s.io/apimachinery/pkg/watch"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryv1client "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
)

// clients talk to the two API groups that matter here. The clientset of all
// groups is left alone: it would add them to every program.
type clients struct {
	http      *http.Client
	core      *corev1client.CoreV1Client
	discovery *discoveryv1client.DiscoveryV1Client
}

func newClients(config *rest.Config, compression bool) (*clients, error) {
	config = rest.CopyConfig(config)
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.DisableCompression = !compression
	config.Timeout = 0
	if config.QPS == 0 && config.RateLimiter == nil {
		// A handful of long requests needs no limit, and the server has its own.
		config.QPS = -1
	}
	var c clients
	var err error
	if c.http, err = rest.HTTPClientFor(config); err != nil {
		return nil, err
	}
	if c.core, err = corev1client.NewForConfigAndClient(config, c.http); err != nil {
		return nil, err
	}
	if c.discovery, err = discoveryv1client.NewForConfigAndClient(config, c.http); err != nil {
		return nil, err
	}
	return &c, nil
}

func (c *clients) close() { utilnet.CloseIdleConnectionsFor(c.http.Transport) }

// server returns the base URL of the API server.
func (c *clients) server() string {
	u := c.core.RESTClient().Get().URL()
	return u.Scheme + "://" + u.Host
}

// listWatcher lists and watches one resource; client-go's typed clients are of
// this form.
type listWatcher[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watchapi.Interface, error)
}
