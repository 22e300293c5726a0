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
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const requestTimeout = 10 * time.Second

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

// get asks a web server for the name of its pod, over the connection c.
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

// quantile returns a quantile of durations. With share 0.99, 99% of the durations are not
// longer than the result.
func quantile(durations []time.Duration, share float64) time.Duration {
	if len(durations) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(durations))
	return sorted[min(len(sorted)-1, int(share*float64(len(sorted))))]
}
