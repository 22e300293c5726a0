// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"fmt"
	"regexp"
	"sync"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/internal/listwatch"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// excludedPods knows the pods of the node that a label selector excludes from eBPF:
// pods with matching labels, and all pods of namespaces with matching labels. From the
// API server, it reads only the metadata of matching namespaces, and of all pods of the
// node that have not ended. It cannot request only pods with matching labels, because
// pods of a matching namespace need no label.
type excludedPods struct {
	sink.Sink // the wrapped sink; both start and stop together
	selector  labels.Selector

	pods, namespaces     cache.Store
	followPods, followNS cache.Controller

	once    sync.Once // starts the goroutines
	running sync.WaitGroup
	end     context.CancelFunc
}

// newExcludedPods returns nil if the selector is empty.
func newExcludedPods(fs *pflag.FlagSet, selector string) (*excludedPods, error) {
	if selector == "" {
		return nil, nil
	}
	parsed, err := labels.Parse(selector)
	if err != nil {
		return nil, fmt.Errorf("--exclude-pods is %q, not a label selector: %w", selector, err)
	}
	config, err := apiServer(fs, "--exclude-pods")
	if err != nil {
		return nil, err
	}
	node, err := kpng.NodeName(flagValue(fs, "node-name"))
	if err != nil {
		return nil, err
	}
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client for --exclude-pods: %w", err)
	}
	e := &excludedPods{selector: parsed}
	onNode := fields.AndSelectors(
		fields.OneTermEqualSelector("spec.nodeName", node),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(corev1.PodFailed)),
	).String()
	e.pods, e.followPods = e.informer(client, "pods", metav1.ListOptions{FieldSelector: onNode})
	e.namespaces, e.followNS = e.informer(client, "namespaces", metav1.ListOptions{LabelSelector: parsed.String()})
	return e, nil
}

// informer returns an informer for the selected objects of a resource. Its store has values of
// the type excludable.
func (e *excludedPods) informer(client metadata.Interface, resource string, selected metav1.ListOptions) (cache.Store, cache.Controller) {
	all := client.Resource(corev1.SchemeGroupVersion.WithResource(resource))
	return cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: listwatch.New(
			func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				o.LabelSelector, o.FieldSelector = selected.LabelSelector, selected.FieldSelector
				return all.List(ctx, o)
			},
			func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.LabelSelector, o.FieldSelector = selected.LabelSelector, selected.FieldSelector
				return all.Watch(ctx, o)
			},
		),
		ObjectType: &metav1.PartialObjectMetadata{},
		Handler:    cache.ResourceEventHandlerFuncs{},
		Transform:  e.reduce,
	})
}

// excludable is an object reduced to its name, namespace and UID.
type excludable struct {
	metav1.ObjectMeta
	// matches reports whether the labels of the object match.
	matches bool
}

// reduce implements cache.TransformFunc.
func (e *excludedPods) reduce(obj any) (any, error) {
	o, ok := obj.(*metav1.PartialObjectMetadata)
	if !ok {
		return obj, nil // reduced already
	}
	return &excludable{metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name, UID: uidOnNode(o)}, e.selector.Matches(labels.Set(o.Labels))}, nil
}

// mirrored is the annotation with which kubelet marks the mirror pod of a static pod.
// Its value is the UID of the static pod on the node. kubelet computes this UID as a
// hash of the pod's definition.
const mirrored = "kubernetes.io/config.mirror"

var hash = regexp.MustCompile(`^[0-9a-f]{32}$`)

// uidOnNode returns the UID that a pod has on the node. Other values of the annotation have no
// effect, so that the annotation of one pod cannot name another pod of the API server.
func uidOnNode(pod *metav1.PartialObjectMetadata) types.UID {
	if uid := pod.Annotations[mirrored]; hash.MatchString(uid) {
		return types.UID(uid)
	}
	return pod.UID
}

// uids implements ebpf.Options.ExcludedPods.
func (e *excludedPods) uids() (pods []types.UID, known bool) {
	if !e.followPods.HasSynced() || !e.followNS.HasSynced() {
		return nil, false
	}
	for _, obj := range e.pods.List() {
		pod := obj.(*excludable)
		_, inNamespace, _ := e.namespaces.GetByKey(pod.Namespace)
		if pod.matches || inNamespace {
			pods = append(pods, pod.UID)
		}
	}
	return pods, true
}

// listTimeout is how long Start waits for the excluded pods.
const listTimeout = 10 * time.Second

// Start implements sink.Starter. It waits a limited time for the pods, so that the
// programs exclude them from their first connection on. If the pods are not known by
// then, the programs still exclude the pods that an earlier process excluded.
func (e *excludedPods) Start(ctx context.Context) error {
	e.once.Do(func() {
		following, end := context.WithCancel(context.WithoutCancel(ctx))
		e.end = end
		e.running.Go(func() { e.followPods.RunWithContext(following) })
		e.running.Go(func() { e.followNS.RunWithContext(following) })
	})
	waiting, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	if !cache.WaitForCacheSync(waiting.Done(), e.followPods.HasSynced, e.followNS.HasSynced) && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Warning: excluded pods are not known yet; eBPF handles new ones. --exclude-pods needs the verbs list and watch for pods and namespaces", "waited", listTimeout)
	}
	if s, ok := sink.As[sink.Starter](e.Sink); ok {
		return s.Start(ctx)
	}
	return nil
}

// Stop implements sink.Stopper.
func (e *excludedPods) Stop(ctx context.Context) error {
	e.end()
	e.running.Wait()
	if s, ok := sink.As[sink.Stopper](e.Sink); ok {
		return s.Stop(ctx)
	}
	return nil
}

// Unwrap returns the other sink, see sink.As.
func (e *excludedPods) Unwrap() sink.Sink { return e.Sink }
