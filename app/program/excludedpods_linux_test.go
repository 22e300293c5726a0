// SPDX-License-Identifier: Apache-2.0

package program

import (
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

func TestExcludedPodsNeedAnAPIServer(t *testing.T) {
	f := &ebpfFlags{}
	fs := pflag.NewFlagSet("ebpf", pflag.ContinueOnError)
	f.register(fs)
	if err := fs.Parse([]string{"--exclude-pods=a=b"}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.parts(command.Run{}); err == nil || !strings.Contains(err.Error(), "--exclude-pods needs an API server") {
		t.Errorf("error %v, want one with --exclude-pods", err)
	}
}

type fakeInformer struct {
	cache.Controller
	synced bool
}

func (f *fakeInformer) HasSynced() bool { return f.synced }

func TestExcludedPodsMatchByTheirLabelsOrNamespace(t *testing.T) {
	const static = "5a105e8b9d40e1329780d62ea2265d8a"
	pods, namespaces := &fakeInformer{}, &fakeInformer{}
	e := &excludedPods{
		selector: labels.SelectorFromSet(labels.Set{"kpng.io/ebpf": "false"}),
		pods:     cache.NewStore(cache.MetaNamespaceKeyFunc), namespaces: cache.NewStore(cache.MetaNamespaceKeyFunc),
		followPods: pods, followNS: namespaces,
	}
	add := func(to cache.Store, namespace, name, value, mirror string) {
		o, err := e.reduce(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: types.UID("uid-of-" + name), Labels: map[string]string{"kpng.io/ebpf": value},
			Annotations: map[string]string{"kubernetes.io/config.mirror": mirror},
		}})
		if err == nil {
			o, err = e.reduce(o) // client-go may call it again
		}
		if err == nil {
			err = to.Add(o)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	add(e.pods, "a", "plain", "true", "")
	add(e.pods, "a", "labelled", "false", "")
	add(e.pods, "a", "static", "false", static)
	add(e.pods, "a", "naming", "false", "uid-of-plain")
	add(e.pods, "mesh", "in-mesh", "", "")
	add(e.namespaces, "", "mesh", "false", "")
	for range 2 {
		if uids, known := e.uids(); known || uids != nil {
			t.Errorf("pods %v are known before both lists", uids)
		}
		pods.synced = true
	}
	namespaces.synced = true
	uids, known := e.uids()
	slices.Sort(uids)
	if want := []types.UID{static, "uid-of-in-mesh", "uid-of-labelled", "uid-of-naming"}; !known || !slices.Equal(uids, want) {
		t.Errorf("pods %v, known %t, want %v", uids, known, want)
	}
}
