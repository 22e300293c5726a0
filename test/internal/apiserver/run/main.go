// SPDX-License-Identifier: Apache-2.0

// Command run starts a real kube-apiserver with etcd on loopback, and creates objects
// from manifests. Use it to try kpng without a cluster:
//
//	go run -C test ./internal/apiserver/run -kubeconfig /tmp/kubeconfig ../examples/demo.yaml
//
// Before run ends, it stops the server and deletes the server's data.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
)

func main() {
	kubeconfig := flag.String("kubeconfig", filepath.Join(os.TempDir(), "kpng-apiserver.kubeconfig"), "write the administrator's kubeconfig to this `file`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *kubeconfig, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "apiserver:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig string, manifests []string) error {
	fmt.Println("Starting kube-apiserver. The first time, it is compiled, which takes minutes.")
	return apiserver.Run(ctx, apiserver.Options{}, func(s *apiserver.Server) error {
		for _, file := range manifests {
			if err := create(ctx, s, file); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
		if err := apiserver.WriteKubeconfig(kubeconfig, s.Config()); err != nil {
			return err
		}
		defer os.Remove(kubeconfig)
		fmt.Printf("The server runs until Ctrl-C. To use it:\n\n    export KUBECONFIG=%s\n\n", kubeconfig)
		<-ctx.Done()
		return nil
	})
}

// create creates the objects of a manifest file, including their status.
func create(ctx context.Context, s *apiserver.Server, file string) error {
	client, err := dynamic.NewForConfig(s.Config())
	if err != nil {
		return err
	}
	groups, err := restmapper.GetAPIGroupResources(s.Client().Discovery())
	if err != nil {
		return err
	}
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for documents := yaml.NewYAMLOrJSONDecoder(bufio.NewReader(f), 4096); ; {
		var object unstructured.Unstructured
		if err := documents.Decode(&object.Object); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if len(object.Object) == 0 {
			continue
		}
		kind := object.GroupVersionKind()
		mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			return err
		}
		var objects dynamic.ResourceInterface = client.Resource(mapping.Resource)
		if mapping.Scope.Name() == "namespace" {
			objects = client.Resource(mapping.Resource).Namespace(object.GetNamespace())
		}
		created, err := objects.Create(ctx, &object, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		if status, ok := object.Object["status"]; ok {
			created.Object["status"] = status
			if _, err := objects.UpdateStatus(ctx, created, metav1.UpdateOptions{}); err != nil {
				return err
			}
		}
		fmt.Printf("Created %s %s.\n", kind.Kind, created.GetName())
	}
}
