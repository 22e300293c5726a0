// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/conformance/internal/world"
)

var healthCases = []testCase{
	{name: "a health-check node port reports the number of ready endpoints on this node", needs: []Feature{HealthChecks}, run: func(s *scene) {
		web := s.healthCheckedService().withEndpoints(asReady(s.a), asReady(s.b), asReady(s.d))
		s.publish()
		s.eventually(func() { s.mustReportHealth(web, 2) })
		web.withEndpoints(asReady(s.a), asDraining(s.b), asReady(s.d))
		s.publish()
		s.eventually(func() { s.mustReportHealth(web, 1) })
		web.withEndpoints(asUnready(s.a), asDraining(s.b), asReady(s.d))
		s.publish()
		s.eventually(func() { s.mustReportHealth(web, 0) })
		web.withEndpoints(asReady(s.a))
		s.publish()
		s.eventually(func() { s.mustReportHealth(web, 1) })
	}},
	{name: "a health-check node port is opened and closed with its service", needs: []Feature{HealthChecks}, run: func(s *scene) {
		web := s.healthCheckedService().withEndpoints(asReady(s.a))
		s.publish()
		s.eventually(func() { s.mustReportHealth(web, 1) })
		old := web.healthCheck(0)
		s.remove(web)
		other := s.healthCheckedService().withEndpoints(asReady(s.b))
		s.publish()
		s.eventually(func() { s.mustReportHealth(other, 1) })
		s.eventually(func() { s.connectionRefused(old) })
	}},
	{name: "a health-check node port that is in use affects no other service and is opened when it is free", needs: []Feature{HealthChecks}, run: func(s *scene) {
		web, other := s.healthCheckedService().withEndpoints(asReady(s.a)), s.healthCheckedService().withEndpoints(asReady(s.b))
		var taken []net.Listener
		for i := range 2 {
			var l net.Listener
			s.must(s.node.Do(func() (err error) { l, err = net.Listen("tcp", web.healthCheck(i).String()); return err }))
			taken = append(taken, l)
			s.addCleanup(func() error {
				if err := l.Close(); !errors.Is(err, net.ErrClosed) {
					return err
				}
				return nil
			})
		}
		s.publishNow()
		s.eventually(func() {
			s.mustReportHealth(other, 1)
			s.mustReach(s.outside, other.loadBalancerIP(), s.b)
			s.mustReach(s.c, web.clusterIP(), s.a)
		})
		for _, l := range taken {
			s.must(l.Close())
		}
		s.eventually(func() { s.mustReportHealth(web, 1) })
	}},
}

// healthCheckedService creates a service with a health-check node port.
func (s *scene) healthCheckedService() *service {
	svc := s.addService("web" + strconv.Itoa(len(s.services))).withLoadBalancer().externalLocal()
	svc.Spec.HealthCheckNodePort = s.nodePort()
	return svc
}

// healthCheck returns the health-check node port of the service at the node's address
// with index i.
func (svc *service) healthCheck(i int) netip.AddrPort {
	return netip.AddrPortFrom(svc.scene.node.Addrs.Family(svc.scene.family)[i], uint16(svc.Spec.HealthCheckNodePort))
}

// mustReportHealth sends health checks to all node addresses. Each response must report
// the argument local as the number of local endpoints.
func (s *scene) mustReportHealth(svc *service, local int) {
	status := http.StatusOK
	if local == 0 {
		status = http.StatusServiceUnavailable
	}
	for i := range 2 {
		for _, path := range []string{"/", "/healthz?any=path"} {
			url := "http://" + svc.healthCheck(i).String() + path
			response, body := s.get(url)
			if response.StatusCode != status {
				s.failf("%s: status %d, want %d with %d ready endpoints on this node", url, response.StatusCode, status, local)
			}
			want := map[string]any{
				"service":             map[string]any{"namespace": svc.Namespace, "name": svc.Name},
				"localEndpoints":      float64(local),
				"serviceProxyHealthy": true,
			}
			var got map[string]any
			if err := json.Unmarshal(body, &got); err != nil {
				s.failf("%s: body %q: %w", url, body, err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				s.failf("%s: body (-want +got):\n%s", url, diff)
			}
			for header, want := range map[string]string{
				"Content-Type":                     "application/json",
				"X-Content-Type-Options":           "nosniff",
				"X-Load-Balancing-Endpoint-Weight": strconv.Itoa(local),
			} {
				if got := response.Header.Get(header); got != want {
					s.failf("%s: header %s is %q, want %q", url, header, got, want)
				}
			}
		}
	}
}

// get sends an HTTP GET request from the client outside the cluster.
func (s *scene) get(url string) (*http.Response, []byte) {
	ctx, cancel := context.WithTimeout(s.ctx, s.opts.Patience)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, to string) (net.Conn, error) {
		return s.outside.Dial(ctx, api.TCP, netip.Addr{}, netip.MustParseAddrPort(to))
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	s.must(err)
	response, err := transport.RoundTrip(request)
	if err != nil {
		s.failf("%s: %w", url, err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		s.failf("%s: %w", url, err)
	}
	return response, body
}

func (s *scene) connectionRefused(to netip.AddrPort) {
	if answer, err := s.ask(s.outside, api.TCP, to, s.opts.Patience); !world.Refused(err) {
		s.failf("%s must be refused: answer %v, error %v", describe(s.outside, api.TCP, to), answer, err)
	}
}
