// SPDX-License-Identifier: Apache-2.0

package program

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

// flagValue returns the value of a flag of the command, or "" if the command has no such
// flag.
func flagValue(fs *pflag.FlagSet, name string) string {
	if f := fs.Lookup(name); f != nil {
		return f.Value.String()
	}
	return ""
}

// asInKubeProxy is the help text of metrics that have kube-proxy's names.
const asInKubeProxy = "As in kube-proxy."

// kubeProxyNamed returns a collector with the metrics of c under the name that kube-proxy
// uses. All metrics of c must have the same name and these labels.
func kubeProxyNamed(name string, c prometheus.Collector, labels ...string) prometheus.Collector {
	return &renamed{c, prometheus.NewDesc("kubeproxy_"+name, asInKubeProxy, labels, nil)}
}

// renamed is a collector. It returns the metrics of another collector, with the name and
// the labels in desc.
type renamed struct {
	of   prometheus.Collector
	desc *prometheus.Desc
}

func (r *renamed) Describe(to chan<- *prometheus.Desc) { to <- r.desc }

func (r *renamed) Collect(to chan<- prometheus.Metric) {
	metrics := make(chan prometheus.Metric)
	go func() {
		defer close(metrics)
		r.of.Collect(metrics)
	}()
	for m := range metrics {
		to <- renamedMetric{m, r.desc}
	}
}

type renamedMetric struct {
	prometheus.Metric
	desc *prometheus.Desc
}

func (m renamedMetric) Desc() *prometheus.Desc { return m.desc }

// nodePortsFlag adds the flag --node-port-addresses.
func nodePortsFlag(fs *pflag.FlagSet, to *nodeaddr.Selection) {
	*to = nodeaddr.Selection{"primary"}
	given := false
	fs.Var(&value{
		show: func() string { return strings.Join(*to, ",") },
		set: func(text string) error {
			if !given {
				*to, given = nil, true
			}
			for item := range strings.SplitSeq(text, ",") {
				*to = append(*to, strings.TrimSpace(item))
			}
			return nil
		},
	}, "node-port-addresses", "serve node ports and health checks at these `addresses` of the node: primary (those of its Node object), all, localhost, CIDRs")
}

// listFlag adds a flag for a list. The flag may appear several times, and each value may
// have several items, separated by commas.
func listFlag[T fmt.Stringer](fs *pflag.FlagSet, to *[]T, parse func(string) (T, error), name, usage string) {
	fs.Var(&value{
		show: func() string { return strings.ReplaceAll(strings.Trim(fmt.Sprint(*to), "[]"), " ", ",") },
		set: func(text string) error {
			for item := range strings.SplitSeq(text, ",") {
				v, err := parse(strings.TrimSpace(item))
				if err != nil {
					return err
				}
				*to = append(*to, v)
			}
			return nil
		},
	}, name, usage)
}

// parseCIDR parses a CIDR and sets the bits after its prefix to zero.
func parseCIDR(text string) (netip.Prefix, error) {
	cidr, err := netip.ParsePrefix(text)
	return cidr.Masked(), err
}

// value implements pflag.Value. Its methods call the functions in its fields.
type value struct {
	show func() string
	set  func(string) error
}

func (v *value) Set(text string) error { return v.set(text) }
func (*value) Type() string            { return "list" }

// String also works for the zero value. The package pflag calls String on the zero value
// to find out whether the default of a flag is the zero value.
func (v *value) String() string {
	if v.show == nil {
		return ""
	}
	return v.show()
}
