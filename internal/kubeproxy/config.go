// SPDX-License-Identifier: Apache-2.0

// Package kubeproxy translates configuration files of kube-proxy into flags of kpng.
package kubeproxy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"
)

// Difference is a field of a configuration file that makes kube-proxy behave otherwise
// than kpng.
type Difference struct {
	// Field is the path of the field, such as iptables.syncPeriod.
	Field string
	// Value is the value in the file, or kube-proxy's default.
	Value string
	// Meaning says what kpng does instead.
	Meaning string
}

// Unknown is the Meaning of a field that KubeProxyConfiguration does not have.
const Unknown = "unknown field; ignored, as kube-proxy does"

// Apply sets the flags of a command that runs a backend of kpng, so that the backend
// behaves like kube-proxy with a configuration file. The argument file is the content of
// the file: a KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1, as YAML or
// JSON. Flags that the command line has set keep their values. Apply does not set flags
// to their defaults. It returns the fields that kpng does not follow.
//
// As kube-proxy does, Apply ignores unknown fields and, of a field that is given twice,
// all values except the last one. The result contains such fields.
func Apply(fs *pflag.FlagSet, backend string, file []byte) ([]Difference, error) {
	t := &translation{flags: fs, backend: backend, values: map[string]string{}}
	if err := t.read(file); err != nil {
		return nil, err
	}
	t.mode = t.values["mode"]
	switch t.mode {
	case "iptables", "ipvs", "nftables", "kernelspace":
	case "":
		t.mode = "iptables"
		if backend == "kernelspace" {
			t.mode = backend
		}
	default:
		return nil, fmt.Errorf("mode: %q is not iptables, ipvs, nftables or kernelspace", t.mode)
	}
	if t.mode != backend {
		t.differ("mode", t.mode, "the command selects the backend "+backend)
	}
	for _, path := range slices.Sorted(maps.Keys(t.values)) {
		value, f := t.values[path], fields[path]
		switch {
		case isZero(value) && f.flag == "", !t.uses(path):
		case f.flag != "":
			t.set(path, f.flag, value)
		case f.meaning != "" && !slices.Contains(f.same, value):
			t.differ(path, value, f.meaning)
		}
	}
	t.addresses()
	if t.mode != "kernelspace" {
		t.pods()
	}
	t.nodePorts()
	t.set("", "kubeproxy-metrics", "true")
	return t.differences, errors.Join(t.errs...)
}

// field describes a field of a configuration file. If it is the zero value, then kpng
// behaves in the same way for all values of the field, or methods of the type translation
// handle the field.
type field struct {
	// flag is the name of the flag of kpng with the same meaning.
	flag string
	// meaning says what kpng does if it has no such flag.
	meaning string
	// same has the values for which kube-proxy behaves like kpng, besides zero values.
	same []string
}

const (
	watches  = "kpng has three watches, and receives protobuf"
	text     = "kpng logs as text, without a buffer"
	resync   = "kpng finds drift of the dataplane without periodic syncs"
	ipvsadm  = "kpng keeps the kernel's timeouts of IPVS; the program ipvsadm can change them"
	priority = "the priority class of the pod sets the value"
)

// fields has all fields of KubeProxyConfiguration. The key is the path of a field.
var fields = map[string]field{
	"apiVersion": {}, "kind": {},
	"featureGates": {meaning: "kpng has no feature gates"},

	"clientConnection.acceptContentTypes": {meaning: watches},
	"clientConnection.burst":              {meaning: watches, same: []string{"10"}},
	"clientConnection.contentType":        {meaning: watches, same: []string{"application/vnd.kubernetes.protobuf"}},
	"clientConnection.kubeconfig":         {flag: "kubeconfig"},
	"clientConnection.qps":                {meaning: watches, same: []string{"5"}},

	"logging.flushFrequency":              {meaning: text, same: []string{"5s", "5000000000"}},
	"logging.format":                      {meaning: text, same: []string{"text"}},
	"logging.options.json.infoBufferSize": {meaning: text},
	"logging.options.json.splitStream":    {meaning: text},
	"logging.options.text.infoBufferSize": {meaning: text},
	"logging.options.text.splitStream":    {meaning: text},
	"logging.verbosity":                   {flag: "v"},
	"logging.vmodule":                     {flag: "vmodule"},

	"hostnameOverride":            {flag: "node-name"},
	"bindAddress":                 {meaning: "kpng takes the node's addresses from its Node object", same: []string{"0.0.0.0", "::"}},
	"bindAddressHardFail":         {}, // kpng always ends if it cannot listen
	"healthzBindAddress":          {},
	"metricsBindAddress":          {},
	"enableProfiling":             {flag: "profiling"},
	"showHiddenMetricsForVersion": {meaning: "kpng has no hidden metrics"},
	"mode":                        {},

	"iptables.localhostNodePorts": {},
	"iptables.masqueradeAll":      {flag: "masquerade-all"},
	"iptables.masqueradeBit":      {flag: "masquerade-bit"},
	"iptables.minSyncPeriod":      {flag: "min-sync-interval"},
	"iptables.syncPeriod":         {meaning: resync, same: []string{"30s"}},

	"ipvs.excludeCIDRs":  {}, // kpng changes no virtual servers of other programs
	"ipvs.minSyncPeriod": {flag: "min-sync-interval"},
	"ipvs.scheduler":     {flag: "scheduler"},
	"ipvs.strictARP":     {flag: "strict-arp"},
	"ipvs.syncPeriod":    {meaning: resync, same: []string{"30s"}},
	"ipvs.tcpFinTimeout": {meaning: ipvsadm},
	"ipvs.tcpTimeout":    {meaning: ipvsadm},
	"ipvs.udpTimeout":    {meaning: ipvsadm},

	"nftables.masqueradeAll": {flag: "masquerade-all"},
	"nftables.masqueradeBit": {flag: "masquerade-bit"},
	"nftables.minSyncPeriod": {flag: "min-sync-interval"},
	"nftables.syncPeriod":    {meaning: resync, same: []string{"30s"}},

	"winkernel.enableDSR":             {flag: "enable-dsr"},
	"winkernel.forwardHealthCheckVip": {flag: "forward-healthcheck-vip"},
	"winkernel.networkName":           {flag: "network"},
	"winkernel.rootHnsEndpointName":   {flag: "root-hnsendpoint-name"},
	"winkernel.sourceVip":             {flag: "source-vip"},

	"clusterCIDR":                     {},
	"detectLocal.bridgeInterface":     {},
	"detectLocal.interfaceNamePrefix": {},
	"detectLocalMode":                 {},
	"nodePortAddresses":               {},

	"conntrack.maxPerCore":            {flag: "conntrack-max-per-core"},
	"conntrack.min":                   {flag: "conntrack-min"},
	"conntrack.tcpBeLiberal":          {flag: "conntrack-tcp-be-liberal"},
	"conntrack.tcpCloseWaitTimeout":   {flag: "conntrack-tcp-timeout-close-wait"},
	"conntrack.tcpEstablishedTimeout": {flag: "conntrack-tcp-timeout-established"},
	"conntrack.udpStreamTimeout":      {flag: "conntrack-udp-timeout-stream"},
	"conntrack.udpTimeout":            {flag: "conntrack-udp-timeout"},

	"oomScoreAdj":         {meaning: priority, same: []string{"-999"}},
	"configSyncPeriod":    {meaning: "kpng's watches need no periodic resync", same: []string{"15m0s", "15m"}},
	"portRange":           {}, // kube-proxy does not use it
	"windowsRunAsService": {meaning: "give the flag --windows-service"},
}

// translation is the state of Apply.
type translation struct {
	flags         *pflag.FlagSet
	backend, mode string
	values        map[string]string // the keys are those of fields; no fields that are null
	differences   []Difference
	errs          []error
}

func (t *translation) differ(path, value, meaning string) {
	t.differences = append(t.differences, Difference{path, value, meaning})
}

// set sets the flag that a field determines. It does nothing if the value is empty or the
// flag is set already.
func (t *translation) set(path, flag, value string) {
	f := t.flags.Lookup(flag)
	switch {
	case value == "":
	case f == nil && !isZero(value):
		t.differ(path, cmp.Or(t.values[path], value), fmt.Sprintf("the command with the backend %s has no flag --%s", t.backend, flag))
	case f == nil || f.Changed || value == f.DefValue:
	default:
		if err := t.flags.Set(flag, value); err != nil {
			t.errs = append(t.errs, fmt.Errorf("%s: %w", path, err))
		}
	}
}

// isZero reports whether a value is what kube-proxy writes for fields that are not set.
func isZero(value string) bool {
	return slices.Contains([]string{"", "false", "0", "0s", "{}"}, value)
}

// uses reports whether kube-proxy uses a field in the mode of the file.
func (t *translation) uses(path string) bool {
	section, name, _ := strings.Cut(path, ".")
	switch section {
	case "iptables":
		return t.mode == "iptables" || t.mode == "ipvs" && strings.HasPrefix(name, "masquerade") || t.mode == "kernelspace" && name == "minSyncPeriod"
	case "ipvs", "nftables":
		return t.mode == section
	case "winkernel", "windowsRunAsService":
		return t.mode == "kernelspace"
	case "conntrack", "oomScoreAdj":
		return t.mode != "kernelspace"
	}
	return true
}

// addresses sets the addresses of health checks and metrics.
func (t *translation) addresses() {
	all, loopback := "0.0.0.0", "127.0.0.1"
	if ip, err := netip.ParseAddr(cmp.Or(t.values["bindAddress"], all)); err == nil && ip.Is6() {
		all, loopback = "::", "::1"
	}
	for _, a := range []struct{ path, flag, host, port string }{
		{"healthzBindAddress", "healthz-bind-address", all, "10256"},
		{"metricsBindAddress", "metrics-bind-address", loopback, "10249"},
	} {
		address := cmp.Or(t.values[a.path], net.JoinHostPort(a.host, a.port))
		if _, _, err := net.SplitHostPort(address); err != nil {
			address = net.JoinHostPort(strings.Trim(address, "[]"), a.port)
		}
		t.set(a.path, a.flag, address)
	}
}

// pods sets the flags that tell which traffic is from pods.
func (t *translation) pods() {
	bridge, prefix := t.values["detectLocal.bridgeInterface"], t.values["detectLocal.interfaceNamePrefix"]
	switch mode := t.values["detectLocalMode"]; mode {
	case "", "ClusterCIDR":
		t.set("clusterCIDR", "cluster-cidr", t.values["clusterCIDR"])
	case "NodeCIDR":
		t.set("detectLocalMode", "node-pod-cidrs", "true")
	case "BridgeInterface":
		t.set("detectLocal.bridgeInterface", "pod-interfaces", bridge)
	case "InterfaceNamePrefix":
		if prefix != "" {
			t.set("detectLocal.interfaceNamePrefix", "pod-interfaces", prefix+"*")
		}
	default:
		t.errs = append(t.errs, fmt.Errorf("detectLocalMode: %q is not ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix", mode))
	}
}

// nodePorts sets the flag for the addresses of node ports.
func (t *translation) nodePorts() {
	const path, flag = "nodePortAddresses", "node-port-addresses"
	if f := t.flags.Lookup(flag); f != nil && f.Changed {
		return
	}
	list := t.values[path]
	if list == "" && (t.mode == "iptables" || t.mode == "ipvs") {
		list = "all"
	}
	if list == "" {
		return // primary is the default of kpng and of the other modes
	}
	var kept []string
	loopback, families := false, map[bool]bool{}
	for item := range strings.SplitSeq(list, ",") {
		cidr, err := netip.ParsePrefix(item)
		loopback = loopback || item == "all" || item == "localhost" || cidr.Contains(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
		if item == "localhost" || cidr.Addr().IsLoopback() {
			continue
		}
		kept = append(kept, item)
		if err == nil {
			families[cidr.Addr().Is4()] = true
		} else { // a keyword
			families[true], families[false] = true, true
		}
	}
	if loopback && t.mode == "iptables" && t.values["iptables.localhostNodePorts"] != "false" {
		t.differ("iptables.localhostNodePorts", "true", "kpng does not serve node ports at loopback addresses")
	}
	if len(kept) == 0 {
		t.errs = append(t.errs, fmt.Errorf("%s: %s has only loopback addresses, at which kpng does not serve node ports; use the flag --%s", path, list, flag))
		return
	}
	if len(families) == 1 {
		t.differ(path, list, "kpng serves no node ports at addresses of the other IP family; kube-proxy serves them at all")
	}
	t.set(path, flag, strings.Join(kept, ","))
}

// read parses a configuration file.
func (t *translation) read(file []byte) error {
	document, err := yaml.YAMLToJSONStrict(file)
	if err != nil {
		strict := err
		if document, err = yaml.YAMLToJSON(file); err != nil {
			return fmt.Errorf("parse YAML: %w", err)
		}
		t.differ("", "", fmt.Sprintf("the last of several values is used: %v", strict))
	}
	decoder := json.NewDecoder(bytes.NewReader(document))
	decoder.UseNumber() // keeps integers as they are
	var tree map[string]any
	if err := decoder.Decode(&tree); err != nil {
		return fmt.Errorf("parse configuration: %w", err)
	}
	const apiVersion, kind = "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration"
	if tree["apiVersion"] != apiVersion || tree["kind"] != kind {
		return fmt.Errorf("the file has apiVersion %v and kind %v, want %s and %s", tree["apiVersion"], tree["kind"], apiVersion, kind)
	}
	return t.walk("", tree)
}

// walk adds the fields below the field with this path to t.values.
func (t *translation) walk(path string, tree map[string]any) error {
	for _, key := range slices.Sorted(maps.Keys(tree)) {
		path, value := path+key, tree[key]
		_, known := fields[path]
		section := slices.ContainsFunc(slices.Collect(maps.Keys(fields)), func(p string) bool { return strings.HasPrefix(p, path+".") })
		nested, ok := value.(map[string]any)
		switch {
		case value == nil:
		case known:
			t.values[path] = format(value)
		case section && !ok:
			return fmt.Errorf("%s: %s is not an object", path, format(value))
		case section:
			if err := t.walk(path+".", nested); err != nil {
				return err
			}
		default:
			t.differ(path, format(value), Unknown)
		}
	}
	return nil
}

// format returns a value as a flag expects it.
func format(value any) string {
	switch v := value.(type) {
	case []any:
		var items []string
		for _, item := range v {
			items = append(items, format(item))
		}
		return strings.Join(items, ",")
	case map[string]any:
		if pattern, ok := v["filePattern"]; ok { // an item of logging.vmodule
			return fmt.Sprintf("%v=%v", pattern, v["verbosity"])
		}
		text, err := json.Marshal(v)
		if err != nil {
			panic(err) // v was decoded from JSON
		}
		return string(text)
	}
	return fmt.Sprint(value)
}
