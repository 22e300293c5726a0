// SPDX-License-Identifier: Apache-2.0

//go:build linux

package reference

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/healthport"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// healthServer answers health checks at health-check node ports.
type healthServer struct {
	cidrs     []netip.Prefix
	fault     Fault
	listeners map[netip.AddrPort]*listener
}

// listener answers the health checks of a service at one address.
type listener struct {
	net.Listener
	service types.NamespacedName
	local   atomic.Int64
	lies    bool
}

func (h *healthServer) serve(services []*api.View) error {
	addrs, err := nodePortAddrs(h.cidrs)
	if err != nil {
		return err
	}
	old := h.listeners
	h.listeners = map[netip.AddrPort]*listener{}
	var failed sink.Failed
	for _, view := range services {
		port := healthport.Of(view.Service)
		if port == 0 {
			continue
		}
		for _, addr := range addrs {
			at := netip.AddrPortFrom(addr, uint16(port))
			l := old[at]
			if l == nil || l.service != view.Key() {
				if l != nil {
					l.Close()
				}
				l = &listener{service: view.Key(), lies: h.fault == HealthLies}
				if l.Listener, err = net.Listen("tcp", at.String()); err != nil {
					failed.Add(view.Key(), fmt.Errorf("open health-check port: %w", err))
					continue
				}
				go http.Serve(l, l) //nolint:errcheck // Serve returns when l is closed
			}
			delete(old, at)
			l.local.Store(int64(healthport.Ready(view, api.FamilyOf(addr))))
			h.listeners[at] = l
		}
	}
	for _, l := range old {
		if h.fault != HealthStays {
			l.Close()
		}
	}
	return failed.Err()
}

func (h *healthServer) close() {
	for _, l := range h.listeners {
		l.Close()
	}
}

func (l *listener) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	local := l.local.Load()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.FormatInt(local, 10))
	if local == 0 && !l.lies {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	// Ignore clients that disconnect.
	_ = json.NewEncoder(w).Encode(map[string]any{
		"service":             map[string]string{"namespace": l.service.Namespace, "name": l.service.Name},
		"localEndpoints":      local,
		"serviceProxyHealthy": true,
	})
}

// nodePortAddrs returns the addresses of this host at which node ports are served.
func nodePortAddrs(cidrs []netip.Prefix) ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, errors.Join(errors.New("list addresses"), err)
	}
	var addrs []netip.Addr
	for _, a := range all {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil {
			return nil, err
		}
		for _, cidr := range cidrs {
			if cidr.Contains(prefix.Addr()) {
				addrs = append(addrs, prefix.Addr())
			}
		}
	}
	return addrs, nil
}
