// SPDX-License-Identifier: Apache-2.0

package program

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/spf13/pflag"
	"k8s.io/utils/cpuset"
)

// conntrackLimits has settings of connection tracking, with the flags and defaults of
// kube-proxy. A zero value leaves the kernel's setting unchanged.
type conntrackLimits struct {
	maxPerCore, min                         int
	established, closeWait, udp, udpStreams time.Duration
	liberal                                 bool
}

// conntrackFlags is the prefix of the names of all flags for connection tracking.
const conntrackFlags = "conntrack-"

func (l *conntrackLimits) register(fs *pflag.FlagSet) {
	fs.IntVar(&l.maxPerCore, conntrackFlags+"max-per-core", 32768, "track this `number` of connections per CPU core of the node; 0 leaves the kernel's limit")
	fs.IntVar(&l.min, conntrackFlags+"min", 131072, "track at least this `number` of connections, whatever the number of cores")
	fs.DurationVar(&l.established, conntrackFlags+"tcp-timeout-established", 24*time.Hour, "time-out of idle established TCP connections; 0 leaves the kernel's")
	fs.DurationVar(&l.closeWait, conntrackFlags+"tcp-timeout-close-wait", time.Hour, "time-out of TCP connections in state CLOSE_WAIT; 0 leaves the kernel's")
	fs.DurationVar(&l.udp, conntrackFlags+"udp-timeout", 0, "time-out of UDP connections without an answer; 0 leaves the kernel's")
	fs.DurationVar(&l.udpStreams, conntrackFlags+"udp-timeout-stream", 0, "time-out of answered UDP connections; 0 leaves the kernel's")
	fs.BoolVar(&l.liberal, conntrackFlags+"tcp-be-liberal", false, "accept TCP packets outside of the window that connection tracking expects")
}

// onlyGiven keeps the values of flags that were given on the command line. It sets all
// other values to zero.
func (l *conntrackLimits) onlyGiven(fs *pflag.FlagSet) {
	given := *l
	*l = conntrackLimits{}
	if fs.Changed(conntrackFlags+"max-per-core") || fs.Changed(conntrackFlags+"min") {
		l.maxPerCore, l.min = given.maxPerCore, given.min
	}
	if fs.Changed(conntrackFlags + "tcp-timeout-established") {
		l.established = given.established
	}
	if fs.Changed(conntrackFlags + "tcp-timeout-close-wait") {
		l.closeWait = given.closeWait
	}
	l.udp, l.udpStreams, l.liberal = given.udp, given.udpStreams, given.liberal
}

// check returns an error if a flag for connection tracking is negative.
func (l *conntrackLimits) check(fs *pflag.FlagSet) (err error) {
	fs.Visit(func(f *pflag.Flag) {
		if strings.HasPrefix(f.Name, conntrackFlags) && strings.HasPrefix(f.Value.String(), "-") {
			err = fmt.Errorf("--%s is %s, which is negative", f.Name, f.Value)
		}
	})
	return err
}

// settings returns the kernel settings for a machine with this number of CPU cores.
func (l *conntrackLimits) settings(cores int) []sysctl.Setting {
	var settings []sysctl.Setting
	set := func(name string, value int, atLeast bool, reason string) {
		if value > 0 {
			settings = append(settings, sysctl.Setting{Name: "net.netfilter.nf_conntrack_" + name, Value: value, AtLeast: atLeast, Reason: reason})
		}
	}
	add := func(name string, value int) { set(name, value, false, "connections are tracked as by kube-proxy") }
	if l.maxPerCore > 0 {
		const most = 1 << 20 // kube-proxy's maximum number of connections on machines with many cores
		limit := max(l.maxPerCore*cores, l.min)
		if l.maxPerCore*cores > most {
			limit = most
		}
		// Unlike kube-proxy, kpng never lowers a limit that the operator has raised.
		set("max", limit, true, "the node has room for as many connections as with kube-proxy")
		set("buckets", limit/4, true, "finding a connection stays fast")
	}
	add("tcp_timeout_established", int(l.established/time.Second))
	add("tcp_timeout_close_wait", int(l.closeWait/time.Second))
	add("udp_timeout", int(l.udp/time.Second))
	add("udp_timeout_stream", int(l.udpStreams/time.Second))
	if l.liberal {
		add("tcp_be_liberal", 1)
	}
	return settings
}

// cores returns the number of CPU cores of the machine, even if this process is allowed
// to use fewer cores.
func cores() int {
	text, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err == nil {
		if cpus, err := cpuset.Parse(strings.TrimSpace(string(text))); err == nil && cpus.Size() > 0 {
			return cpus.Size()
		}
	}
	return runtime.NumCPU()
}
