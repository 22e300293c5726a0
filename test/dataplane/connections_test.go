// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	// loadTime is the duration of each load in BenchmarkConnections.
	loadTime = time.Second
	// rounds is the number of measurements of each load. Direct connections and
	// connections through services alternate.
	rounds = 5
	// clients is the number of goroutines that send requests.
	clients = 4
)

// BenchmarkConnections compares connections through services with connections to their
// endpoints: the time to connect, the throughput of an established connection, and
// requests per second with a new connection for each request.
func BenchmarkConnections(b *testing.B) {
	work(b)
	for _, s := range parseShapes(b, *shapes) {
		b.Run(s.String(), func(b *testing.B) {
			c := newCluster(b, s)
			for _, p := range allProxies {
				if !slices.Contains(strings.Split(*proxies, ","), p.name) {
					continue
				}
				b.Run(p.name, func(b *testing.B) {
					for range b.N {
						c.compare(b, p)
					}
				})
			}
		})
	}
}

func (c *cluster) compare(b *testing.B, p proxy) {
	b.ReportMetric(0, "ns/op")
	b.Cleanup(func() { flush(b) })
	c.join(b)
	c.ipvs = strings.HasSuffix(p.name, "ipvs")
	r := c.start(b, p, 0)
	r.wait(b)
	r.rest()

	random := rand.New(rand.NewPCG(3, 4))
	var took [2][]float64
	for range *connects {
		service := random.IntN(c.services)
		for i, to := range c.targets(service) {
			d, err := connectTo(to, 5*time.Second)
			if err != nil {
				b.Fatalf("connect to %s: %v", to, err)
			}
			took[i] = append(took[i], float64(d.Nanoseconds())/1000)
		}
	}
	report(b, took, "µs-connect")

	var rates, speeds [2][]float64
	for range rounds {
		for i := range 2 {
			rates[i] = append(rates[i], c.requests(b, i))
			speeds[i] = append(speeds[i], transfer(b, c.targets(0)[i]))
		}
	}
	report(b, rates, "requests/s")
	report(b, speeds, "Gbit/s")
	r.kill(b)
}

// targets returns the addresses of an endpoint and of a service. The endpoint may belong
// to another service. It differs for each service.
func (c *cluster) targets(service int) [2]netip.AddrPort {
	return [2]netip.AddrPort{
		netip.AddrPortFrom(offset(podCIDR.Addr(), 257+service*c.endpoints), podPort),
		netip.AddrPortFrom(vip(service), servicePort),
	}
}

// report reports the medians of direct connections and of connections through services,
// and their ratio.
func report(b *testing.B, values [2][]float64, unit string) {
	var medians [2]float64
	for i := range values {
		slices.Sort(values[i])
		medians[i] = values[i][len(values[i])/2]
	}
	b.ReportMetric(medians[0], unit+"-direct")
	b.ReportMetric(medians[1], unit)
	b.ReportMetric(medians[1]/medians[0], unit+"-ratio")
}

// work accepts connections to all pods until the test ends. It answers the
// byte "?" with a byte, and discards everything else.
func work(t testing.TB) {
	t.Helper()
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", podPort))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buffer := make([]byte, 1)
				_, err := c.Read(buffer)
				if err == nil && buffer[0] == '?' {
					c.Write(buffer)
				} else if err == nil {
					buffer = make([]byte, 256<<10)
				}
				for err == nil {
					_, err = c.Read(buffer)
				}
			}()
		}
	}()
}

// requests returns the requests per second of several clients. Each request needs a new
// connection to a random target of the given kind.
func (c *cluster) requests(b *testing.B, kind int) float64 {
	b.Helper()
	var done atomic.Int64
	var group sync.WaitGroup
	begin := time.Now()
	for client := range uint64(clients) {
		group.Go(func() {
			random := rand.New(rand.NewPCG(5, client))
			for time.Since(begin) < loadTime {
				if err := request(c.targets(random.IntN(c.services))[kind]); err != nil {
					b.Errorf("request: %v", err)
					return
				}
				done.Add(1)
			}
		})
	}
	group.Wait()
	return float64(done.Load()) / time.Since(begin).Seconds()
}

func request(to netip.AddrPort) error {
	c, err := net.DialTimeout("tcp", to.String(), 5*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	c.(*net.TCPConn).SetLinger(0) // close with a reset, so that the local port becomes free
	if _, err := c.Write([]byte("?")); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

// transfer returns the throughput of a connection.
func transfer(b *testing.B, to netip.AddrPort) float64 {
	b.Helper()
	c, err := net.DialTimeout("tcp", to.String(), 5*time.Second)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	buffer := make([]byte, 256<<10)
	sent, begin := 0, time.Now()
	for time.Since(begin) < loadTime {
		n, err := c.Write(buffer)
		if err != nil {
			b.Fatal(err)
		}
		sent += n
	}
	return float64(sent) * 8 / 1e9 / time.Since(begin).Seconds()
}
