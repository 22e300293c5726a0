// SPDX-License-Identifier: Apache-2.0

package kpng

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher/file"
	"github.com/kpng-project/kpng/watcher/kube"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// source returns what fills the state, as opts says. Once says to return the first error.
func source(opts Options, once bool) (func(context.Context, *cluster.State) error, error) {
	given := 0
	for _, set := range [...]bool{opts.Kubeconfig != "", opts.Config != nil, opts.Informers != nil, opts.Manifests != ""} {
		if set {
			given++
		}
	}
	if given > 1 {
		return nil, errors.New("more than one of Kubeconfig, Config, Informers and Manifests is given")
	}
	if opts.Manifests != "" {
		return func(ctx context.Context, state *cluster.State) error {
			return file.Watch(ctx, state, file.Options{Path: opts.Manifests, Once: once, Options: opts.Services})
		}, nil
	}
	if opts.Informers != nil {
		if err := checkInformers(opts.Informers); err != nil {
			return nil, err
		}
	}
	config := opts.Config
	if config == nil && opts.Informers == nil {
		var err error
		if config, err = kube.LoadConfig(opts.Kubeconfig); err != nil {
			return nil, err
		}
	}
	return func(ctx context.Context, state *cluster.State) error {
		return kube.Watch(ctx, state, kube.Options{
			Options:   opts.Services,
			Config:    config,
			Informers: opts.Informers,
			NodeName:  opts.NodeName,
			FailFast:  once,
		})
	}, nil
}

// checkInformers refuses informers that are missing or of the wrong kind, which would look like
// an empty cluster.
func checkInformers(in *kube.Informers) error {
	for _, i := range [...]struct {
		field    string
		informer cache.SharedInformer
		want     any
	}{
		{"Services", in.Services, &corev1.Service{}},
		{"EndpointSlices", in.EndpointSlices, &discoveryv1.EndpointSlice{}},
		{"Nodes", in.Nodes, &corev1.Node{}},
	} {
		if i.informer == nil {
			return fmt.Errorf("no informer given for %s", i.field)
		}
		want := reflect.TypeOf(i.want)
		if got := informedType(i.informer); got != nil && got != want {
			return fmt.Errorf("the informer given for %s is one of %v, want %v", i.field, got, want)
		}
	}
	return nil
}

// informedType returns the type of an informer's objects, nil if it is not known: the informer
// is another one than client-go's. There is no other way to get it before the informer has
// objects.
func informedType(informer cache.SharedInformer) reflect.Type {
	v := reflect.Indirect(reflect.ValueOf(informer))
	if v.Kind() != reflect.Struct {
		return nil
	}
	object := v.FieldByName("objectType")
	if !object.IsValid() || object.Kind() != reflect.Interface || object.IsNil() {
		return nil
	}
	return object.Elem().Type()
}
