// SPDX-License-Identifier: Apache-2.0

// Package kubeproxy translates configuration files of kube-proxy into flags of kpng.
package kubeproxy

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// Difference is a field of a configuration file with which kube-proxy behaves differently
// from kpng.
type Difference struct {
	// Field is the path of the field, such as iptables.syncPeriod.
	Field string
	// Value is the value in the file, or kube-proxy's default.
	Value string
	// About names the kind of traffic if a field has several differences. Default: none.
	About string
	// Meaning says what kpng does instead.
	Meaning string
	// IsNote is true if no setting has to change. Then Meaning contains advice.
	IsNote bool
}

// Subject returns what the difference is about: a field with its value, a kind of traffic,
// or the whole file.
func (d *Difference) Subject() string {
	switch {
	case d.About != "":
		return d.About
	case d.Field == "":
		return "the whole file"
	default:
		return d.Field + "=" + d.Value
	}
}

// Unknown is the Meaning of a field that KubeProxyConfiguration does not have.
const Unknown = "unknown field; ignored, as kube-proxy does"

// Apply sets the flags of a command that runs a backend of kpng, so that the backend
// behaves like kube-proxy with a configuration file. The argument file is the content of
// the file: a KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1, as YAML or
// JSON. Flags that the command line has set keep their values. Apply does not set flags
// to their defaults. It returns the fields that kpng does not follow.
//
// Apply calls try before it sets a flag. An error of try means that the backend refuses
// this value. The errors that Apply returns name the fields at fault.
//
// Apply refuses the files that kube-proxy refuses. Like kube-proxy, Apply ignores unknown
// fields. If a field is given twice, both programs use the last value. The result
// contains such fields.
func Apply(fs *pflag.FlagSet, backend string, file []byte, try func(flag, value string) error) ([]Difference, error) {
	t := &translation{flags: fs, backend: backend, try: try, windows: runtime.GOOS == "windows"}
	err := t.apply(file)
	return t.differences, err
}

func (t *translation) apply(file []byte) error {
	t.values, t.refused = map[string]string{}, map[string]bool{}
	if err := t.read(file); err != nil {
		return err
	}
	t.mode = t.values["mode"]
	if t.mode == "" {
		t.mode = map[bool]string{false: "iptables", true: "kernelspace"}[t.windows]
	}
	t.validate()
	if t.refused["mode"] {
		return errors.Join(t.errs...) // the mode decides what the other fields mean
	}
	if t.mode != t.backend {
		t.differ("mode", t.mode, "the command selects the backend "+t.backend)
	}
	for _, path := range slices.Sorted(maps.Keys(t.values)) {
		value, f := t.values[path], fields[path]
		switch {
		case t.refused[path], isZero(value) && f.flag == "", !t.uses(path):
		case f.flag == "masquerade-bit":
			t.masqueradeBit(path, value)
		case f.flag != "":
			t.set(path, f.flag, value)
			if f.flag == "min-sync-interval" && !isZero(value) {
				t.advise(path, value, "kpng does not need it, because a sync costs only what changed; --min-sync-interval=0 is safe")
			}
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
	t.drops()
	return errors.Join(t.errs...)
}

// field describes a field of a configuration file. If flag and meaning are empty, then
// all values of the field have the same effect on kpng, or methods of the type
// translation handle the field.
type field struct {
	// read checks the type of a value in JSON, and returns the value as a flag expects it.
	read reader
	// flag is the name of the flag of kpng with the same meaning.
	flag string
	// meaning says what kpng does if it has no such flag.
	meaning string
	// With the values in same, and with zero values, kube-proxy behaves like kpng.
	same []string
	// check returns an error if kube-proxy refuses a value. Nil means no check.
	check func(value string) error
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
	"apiVersion": {read: textValue}, "kind": {read: textValue},
	"featureGates": {read: gatesValue, meaning: "kpng has no feature gates"},

	"clientConnection.acceptContentTypes": {read: textValue, meaning: watches},
	"clientConnection.burst":              {read: int32Value, meaning: watches, same: []string{"10"}, check: within(0, maxInt32)},
	"clientConnection.contentType":        {read: textValue, meaning: watches, same: []string{"application/vnd.kubernetes.protobuf"}},
	"clientConnection.kubeconfig":         {read: textValue, flag: "kubeconfig"},
	"clientConnection.qps":                {read: floatValue, meaning: watches, same: []string{"5"}},

	"logging.flushFrequency":              {read: timeValue, meaning: text, same: []string{"5s"}, check: notNegative},
	"logging.format":                      {read: textValue, meaning: text, same: []string{"text"}},
	"logging.options.json.infoBufferSize": {read: quantityValue, meaning: text},
	"logging.options.json.splitStream":    {read: boolValue, meaning: text},
	"logging.options.text.infoBufferSize": {read: quantityValue, meaning: text},
	"logging.options.text.splitStream":    {read: boolValue, meaning: text},
	"logging.verbosity":                   {read: uint32Value, flag: "v", check: within(0, maxInt32)},
	"logging.vmodule":                     {read: vmoduleValue, flag: "vmodule"},

	"hostnameOverride":            {read: textValue, flag: "node-name"},
	"bindAddress":                 {read: textValue, meaning: "kpng takes the node's addresses from its Node object", same: []string{"0.0.0.0", "::"}, check: isIP},
	"bindAddressHardFail":         {read: boolValue},
	"healthzBindAddress":          {read: textValue},
	"metricsBindAddress":          {read: textValue},
	"enableProfiling":             {read: boolValue, flag: "profiling"},
	"showHiddenMetricsForVersion": {read: textValue, meaning: "kpng has no hidden metrics", check: isVersion},
	"mode":                        {read: textValue},

	"iptables.localhostNodePorts": {read: boolValue},
	"iptables.masqueradeAll":      {read: boolValue, flag: "masquerade-all"},
	"iptables.masqueradeBit":      {read: int32Value, flag: "masquerade-bit", check: within(0, 31)},
	"iptables.minSyncPeriod":      {read: durationValue, flag: "min-sync-interval"},
	"iptables.syncPeriod":         {read: durationValue, meaning: resync, same: []string{"30s"}},

	"ipvs.excludeCIDRs":  {read: listValue, meaning: "kpng changes no virtual servers of other programs, inside and outside these ranges", check: each(isCIDR)},
	"ipvs.minSyncPeriod": {read: durationValue, flag: "min-sync-interval"},
	"ipvs.scheduler":     {read: textValue, flag: "scheduler"},
	"ipvs.strictARP":     {read: boolValue, flag: "strict-arp"},
	"ipvs.syncPeriod":    {read: durationValue, meaning: resync, same: []string{"30s"}},
	"ipvs.tcpFinTimeout": {read: durationValue, meaning: ipvsadm, check: notNegative},
	"ipvs.tcpTimeout":    {read: durationValue, meaning: ipvsadm, check: notNegative},
	"ipvs.udpTimeout":    {read: durationValue, meaning: ipvsadm, check: notNegative},

	"nftables.masqueradeAll": {read: boolValue, flag: "masquerade-all"},
	"nftables.masqueradeBit": {read: int32Value, flag: "masquerade-bit", check: within(0, 31)},
	"nftables.minSyncPeriod": {read: durationValue, flag: "min-sync-interval"},
	"nftables.syncPeriod":    {read: durationValue, meaning: resync, same: []string{"30s"}},

	"winkernel.enableDSR":             {read: boolValue, flag: "enable-dsr"},
	"winkernel.forwardHealthCheckVip": {read: boolValue, flag: "forward-healthcheck-vip"},
	"winkernel.networkName":           {read: textValue, flag: "network"},
	"winkernel.rootHnsEndpointName":   {read: textValue, flag: "root-hnsendpoint-name"},
	"winkernel.sourceVip":             {read: textValue, flag: "source-vip"},

	"clusterCIDR":                     {read: textValue},
	"detectLocal.bridgeInterface":     {read: textValue},
	"detectLocal.interfaceNamePrefix": {read: textValue},
	"detectLocalMode":                 {read: textValue},
	"nodePortAddresses":               {read: listValue},

	"conntrack.maxPerCore":            {read: int32Value, flag: "conntrack-max-per-core", check: within(0, maxInt32)},
	"conntrack.min":                   {read: int32Value, flag: "conntrack-min", check: within(0, maxInt32)},
	"conntrack.tcpBeLiberal":          {read: boolValue, flag: "conntrack-tcp-be-liberal"},
	"conntrack.tcpCloseWaitTimeout":   {read: optional(durationValue), flag: "conntrack-tcp-timeout-close-wait", check: notNegative},
	"conntrack.tcpEstablishedTimeout": {read: optional(durationValue), flag: "conntrack-tcp-timeout-established", check: notNegative},
	"conntrack.udpStreamTimeout":      {read: durationValue, flag: "conntrack-udp-timeout-stream", check: notNegative},
	"conntrack.udpTimeout":            {read: durationValue, flag: "conntrack-udp-timeout", check: notNegative},

	"oomScoreAdj":         {read: int32Value, meaning: priority, same: []string{"-999"}, check: within(-1000, 1000)},
	"configSyncPeriod":    {read: durationValue, meaning: "kpng's watches need no periodic resync", same: []string{"15m0s"}, check: notNegative},
	"portRange":           {read: textValue, meaning: "kpng has no such setting, and kube-proxy does not use it"},
	"windowsRunAsService": {read: boolValue, meaning: "give the flag --windows-service"},
}

// translation is the state of Apply.
type translation struct {
	flags         *pflag.FlagSet
	backend, mode string
	try           func(flag, value string) error
	windows       bool
	values        map[string]string // values of the fields that the file sets; the keys are those of the map fields
	gates         map[string]bool
	differences   []Difference
	errs          []error
	refused       map[string]bool // the paths of the fields with errors
}

func (t *translation) differ(path, value, meaning string) {
	t.differences = append(t.differences, Difference{Field: path, Value: value, Meaning: meaning})
}

// advise records advice about a field for which no setting has to change.
func (t *translation) advise(path, value, meaning string) {
	t.differences = append(t.differences, Difference{Field: path, Value: value, Meaning: meaning, IsNote: true})
}

// set sets the flag that a field determines. It does nothing if the value is empty, or if
// the command line has set the flag.
func (t *translation) set(path, flag, value string) {
	f := t.flags.Lookup(flag)
	inFile := t.values[path]
	switch {
	case value == "" || t.refused[path]:
	case f == nil && !isZero(value):
		t.differ(path, cmp.Or(inFile, value), t.without(flag))
	case f == nil:
	case f.Changed && inFile != "" && strings.Trim(f.Value.String(), "[]") != value:
		t.differ(path, inFile, fmt.Sprintf("the command line sets --%s=%s, which overrides the file", flag, f.Value))
	case f.Changed || value == f.DefValue:
	default:
		err := t.try(flag, value)
		if err == nil {
			err = t.flags.Set(flag, value)
		}
		if err != nil {
			t.refuse(path, err)
		}
	}
}

// without describes the effect if a field needs a flag that the command does not have.
func (t *translation) without(flag string) string {
	switch flag {
	case "scheduler":
		how := "at random"
		if t.backend == "ovs" {
			how = "by a hash of the client's address"
		}
		return fmt.Sprintf("the backend %s chooses endpoints %s, unless the service has traffic parameters", t.backend, how)
	case "strict-arp":
		return "kpng changes the kernel's ARP settings only with the backend ipvs; those that kube-proxy has set stay until the node restarts"
	case "kubeconfig":
		return "the command reads services from another source, without an API server"
	case "node-pod-cidrs", "pod-interfaces":
		for _, other := range []string{"pod-interfaces", "cluster-cidr"} {
			if t.flags.Lookup(other) != nil {
				return fmt.Sprintf("the backend %s has no flag --%s; define the pods with --%s", t.backend, flag, other)
			}
		}
	}
	return fmt.Sprintf("the command with the backend %s has no flag --%s", t.backend, flag)
}

// drops finds packets that kube-proxy, in the mode of the file, handles differently from
// the backend: one drops them and the other accepts them.
func (t *translation) drops() {
	if t.mode == "kernelspace" {
		return
	}
	const invalid = "forwarded packets that belong to no connection"
	differ := func(about, meaning string, isNote bool) {
		t.differences = append(t.differences, Difference{Field: "mode", Value: t.mode, About: about, Meaning: meaning, IsNote: isNote})
	}
	isSet := func(flag string) bool {
		f := t.flags.Lookup(flag)
		return f != nil && f.Value.String() != f.DefValue
	}
	only := func(flag string) string {
		if t.flags.Lookup(flag) == nil {
			return "the backend " + t.backend + " does not"
		}
		return "the backend " + t.backend + " does so only with --" + flag
	}
	kubeProxyDrops := t.mode == "iptables" && t.values["conntrack.tcpBeLiberal"] != "true"
	switch kpngDrops := t.backend == "iptables" && !isSet("conntrack-tcp-be-liberal") || isSet("drop-invalid"); {
	case kubeProxyDrops && !kpngDrops:
		differ("invalid packets", "kube-proxy drops "+invalid+"; "+only("drop-invalid"), false)
	case kpngDrops && !kubeProxyDrops:
		differ("invalid packets", "kube-proxy accepts "+invalid+"; the backend "+t.backend+" drops them", false)
	}
	switch {
	case t.mode != "nftables":
		differ("masqueraded packets", "kube-proxy accepts forwarded packets that it masquerades, before a DROP in the chain FORWARD; kpng accepts none; of the node's firewall, only policies are checked", true)
	case !isSet("service-cidr"):
		differ("unused addresses", "kube-proxy drops packets to addresses of ServiceCIDR objects that no service has; "+only("service-cidr"), false)
	}
}

// masqueradeBit sets the flag for the bit of packet marks. If the file contains
// kube-proxy's default, kpng keeps its own default, because such files usually write out
// all defaults. Where both programs run, their bits must differ.
func (t *translation) masqueradeBit(path, value string) {
	const flag, kubeProxys = "masquerade-bit", "14"
	f := t.flags.Lookup(flag)
	if value != kubeProxys || f != nil && f.Changed {
		t.set(path, flag, value)
	} else if f != nil {
		t.differ(path, value, "this is kube-proxy's default; kpng uses its own, bit "+f.DefValue+", so that both can run on a node")
	}
}

// isZero reports whether kube-proxy writes this value for fields that are not set.
func isZero(value string) bool {
	return slices.Contains([]string{"", "false", "0", "0s", "{}"}, value)
}

// section returns the first part of a path, such as iptables, and the rest.
func section(path string) (section, name string) {
	section, name, _ = strings.Cut(path, ".")
	return section, name
}

// uses reports whether kube-proxy uses a field in the mode of the file.
func (t *translation) uses(path string) bool {
	switch section, name := section(path); section {
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
	for _, a := range t.listeners() {
		t.set(a.path, a.flag, a.address)
	}
	if value, f := t.values["healthzBindAddress"], t.flags.Lookup("healthz-bind-address"); f != nil && value != "" && !t.refused["healthzBindAddress"] && !answersProbes(f.Value.String()) {
		t.advise("healthzBindAddress", value, "the chart's probes use 127.0.0.1:10256; for another port, set its value healthzBindAddress to 0.0.0.0:PORT")
	}
	if value := t.values["bindAddressHardFail"]; value == "false" {
		t.advise("bindAddressHardFail", value, "kpng always ends if it cannot listen on an address of health checks or metrics")
	}
}

// answersProbes reports whether a program that listens at an address answers the default
// probes of the chart.
func answersProbes(address string) bool {
	host, port, err := net.SplitHostPort(address)
	return err == nil && port == "10256" && slices.Contains([]string{"", "0.0.0.0", "::", "127.0.0.1"}, host)
}

// listener is an address where a program listens.
type listener struct{ path, flag, address string }

func (t *translation) listeners() []listener {
	all, loopback := "0.0.0.0", "127.0.0.1"
	if ip, err := parseIP(cmp.Or(t.values["bindAddress"], all)); err == nil && ip.Is6() {
		all, loopback = "::", "::1"
	}
	address := func(path, host, port string) string {
		text := cmp.Or(t.values[path], host)
		if ip, err := parseIP(text); err == nil {
			return net.JoinHostPort(ip.String(), port)
		}
		return text
	}
	return []listener{
		{"healthzBindAddress", "healthz-bind-address", address("healthzBindAddress", all, "10256")},
		{"metricsBindAddress", "metrics-bind-address", address("metricsBindAddress", loopback, "10249")},
	}
}

// pods sets the flags that tell which traffic is from pods.
func (t *translation) pods() {
	bridge, prefix := t.values["detectLocal.bridgeInterface"], t.values["detectLocal.interfaceNamePrefix"]
	switch t.values["detectLocalMode"] {
	case "", "ClusterCIDR":
		t.set("clusterCIDR", "cluster-cidr", canonical(t.values["clusterCIDR"]))
	case "NodeCIDR":
		t.set("detectLocalMode", "node-pod-cidrs", "true")
	case "BridgeInterface":
		t.set("detectLocal.bridgeInterface", "pod-interfaces", listItem(bridge))
	case "InterfaceNamePrefix":
		t.set("detectLocal.interfaceNamePrefix", "pod-interfaces", listItem(prefix+"*"))
	}
}

// listItem returns the value of a flag for a list with one item. The item may contain
// commas.
func listItem(item string) string {
	if strings.ContainsAny(item, `",`) {
		return `"` + strings.ReplaceAll(item, `"`, `""`) + `"`
	}
	return item
}

// nodePorts sets the flag for the addresses of node ports.
func (t *translation) nodePorts() {
	const path, flag = "nodePortAddresses", "node-port-addresses"
	list := canonical(t.values[path])
	if list == "" && (t.mode == "iptables" || t.mode == "ipvs") {
		list = "all"
	}
	if list == "" {
		return // "primary" is the default of kpng and of the other modes
	}
	if f := t.flags.Lookup(flag); f != nil && f.Changed {
		t.set(path, flag, list)
		return
	}
	var kept []string
	// In kube-proxy's mode iptables, iptables.localhostNodePorts decides whether loopback
	// addresses are served. In this mode, ranges such as 0.0.0.0/0 contain loopback
	// addresses. In other modes, kpng serves the loopback addresses that the list names.
	localhost := t.mode == "iptables" && t.values["iptables.localhostNodePorts"] != "false"
	named, contained, families := false, false, map[bool]bool{}
	for item := range strings.SplitSeq(list, ",") {
		cidr, err := netip.ParsePrefix(item)
		switch {
		case item == "localhost" || cidr.Addr().IsLoopback():
			if t.mode == "iptables" && !localhost {
				continue
			}
			named = true
		case item == "all" || cidr.Contains(netip.AddrFrom4([4]byte{127, 0, 0, 1})):
			contained = true
		}
		kept = append(kept, item)
		if err == nil {
			families[cidr.Addr().Is4()] = true
		} else { // a keyword
			families[true], families[false] = true, true
		}
	}
	if localhost && contained && !named {
		kept = append(kept, "localhost")
	}
	if named && t.mode == "ipvs" {
		t.differ(path, list, "kpng serves node ports at loopback addresses, and kube-proxy does not in this mode")
	}
	if len(kept) == 0 {
		t.refuse(path, fmt.Errorf("%s has only loopback addresses, at which iptables.localhostNodePorts is false; the flag --%s overrides it", list, flag))
		return
	}
	if len(families) == 1 {
		missing := map[bool]string{true: "IPv6", false: "IPv4"}[families[true]]
		t.differ(path, list, "kube-proxy serves node ports at all "+missing+" addresses of the node, because the list has none; kpng at no "+missing+" address")
	}
	if localhost && (named || contained) && t.backend != "ebpf" {
		t.advise("iptables.localhostNodePorts", "true", "kpng listens on node ports at loopback addresses itself, for TCP and UDP, while it runs")
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
	var content any
	if err := decoder.Decode(&content); err != nil {
		return fmt.Errorf("parse configuration: %w", err)
	}
	const apiVersion, kind = "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration"
	tree, ok := content.(map[string]any)
	if !ok {
		return fmt.Errorf("the file is empty or not an object, want a %s of %s", kind, apiVersion)
	}
	documents := countDocuments(file)
	if tree["apiVersion"] != apiVersion || tree["kind"] != kind {
		first := map[bool]string{true: "the first document of "}[documents > 1]
		return fmt.Errorf("%sthe file has apiVersion %s and kind %s, want %s and %s", first, inJSON(tree["apiVersion"]), inJSON(tree["kind"]), apiVersion, kind)
	}
	if documents > 1 {
		t.differ("", "", fmt.Sprintf("the first of %d documents is used, as by kube-proxy", documents))
	}
	t.walk("", tree)
	return errors.Join(t.errs...)
}

// countDocuments returns the number of YAML documents that are not empty.
func countDocuments(file []byte) int {
	n := 0
	for reader := yamlutil.NewYAMLReader(bufio.NewReader(bytes.NewReader(file))); ; {
		document, err := reader.Read()
		if err != nil {
			return n // Read returns only io.EOF, because the source is in memory
		}
		if text, err := yaml.YAMLToJSON(document); err != nil || string(text) != "null" {
			n++
		}
	}
}

// walk adds to t.values all fields below the field with this path.
func (t *translation) walk(path string, tree map[string]any) {
	for _, key := range slices.Sorted(maps.Keys(tree)) {
		path, value := path+key, tree[key]
		f, known := fields[path]
		section := slices.ContainsFunc(slices.Collect(maps.Keys(fields)), func(p string) bool { return strings.HasPrefix(p, path+".") })
		nested, ok := value.(map[string]any)
		switch {
		case strings.Contains(key, "."): // not the path of a field
			t.differ(strings.TrimSuffix(path, key)+strconv.Quote(key), strings.Trim(inJSON(value), `"`), Unknown)
		case known:
			text, err := f.read(value)
			if err != nil {
				t.refuse(path, err)
			} else if value != nil {
				t.values[path] = text
			}
		case section && !ok && value != nil:
			t.refuse(path, fmt.Errorf("%s is not an object", inJSON(value)))
		case section:
			t.walk(path+".", nested)
		default:
			t.differ(path, strings.Trim(inJSON(value), `"`), Unknown)
		}
	}
}
