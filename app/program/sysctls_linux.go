// SPDX-License-Identifier: Apache-2.0

package program

import (
	"fmt"
	"strings"

	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/spf13/pflag"
)

// conntrackLimits has settings of connection tracking, with the flags of kube-proxy.
type conntrackLimits struct{ sysctl.Conntrack }

// conntrackFlags is the prefix of the names of all flags for connection tracking.
const conntrackFlags = "conntrack-"

func (l *conntrackLimits) register(fs *pflag.FlagSet) {
	kubeProxy := sysctl.KubeProxyConntrack
	fs.IntVar(&l.MaxPerCore, conntrackFlags+"max-per-core", kubeProxy.MaxPerCore, "track this `number` of connections per CPU core of the node; 0 leaves the kernel's limit")
	fs.IntVar(&l.Min, conntrackFlags+"min", kubeProxy.Min, "track at least this `number` of connections, whatever the number of cores")
	fs.DurationVar(&l.Established, conntrackFlags+"tcp-timeout-established", kubeProxy.Established, "time-out of idle established TCP connections; 0 leaves the kernel's")
	fs.DurationVar(&l.CloseWait, conntrackFlags+"tcp-timeout-close-wait", kubeProxy.CloseWait, "time-out of TCP connections in state CLOSE_WAIT; 0 leaves the kernel's")
	fs.DurationVar(&l.UDP, conntrackFlags+"udp-timeout", 0, "time-out of UDP connections without an answer; 0 leaves the kernel's")
	fs.DurationVar(&l.UDPStreams, conntrackFlags+"udp-timeout-stream", 0, "time-out of answered UDP connections; 0 leaves the kernel's")
	fs.BoolVar(&l.Liberal, conntrackFlags+"tcp-be-liberal", false, "accept TCP packets outside of the window that connection tracking expects")
}

// onlyGiven keeps the values of flags that were given on the command line. It sets all
// other values to zero.
func (l *conntrackLimits) onlyGiven(fs *pflag.FlagSet) {
	given := *l
	*l = conntrackLimits{}
	if fs.Changed(conntrackFlags+"max-per-core") || fs.Changed(conntrackFlags+"min") {
		l.MaxPerCore, l.Min = given.MaxPerCore, given.Min
	}
	if fs.Changed(conntrackFlags + "tcp-timeout-established") {
		l.Established = given.Established
	}
	if fs.Changed(conntrackFlags + "tcp-timeout-close-wait") {
		l.CloseWait = given.CloseWait
	}
	l.UDP, l.UDPStreams, l.Liberal = given.UDP, given.UDPStreams, given.Liberal
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
