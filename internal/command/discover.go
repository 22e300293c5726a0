// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/watcher/kube"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
)

// serverService is a Service whose endpoints are kpng servers.
//
// A client reads its EndpointSlices from the API server. DNS and cluster IPs are no
// alternative: on a node, they work only when the service proxy runs.
type serverService struct {
	key  types.NamespacedName
	port string // the name of the port; empty if the Service has only one port
}

const serviceScheme = "service://"

// parseServerService parses an address of the form service://NAMESPACE/NAME[:PORT]. It
// reports false if the address has another scheme.
func parseServerService(address string) (s serverService, ok bool, err error) {
	rest, ok := strings.CutPrefix(address, serviceScheme)
	if !ok {
		return s, false, nil
	}
	rest, s.port, _ = strings.Cut(rest, ":")
	namespace, name, _ := strings.Cut(rest, "/")
	s.key = types.NamespacedName{Namespace: namespace, Name: name}
	if len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Label(name)) > 0 {
		return s, true, fmt.Errorf("address %q is not %sNAMESPACE/NAME[:PORT]", address, serviceScheme)
	}
	return s, true, nil
}

func (s serverService) String() string {
	if s.port == "" {
		return serviceScheme + s.key.String()
	}
	return serviceScheme + s.key.String() + ":" + s.port
}

// discover returns a function that returns the addresses of the servers. It needs only the
// permission to list EndpointSlices in the namespace of the Service.
func (s serverService) discover(kubeconfig string) func(context.Context) ([]string, error) {
	return func(ctx context.Context) ([]string, error) {
		config, err := kube.LoadConfig(kubeconfig)
		if err != nil {
			return nil, err
		}
		slices, err := s.slices(ctx, config)
		if err != nil {
			return nil, fmt.Errorf("list the EndpointSlices of Service %s: %w", s.key, err)
		}
		return s.addresses(slices)
	}
}

func (s serverService) slices(ctx context.Context, config *rest.Config) ([]discoveryv1.EndpointSlice, error) {
	scheme := runtime.NewScheme()
	if err := discoveryv1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	config.APIPath, config.GroupVersion = "/apis", &discoveryv1.SchemeGroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, err
	}
	var list discoveryv1.EndpointSliceList
	err = client.Get().Namespace(s.key.Namespace).Resource("endpointslices").
		Param("labelSelector", labels.Set{discoveryv1.LabelServiceName: s.key.Name}.String()).
		Param("resourceVersion", "0"). // from the API server's cache
		Do(ctx).Into(&list)
	return list.Items, err
}

// addresses returns the addresses of the ready endpoints. If no endpoint is ready, it
// returns all addresses: kubelets may be unable to report that servers are ready.
func (s serverService) addresses(list []discoveryv1.EndpointSlice) ([]string, error) {
	var ready, other []string
	ports := map[string]bool{}
	for i := range list {
		slice := &list[i]
		port := 0
		for _, p := range slice.Ports {
			if p.Port == nil || p.Protocol != nil && *p.Protocol != corev1.ProtocolTCP {
				continue
			}
			name := ""
			if p.Name != nil {
				name = *p.Name
			}
			ports[name] = true
			if s.port == "" || s.port == name {
				port = int(*p.Port)
			}
		}
		if port == 0 {
			continue
		}
		for _, e := range slice.Endpoints {
			if len(e.Addresses) == 0 {
				continue
			}
			address := net.JoinHostPort(e.Addresses[0], strconv.Itoa(port))
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				ready = append(ready, address)
			} else {
				other = append(other, address)
			}
		}
	}
	if s.port == "" && len(ports) > 1 {
		return nil, fmt.Errorf("several ports in Service %s: append the name of a port to %s", s.key, s)
	}
	if len(ready) == 0 {
		ready = other
	}
	slices.Sort(ready)
	return slices.Compact(ready), nil
}
