// SPDX-License-Identifier: Apache-2.0

package growth

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
)

// object is a Service, EndpointSlice or Node.
type object interface {
	metav1.Object
	runtime.Object
	Marshal() ([]byte, error)
}

// server is an API server for one proxy. It serves lists and watches in protobuf, with
// label and field selectors, and nothing else. It encodes an object once, when the object
// is written, so that it uses little CPU time while the proxy is measured.
type server struct {
	mu        sync.Mutex
	revision  int
	resources map[string]*resource
}

// resource has the objects of a resource and the log of their changes.
type resource struct {
	list    schema.GroupVersionKind
	objects map[string]*encoded
	log     []change
	changed chan struct{} // closed and replaced after each change
}

// change is an entry of the log. For a new object, old is nil. For a deleted object, new
// is nil.
type change struct {
	revision int
	old, new *encoded
}

// encoded is an object and its message.
type encoded struct {
	object  object
	message []byte
}

func newServer() *server {
	s := &server{revision: 1, resources: map[string]*resource{}}
	for name, list := range map[string]schema.GroupVersionKind{
		"services":       corev1.SchemeGroupVersion.WithKind("ServiceList"),
		"endpointslices": discoveryv1.SchemeGroupVersion.WithKind("EndpointSliceList"),
		"nodes":          corev1.SchemeGroupVersion.WithKind("NodeList"),
		"servicecidrs":   {Group: "networking.k8s.io", Version: "v1", Kind: "ServiceCIDRList"},
	} {
		s.resources[name] = &resource{list: list, objects: map[string]*encoded{}, changed: make(chan struct{})}
	}
	return s
}

func resourceOf(o object) string {
	switch o.(type) {
	case *corev1.Service:
		return "services"
	case *discoveryv1.EndpointSlice:
		return "endpointslices"
	case *corev1.Node:
		return "nodes"
	}
	panic(fmt.Sprintf("unexpected %T", o))
}

func keyOf(o object) string { return o.GetNamespace() + "/" + o.GetName() }

// write creates or changes the objects in set, and deletes those in gone. It returns when
// all watches can read the changes.
func (s *server) write(set, gone []object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := map[*resource]bool{}
	for i, o := range slices.Concat(gone, set) {
		s.revision++
		o.SetResourceVersion(strconv.Itoa(s.revision))
		r := s.resources[resourceOf(o)]
		c := change{revision: s.revision, old: r.objects[keyOf(o)]}
		if i < len(gone) {
			delete(r.objects, keyOf(o))
			c.old = encode(o)
		} else {
			c.new = encode(o)
			r.objects[keyOf(o)] = c.new
		}
		r.log = append(r.log, c)
		touched[r] = true
	}
	for r := range touched {
		close(r.changed)
		r.changed = make(chan struct{})
	}
}

func encode(o object) *encoded { return &encoded{o, must(o.Marshal())} }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// typed returns a message in Kubernetes' content type protobuf.
func typed(kind schema.GroupVersionKind, message []byte) []byte {
	is := runtime.TypeMeta{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind}
	return append([]byte("k8s\x00"), must((&runtime.Unknown{TypeMeta: is, Raw: message}).Marshal())...)
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	found := s.resources[path[len(path)-1]]
	query := r.URL.Query()
	byLabels, err := labels.Parse(query.Get("labelSelector"))
	byFields, err2 := fields.ParseSelector(query.Get("fieldSelector"))
	match := func(e *encoded) bool {
		if e == nil {
			return false
		}
		set := fields.Set{"metadata.name": e.object.GetName(), "metadata.namespace": e.object.GetNamespace()}
		if service, ok := e.object.(*corev1.Service); ok {
			set["spec.clusterIP"], set["spec.type"] = service.Spec.ClusterIP, string(service.Spec.Type)
		}
		return byLabels.Matches(labels.Set(e.object.GetLabels())) && byFields.Matches(set)
	}
	switch {
	case found == nil || r.Method != http.MethodGet:
		refuse(w, apierrors.NewNotFound(schema.GroupResource{Resource: path[len(path)-1]}, ""))
	case err != nil || err2 != nil:
		refuse(w, apierrors.NewBadRequest(fmt.Sprintf("%v %v", err, err2)))
	case query.Get("sendInitialEvents") == "true": // not supported, so clients use a list
		refuse(w, apierrors.NewInvalid(schema.GroupKind{Kind: "ListOptions"}, "", nil))
	case query.Get("watch") == "true":
		since, _ := strconv.Atoi(query.Get("resourceVersion"))
		s.watch(w, r, found, match, since)
	default:
		s.list(w, found, match)
	}
}

func refuse(w http.ResponseWriter, e *apierrors.StatusError) {
	status := e.Status()
	status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(status.Code))
	json.NewEncoder(w).Encode(status)
}

func (s *server) list(w http.ResponseWriter, r *resource, match func(*encoded) bool) {
	s.mu.Lock()
	var items []*encoded
	for _, e := range r.objects {
		if match(e) {
			items = append(items, e)
		}
	}
	meta := metav1.ListMeta{ResourceVersion: strconv.Itoa(s.revision)}
	s.mu.Unlock()
	slices.SortFunc(items, func(a, b *encoded) int { return cmp.Compare(keyOf(a.object), keyOf(b.object)) })

	message := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), must(meta.Marshal()))
	for _, e := range items {
		message = protowire.AppendBytes(protowire.AppendTag(message, 2, protowire.BytesType), e.message)
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	w.Write(typed(r.list, message))
}

func (s *server) watch(w http.ResponseWriter, request *http.Request, r *resource, match func(*encoded) bool, since int) {
	kind := r.list
	kind.Kind = strings.TrimSuffix(kind.Kind, "List")
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	w.WriteHeader(http.StatusOK)
	var frames []byte
	send := func(event watch.EventType, e *encoded) {
		message := must((&metav1.WatchEvent{Type: string(event), Object: runtime.RawExtension{Raw: typed(kind, e.message)}}).Marshal())
		frames = append(binary.BigEndian.AppendUint32(frames, uint32(len(message))), message...)
	}
	s.mu.Lock()
	next, _ := slices.BinarySearchFunc(r.log, since+1, func(c change, revision int) int { return cmp.Compare(c.revision, revision) })
	for {
		log, changed := r.log[next:], r.changed
		next += len(log)
		s.mu.Unlock()
		frames = frames[:0]
		for _, c := range log {
			switch before, after := match(c.old), match(c.new); {
			case before && after:
				send(watch.Modified, c.new)
			case after:
				send(watch.Added, c.new)
			case before:
				send(watch.Deleted, c.old)
			}
		}
		w.Write(frames)
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-request.Context().Done():
			return
		}
		s.mu.Lock()
	}
}
