// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
)

// Store writes objects directly to etcd, in the form in which an API server stores them.
// The API server's watches deliver these objects. Use Store for large clusters: creating
// the objects through the API is slow, because each allocation of a cluster IP counts all
// allocated IPs. The caller must set the fields that the API server would set, such as
// defaults, UIDs and node ports, and must provide the IPAddress object of each cluster
// IP. Store calls newObjects for each i from 0 to n-1, from several goroutines. It writes
// the objects of one call in their order.
func (s *Server) Store(ctx context.Context, n int, newObjects func(i int) []runtime.Object) (err error) {
	client, err := s.etcdClient(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(storers)
	for i := range n {
		group.Go(func() error {
			for _, o := range newObjects(i) {
				if err := store(ctx, client, o); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// storers is the number of concurrent writes to etcd.
const storers = 16

func store(ctx context.Context, client *clientv3.Client, object runtime.Object) error {
	var in string
	var meta *metav1.ObjectMeta
	version := corev1.SchemeGroupVersion
	switch o := object.(type) {
	case *corev1.Service:
		in, meta = "services/specs", &o.ObjectMeta
	case *discoveryv1.EndpointSlice:
		in, meta, version = "endpointslices", &o.ObjectMeta, discoveryv1.SchemeGroupVersion
	case *networkingv1.IPAddress:
		in, meta, version = "ipaddresses", &o.ObjectMeta, networkingv1.SchemeGroupVersion
	default:
		return fmt.Errorf("store a %T: it is not known where", object)
	}
	key := path.Join("/registry", in, meta.Namespace, meta.Name)
	meta.ResourceVersion = "" // not part of the stored object
	var value bytes.Buffer
	if err := scheme.Codecs.EncoderForVersion(storageCodec, version).Encode(object, &value); err != nil {
		return fmt.Errorf("encode %s: %w", key, err)
	}
	_, err := client.Put(ctx, key, value.String())
	return err
}

// storageCodec encodes objects in an API server's storage form.
var storageCodec = func() runtime.Serializer {
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		panic("the scheme has no protobuf")
	}
	return info.Serializer
}()

func (s *Server) etcdClient(ctx context.Context) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + s.etcdSocket()}, Context: ctx})
}
