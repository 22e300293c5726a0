// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
)

const (
	origin = iota
	relayer
)

// model is one state of the model.
type model struct {
	fault   fault
	path    []string // the actions so far
	err     error
	ctx     context.Context
	close   context.CancelFunc
	content map[string]string // the source: versions of services and of the node
	servers [2]*modelServer
	all     []*modelServer // all servers, even if they have ended

	client  *Client
	has     *modelToken // the client's token; nil if there is none
	stream  *modelStream
	digests *localv1.Digests // the digests of the client's last stream; only one of the faults needs them
	mirror  *mirror
	relayed *relay
	parts   *sent // of the relay
}

// modelServer is a process with a server.
type modelServer struct {
	state  *cluster.State
	server *Server
	waited bool // deletions may be forgotten at the next change
	// log maps a revision to the names of the changed services, or to "node".
	log []modelChange
	// forgotten is a revision. Deletions up to this revision may be forgotten.
	forgotten uint64
}

type modelChange struct {
	revision uint64
	name     string
}

// modelToken has the content of a token, in the terms of the model.
type modelToken struct {
	server   *modelServer
	revision uint64
	zone     string
	token    []byte
}

// modelStream is the client's stream.
type modelStream struct {
	*sent
	server  *modelServer
	watch   *watch
	buckets int
	close   context.CancelFunc
	first   bool // the server has not answered
	has     uint64
	zone    string
}

// sent has the messages that a server has sent on a stream.
type sent struct {
	grpc.ServerStream
	ctx      context.Context
	messages [][]byte
}

func (s *sent) Context() context.Context { return s.ctx }

func (s *sent) SendMsg(m any) error {
	s.messages = append(s.messages, m.(*raw).bytes.Materialize())
	return nil
}

func (s *sent) take() [][]byte {
	messages := s.messages
	s.messages = nil
	return messages
}

const modelNode = "n1"

var modelZones = []string{"", "z1", "z2"}

// nodeIn returns the client's node in a zone, or nil if zone is empty.
func nodeIn(zone string) *api.Node {
	if zone == "" {
		return nil
	}
	return &api.Node{Name: modelNode, Labels: map[string]string{"topology.kubernetes.io/zone": zone}}
}

func newModel(f fault) *model {
	m := &model{fault: f, content: map[string]string{"c": "1", "d": "1"}}
	m.ctx, m.close = context.WithCancel(context.Background())
	m.client, m.err = NewClient(ClientOptions{NodeName: modelNode, DialOptions: DialOptions{}})
	m.servers[origin] = m.start()
	m.servers[relayer] = m.start()
	m.fill()
	m.mirror = &mirror{state: m.servers[relayer].state}
	return m
}

func (m *model) start() *modelServer {
	s := &modelServer{state: cluster.New(cluster.Options{Resumable: true})}
	s.server, m.err = NewServer(s.state, ServerOptions{ServeCluster: true})
	m.all = append(m.all, s)
	return s
}

// fill writes the whole source to a new origin.
func (m *model) fill() {
	s := m.servers[origin]
	s.update(func(tx *cluster.Tx) {
		for name, version := range m.content {
			writeModel(tx, name, version)
		}
	})
	s.state.SetSynced()
}

// writeModel writes a version of an object. If the version is empty, the object does not
// exist.
func writeModel(tx *cluster.Tx, name, version string) {
	key := types.NamespacedName{Namespace: "ns", Name: name}
	switch {
	case name == "node" && version == "":
		tx.DeleteNode(modelNode)
		return
	case name == "node":
		tx.SetNode(nodeIn(version))
		return
	case version == "":
		tx.DeleteService(key)
		tx.DeleteSlice(key)
		return
	}
	addr := func(i byte) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, name[0], i}) }
	service := &api.Service{
		Namespace: "ns", Name: name, Type: api.ClusterIP, InternalTrafficToLocal: name == "b",
		IPs:   api.ServiceIPs{ClusterIPs: api.NewIPSet(addr(0))},
		Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 80}},
	}
	if name == "a" && version == "2" || name == "b" {
		service.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1")) // version a2 takes this address from service b
	}
	slice := &api.EndpointSlice{
		Namespace: "ns", Name: name, ServiceName: name, Family: api.IPv4,
		Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 80}},
	}
	for i, zone := range []string{"z1", "z2"} {
		details := &api.EndpointDetails{NodeName: fmt.Sprint("n", i+1), Zone: zone}
		e := api.SliceEndpoint{Addr: addr(byte(i + 1)), Details: details, Conditions: api.Conditions{Ready: true, Serving: true}}
		if name == "a" && version == "2" || name == "c" {
			details.Hints = &api.Hints{ForZones: []string{zone}}
		}
		slice.Endpoints = append(slice.Endpoints, e)
	}
	tx.SetService(service)
	tx.SetSlice(slice)
}

// update changes the state of a server, and logs the names of changed objects.
func (s *modelServer) update(f func(*cluster.Tx)) {
	before := s.state.Objects()
	s.state.Update(f)
	after := s.state.Objects()
	if after.Revision == before.Revision {
		return
	}
	if s.waited {
		s.waited, s.forgotten = false, before.Revision
	}
	log := func(name string) { s.log = append(s.log, modelChange{after.Revision, name}) }
	for _, name := range []string{"a", "b", "c", "d"} {
		key := types.NamespacedName{Namespace: "ns", Name: name}
		old, _ := before.States.Get(key)
		if now, _ := after.States.Get(key); old != now {
			log(name)
		}
	}
	old, _ := before.Nodes.Get(modelNode)
	if now, _ := after.Nodes.Get(modelNode); !old.Equal(now) {
		log("node")
	}
}

// changed returns the names of the objects that changed after a revision.
func (s *modelServer) changed(since uint64) map[string]bool {
	names := map[string]bool{}
	for _, c := range s.log {
		if c.revision > since {
			names[c.name] = true
		}
	}
	return names
}

func (s *modelServer) node() *api.Node {
	node, _ := s.state.Objects().Nodes.Get(modelNode)
	return node
}

// views returns the client's views by the rules of package nodeview.
func (s *modelServer) views() map[string]*api.View {
	views := map[string]*api.View{}
	snapshot := s.state.Objects()
	node := cmp.Or(s.node(), &api.Node{Name: modelNode})
	for key, state := range snapshot.States.All() {
		if view := nodeview.View(snapshot.WithWinners(state), node); view != nil {
			views[key.Name] = view
		}
	}
	return views
}

func (m *model) failf(format string, args ...any) {
	if m.err == nil {
		m.err = fmt.Errorf(format, args...)
	}
}

// do plays an action. It returns false if the action is not possible.
func (m *model) do(action string) bool {
	possible := m.play(action)
	if possible {
		m.path = append(m.path, action)
	}
	return possible
}

func (m *model) play(action string) bool {
	name, version := "", ""
	switch action {
	case "put a1", "put a2":
		name, version = "a", action[5:]
	case "delete a", "delete b":
		name = action[7:]
	case "put b":
		name, version = "b", "1"
	case "node in z1", "node in z2":
		name, version = "node", action[8:]
	case "delete node":
		name = "node"
	case "connect to origin":
		return m.connect(m.servers[origin])
	case "connect to relay":
		return m.connect(m.servers[relayer])
	case "answer":
		return m.answer(true)
	case "part":
		return m.answer(false)
	case "relay":
		return m.relay(true)
	case "relay part":
		return m.relay(false)
	case "restart origin":
		m.lose(m.servers[origin])
		m.servers[origin], m.relayed = m.start(), nil
		m.fill()
		return true
	case "restart relay":
		m.lose(m.servers[relayer])
		m.servers[relayer], m.relayed = m.start(), nil
		m.mirror = &mirror{state: m.servers[relayer].state}
		return true
	case "wait":
		<-time.After(11 * time.Minute) // in a bubble of synctest
		for _, s := range m.servers {
			s.server.beginnings.forget()
			s.waited = true
		}
		return true
	}
	if m.content[name] == version {
		return false
	}
	m.content[name] = version
	m.servers[origin].update(func(tx *cluster.Tx) { writeModel(tx, name, version) })
	return true
}

// lose ends the client's stream if it is a stream of s.
func (m *model) lose(s *modelServer) {
	if m.stream != nil && m.stream.server == s {
		m.stream.close()
		m.stream = nil
	}
}

// connect opens the client's stream and sends the first request. The server does not answer
// before its state is synced.
func (m *model) connect(s *modelServer) bool {
	if !s.state.IsSynced() || m.stream != nil && m.stream.server == s && m.stream.first {
		return false
	}
	if m.stream != nil {
		m.stream.close()
	}
	request := proto.CloneOf(m.client.firstRequest(m.client.token))
	buckets := bucketCount(request.Have)
	if m.fault.request != nil {
		m.fault.request(m, s, request)
	}
	ctx, cancel := context.WithCancel(m.ctx)
	m.stream = &modelStream{sent: &sent{ctx: ctx}, server: s, buckets: buckets, close: cancel, first: true}
	m.stream.watch = s.server.newWatch(m.stream, caller{turns: semaphore.NewWeighted(maxTurnsPerPeer)}, request)
	return true
}

// answer lets the server answer if it has something to send.
func (m *model) answer(complete bool) bool {
	if m.stream == nil {
		return false
	}
	server := m.stream.server
	server.server.published.snapshot.Store(server.state.Objects())
	some, err := m.stream.watch.send(server.server.published.get())
	if err != nil {
		m.failf("the server fails: %w", err)
		return true
	}
	messages := m.stream.take()
	if !some {
		if len(messages) > 0 {
			m.failf("the server sent %d messages and says that it sent none", len(messages))
		}
		m.check()
		return true
	}
	items, err := itemsOf(messages)
	if err != nil {
		m.failf("a message is unreadable: %w", err)
	}
	if m.fault.answer != nil {
		items = m.fault.answer(items)
	}
	if complete {
		m.receive(items)
	} else {
		m.receivePart(items)
	}
	return true
}

// itemsOf returns the operations of an answer. Servers may send each one in its own message.
func itemsOf(messages [][]byte) (items []*localv1.OpItem, err error) {
	for _, b := range messages {
		var item localv1.OpItem
		if err := proto.Unmarshal(b, &item); err != nil {
			return nil, err
		}
		items = append(items, item.GetBatch()...)
		if item.Op != nil {
			item.Batch = nil
			items = append(items, &item)
		}
	}
	return items, nil
}

// relay lets the relay receive an answer of the origin, or parts of it.
func (m *model) relay(complete bool) bool {
	from, to := m.servers[origin], m.servers[relayer]
	if m.relayed == nil {
		request := &clusterv1.WatchRequest{Resume: m.mirror.token}
		if m.fault.relayRequest != nil {
			m.fault.relayRequest(m, request)
		}
		m.parts = &sent{ctx: m.ctx}
		m.relayed = &relay{server: from.server, sender: sender{server: from.server, stream: m.parts}}
		m.relayed.revision = from.server.readToken(request.GetResume(), nil)
	}
	some, err := m.relayed.send(from.state.Objects())
	if err != nil {
		m.failf("the origin fails: %w", err)
	}
	if !some {
		return false
	}
	a := clusterAnswer{had: to.state.Objects(), log: logr.Discard()}
	for _, b := range m.parts.take() {
		var part clusterv1.WatchResponse
		if err := proto.Unmarshal(b, &part); err != nil {
			m.failf("a message is unreadable: %w", err)
		}
		if m.fault.relayed != nil {
			m.fault.relayed(&part)
		}
		a.take(&part)
	}
	if !complete {
		m.relayed = nil // the last message is missing, so the answer is not written
		return true
	}
	to.update(a.write)
	to.state.SetSynced()
	m.mirror.token = a.token
	if got, want := modelContent(to), modelContent(from); got != want {
		m.failf("the relay has\n%s, and the origin has\n%s", got, want)
	}
	return true
}
