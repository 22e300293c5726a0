// SPDX-License-Identifier: Apache-2.0

package objects

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic/fake"
)

type object struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct{ Refs []string }
}

func resource(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: name}
}

var resources = map[string]schema.GroupVersionResource{"Route": resource("routes"), "Gate": resource("gates"), "Grant": resource("grants")}

// A Route refers to a Gate, to a Service, and to all Grants of a namespace.
func references(o *object) (all []Key) {
	if o.Kind == "Route" {
		all = append(all, NewKey("Grant", "others", ""))
	}
	for _, r := range o.Spec.Refs {
		all = append(all, NewKey("Gate", o.Namespace, r), NewKey("Service", o.Namespace, r))
	}
	return all
}

func of(kind, namespace, name string, refs ...any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "example.com/v1", "kind": kind,
		"metadata": map[string]any{"namespace": namespace, "name": name},
		"spec":     map[string]any{"refs": refs},
	}}
}

func TestChangesProcessDependents(t *testing.T) {
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
		map[schema.GroupVersionResource]string{resource("routes"): "RouteList", resource("gates"): "GateList", resource("grants"): "GrantList"},
		of("Gate", "default", "a"), of("Gate", "default", "b"), of("Gate", "default", "alone"), of("Route", "default", "x", "a"), of("Route", "default", "y", "b"),
		of("Route", "default", "wrong", int64(1)), of("Grant", "others", "g"))
	store := New(client, resources, references)
	processed, synced, count := make(chan Key, 1000), make(chan struct{}), map[string]int{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		store.Run(ctx, func(_ context.Context, key Key) error {
			processed <- key
			return nil
		}, func() { close(synced) })
	}()
	// expect waits until all these keys are processed.
	expect := func(what string, want ...string) {
		t.Helper()
		missing := map[string]bool{}
		for _, key := range want {
			missing[key] = true
		}
		for len(missing) > 0 {
			select {
			case key := <-processed:
				delete(missing, key.String())
				count[key.String()]++
			case <-time.After(time.Minute):
				t.Fatalf("%s: not processed: %v", what, slices.Collect(maps.Keys(missing)))
			}
		}
	}
	<-synced
	expect("start", "Gate default/a", "Gate default/b", "Gate default/alone", "Route default/x", "Route default/y", "Route default/wrong", "Grant others/g")
	if got := store.Get(NewKey("Route", "default", "wrong")); got != nil {
		t.Errorf("an object of another form is %v", got)
	}
	if got := store.Get(NewKey("Service", "default", "a")); got != nil {
		t.Errorf("an object of another kind is %v", got)
	}
	if got := store.Referring(NewKey("Gate", "default", "a")); len(got) != 1 || got[0].Name != "x" {
		t.Errorf("%v refer to Gate a, want Route x", got)
	}
	if got := store.In("Gate", "default"); len(got) != 3 {
		t.Errorf("%d Gates, want 3", len(got))
	}
	check := func(_ *unstructured.Unstructured, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	routes, gates := client.Resource(resource("routes")).Namespace("default"), client.Resource(resource("gates")).Namespace("default")

	store.Changed(NewKey("Service", "default", "b"))
	expect("a Service", "Route default/y", "Gate default/b")
	check(gates.Update(ctx, of("Gate", "default", "a", "b"), metav1.UpdateOptions{}))
	expect("a Gate that begins to refer to another one", "Gate default/a", "Gate default/b", "Route default/x")
	store.Changed(NewKey("Service", "default", "b"))
	expect("a Service on which a Route depends over Gates", "Route default/x", "Route default/y", "Gate default/a", "Gate default/b")
	check(gates.Update(ctx, of("Gate", "default", "b", "a"), metav1.UpdateOptions{}))
	expect("a circle of Gates", "Route default/x", "Route default/y", "Gate default/a", "Gate default/b")
	check(routes.Update(ctx, of("Route", "default", "y", "a"), metav1.UpdateOptions{}))
	expect("a Route with a new reference", "Route default/y", "Gate default/a", "Gate default/b")
	check(client.Resource(resource("grants")).Namespace("others").Create(ctx, of("Grant", "others", "h"), metav1.CreateOptions{}))
	expect("a Grant", "Grant others/h", "Route default/x", "Route default/y", "Gate default/a")
	if err := routes.Delete(ctx, "y", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("a deleted Route", "Route default/y", "Gate default/a")
	check(routes.Update(ctx, of("Route", "default", "wrong", "a"), metav1.UpdateOptions{}))
	expect("a repaired Route", "Route default/wrong", "Gate default/a")

	if n := count["Gate default/alone"]; n != 1 {
		t.Errorf("an object on which nothing depends was processed %d times, want once", n)
	}
	cancel()
	<-done
	if fmt.Sprint(NewKey("Node", "", "n")) != "Node /n" {
		t.Errorf("a key without a namespace is %q", NewKey("Node", "", "n"))
	}
}

func TestFailedCallsAreRepeated(t *testing.T) {
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
		map[schema.GroupVersionResource]string{resource("gates"): "GateList"}, of("Gate", "default", "a"))
	store := New(client, map[string]schema.GroupVersionResource{"Gate": resource("gates")}, references)
	ctx, cancel := context.WithCancel(t.Context())
	calls, synced := 0, 0
	store.Run(ctx, func(context.Context, Key) error {
		if calls++; calls == 3 {
			cancel()
			return nil
		}
		return errors.New("not now")
	}, func() { synced++ })
	if calls != 3 || synced != 1 {
		t.Errorf("%d calls, and synced %d times; want 3 and 1", calls, synced)
	}
}
