// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

const transferPort = 8081

const manifest = `
apiVersion: v1
kind: Service
metadata: {name: bench, labels: {service.kubernetes.io/service-proxy-name: bench}}
spec:
  clusterIP: 10.96.0.1
  clusterIPs: [10.96.0.1]
  externalIPs: [192.0.2.1]
  ports: [{port: 8081}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: bench
  labels: {kubernetes.io/service-name: bench, service.kubernetes.io/service-proxy-name: bench}
addressType: IPv4
ports: [{port: 8081}]
endpoints: [{addresses: [10.1.%[1]d.2], nodeName: node%[1]d, conditions: {ready: true}}]
`

// BenchmarkProxies compares direct-return, kpng's nftables backend and all-ip. Each has its own
// network, where a client reaches one pod. With direct-return and nftables, the packets arrive at
// another node. With all-ip, they arrive at the node of the pod, since all-ip serves only such pods.
func BenchmarkProxies(b *testing.B) {
	const megabytes = 64
	file := filepath.Join(b.TempDir(), "service.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, manifest, entries), 0o600); err != nil {
		b.Fatal(err)
	}
	proxies := []struct {
		name  string
		start func(l *lan)
		entry int
	}{
		{"direct-return", func(l *lan) { l.sync(b, map[int]bool{entries: true}) }, 0},
		{"nftables", func(l *lan) {
			startProgram(b, l, 0, "../../cmd/kpng", "file", "-i", file, "to-local", "nftables")
		}, 0},
		{"all-ip", func(l *lan) { startProgram(b, l, entries, "../all-ip", "-i", file) }, entries},
	}
	var connections, downloads, uploads []backendtest.Case
	for _, p := range proxies {
		l := newLAN(b, 1)
		netnstest.Listen(b, l.pods[entries].Do, fmt.Sprintf(":%d", transferPort), serveTransfers)
		p.start(l)
		l.enter(b, p.entry)
		transfer := func(toPod, fromPod int64) func(func(time.Duration)) error {
			return func(took func(time.Duration)) error { return l.transfer(toPod, fromPod, took) }
		}
		for began := time.Now(); ; time.Sleep(100 * time.Millisecond) { // until the program has its services
			err := l.transfer(1, 1, func(time.Duration) {})
			if err == nil {
				break
			}
			if time.Since(began) > time.Minute {
				b.Fatalf("%s: %v", p.name, err)
			}
		}
		connections = append(connections, backendtest.Case{Name: p.name, Batch: func(took func(time.Duration)) error {
			return l.client.Do(func() error {
				for range 100 {
					d, err := netnstest.TimeConnect(&unix.SockaddrInet4{Port: transferPort, Addr: ips[0].As4()})
					if err != nil {
						return err
					}
					took(d)
				}
				return nil
			})
		}})
		downloads = append(downloads, backendtest.Case{Name: p.name, Batch: transfer(1, megabytes<<20)})
		uploads = append(uploads, backendtest.Case{Name: p.name, Batch: transfer(megabytes<<20, 1)})
	}
	b.Run("connect", func(b *testing.B) { backendtest.Compare(b, connections...) })
	b.Run(fmt.Sprintf("download-%d-MiB", megabytes), func(b *testing.B) { backendtest.Compare(b, downloads...) })
	b.Run(fmt.Sprintf("upload-%d-MiB", megabytes), func(b *testing.B) { backendtest.Compare(b, uploads...) })
}

// transfer sends bytes to the pod, and then receives bytes.
func (l *lan) transfer(toPod, fromPod int64, took func(time.Duration)) error {
	var conn net.Conn
	if err := l.client.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(ips[0], transferPort).String(), time.Second)
		return err
	}); err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(time.Minute))
	begin := time.Now()
	if _, err := fmt.Fprintf(conn, "%d %d\n", toPod, fromPod); err != nil {
		return err
	}
	if err := fill(conn, toPod); err != nil {
		return err
	}
	if _, err := io.CopyN(io.Discard, conn, fromPod); err != nil {
		return err
	}
	took(time.Since(begin))
	return nil
}

// serveTransfers is the pod's end of transfers.
func serveTransfers(c net.Conn) {
	var toPod, fromPod int64
	r := bufio.NewReader(c)
	line, _ := r.ReadString('\n')
	fmt.Sscan(line, &toPod, &fromPod)
	io.CopyN(io.Discard, r, toPod)
	fill(c, fromPod)
}

func fill(w io.Writer, n int64) error {
	for block := make([]byte, 1<<20); n > 0; n -= int64(len(block)) {
		if _, err := w.Write(block[:min(n, int64(len(block)))]); err != nil {
			return err
		}
	}
	return nil
}

// startProgram builds a program, and runs it on a node.
func startProgram(b *testing.B, l *lan, node int, source string, args ...string) {
	b.Helper()
	path := filepath.Join(b.TempDir(), filepath.Base(source))
	if out, err := exec.Command("go", "build", "-o", path, source).CombinedOutput(); err != nil {
		b.Fatalf("build %s: %v\n%s", source, err, out)
	}
	var log strings.Builder
	program := exec.Command(path, append(args, "--service-proxy-name", "bench", "--node-name", fmt.Sprintf("node%d", node))...)
	program.Stdout, program.Stderr = &log, &log
	ended, err := l.nodes[node].Start(program)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		program.Process.Kill()
		<-ended
		if b.Failed() {
			b.Logf("%s logged:\n%s", source, &log)
		}
	})
}
