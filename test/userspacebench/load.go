// SPDX-License-Identifier: Apache-2.0

//go:build linux

package userspacebench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// load describes what a client does.
type load struct {
	Kind    string // http, bulk, echo, idle or udp
	Target  string
	Clients int
	For     time.Duration
}

// result is a client's measurement.
type result struct {
	Count    int64 // number of connections, bytes or round trips, depending on the kind of load
	Errors   int64
	Took     time.Duration
	P50, P99 time.Duration
}

func (r result) perSecond() float64 { return float64(r.Count) / r.Took.Seconds() }

// client runs a load, prints the result, and waits until its standard input ends.
func client(arg string) {
	var l load
	if err := json.Unmarshal([]byte(arg), &l); err != nil {
		fatal(err)
	}
	var held []net.Conn
	var r result
	var latencies []time.Duration
	var errs atomic.Int64
	begin := time.Now()
	end := begin.Add(l.For)
	switch l.Kind {
	case "http":
		r.Count = runConcurrently(l.Clients, func(int) int64 {
			n := int64(0)
			for time.Now().Before(end) {
				if err := getOnce(l.Target); err != nil {
					errs.Add(1)
					continue
				}
				n++
			}
			return n
		})
	case "bulk":
		r.Count = runConcurrently(l.Clients, func(int) int64 {
			c := dial("tcp", at(l.Target, bulkPort))
			defer c.Close()
			c.SetDeadline(end)
			n, err := io.CopyBuffer(justWriter{io.Discard}, c, make([]byte, 256<<10))
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				errs.Add(1)
			}
			return n
		})
	case "echo":
		r.Count = runConcurrently(l.Clients, func(i int) int64 {
			c := dial("tcp", at(l.Target, echoPort))
			defer c.Close()
			n, b := int64(0), make([]byte, 64)
			for ; time.Now().Before(end); n++ {
				sent := time.Now()
				exchange(c, b)
				if i == 0 {
					latencies = append(latencies, time.Since(sent))
				}
			}
			return n
		})
	case "idle":
		var mu sync.Mutex
		r.Count = runConcurrently(16, func(i int) int64 {
			for range l.Clients / 16 {
				c := dial("tcp", at(l.Target, echoPort))
				exchange(c, make([]byte, 64))
				mu.Lock()
				held = append(held, c)
				mu.Unlock()
			}
			return int64(l.Clients / 16)
		})
	case "udp":
		r.Count = runConcurrently(l.Clients, func(int) int64 { return ping(dial("udp", at(l.Target, echoPort)), end) })
	default:
		fatal(fmt.Errorf("unknown load %q", l.Kind))
	}
	r.Took, r.Errors = time.Since(begin), errs.Load()
	if len(latencies) > 0 {
		slices.Sort(latencies)
		r.P50, r.P99 = latencies[len(latencies)/2], latencies[len(latencies)*99/100]
	}
	json.NewEncoder(os.Stdout).Encode(r)
	io.Copy(io.Discard, os.Stdin)
	for _, c := range held {
		c.Close()
	}
}

// runConcurrently makes n concurrent calls of f and returns the sum of their results.
func runConcurrently(n int, f func(i int) int64) int64 {
	var sum atomic.Int64
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { sum.Add(f(i)) })
	}
	all.Wait()
	return sum.Load()
}

func getOnce(target string) error {
	c, err := net.Dial("tcp", at(target, httpPort))
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"); err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, c)
	if err == nil && n < bodySize {
		err = io.ErrUnexpectedEOF
	}
	return err
}

func exchange(c net.Conn, b []byte) {
	if _, err := c.Write(b); err != nil {
		fatal(err)
	}
	if _, err := io.ReadFull(c, b); err != nil {
		fatal(err)
	}
}

// ping sends datagrams and counts the answers. It sends a datagram whenever fewer than 32
// datagrams wait for an answer.
func ping(c net.Conn, end time.Time) int64 {
	defer c.Close()
	const window = 32
	b := make([]byte, 64)
	n, under := int64(0), 0
	for time.Now().Before(end) {
		for ; under < window; under++ {
			c.Write(b)
		}
		c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := c.Read(b); err != nil {
			under = 0 // no answer arrived in time: count all unanswered datagrams as lost
			continue
		}
		n++
		under--
	}
	return n
}

// server runs the servers for all kinds of load until it is killed.
func server() {
	listen(httpPort, func(c *net.TCPConn) {
		for lines := bufio.NewScanner(c); lines.Scan() && lines.Text() != ""; {
		}
		c.Write(answer)
	})
	chunk := make([]byte, 256<<10)
	listen(bulkPort, func(c *net.TCPConn) {
		for {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	})
	listen(echoPort, func(c *net.TCPConn) {
		b := make([]byte, 4096)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			c.Write(b[:n])
		}
	})
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(serverAddr), Port: echoPort})
	if err != nil {
		fatal(err)
	}
	b := make([]byte, 4096)
	for {
		if n, from, err := socket.ReadFromUDPAddrPort(b); err == nil {
			socket.WriteToUDPAddrPort(b[:n], from)
		}
	}
}

const bodySize = 1024

var answer = fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%0*d", bodySize, bodySize, 0)

// config returns a configuration without Multipath TCP.
func config() *net.ListenConfig {
	c := &net.ListenConfig{}
	c.SetMultipathTCP(false)
	return c
}

func listen(port int, handle func(*net.TCPConn)) {
	l, err := config().Listen(context.Background(), "tcp4", at(serverAddr, port))
	if err != nil {
		fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				fatal(err)
			}
			go func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			}()
		}
	}()
}

func at(addr string, port int) string { return net.JoinHostPort(addr, strconv.Itoa(port)) }

func dial(network, target string) net.Conn {
	c, err := net.Dial(network, target)
	if err != nil {
		fatal(err)
	}
	return c
}

// justWriter hides all methods of a writer, such as ReadFrom, except Write.
type justWriter struct{ io.Writer }

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "load:", err)
	os.Exit(1)
}
