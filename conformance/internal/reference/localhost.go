// SPDX-License-Identifier: Apache-2.0

//go:build linux

package reference

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// localhostServer serves node ports at loopback addresses with sockets.
type localhostServer struct {
	cidrs []netip.Prefix
	fault Fault
	ports map[localhostKey]*localhostPort
}

type localhostKey struct {
	service  types.NamespacedName
	protocol api.Protocol
	at       netip.AddrPort
}

// localhostPort is a node port at one address.
type localhostPort struct {
	tcp net.Listener
	udp *net.UDPConn

	mu        sync.Mutex
	endpoints []netip.AddrPort
	affinity  bool
	last      netip.AddrPort // the endpoint of the last connection
	// clients has the sockets of UDP clients.
	clients map[netip.AddrPort]*net.UDPConn
}

func (h *localhostServer) serve(services []*api.View) error {
	if len(h.cidrs) == 0 {
		return nil
	}
	if h.fault == LocalhostRoutes {
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/all/route_localnet", []byte("1"), 0); err != nil {
			return err
		}
	}
	addrs, err := nodePortAddrs(h.cidrs)
	if err != nil {
		return err
	}
	wanted := map[localhostKey]*nodeview.Frontend{}
	for _, view := range services {
		for f := range nodeview.Frontends(view) {
			if f.Kind == nodeview.NodePort && (f.Protocol == api.TCP || f.Protocol == api.UDP && h.fault != LocalhostTCP) {
				for at := range f.At(addrs) {
					wanted[localhostKey{view.Key(), f.Protocol, at}] = &f
				}
			}
		}
	}
	old := h.ports
	h.ports = map[localhostKey]*localhostPort{}
	for key, p := range old {
		if f := wanted[key]; f != nil && len(h.endpoints(f)) > 0 || h.fault == LocalhostStays {
			h.ports[key] = p
		} else {
			p.close()
		}
	}
	var failed sink.Failed
	for key, f := range wanted {
		endpoints := h.endpoints(f)
		p := h.ports[key]
		switch {
		case p == nil && len(endpoints) == 0 && h.fault != LocalhostStays:
			continue
		case p == nil:
			if p, err = openLocalhost(key); err != nil {
				if h.fault != LocalhostOnce {
					failed.Add(key.service, fmt.Errorf("open node port on localhost: %w", err))
				}
				continue
			}
			h.ports[key] = p
		case h.fault == LocalhostFrozen:
			continue
		}
		p.set(endpoints, f.Affinity > 0 && h.fault != NoAffinity, h.fault == KeepsFlows)
	}
	return failed.Err()
}

// endpoints returns the endpoints of a frontend for connections of the node itself.
func (h *localhostServer) endpoints(f *nodeview.Frontend) (endpoints []netip.AddrPort) {
	traffic := f.Node
	if h.fault == NoShortCircuit {
		traffic = f.Elsewhere
	}
	if traffic.Verdict != nodeview.Forward {
		return nil
	}
	for _, e := range traffic.Endpoints {
		if h.fault == LocalhostPodsOnly && !strings.Contains(e.Addr.String(), "10:244") && !strings.Contains(e.Addr.String(), "10.244") {
			continue
		}
		endpoints = append(endpoints, netip.AddrPortFrom(e.Addr, uint16(e.Port)))
	}
	return endpoints
}

func (h *localhostServer) close() {
	for _, p := range h.ports {
		p.close()
	}
}

func openLocalhost(key localhostKey) (*localhostPort, error) {
	p := &localhostPort{clients: map[netip.AddrPort]*net.UDPConn{}}
	var err error
	if key.protocol == api.TCP {
		if p.tcp, err = net.Listen("tcp", key.at.String()); err == nil {
			go p.acceptTCP()
		}
	} else if p.udp, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(key.at)); err == nil {
		go p.receiveUDP()
	}
	return p, err
}

func (p *localhostPort) close() {
	if p.tcp != nil {
		p.tcp.Close()
		return
	}
	p.udp.Close()
	p.set(nil, false, false)
}

// set sets the endpoints. UDP clients of removed endpoints lose their sockets, unless
// keepFlows is true.
func (p *localhostPort) set(endpoints []netip.AddrPort, affinity, keepFlows bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endpoints, p.affinity = endpoints, affinity
	for client, c := range p.clients {
		if !keepFlows && !slices.Contains(endpoints, c.RemoteAddr().(*net.UDPAddr).AddrPort()) {
			c.Close()
			delete(p.clients, client)
		}
	}
}

// choose returns the endpoint of a new connection. The caller must hold the lock.
func (p *localhostPort) choose() (netip.AddrPort, error) {
	if p.affinity && slices.Contains(p.endpoints, p.last) {
		return p.last, nil
	}
	if len(p.endpoints) == 0 {
		return netip.AddrPort{}, errors.New("no endpoint")
	}
	p.last = p.endpoints[rand.IntN(len(p.endpoints))]
	return p.last, nil
}

func (p *localhostPort) acceptTCP() {
	for {
		client, err := p.tcp.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		endpoint, err := p.choose()
		p.mu.Unlock()
		go func() {
			defer client.Close()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", endpoint.String())
			if err != nil {
				return
			}
			defer server.Close()
			go func() {
				io.Copy(server, client)            //nolint:errcheck // the other direction ends, too
				server.(*net.TCPConn).CloseWrite() //nolint:errcheck
			}()
			io.Copy(client, server) //nolint:errcheck
		}()
	}
}

func (p *localhostPort) receiveUDP() {
	buffer := make([]byte, 1<<16)
	for {
		n, from, err := p.udp.ReadFromUDPAddrPort(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			p.forward(from, buffer[:n])
		}
	}
}

// forward sends a datagram of a client to its endpoint.
func (p *localhostPort) forward(from netip.AddrPort, datagram []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clients[from]
	if c == nil {
		endpoint, err := p.choose()
		if err != nil {
			return
		}
		if c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(endpoint)); err != nil {
			return
		}
		p.clients[from] = c
		go func() {
			answer := make([]byte, 1<<16)
			for {
				n, err := c.Read(answer)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					p.udp.WriteToUDPAddrPort(answer[:n], from) //nolint:errcheck // datagrams may be lost
				}
			}
		}()
	}
	c.Write(datagram) //nolint:errcheck // datagrams may be lost
}
