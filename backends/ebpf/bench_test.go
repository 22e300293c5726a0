// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

// numberedService returns the view of a service that has a TCP port and the given
// number of endpoints.
func numberedService(number, endpoints int) *api.View {
	var addrs []string
	for i := range endpoints {
		addrs = append(addrs, fmt.Sprintf("10.0.0.%d", 1+i))
	}
	ip := netip.AddrFrom4([4]byte{10, 96 + byte(number>>16), byte(number >> 8), byte(number)})
	return view(fmt.Sprint("web-", number), []string{ip.String()}, addrs, func(s *api.Service) { s.Ports = s.Ports[:1] })
}

var sizes = []int{10, 1000, 100000}

// BenchmarkConnect compares the time to connect to a service with the time to connect to
// its endpoint. The endpoint is on the loopback interface. The benchmark alternates
// between the two kinds of connections, and reports the median time of each kind.
func BenchmarkConnect(b *testing.B) {
	for _, services := range sizes {
		b.Run(fmt.Sprint(services), func(b *testing.B) { benchmarkConnect(b, services, Options{}) })
	}
}

// BenchmarkConnectWithExclusions is like BenchmarkConnect, first without excluded pods and
// then while another pod is excluded.
func BenchmarkConnectWithExclusions(b *testing.B) {
	for _, excluded := range [][]string{nil, {"other"}} {
		b.Run(fmt.Sprint(len(excluded)), func(b *testing.B) { benchmarkConnect(b, 10, Options{ExcludedCgroups: excluded}) })
	}
}

// The client is in a cgroup at the depth of a container.
func benchmarkConnect(b *testing.B, services int, opts Options) {
	n := newNode(b, opts)
	n.ns.Cgroup.Below(b, "other")
	if err := n.Verify(b.Context()); err != nil {
		b.Fatal(err)
	}
	for _, name := range []string{"kubepods-burstable.slice", "kubepods-burstable-pod1.slice", "cri-containerd-1.scope"} {
		n.ns.Cgroup = n.ns.Cgroup.Below(b, name)
	}
	n.ns.Add(b, "lo", "10.0.0.1")
	netnstest.Listen(b, n.ns.Do, "10.0.0.1:8080", func(c net.Conn) {})
	var views []*api.View
	for i := range services {
		views = append(views, numberedService(i, 1))
	}
	n.pass(views...)
	targets := []*unix.SockaddrInet4{{Addr: [4]byte{10, 0, 0, 1}, Port: 8080}, {Addr: [4]byte{10, 96, 0, 5}, Port: 80}}
	var took [2][]time.Duration
	err := n.ns.Do(func() error {
		for b.Loop() {
			for i, target := range targets {
				d, err := netnstest.TimeConnect(target)
				if err != nil {
					return err
				}
				took[i] = append(took[i], d)
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	for i := range took {
		slices.Sort(took[i])
	}
	direct, service := took[0][len(took[0])/2], took[1][len(took[1])/2]
	b.ReportMetric(float64(direct.Nanoseconds())/1000, "µs/direct")
	b.ReportMetric(float64(service.Nanoseconds())/1000, "µs/service")
	b.ReportMetric(float64(service)/float64(direct), "ratio")
}

// memory returns the memory of the maps. Before Linux 6.4, it does not depend on the number
// of elements.
func (n *node) memory() (sum uint64) {
	for name, m := range n.programs.maps() {
		info, err := m.Info()
		if err != nil {
			n.t.Fatal(err)
		}
		used, ok := info.Memlock()
		if !ok {
			n.t.Fatalf("the kernel does not report the memory of map %s", name)
		}
		sum += used
	}
	return sum
}

// cpuTime returns the processor time of this process.
func cpuTime(b *testing.B) time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkPass measures the first pass over services with ten endpoints each, and the
// pass of a new process that finds these services in the maps. It also reports the
// processor time of both passes, and the memory of the maps.
func BenchmarkPass(b *testing.B) {
	for _, services := range sizes {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			var views []*api.View
			for i := range services {
				views = append(views, numberedService(i, 10))
			}
			var again, cpu, cpuAgain time.Duration
			for b.Loop() {
				b.StopTimer()
				n := newNode(b, Options{})
				used := cpuTime(b)
				b.StartTimer()
				n.pass(views...)
				b.StopTimer()
				cpu += cpuTime(b) - used
				b.ReportMetric(float64(n.memory())/(1<<20), "MB-maps")
				n.restart()
				start, used := time.Now(), cpuTime(b)
				n.pass(views...)
				again += time.Since(start)
				cpuAgain += cpuTime(b) - used
				n.remove()
				b.StartTimer()
			}
			b.ReportMetric(float64(cpu.Milliseconds())/float64(b.N), "cpu-ms/pass")
			b.ReportMetric(float64(again.Milliseconds())/float64(b.N), "ms/restart")
			b.ReportMetric(float64(cpuAgain.Milliseconds())/float64(b.N), "cpu-ms/restart")
		})
	}
}

// BenchmarkChange removes, adds and replaces an endpoint in turn, for services with ten endpoints each.
func BenchmarkChange(b *testing.B) {
	for _, services := range sizes {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			n := newNode(b, Options{})
			var views []*api.View
			for i := range services {
				views = append(views, numberedService(i, 10))
			}
			n.pass(views...)
			// The steps remove endpoint 10, replace endpoint 9 by endpoint 10, and add endpoint 9.
			replaced := numberedService(0, 10)
			replaced.Endpoints = slices.Delete(slices.Clone(replaced.Endpoints), 8, 9)
			steps := []struct {
				name string
				view *api.View
			}{{"remove", numberedService(0, 9)}, {"replace", replaced}, {"add", views[0]}}
			took := map[string][]time.Duration{}
			for b.Loop() {
				for _, step := range steps {
					start := time.Now()
					n.set(step.view)
					took[step.name] = append(took[step.name], time.Since(start))
				}
			}
			for name, times := range took {
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)/2].Nanoseconds())/1000, "µs/"+name+"-median")
				b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds())/1000, "µs/"+name+"-p99")
			}
		})
	}
}

// BenchmarkSend measures the time to send a datagram from a UDP socket that is not
// connected. The destination is an endpoint, from outside the cgroup and from inside, or a
// service. The socket stays open, or is opened and closed for each datagram.
func BenchmarkSend(b *testing.B) {
	n := newNode(b, Options{})
	n.ns.Add(b, "lo", "10.0.0.1")
	n.pass(numberedService(5, 1), view("udp", []string{"10.96.1.1"}, []string{"10.0.0.1"}, nil))
	endpoint, service := &unix.SockaddrInet4{Addr: [4]byte{10, 0, 0, 1}, Port: 8080}, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 1, 1}, Port: 80}
	for _, test := range []struct {
		name    string
		outside bool
		to      *unix.SockaddrInet4
		reopen  bool
	}{
		{"outside", true, endpoint, false},
		{"endpoint", false, endpoint, false},
		{"service", false, service, false},
		{"open-outside", true, endpoint, true},
		{"open-endpoint", false, endpoint, true},
		{"open-service", false, service, true},
	} {
		b.Run(test.name, func(b *testing.B) {
			ns := *n.ns
			if test.outside {
				ns.Cgroup = nil
			}
			open := func() (int, error) { return unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) }
			var took []time.Duration
			err := ns.Do(func() error {
				fd, err := open()
				if err != nil {
					return err
				}
				defer unix.Close(fd)
				for b.Loop() {
					start := time.Now()
					to := fd
					if test.reopen {
						if to, err = open(); err != nil {
							return err
						}
					}
					// No socket receives the datagrams, so the kernel may report that an
					// earlier datagram was refused.
					if err := unix.Sendto(to, nil, 0, test.to); err != nil && err != unix.ECONNREFUSED {
						return err
					}
					if test.reopen {
						unix.Close(to)
					}
					took = append(took, time.Since(start))
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "ns-median")
		})
	}
}

// BenchmarkQuestion compares questions to a service with questions to its endpoint, from
// connected UDP sockets. Each question opens and connects a socket, as resolvers do. The
// benchmark alternates between the two, and reports the medians of the whole question and
// of connect.
func BenchmarkQuestion(b *testing.B) {
	n := newNode(b, Options{})
	n.ns.Add(b, "lo", "10.0.0.1")
	netnstest.Answer(b, n.ns.Do, "10.0.0.1:8080", "answer")
	n.pass(view("udp", []string{"10.96.1.1"}, []string{"10.0.0.1"}, nil))
	targets := []unix.Sockaddr{sockaddr("10.0.0.1:8080"), sockaddr("10.96.1.1:80")}
	var whole, connect [2][]float64
	ask := func(i int) error {
		start := time.Now()
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		opened := time.Now()
		if err := unix.Connect(fd, targets[i]); err != nil {
			return err
		}
		connect[i] = append(connect[i], float64(time.Since(opened).Nanoseconds())/1000)
		if _, err := unix.Write(fd, []byte("?")); err != nil {
			return err
		}
		_, err = unix.Read(fd, make([]byte, 100))
		whole[i] = append(whole[i], float64(time.Since(start).Nanoseconds())/1000)
		return err
	}
	err := n.ns.Do(func() error {
		for b.Loop() {
			if err := errors.Join(ask(0), ask(1)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	for name, took := range map[string][2][]float64{"whole": whole, "connect": connect} {
		for i := range took {
			slices.Sort(took[i])
		}
		direct, service := took[0][len(took[0])/2], took[1][len(took[1])/2]
		b.ReportMetric(direct, "µs/direct-"+name)
		b.ReportMetric(service, "µs/service-"+name)
		b.ReportMetric(service/direct, "ratio-"+name)
	}
}

// BenchmarkLargeService measures a service with many ports and endpoints: loading it, the loss
// of one endpoint, and its deletion.
func BenchmarkLargeService(b *testing.B) {
	for _, ports := range []int{50, 2000} {
		b.Run(fmt.Sprint(ports), func(b *testing.B) {
			n := newNode(b, Options{})
			n.pass()
			all, smaller := large("large", ports, 0, 100), large("large", ports, 0, 99)
			steps := []struct {
				name string
				f    func()
			}{{"load", func() { n.set(all) }}, {"change", func() { n.set(smaller) }}, {"delete", func() { n.delete("large") }}}
			used := map[string]time.Duration{}
			elements := 0
			for b.Loop() {
				for _, step := range steps {
					before := cpuTime(b)
					step.f()
					used[step.name] += cpuTime(b) - before
					if step.name == "load" {
						usage := n.dataplane.usage()
						elements = usage.frontends + usage.endpoints + usage.members
					}
				}
			}
			for name, d := range used {
				b.ReportMetric(float64(d.Microseconds())/float64(b.N)/1000, "cpu-ms/"+name)
			}
			b.ReportMetric(float64(elements), "elements")
		})
	}
}
