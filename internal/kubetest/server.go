// SPDX-License-Identifier: Apache-2.0

// Package kubetest has a Kubernetes API server in memory, for tests of clients. It supports
// list, watch, label and field selectors, resource versions, streaming lists, bookmarks and
// 410 Gone, in protobuf and JSON. It can run in a synctest bubble.
package kubetest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// Object is a Service, EndpointSlice, Node or ServiceCIDR.
type Object interface {
	metav1.Object
	runtime.Object
}

// Server serves Services, EndpointSlices, Nodes and ServiceCIDRs like a kube-apiserver. It is
// an [http.Handler].
type Server struct {
	listener *pipeListener

	// Mu guards the fields of the Server while it serves.
	Mu sync.Mutex
	// Refuse returns the error for a request that must fail, and nil for other requests.
	// It may be unset.
	Refuse func(Request) *apierrors.StatusError
	// OnlyJSON is true for a server without protobuf.
	OnlyJSON bool
	// Old is true for a server of Kubernetes v1.21. Such a server refuses most field
	// selectors and ignores requests for streaming lists.
	Old bool
	// Objects has all objects. The key is resource/namespace/name.
	Objects map[string]Object

	revision  int
	compacted int
	log       []change
	requests  []Request
	changed   chan struct{}          // closed and replaced to announce events
	dropped   chan struct{}          // closed and replaced to end all watches
	last      *apierrors.StatusError // the error event that watches send before they end, or nil
	bookmarks int                    // number of calls of Bookmark
	watches   map[*Request]bool      // open watches
}

// change is an entry of the log. For a new object, old is nil. For a deleted object, new
// is nil.
type change struct {
	revision int
	resource string
	old, new Object
}

// Request is a list or watch request.
type Request struct {
	Verb, Resource, Namespace, Labels, Fields, ResourceVersion string
	InitialEvents                                              bool
	Header                                                     http.Header
}

// New returns a server without objects. It has no listener; see [Start].
func New() *Server {
	return &Server{
		listener: newPipeListener(), Objects: map[string]Object{}, revision: 10,
		changed: make(chan struct{}), dropped: make(chan struct{}),
	}
}

// Start returns a server without objects that accepts connections in memory until t ends.
func Start(t testing.TB) *Server {
	s := New()
	server := &http.Server{Handler: s}
	var serving sync.WaitGroup
	serving.Go(func() { server.Serve(s.listener) })
	t.Cleanup(func() {
		server.Close()
		serving.Wait()
	})
	return s
}

// Config returns the configuration of a client of a server that [Start] returned.
func (s *Server) Config() *rest.Config {
	return &rest.Config{Host: "http://api.test", Dial: s.listener.dial}
}

// Unplug makes the server unreachable if off is true. Otherwise it makes the server
// reachable again. The server must come from [Start].
func (s *Server) Unplug(off bool) { s.listener.unplug(off) }

const (
	services       = "services"
	endpointSlices = "endpointslices"
	nodes          = "nodes"
	serviceCIDRs   = "servicecidrs"
)

// magic is the beginning of an object in Kubernetes' content type protobuf.
const magic = "k8s\x00"

func resourceOf(o Object) string {
	switch o.(type) {
	case *corev1.Service:
		return services
	case *discoveryv1.EndpointSlice:
		return endpointSlices
	case *corev1.Node:
		return nodes
	case *networkingv1.ServiceCIDR:
		return serviceCIDRs
	}
	panic(fmt.Sprintf("unexpected %T", o))
}

// Set creates or changes objects.
func (s *Server) Set(list ...Object) {
	for _, o := range list {
		s.write(o, o.DeepCopyObject().(Object))
	}
}

// Delete deletes objects.
func (s *Server) Delete(list ...Object) {
	for _, o := range list {
		s.write(o, nil)
	}
}

func (s *Server) write(id, new Object) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.revision++
	resource := resourceOf(id)
	key := resource + "/" + id.GetNamespace() + "/" + id.GetName()
	old := s.Objects[key]
	if new != nil {
		new.SetResourceVersion(strconv.Itoa(s.revision))
		new.GetObjectKind().SetGroupVersionKind(KindOf(resource, ""))
		s.Objects[key] = new
	} else {
		delete(s.Objects, key)
	}
	s.log = append(s.log, change{s.revision, resource, old, new})
	s.signal()
}

// KindOf returns the kind of the objects of a resource, with a suffix such as "List".
func KindOf(resource, suffix string) schema.GroupVersionKind {
	switch resource {
	case services:
		return corev1.SchemeGroupVersion.WithKind("Service" + suffix)
	case nodes:
		return corev1.SchemeGroupVersion.WithKind("Node" + suffix)
	case serviceCIDRs:
		return networkingv1.SchemeGroupVersion.WithKind("ServiceCIDR" + suffix)
	default:
		return discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice" + suffix)
	}
}

func (s *Server) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Bookmark sends a bookmark to each watch.
func (s *Server) Bookmark() {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.bookmarks++
	s.signal()
}

// Drop ends all watches. If last is not nil, each watch first sends this error event.
func (s *Server) Drop(last *apierrors.StatusError) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.last = last
	close(s.dropped)
	s.dropped = make(chan struct{})
}

// Compact clears the log. New watches from an earlier revision get 410 Gone.
func (s *Server) Compact() {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.compacted = s.revision
}

// Backup returns a function that restores the present objects and the present revision,
// and ends all watches. A restore of etcd has the same effects. After it, the server has
// no earlier events.
func (s *Server) Backup() (restore func()) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	objects, revision := maps.Clone(s.Objects), s.revision
	return func() {
		s.Mu.Lock()
		s.Objects, s.revision, s.log, s.compacted = maps.Clone(objects), revision, nil, revision
		s.Mu.Unlock()
		s.Drop(nil)
	}
}

// Seen returns the matching requests since the last call.
func (s *Server) Seen(match func(Request) bool) []Request {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	var out []Request
	for _, r := range s.requests {
		if match(r) {
			out = append(out, r)
		}
	}
	s.requests = nil
	return out
}

// Watched returns the label selectors of the open watches of a resource.
func (s *Server) Watched(resource string) (labels []string) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for r := range s.watches {
		if r.Resource == resource {
			labels = append(labels, r.Labels)
		}
	}
	return labels
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	req, match, err := parseRequest(r.URL)
	req.Header = r.Header
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.Mu.Lock()
	s.requests = append(s.requests, req)
	refuse, compacted, revision, old := s.Refuse, s.compacted, s.revision, s.Old
	s.Mu.Unlock()
	if old {
		req.InitialEvents = false
		if byFields, _ := fields.ParseSelector(req.Fields); !byFields.Empty() && byFields.Requirements()[0].Field != "metadata.name" {
			sendStatus(w, apierrors.NewBadRequest(fmt.Sprintf("Unable to find %q that match label selector %q, field selector %q: field label not supported: %s",
				"/v1, Resource="+req.Resource, req.Labels, req.Fields, byFields.Requirements()[0].Field)))
			return
		}
	}
	if refuse != nil {
		if refused := refuse(req); refused != nil {
			sendStatus(w, refused)
			return
		}
	}
	since, _ := strconv.Atoi(req.ResourceVersion)
	switch {
	case req.Verb == "list" && since > revision:
		tooLarge := apierrors.NewTimeoutError("Too large resource version", 1)
		tooLarge.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge}}
		sendStatus(w, tooLarge)
	case req.Verb == "list":
		s.list(w, req, match)
	case since != 0 && since < compacted:
		sendStatus(w, apierrors.NewResourceExpired("too old resource version"))
	default:
		s.watch(w, r.Context(), req, match, since)
	}
}

func parseRequest(u *url.URL) (Request, func(Object) bool, error) {
	q := u.Query()
	r := Request{
		Verb:            "list",
		Labels:          q.Get("labelSelector"),
		Fields:          q.Get("fieldSelector"),
		ResourceVersion: q.Get("resourceVersion"),
		InitialEvents:   q.Get("sendInitialEvents") == "true",
	}
	if q.Get("watch") == "true" {
		r.Verb = "watch"
	}
	path := strings.Split(strings.Trim(u.Path, "/"), "/")
	r.Resource = path[len(path)-1]
	if len(path) > 2 && path[len(path)-3] == "namespaces" {
		r.Namespace = path[len(path)-2]
	}
	byLabels, err := labels.Parse(r.Labels)
	if err != nil {
		return r, nil, err
	}
	byFields, err := fields.ParseSelector(r.Fields)
	if err != nil {
		return r, nil, err
	}
	return r, func(o Object) bool {
		set := fields.Set{"metadata.name": o.GetName()}
		if service, ok := o.(*corev1.Service); ok {
			set["spec.clusterIP"] = service.Spec.ClusterIP
		}
		return (r.Namespace == "" || r.Namespace == o.GetNamespace()) && byLabels.Matches(labels.Set(o.GetLabels())) && byFields.Matches(set)
	}, nil
}

func withKind(e *apierrors.StatusError) metav1.Status {
	status := e.Status()
	status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	return status
}

func sendStatus(w http.ResponseWriter, e *apierrors.StatusError) {
	status := withKind(e)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(status.Code))
	json.NewEncoder(w).Encode(status)
}

// matching returns those objects of the requested resource for which the function match
// returns true.
func (s *Server) matching(req Request, match func(Object) bool) []Object {
	var out []Object
	for key, o := range s.Objects {
		if strings.HasPrefix(key, req.Resource+"/") && match(o) {
			out = append(out, o)
		}
	}
	return out
}

func (s *Server) list(w http.ResponseWriter, req Request, match func(Object) bool) {
	s.Mu.Lock()
	items, revision := s.matching(req, match), s.revision
	s.Mu.Unlock()
	kind := KindOf(req.Resource, "List")
	if s.usesProtobuf(req) {
		raw := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), Marshalled(&metav1.ListMeta{ResourceVersion: strconv.Itoa(revision)}))
		for _, o := range items {
			raw = protowire.AppendBytes(protowire.AppendTag(raw, 2, protowire.BytesType), Marshalled(o))
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		w.Write(Encoded(kind, raw))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": kind.GroupVersion().String(),
		"kind":       kind.Kind,
		"metadata":   metav1.ListMeta{ResourceVersion: strconv.Itoa(revision)},
		"items":      items,
	})
}

func (s *Server) usesProtobuf(req Request) bool {
	return !s.OnlyJSON && strings.HasPrefix(req.Header.Get("Accept"), runtime.ContentTypeProtobuf)
}

// Marshalled returns o as a protobuf message. The type of o must be an API type.
func Marshalled(o any) []byte {
	message, err := o.(interface{ Marshal() ([]byte, error) }).Marshal()
	if err != nil {
		panic(err)
	}
	return message
}

// Encoded returns an object in Kubernetes' content type protobuf.
func Encoded(kind schema.GroupVersionKind, message []byte) []byte {
	is := runtime.TypeMeta{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind}
	return append([]byte(magic), Marshalled(&runtime.Unknown{TypeMeta: is, Raw: message})...)
}

// Framed returns a message in the form that a watch sends.
func Framed(message []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(message))), message...)
}

func (s *Server) watch(w http.ResponseWriter, ctx context.Context, req Request, match func(Object) bool, since int) {
	protobuf := s.usesProtobuf(req)
	w.Header().Set("Content-Type", "application/json")
	if protobuf {
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	}
	w.WriteHeader(http.StatusOK)
	// Collect events while Mu is locked, and flush them while it is not locked. Otherwise a
	// write could block while the client waits for another answer, which needs Mu.
	var pending bytes.Buffer
	send := func(event string, o runtime.Object) {
		if protobuf {
			raw := Encoded(o.GetObjectKind().GroupVersionKind(), Marshalled(o))
			pending.Write(Framed(Marshalled(&metav1.WatchEvent{Type: event, Object: runtime.RawExtension{Raw: raw}})))
		} else {
			json.NewEncoder(&pending).Encode(map[string]any{"type": event, "object": o})
		}
	}
	flush := func() {
		w.Write(pending.Bytes())
		pending.Reset()
		w.(http.Flusher).Flush()
	}
	sendBookmark := func(revision int, annotations map[string]string) {
		m := metav1.ObjectMeta{ResourceVersion: strconv.Itoa(revision), Annotations: annotations}
		var o Object
		switch req.Resource {
		case services:
			o = &corev1.Service{ObjectMeta: m}
		case endpointSlices:
			o = &discoveryv1.EndpointSlice{ObjectMeta: m}
		case serviceCIDRs:
			o = &networkingv1.ServiceCIDR{ObjectMeta: m}
		default:
			o = &corev1.Node{ObjectMeta: m}
		}
		o.GetObjectKind().SetGroupVersionKind(KindOf(req.Resource, ""))
		send("BOOKMARK", o)
	}

	s.Mu.Lock()
	if s.watches == nil {
		s.watches = map[*Request]bool{}
	}
	s.watches[&req] = true
	defer func() {
		s.Mu.Lock()
		defer s.Mu.Unlock()
		delete(s.watches, &req)
	}()
	dropped, bookmarks := s.dropped, s.bookmarks
	if req.InitialEvents {
		for _, o := range s.matching(req, match) {
			send("ADDED", o)
		}
		since = s.revision
		sendBookmark(since, map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	for {
		for _, c := range s.log {
			if c.revision <= since || c.resource != req.Resource {
				continue
			}
			before, after := c.old != nil && match(c.old), c.new != nil && match(c.new)
			switch {
			case before && after:
				send("MODIFIED", c.new)
			case after:
				send("ADDED", c.new)
			case before:
				gone := c.old.DeepCopyObject().(Object)
				gone.SetResourceVersion(strconv.Itoa(c.revision))
				send("DELETED", gone)
			}
		}
		since = max(since, s.revision) // after a restore, the revision in since may be in the future
		if bookmarks != s.bookmarks {
			bookmarks = s.bookmarks
			sendBookmark(since, nil)
		}
		changed := s.changed
		s.Mu.Unlock()
		flush()
		select {
		case <-changed:
		case <-dropped:
			s.Mu.Lock()
			last := s.last
			s.Mu.Unlock()
			if last != nil {
				status := withKind(last)
				send("ERROR", &status)
				flush()
			}
			return
		case <-ctx.Done():
			return
		}
		s.Mu.Lock()
	}
}

// pipeListener accepts connections in memory.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once

	mu        sync.Mutex
	unplugged bool
	live      []net.Conn
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return pipeAddr{} }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }

// unplug makes the server unreachable if off is true. Otherwise it makes the server
// reachable again.
func (l *pipeListener) unplug(off bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unplugged = off
	if off {
		for _, c := range l.live {
			c.Close()
		}
		l.live = nil
	}
}

func (l *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.unplugged {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	client, server := net.Pipe()
	select {
	case l.conns <- server:
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	l.live = append(l.live, client)
	return client, nil
}

// Meta returns the metadata of an object with these labels.
func Meta(namespace, name string, keyValues ...string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "/" + name)}
	for i := 0; i < len(keyValues); i += 2 {
		metav1.SetMetaDataLabel(&m, keyValues[i], keyValues[i+1])
	}
	return m
}
