// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/net/dns/dnsmessage"
)

const (
	// requestInterval is the time between two requests of a client.
	requestInterval = 20 * time.Millisecond
	requestTimeout  = 10 * time.Second
	// lossDelay is less than one second, TCP's initial retransmission timeout. If a request
	// takes longer than lossDelay, a packet was lost or the machine is busy.
	lossDelay = 900 * time.Millisecond
)

// traffic consists of several clients that send requests, and counts the requests.
type traffic struct {
	stop    chan struct{}
	clients sync.WaitGroup

	mu    sync.Mutex
	count map[string]*requests
}

// requests counts what happened to the requests of one client.
type requests struct {
	made, slow int
	failures   []string
}

func (r *requests) String() string {
	return fmt.Sprintf("%d requests, %d failed, %d took longer than %v", r.made, len(r.failures), r.slow, lossDelay)
}

// newTraffic returns a traffic without clients. Clients that start later end when the
// test ends.
func newTraffic(t *testing.T) *traffic {
	tr := &traffic{stop: make(chan struct{}), count: map[string]*requests{}}
	t.Cleanup(tr.end)
	return tr
}

// end stops all clients and waits until they have ended.
func (tr *traffic) end() {
	tr.mu.Lock()
	select {
	case <-tr.stop:
	default:
		close(tr.stop)
	}
	tr.mu.Unlock()
	tr.clients.Wait()
}

// start runs a client in a network namespace. The client makes requests one after the
// other.
func (tr *traffic) start(name string, in *netnstest.Namespace, request func() error) {
	tr.clients.Go(func() {
		in.Do(func() error {
			ticker := time.NewTicker(requestInterval)
			defer ticker.Stop()
			for {
				select {
				case <-tr.stop:
					return nil
				case <-ticker.C:
				}
				began := time.Now()
				err := request()
				tr.add(name, began, err)
			}
		})
	})
}

func (tr *traffic) add(name string, began time.Time, err error) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	r := tr.count[name]
	if r == nil {
		r = &requests{}
		tr.count[name] = r
	}
	r.made++
	took := time.Since(began)
	if err != nil {
		r.failures = append(r.failures, fmt.Sprintf("%s, after %v: %v", began.Format(time.TimeOnly), took.Round(time.Millisecond), err))
	} else if took > lossDelay {
		r.slow++
	}
}

// report logs what happened since the last report, and returns the number of failed
// requests.
func (tr *traffic) report(t *testing.T, phase string) (failed int) {
	t.Helper()
	tr.mu.Lock()
	count := tr.count
	tr.count = map[string]*requests{}
	tr.mu.Unlock()
	total := &requests{}
	for name, r := range count {
		total.made += r.made
		total.slow += r.slow
		total.failures = append(total.failures, r.failures...)
		for i, failure := range r.failures {
			if i == 5 {
				t.Logf("%s: %s: and %d more", phase, name, len(r.failures)-i)
				break
			}
			t.Logf("%s: %s: %s", phase, name, failure)
		}
	}
	t.Logf("%s: %v", phase, total)
	if total.made == 0 {
		t.Errorf("%s: no requests were made", phase)
	}
	return len(total.failures)
}

// hostname asks a web server for the name of its pod, over a new connection.
func hostname(addr netip.AddrPort) (string, error) {
	c, err := net.DialTimeout("tcp", addr.String(), requestTimeout)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return get(c, bufio.NewReader(c))
}

// dial returns a function that sends a request to a web server over a new connection.
func dial(addr netip.AddrPort) func() error {
	return func() error {
		_, err := hostname(addr)
		return err
	}
}

// keep is like dial, but all calls of the returned function use one connection. After a
// failure, the next call opens a new connection.
func keep(addr netip.AddrPort) func() error {
	var c net.Conn
	var r *bufio.Reader
	return func() (err error) {
		if c == nil {
			if c, err = net.DialTimeout("tcp", addr.String(), requestTimeout); err != nil {
				c = nil
				return err
			}
			r = bufio.NewReader(c)
		}
		if _, err = get(c, r); err != nil {
			c.Close()
			c = nil
		}
		return err
	}
}

// get asks a web server for the name of its pod.
func get(c net.Conn, r *bufio.Reader) (string, error) {
	c.SetDeadline(time.Now().Add(requestTimeout))
	if _, err := io.WriteString(c, "GET /hostname HTTP/1.1\r\nHost: test\r\n\r\n"); err != nil {
		return "", err
	}
	answer, err := http.ReadResponse(r, nil)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	name, err := io.ReadAll(answer.Body)
	switch {
	case err != nil:
		return "", err
	case answer.StatusCode != http.StatusOK:
		return "", fmt.Errorf("answer %q", answer.Status)
	case len(name) == 0:
		return "", errors.New("the answer is empty")
	}
	return string(name), nil
}

// dnsServer is the address of the cluster's DNS service.
var dnsServer = netip.MustParseAddrPort("10.96.0.10:53")

// lookup queries DNS for the address of a service, over UDP.
func lookup() func() error {
	question := dnsmessage.Message{
		Header: dnsmessage.Header{ID: 1, RecursionDesired: true},
		Questions: []dnsmessage.Question{{
			Name: dnsmessage.MustNewName("kubernetes.default.svc.cluster.local."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
		}},
	}
	packed, err := question.Pack()
	if err != nil {
		panic(err)
	}
	return func() error {
		c, err := net.Dial("udp", dnsServer.String())
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(requestTimeout))
		if _, err := c.Write(packed); err != nil {
			return err
		}
		buffer := make([]byte, 1500)
		n, err := c.Read(buffer)
		if err != nil {
			return err
		}
		var answer dnsmessage.Message
		if err := answer.Unpack(buffer[:n]); err != nil {
			return err
		}
		if answer.RCode != dnsmessage.RCodeSuccess || len(answer.Answers) == 0 {
			return fmt.Errorf("answer %v", answer.RCode)
		}
		return nil
	}
}

// quantile returns the duration that the given share of the durations does not exceed.
func quantile(durations []time.Duration, share float64) time.Duration {
	if len(durations) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(durations))
	return sorted[min(len(sorted)-1, int(share*float64(len(sorted))))]
}
