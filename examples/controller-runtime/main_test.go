// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/watcher/kube"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// A kpng.Proxy cannot run again, so the Runnable makes a new one.
func TestEachStartRunsNewProxy(t *testing.T) {
	p := newProxy("node", &kube.Informers{
		Services:       cache.NewSharedInformer(&cache.ListWatch{}, &corev1.Service{}, 0),
		EndpointSlices: cache.NewSharedInformer(&cache.ListWatch{}, &discoveryv1.EndpointSlice{}, 0),
		Nodes:          cache.NewSharedInformer(&cache.ListWatch{}, &corev1.Node{}, 0),
	}, true)
	var last *kpng.Proxy
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := p.Start(ctx); err != nil {
			t.Fatal(err)
		}
		if now := p.running.Load(); now == last {
			t.Error("Start ran the same proxy again")
		} else {
			last = now
		}
	}
}
