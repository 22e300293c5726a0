// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/watcher/file"
	corev1 "k8s.io/api/core/v1"
)

// ExampleManifests publishes objects as the kit does, and reads them as a proxy does.
func ExampleManifests() {
	dir, err := os.MkdirTemp("", "kpng-example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	ctx := context.Background()

	manifests := filepath.Join(dir, "manifests.json")
	web := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}}}
	web.Namespace, web.Name = "default", "web"
	objects := &conformance.Objects{Services: []*corev1.Service{web}}
	if err := conformance.Manifests(manifests).Publish(ctx, objects); err != nil {
		log.Fatal(err)
	}

	state := cluster.New(cluster.Options{})
	if err := file.Watch(ctx, state, file.Options{Path: manifests, Once: true}); err != nil {
		log.Fatal(err)
	}
	for key, s := range state.Objects().Services.All() {
		fmt.Println(key, s.IPs.ClusterIPs)
	}
	// Output:
	// default/web [10.96.0.1]
}

// ExampleMatrix writes a matrix of the type that Run and RunSubject return.
func ExampleMatrix() {
	const section = "Session affinity"
	matrix := conformance.Matrix{
		{Section: section, Case: "each port of a service has its own affinity", Family: api.IPv4},
		{Section: section, Case: "each port of a service has its own affinity", Family: api.IPv6,
			Outcome: conformance.Unsupported, Reason: "session affinity: IPv4 only"},
	}
	if err := matrix.WriteMarkdown(os.Stdout); err != nil {
		log.Fatal(err)
	}
	fmt.Println("failed:", matrix.Count(conformance.Failed))
	// Output:
	// ### Session affinity
	//
	// | Case | IPv4 | IPv6 |
	// |---|---|---|
	// | each port of a service has its own affinity | ok | not supported (1) |
	//
	// 1 ok; 1 not supported
	//
	// 1. session affinity: IPv4 only
	// failed: 0
}
