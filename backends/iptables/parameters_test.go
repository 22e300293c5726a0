// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
)

// weighted returns the view of a service whose endpoints have these weights. The endpoints
// have the addresses 10.2.1.2, 10.2.1.3 and so on.
func weighted(weights ...int32) *api.View {
	list := ""
	for i := range weights {
		list += fmt.Sprintf(" 10.2.1.%d", 2+i)
	}
	v := view("weighted", "10.96.0.1", list)
	for i := range v.Endpoints {
		v.Endpoints[i].Weight = weights[v.Endpoints[i].Addr.As4()[3]-2]
	}
	return v
}

// TestWeightsAreShares connects to a service with few endpoints, and to a service whose
// chain leads to groups of endpoints.
func TestWeightsAreShares(t *testing.T) {
	eachVariant(t, func(t *testing.T, _ *netnstest.Namespace, v variant) {
		for name, weights := range map[string][]int32{"few": {1, 2, 7}, "many": append([]int32{6500, 6500}, repeat(100, 130)...)} {
			t.Run(name, func(t *testing.T) {
				node, from, to := forwardingNode(t)
				for i := 1; i < len(weights); i++ {
					to.Add(t, "eth0", fmt.Sprintf("10.2.1.%d/24", 2+i))
				}
				netnstest.Listen(t, to.Do, ":8080", func(c net.Conn) {
					io.WriteString(c, c.LocalAddr().String())
					c.Close()
				})
				mustSync(t, start(t, node, v), pass(weighted(weights...)))
				const connections = 3000
				counts := make([]int, len(weights))
				for range connections {
					answer := ""
					if err := from.Do(func() error {
						c, err := net.DialTimeout("tcp", "10.96.0.1:80", time.Minute)
						if err != nil {
							return err
						}
						defer c.Close()
						text, err := io.ReadAll(c)
						answer = string(text)
						return err
					}); err != nil {
						t.Fatal(err)
					}
					counts[netip.MustParseAddrPort(answer).Addr().Unmap().As4()[3]-2]++
				}
				var sum float64
				for _, w := range weights {
					sum += float64(w)
				}
				for i, w := range weights[:2] {
					if is, want := float64(counts[i])/connections, float64(w)/sum; math.Abs(is-want) > 0.03 {
						t.Errorf("endpoint %d of weight %d has %.3f of the connections, want %.3f", i, w, is, want)
					}
				}
			})
		}
	})
}

func repeat(w int32, n int) (list []int32) {
	for range n {
		list = append(list, w)
	}
	return list
}

func TestSourceRangesApplyToNodePorts(t *testing.T) {
	eachVariant(t, func(t *testing.T, _ *netnstest.Namespace, v variant) {
		node, from, to := forwardingNode(t)
		netnstest.Listen(t, to.Do, ":8080", func(net.Conn) {})
		b := start(t, node, v, func(o *options) { o.NodeAddresses = nodeaddr.Of(netip.MustParseAddr("10.2.0.1")) })
		for source, admitted := range map[string]bool{"10.2.0.0/24": true, "192.0.2.0/24": false} {
			mustSync(t, b, pass(view("ranges", "10.96.0.1", "10.2.1.2", nodePort, func(s *api.Service) {
				s.SourceRanges = []api.SourceRanges{{Prefixes: []netip.Prefix{netip.MustParsePrefix(source)}, NodePorts: true}}
			})))
			backendtest.CheckConnect(t, from, "10.2.0.1:30080", admitted)
		}
	})
}

// TestConnectionsToLostEndpointsAreReset uses an idle connection, with connection tracking
// of the backend itself.
func TestConnectionsToLostEndpointsAreReset(t *testing.T) {
	eachVariant(t, func(t *testing.T, _ *netnstest.Namespace, v variant) {
		for _, resets := range []bool{true, false} {
			node, from, to := forwardingNode(t)
			netnstest.Listen(t, to.Do, ":8080", func(c net.Conn) { io.Copy(c, c) })
			b := start(t, node, v, func(o *options) { o.Conntrack = nil })
			set := func(s *api.Service) { s.ResetConnections = resets }
			mustSync(t, b, pass(view("web", "10.96.0.1", "10.2.1.2", set)))
			var c net.Conn
			if err := from.Do(func() (err error) { c, err = net.DialTimeout("tcp", "10.96.0.1:80", time.Minute); return err }); err != nil {
				t.Fatal(err)
			}
			mustSync(t, b, pass(view("web", "10.96.0.1", "", set)))
			began := time.Now()
			c.SetReadDeadline(began.Add(time.Second))
			_, err := c.Read(make([]byte, 1))
			if timeout, ok := err.(net.Error); resets == (ok && timeout.Timeout()) {
				t.Errorf("resets %t: the connection has error %v after %s", resets, err, time.Since(began))
			}
			if resets {
				t.Logf("reset after %s", time.Since(began))
			}
			c.Close()
		}
	})
}
