// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	netutils "k8s.io/utils/net"
)

// refuse records an error of a field.
func (t *translation) refuse(path string, err error) {
	t.errs = append(t.errs, fmt.Errorf("%s: %w", path, err))
	t.refused[path] = true
}

// validate refuses the values that kube-proxy refuses.
func (t *translation) validate() {
	for _, path := range slices.Sorted(maps.Keys(t.values)) {
		check := fields[path].check
		if section, _ := section(path); check == nil || (section == "ipvs" || section == "nftables") && section != t.mode {
			continue // kube-proxy checks the settings of these modes only in these modes
		}
		if err := check(t.values[path]); err != nil {
			t.refuse(path, err)
		}
	}
	t.validateGates()
	t.validateMode()
	t.validateLogging()
	t.validateSyncPeriods()
	t.validateAddresses()
	t.validateLocalMode()
}

// featureGates has the feature gates of kube-proxy v1.37, one in each line. If kube-proxy
// accepts only one value of a gate, the line has the form NAME=VALUE.
//
//go:embed featuregates.txt
var featureGates string

// FeatureGates returns the feature gates that kube-proxy knows. If a gate has a value here,
// kube-proxy accepts no other value.
func FeatureGates() map[string]string {
	known := map[string]string{}
	for _, line := range strings.Fields(featureGates) {
		name, locked, _ := strings.Cut(line, "=")
		known[name] = locked
	}
	return known
}

func (t *translation) validateGates() {
	t.gates = map[string]bool{}
	if text := t.values["featureGates"]; text != "" {
		if err := json.Unmarshal([]byte(text), &t.gates); err != nil {
			panic(err) // the method gatesValue made this text, so it is valid
		}
	}
	known := FeatureGates()
	for _, name := range slices.Sorted(maps.Keys(t.gates)) {
		locked, ok := known[name]
		switch value := strconv.FormatBool(t.gates[name]); {
		case !ok:
			t.refuse("featureGates", fmt.Errorf("kube-proxy v1.37 has no feature gate %s; give kpng a copy of the file without it", name))
		case locked != "" && locked != value:
			t.refuse("featureGates", fmt.Errorf("kube-proxy v1.37 accepts only the value %s of %s; give kpng a copy of the file without it", locked, name))
		}
	}
}

// gate returns the value of the feature gate called name. The argument all is the name of
// another gate that also sets this gate.
func (t *translation) gate(name, all string, byDefault bool) bool {
	for _, name := range [...]string{name, all} {
		if value, ok := t.gates[name]; ok {
			return value
		}
	}
	return byDefault
}

func (t *translation) validateMode() {
	switch {
	case t.windows && t.mode != "kernelspace":
		t.refuse("mode", fmt.Errorf("%q is not a mode of kube-proxy on Windows, which has only kernelspace", t.mode))
	case !t.windows && t.mode == "kernelspace":
		t.refuse("mode", errors.New("kernelspace is a mode for Windows only"))
	case !t.windows && !slices.Contains([]string{"iptables", "ipvs", "nftables"}, t.mode):
		t.refuse("mode", fmt.Errorf("%q is not iptables, ipvs or nftables", t.mode))
	case t.mode == "ipvs" && !t.gate("KubeProxyIPVS", "", true):
		t.refuse("mode", errors.New("the feature gate KubeProxyIPVS in the file disables ipvs"))
	}
}

func (t *translation) validateLogging() {
	switch format := t.values["logging.format"]; {
	case format != "" && format != "text" && format != "json":
		t.refuse("logging.format", fmt.Errorf("%q is not text or json", format))
	case format == "json" && t.values["logging.vmodule"] != "":
		t.refuse("logging.vmodule", errors.New("kube-proxy supports it only with the format text"))
	case format == "json" && !t.gate("LoggingBetaOptions", "AllBeta", true):
		t.refuse("logging.format", errors.New("json needs the feature gate LoggingBetaOptions"))
	}
	for _, path := range slices.Sorted(maps.Keys(t.values)) {
		if strings.HasPrefix(path, "logging.options.") && !isZero(t.values[path]) && !t.gate("LoggingAlphaOptions", "AllAlpha", false) {
			t.refuse(path, errors.New("kube-proxy supports it only with the feature gate LoggingAlphaOptions"))
		}
	}
}

// validateSyncPeriods checks the periods of the file's mode.
func (t *translation) validateSyncPeriods() {
	mode, least := t.mode, time.Second
	switch mode {
	case "ipvs":
		least = 0
	case "kernelspace":
		mode = "iptables"
	}
	period := func(name string, byDefault time.Duration) (path string, d time.Duration) {
		path = mode + "." + name
		if d, _ = time.ParseDuration(t.values[path]); d == 0 {
			d = byDefault
		}
		return path, d
	}
	syncPath, sync := period("syncPeriod", 30*time.Second)
	leastPath, least := period("minSyncPeriod", least)
	switch {
	case sync < 0:
		t.refuse(syncPath, errNegative)
	case least < 0:
		t.refuse(leastPath, errNegative)
	case least > sync:
		t.refuse(syncPath, fmt.Errorf("%v is shorter than %s, which is %v", sync, leastPath, least))
	}
}

func (t *translation) validateAddresses() {
	for _, l := range t.listeners() {
		host, port, err := net.SplitHostPort(l.address)
		if err == nil {
			_, err = parseIP(host)
		}
		if number, atoi := strconv.Atoi(port); err == nil && (atoi != nil || number < 1 || number > math.MaxUint16) {
			err = fmt.Errorf("%q is not a port number", port)
		}
		if err != nil {
			t.refuse(l.path, fmt.Errorf("%q is not IP:PORT: %w", l.address, err))
		}
	}
	seen := map[string]bool{}
	for _, item := range split(t.values["nodePortAddresses"]) {
		switch item {
		case "primary", "localhost", "all":
			if seen[item] {
				t.refuse("nodePortAddresses", fmt.Errorf("%s is there twice", item))
			}
			seen[item] = true
		default:
			if err := isCIDR(item); err != nil {
				t.refuse("nodePortAddresses", fmt.Errorf("%w, nor primary, localhost or all", err))
			}
		}
	}
}

// validateLocalMode checks how kube-proxy recognizes traffic from pods.
func (t *translation) validateLocalMode() {
	switch mode := t.values["detectLocalMode"]; mode {
	case "":
		if t.mode != "kernelspace" {
			t.validateClusterCIDR()
		}
	case "ClusterCIDR":
		t.validateClusterCIDR()
	case "NodeCIDR":
	case "BridgeInterface":
		t.require("detectLocal.bridgeInterface", mode)
	case "InterfaceNamePrefix":
		t.require("detectLocal.interfaceNamePrefix", mode)
	default:
		t.refuse("detectLocalMode", fmt.Errorf("%q is not ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix", mode))
	}
}

func (t *translation) require(path, mode string) {
	if t.values[path] == "" {
		t.refuse(path, fmt.Errorf("it is empty, but detectLocalMode is %s", mode))
	}
}

func (t *translation) validateClusterCIDR() {
	families := map[bool]int{}
	for _, item := range split(t.values["clusterCIDR"]) {
		if err := isCIDR(item); err != nil {
			t.refuse("clusterCIDR", err)
		}
		families[netutils.IsIPv6CIDRString(item)]++
	}
	if families[false] > 1 || families[true] > 1 {
		t.refuse("clusterCIDR", errors.New("kube-proxy accepts one range for each IP family"))
	}
}

const maxInt32 = math.MaxInt32

var errNegative = errors.New("it is negative")

// within returns a check that an integer is in a range.
func within(least, most int64) func(string) error {
	return func(value string) error {
		if n, err := strconv.ParseInt(value, 10, 64); err != nil || n < least || n > most {
			return fmt.Errorf("%s is not between %d and %d", value, least, most)
		}
		return nil
	}
}

func notNegative(value string) error {
	if strings.HasPrefix(value, "-") {
		return errNegative
	}
	return nil
}

func isIP(value string) error {
	if value == "" {
		return nil
	}
	_, err := parseIP(value)
	return err
}

// parseIP parses an address like kube-proxy: it ignores leading zeros.
func parseIP(value string) (netip.Addr, error) {
	ip, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(value))
	if !ok {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", value)
	}
	return ip.Unmap(), nil
}

func isCIDR(value string) error {
	if _, _, err := netutils.ParseCIDRSloppy(value); err != nil {
		return fmt.Errorf("%q is not a CIDR", value)
	}
	return nil
}

// each returns a check of all items of a list.
func each(check func(string) error) func(string) error {
	return func(list string) error {
		var errs []error
		for _, item := range split(list) {
			errs = append(errs, check(item))
		}
		return errors.Join(errs...)
	}
}

var version = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)

func isVersion(value string) error {
	if value != "" && !version.MatchString(value) {
		return fmt.Errorf("%q is not a version such as 1.36", value)
	}
	return nil
}

// split returns the items of a list in the form of translation.values.
func split(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

// canonical returns a list of CIDRs and keywords without leading zeros and host bits.
func canonical(list string) string {
	items := split(list)
	for i, item := range items {
		if _, cidr, err := netutils.ParseCIDRSloppy(item); err == nil {
			items[i] = cidr.String()
		}
	}
	return strings.Join(items, ",")
}
