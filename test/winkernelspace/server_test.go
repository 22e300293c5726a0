// SPDX-License-Identifier: Apache-2.0

//go:build linux

package winkernelspace

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
)

// The results that calls of HNS return, as HRESULT values.
const (
	ok           = "0"
	notFound     = "80070490" // ERROR_NOT_FOUND
	exists       = "803b0013" // HCN_E_PORT_ALREADY_EXISTS
	notSupported = "80004001" // E_NOTIMPL
	invalid      = "80070057" // E_INVALIDARG
)

// results contains each failure of HNS that has a name in kube-proxy or hcsshim.
var results = []string{
	notFound, exists, notSupported, invalid,
	"80070005", // ERROR_ACCESS_DENIED
	"8007000d", // ERROR_INVALID_DATA
	"8007001f", // ERROR_GEN_FAILURE
	"80070032", // ERROR_NOT_SUPPORTED
	"80070034", // ERROR_DUP_NAME
	"800700b7", // ERROR_ALREADY_EXISTS
	"80070426", // ERROR_SERVICE_NOT_ACTIVE
	"800706b5", // RPC_S_UNKNOWN_IF
	"800706ba", // RPC_S_SERVER_UNAVAILABLE
	"800706be", // RPC_S_CALL_FAILED
	"80071392", // ERROR_OBJECT_ALREADY_EXISTS
	"803b0001", // HCN_E_NETWORK_NOT_FOUND
	"803b0002", // HCN_E_ENDPOINT_NOT_FOUND
	"803b000d", // HCN_E_INVALID_POLICY
	"803b0012", // HCN_E_POLICY_ALREADY_EXISTS
	"803b0015", // HCN_E_REQUEST_UNSUPPORTED
	"803b001b", // HCN_E_INVALID_JSON
	"803b001e", // HCN_E_INVALID_IP
	"803b0020", // HCN_E_MANAGER_STOPPED
	"803b002c", // HCN_E_ENTITY_HAS_REFERENCES
	"c037010e", // HCS_E_SYSTEM_NOT_FOUND
}

// server is a simulated HNS. The DLLs that are built from testdata/hcn.c call the server.
// The server keeps its objects while it is stopped.
type server struct {
	hns     *fakehns.HNS
	version version
	port    int

	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]bool
	handles  map[string]string // the ID of the object that a handle refers to
	next     int
	calls    map[string]int
	// The next failuresLeft calls of the HNS function with the name failingCall fail with
	// the error in the field result.
	failingCall  string
	failuresLeft int
	result       string
}

// version is the version of HNS. It determines which features HNS has.
type version struct{ Major, Minor int }

// The versions to test: Windows Server 2019's version, and a version with all features.
var (
	server2019 = version{9, 3}
	latest     = version{15, 4}
)

func (v version) features() hns.Features {
	since := func(major, minor int) bool { return v.Major > major || v.Major == major && v.Minor >= minor }
	return hns.Features{
		DSR: since(9, 3), DualStack: since(11, 10), RemoteSubnet: since(9, 2), SessionAffinity: since(12, 0), ModifyLoadBalancer: since(15, 4),
	}
}

// resetTo removes all objects from s and gives s the version v.
func (s *server) resetTo(v version) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hns, s.version = fakehns.New(v.features()), v
	s.hns.SetHost(netip.MustParseAddr(nodeIP))
}

func newServer(t *testing.T) *server {
	s := &server{handles: map[string]string{}, conns: map[net.Conn]bool{}, calls: map[string]int{}}
	s.resetTo(latest)
	s.start(t)
	t.Cleanup(s.stop)
	return s
}

func (s *server) start(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", s.port))
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listener, s.port = l, l.Addr().(*net.TCPAddr).Port
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns[c] = true
			s.mu.Unlock()
			go s.serve(c)
		}
	}()
}

func (s *server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listener.Close()
	for c := range s.conns {
		c.Close()
	}
	clear(s.conns)
	clear(s.handles)
}

// totalCalls returns the number of calls since the last call of the method functions.
func (s *server) totalCalls() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, calls := range s.calls {
		n += calls
	}
	return n
}

// fail makes the next n calls of a function fail with result. It cancels the remaining
// failures of an earlier call of fail, and returns their number.
func (s *server) fail(function string, n int, result string) (left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left = s.failuresLeft
	s.failingCall, s.failuresLeft, s.result = function, n, result
	return left
}

// functions returns and resets the number of calls of each HNS function.
func (s *server) functions() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls := s.calls
	s.calls = map[string]int{}
	return calls
}

// serve answers the requests of a connection.
func (s *server) serve(c net.Conn) {
	defer c.Close()
	for {
		var size uint32
		if err := binary.Read(c, binary.LittleEndian, &size); err != nil {
			return
		}
		request := make([]byte, size)
		if _, err := io.ReadFull(c, request); err != nil {
			return
		}
		parts := strings.Split(string(request), "\x00")
		a := s.answer(parts[0], strings.ToLower(parts[1]), parts[2], parts[3])
		body := strings.Join([]string{a.result, strconv.Itoa(a.handle), a.document, a.fault, ""}, "\x00")
		var out bytes.Buffer
		binary.Write(&out, binary.LittleEndian, uint32(len(body)))
		out.WriteString(body)
		if _, err := c.Write(out.Bytes()); err != nil {
			return
		}
	}
}

// answer is the result of a call.
type answer struct {
	result   string
	handle   int
	document string
	fault    string
}

// answerOf returns the answer to a call. If err is nil, the answer contains v as a JSON
// document.
func answerOf(v any, err error) answer {
	if err == nil {
		document := ""
		if v != nil {
			data, err := json.Marshal(v)
			if err != nil {
				panic(err)
			}
			document = string(data)
		}
		return answer{result: ok, document: document}
	}
	fault, _ := json.Marshal(map[string]any{"Success": false, "Error": err.Error()})
	a := answer{result: invalid, fault: string(fault)}
	switch {
	case errors.Is(err, hns.ErrNotFound):
		a.result = notFound
	case errors.Is(err, hns.ErrExists):
		a.result = exists
	case errors.Is(err, hns.ErrNotSupported):
		a.result = notSupported
	}
	return a
}

func (s *server) answer(function, id, handle, document string) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[function]++
	if s.failingCall == function && s.failuresLeft > 0 {
		s.failuresLeft--
		a := answerOf(nil, errors.New("injected"))
		a.result = s.result
		return a
	}
	if opened, ok := s.handles[handle]; ok {
		id = opened
	}
	switch function {
	case "HNSCall /globals/version":
		return answerOf(map[string]any{"Success": true, "Output": s.version}, nil)

	case "EnumerateNetwork":
		n, err := s.hns.Network(filter(document)["Name"])
		if errors.Is(err, hns.ErrNotFound) {
			return answerOf([]string{}, nil)
		} else if err != nil {
			return answerOf(nil, err)
		}
		return answerOf([]string{n.ID}, nil)
	case "OpenNetwork":
		_, found := s.hns.NetworkByID(id)
		return s.open(id, found)
	case "QueryNetwork":
		n, _ := s.hns.NetworkByID(id)
		return answerOf(fromNetwork(n), nil)

	case "EnumerateEndpoint":
		// HNS writes network IDs in upper case, and finds no network for an ID in lower case.
		network := filter(document)["VirtualNetwork"]
		if network != strings.ToUpper(network) {
			return answerOf([]string{}, nil)
		}
		list, err := s.hns.Endpoints(strings.ToLower(network))
		return answerOf(mapStrings(list, func(e hns.Endpoint) string { return e.ID }), err)
	case "OpenEndpoint":
		_, found := s.hns.Endpoint(id)
		return s.open(id, found)
	case "QueryEndpoint":
		e, _ := s.hns.Endpoint(id)
		return answerOf(fromEndpoint(e), nil)
	case "CreateEndpoint":
		var e hcnEndpoint
		if err := json.Unmarshal([]byte(document), &e); err != nil {
			return answerOf(nil, err)
		}
		made, err := s.hns.CreateEndpoint(e.endpoint(id))
		if err != nil {
			return answerOf(nil, err)
		}
		return s.open(made, true)
	case "DeleteEndpoint":
		return answerOf(nil, s.hns.DeleteEndpoint(id))

	case "EnumerateLoadBalancer":
		list, err := s.hns.LoadBalancers()
		return answerOf(mapStrings(list, func(lb hns.LoadBalancer) string { return lb.ID }), err)
	case "OpenLoadBalancer":
		_, found := s.hns.LoadBalancer(id)
		return s.open(id, found)
	case "QueryLoadBalancer":
		lb, _ := s.hns.LoadBalancer(id)
		return answerOf(fromBalancer(lb), nil)
	case "CreateLoadBalancer", "ModifyLoadBalancer":
		var lb hcnBalancer
		if err := json.Unmarshal([]byte(document), &lb); err != nil {
			return answerOf(nil, err)
		}
		if function == "ModifyLoadBalancer" {
			return answerOf(nil, s.hns.UpdateLoadBalancer(lb.balancer(id)))
		}
		made, err := s.hns.CreateLoadBalancer(lb.balancer(""))
		if err != nil {
			return answerOf(nil, err)
		}
		return s.open(made.ID, true)
	case "DeleteLoadBalancer":
		return answerOf(nil, s.hns.DeleteLoadBalancer(id))

	case "CloseNetwork", "CloseEndpoint", "CloseLoadBalancer":
		delete(s.handles, handle)
		return answerOf(nil, nil)
	default:
		return answerOf(nil, fmt.Errorf("function %s: %w", function, hns.ErrNotSupported))
	}
}

// open returns an answer with a new handle for an object.
func (s *server) open(id string, found bool) answer {
	if !found {
		return answerOf(nil, hns.ErrNotFound)
	}
	s.next++
	s.handles[strconv.Itoa(s.next)] = id
	return answer{result: ok, handle: s.next}
}

// mapStrings returns the results of f for all items. Its result is never nil, because
// JSON encodes a nil slice as null and not as an empty list.
func mapStrings[T any](list []T, f func(T) string) []string {
	made := []string{}
	for _, item := range list {
		made = append(made, f(item))
	}
	return made
}

// filter decodes the filter in the document of a query.
func filter(document string) map[string]string {
	var query struct{ Filter string }
	var f map[string]string
	if json.Unmarshal([]byte(document), &query) == nil {
		json.Unmarshal([]byte(query.Filter), &f)
	}
	return f
}

// hcnPolicy is a setting of a network or an endpoint.
type hcnPolicy struct {
	Type     string
	Settings map[string]string
}

func fromNetwork(n hns.Network) any {
	to := struct {
		ID, Name, Type string
		Policies       []hcnPolicy
	}{ID: strings.ToUpper(n.ID), Name: n.Name, Type: "L2Bridge"}
	if n.Overlay {
		to.Type = "Overlay"
	}
	for _, s := range n.RemoteSubnets {
		to.Policies = append(to.Policies, hcnPolicy{"RemoteSubnetRoute", map[string]string{
			"DestinationPrefix": s.Prefix.String(), "ProviderAddress": s.Provider.String(),
		}})
	}
	return to
}

// hcnEndpoint and hcnBalancer are JSON documents of HNS.
type hcnEndpoint struct {
	ID                 string
	Name               string
	HostComputeNetwork string
	IpConfigurations   []struct{ IpAddress string }
	MacAddress         string
	Flags              uint32
	Policies           []hcnPolicy
}

func fromEndpoint(e hns.Endpoint) hcnEndpoint {
	to := hcnEndpoint{ID: strings.ToUpper(e.ID), Name: e.Name, HostComputeNetwork: strings.ToUpper(e.Network), MacAddress: e.MAC}
	for _, a := range e.Addrs {
		to.IpConfigurations = append(to.IpConfigurations, struct{ IpAddress string }{a.String()})
	}
	if e.Remote {
		to.Flags = 1
	}
	if e.Provider.IsValid() {
		to.Policies = []hcnPolicy{{"ProviderAddress", map[string]string{"ProviderAddress": e.Provider.String()}}}
	}
	return to
}

func (e *hcnEndpoint) endpoint(network string) hns.Endpoint {
	to := hns.Endpoint{Name: e.Name, Network: network, MAC: e.MacAddress, Remote: e.Flags == 1}
	for _, c := range e.IpConfigurations {
		to.Addrs = append(to.Addrs, netip.MustParseAddr(c.IpAddress))
	}
	for _, p := range e.Policies {
		to.Provider = netip.MustParseAddr(p.Settings["ProviderAddress"])
	}
	return to
}

type hcnBalancer struct {
	ID                   string
	HostComputeEndpoints []string
	SourceVIP            string
	FrontendVIPs         []string
	PortMappings         []hcnPort
	Flags                uint32
}

type hcnPort struct {
	Protocol                   uint32
	InternalPort, ExternalPort uint16
	DistributionType, Flags    uint32
}

func fromBalancer(lb hns.LoadBalancer) hcnBalancer {
	to := hcnBalancer{ID: strings.ToUpper(lb.ID), Flags: uint32(lb.Flags)}
	if lb.SourceVIP.IsValid() {
		to.SourceVIP = lb.SourceVIP.String()
	}
	for _, id := range lb.Endpoints {
		to.HostComputeEndpoints = append(to.HostComputeEndpoints, strings.ToUpper(id))
	}
	for _, vip := range lb.VIPs {
		to.FrontendVIPs = append(to.FrontendVIPs, vip.String())
	}
	for _, p := range lb.Ports {
		to.PortMappings = append(to.PortMappings, hcnPort{p.Protocol, p.Internal, p.External, uint32(p.Distribution), uint32(p.Flags)})
	}
	return to
}

func (lb *hcnBalancer) balancer(id string) hns.LoadBalancer {
	to := hns.LoadBalancer{ID: id, Flags: hns.LoadBalancerFlags(lb.Flags)}
	if lb.SourceVIP != "" {
		to.SourceVIP = netip.MustParseAddr(lb.SourceVIP)
	}
	for _, e := range lb.HostComputeEndpoints {
		to.Endpoints = append(to.Endpoints, strings.ToLower(e))
	}
	for _, vip := range lb.FrontendVIPs {
		to.VIPs = append(to.VIPs, netip.MustParseAddr(vip))
	}
	for _, p := range lb.PortMappings {
		to.Ports = append(to.Ports, hns.PortMapping{
			Protocol: p.Protocol, Internal: p.InternalPort, External: p.ExternalPort,
			Distribution: hns.Distribution(p.DistributionType), Flags: hns.PortFlags(p.Flags),
		})
	}
	return to
}
