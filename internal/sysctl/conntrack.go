// SPDX-License-Identifier: Apache-2.0

package sysctl

import (
	"os"
	"runtime"
	"strings"
	"time"

	"k8s.io/utils/cpuset"
)

// Conntrack has settings of connection tracking. A zero value leaves the kernel's setting
// unchanged.
type Conntrack struct {
	MaxPerCore, Min                         int
	Established, CloseWait, UDP, UDPStreams time.Duration
	Liberal                                 bool
}

// KubeProxyConntrack has the defaults of kube-proxy.
var KubeProxyConntrack = Conntrack{MaxPerCore: 32768, Min: 131072, Established: 24 * time.Hour, CloseWait: time.Hour}

// Settings returns the kernel settings for a machine with this number of CPU cores.
func (c *Conntrack) Settings(cores int) []Setting {
	var settings []Setting
	set := func(name string, value int, atLeast bool, reason string) {
		if value > 0 {
			settings = append(settings, Setting{Name: "net.netfilter.nf_conntrack_" + name, Value: value, AtLeast: atLeast, Reason: reason})
		}
	}
	add := func(name string, value int) { set(name, value, false, "connections are tracked as by kube-proxy") }
	if c.MaxPerCore > 0 {
		const most = 1 << 20 // kube-proxy's maximum number of connections on machines with many cores
		limit := max(c.MaxPerCore*cores, c.Min)
		if c.MaxPerCore*cores > most {
			limit = most
		}
		// Unlike kube-proxy, kpng never lowers a limit that the operator has raised.
		set("max", limit, true, "the node has room for as many connections as with kube-proxy")
		set("buckets", limit/4, true, "finding a connection stays fast")
	}
	add("tcp_timeout_established", int(c.Established/time.Second))
	add("tcp_timeout_close_wait", int(c.CloseWait/time.Second))
	add("udp_timeout", int(c.UDP/time.Second))
	add("udp_timeout_stream", int(c.UDPStreams/time.Second))
	if c.Liberal {
		add("tcp_be_liberal", 1)
	}
	return settings
}

// Cores returns the number of CPU cores of the machine, even if this process is allowed
// to use fewer cores.
func Cores() int {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err == nil {
		if cpus, err := cpuset.Parse(strings.TrimSpace(string(text))); err == nil && cpus.Size() > 0 {
			return cpus.Size()
		}
	}
	return runtime.NumCPU()
}
