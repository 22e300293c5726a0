// SPDX-License-Identifier: Apache-2.0

package kubeproxy_test

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/kubeproxy"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	_ "k8s.io/component-base/logs/json/register" // kube-proxy supports this format
	"k8s.io/klog/v2"
	"k8s.io/kube-proxy/config/v1alpha1"
	_ "k8s.io/kubernetes/cmd/kube-proxy/app" // registers all feature gates of kube-proxy
	"k8s.io/kubernetes/pkg/proxy/apis/config"
	"k8s.io/kubernetes/pkg/proxy/apis/config/scheme"
	"k8s.io/kubernetes/pkg/proxy/apis/config/validation"
)

// TestMain discards kube-proxy's warnings about feature gates.
func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	os.Exit(m.Run())
}

var lenient = serializer.NewCodecFactory(scheme.Scheme, serializer.DisableStrict)

// verdict returns kube-proxy's verdict on a configuration file. It decodes, defaults and
// validates the file as the command kube-proxy does on Linux.
func verdict(file []byte) error {
	object, _, err := scheme.Codecs.UniversalDecoder().Decode(file, nil, nil)
	if runtime.IsStrictDecodingError(err) {
		object, _, err = lenient.UniversalDecoder().Decode(file, nil, nil)
	}
	if err != nil {
		return err
	}
	c, ok := object.(*config.KubeProxyConfiguration)
	if !ok {
		return fmt.Errorf("unexpected type %T", object)
	}
	if c.Mode == "" {
		c.Mode = config.ProxyModeIPTables
	}
	if c.DetectLocalMode == "" {
		c.DetectLocalMode = config.LocalModeClusterCIDR
	}
	return validation.Validate(c).ToAggregate()
}

// apply returns kpng's verdict on a configuration file.
func apply(file []byte) error {
	accept := func(flag, value string) error { return nil }
	_, err := kubeproxy.Apply(pflag.NewFlagSet("", pflag.ContinueOnError), "nftables", file, accept)
	return err
}

func compareVerdicts(t *testing.T, name string, file []byte) {
	t.Helper()
	want, got := verdict(file), apply(file)
	if want != nil && strings.Contains(want.Error(), "depends on features that are disabled") {
		return // kpng does not know the dependencies of feature gates; see docs/operate/run.md
	}
	if (want == nil) != (got == nil) {
		t.Errorf("%s: kpng: %v; kube-proxy: %v\n%s", name, got, want, file)
	}
}

// TestFilesOfDistributionsGetKubeProxysVerdict reads files in testdata. They have the
// settings of files that distributions make or users publish.
func TestFilesOfDistributionsGetKubeProxysVerdict(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	accepted, refused := 0, 0
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		compareVerdicts(t, name, text)
		err = verdict(text)
		t.Logf("%s: %v", name, err)
		if err == nil {
			accepted++
		} else {
			refused++
		}
	}
	if accepted < 20 || refused < 10 {
		t.Errorf("kube-proxy accepts %d files and refuses %d, want at least 20 and 10", accepted, refused)
	}
}

// leaves yields the path of each field that is not an object of fields.
func leaves(of reflect.Type, path []string, yield func([]string)) {
	for f := range of.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		below := slices.Clone(path)
		if name != "" {
			below = append(below, name)
		}
		switch {
		case slices.Contains([]string{"", "options", "text", "json"}, name) && len(path) > 0,
			f.Type.Kind() == reflect.Struct && strings.HasSuffix(f.Type.Name(), "Configuration"):
			leaves(f.Type, below, yield)
		case f.Type.Name() != "TypeMeta":
			yield(below)
		}
	}
}

// values has values for all fields. Most of them are wrong for most fields.
var values = []any{
	nil, true, false, 0, 1, -1, 5, 13, 14, 15, 31, 32, 1001, -1001, 2147483647, 2147483648, 4294967296, -2147483649, 1.5, 1e39, json.Number("99999999999999999999"),
	"", " ", "0", "7", "14", "0s", "1s", "30s", "999ms", "-1s", "1h", "2540400h", "15m0s", "1Mi", "-1Mi",
	"0.0.0.0", "::", "127.0.0.1", "10.0.0.1", "010.0.0.1", "fd00::1", "[fd00::1]", "fe80::1%eth0", "::ffff:10.0.0.1",
	"0.0.0.0:10256", "[::]:10249", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", ":10256", "localhost:10256", "localhost", "10256",
	"10.0.0.0/8", "10.0.0.1/8", "010.0.0.0/8", "fd00::/8", "10.0.0.0/8,fd00::/8", "10.0.0.0/8, fd00::/8", "10.0.0.0/8,11.0.0.0/8", "10.0.0.0/8,fd00::/8,fd01::/8", ",", "10.0.0.0/33",
	"iptables", "ipvs", "nftables", "kernelspace", "userspace", "Iptables", "text", "json", "JSON",
	"ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", "nodecidr", "application/json", "rr", "cni0",
	[]any{}, []any{""}, []any{nil}, []any{1}, []any{"x"}, []any{"10.0.0.0/8"}, []any{"10.0.0.1/8", "fd00::/8"}, []any{"10.0.0.0/8,fd00::/8"}, []any{"010.0.0.0/8"}, []any{"10.0.0.1"},
	[]any{"primary"}, []any{"all"}, []any{"primary", "primary"}, []any{"primary", "all"}, []any{"Primary"}, []any{"localhost", "all"},
	map[string]any{}, map[string]any{"x": true}, map[string]any{"ContextualLogging": true}, map[string]any{"ContextualLogging": nil}, map[string]any{"ContextualLogging": "true"}, map[string]any{"AllBeta": false},
	[]any{map[string]any{}}, []any{map[string]any{"filePattern": "a"}}, []any{map[string]any{"filePattern": "a", "verbosity": 3, "x": 1}}, []any{map[string]any{"filePattern": "a=b", "verbosity": 3}},
	[]any{map[string]any{"filePattern": "a", "verbosity": -1}}, []any{map[string]any{"filePattern": "a", "verbosity": 2147483648}}, []any{map[string]any{"filePattern": 1}},
}

// Each field with each value gets kube-proxy's verdict, in each mode.
func TestFieldsGetKubeProxysVerdict(t *testing.T) {
	fields := 0
	leaves(reflect.TypeFor[v1alpha1.KubeProxyConfiguration](), nil, func(path []string) {
		fields++
		name := strings.Join(path, ".")
		modes := []string{"iptables", "ipvs", "nftables"}
		if !slices.Contains(modes, path[0]) {
			modes = modes[:1] // the mode does not matter
		}
		for _, mode := range modes {
			for _, value := range values {
				if text, ok := value.(string); ok && name == "showHiddenMetricsForVersion" && text != "" {
					continue // depends on the version of kube-proxy; a test has no such version
				}
				compareVerdicts(t, fmt.Sprintf("%s in mode %s", name, mode), file(t, mode, path, value))
			}
		}
	})
	if fields < 55 {
		t.Errorf("only %d fields", fields)
	}
}

// Combinations of fields get kube-proxy's verdict.
func TestCombinationsGetKubeProxysVerdict(t *testing.T) {
	for _, text := range []string{
		"iptables: {syncPeriod: 1s, minSyncPeriod: 2s}",
		"iptables: {syncPeriod: 2s, minSyncPeriod: 1s}",
		"mode: nftables\nnftables: {syncPeriod: 1s, minSyncPeriod: 2s}",
		"mode: ipvs\nipvs: {syncPeriod: 500ms}",
		"mode: ipvs\nipvs: {syncPeriod: 500ms, minSyncPeriod: 1s}",
		"mode: nftables\niptables: {syncPeriod: -1s}",
		"detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}",
		"detectLocalMode: InterfaceNamePrefix\ndetectLocal: {bridgeInterface: cni0}",
		"detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: veth}",
		"detectLocalMode: NodeCIDR\nclusterCIDR: x",
		"logging: {format: json, vmodule: [{filePattern: a, verbosity: 1}]}",
		"logging: {format: json}\nfeatureGates: {LoggingBetaOptions: false}",
		"logging: {format: json}\nfeatureGates: {AllBeta: false}",
		"logging: {options: {text: {splitStream: true}}}\nfeatureGates: {LoggingAlphaOptions: true}",
		"logging: {options: {json: {infoBufferSize: 1Mi}}}\nfeatureGates: {LoggingAlphaOptions: true}",
		"mode: iptables\nmode: nftables",
		"iptables: null", "iptables: []", "iptables: x", "logging: {options: []}", "conntrack: 1",
		"Mode: x", "IPTables: 1",
	} {
		compareVerdicts(t, text, []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"+text+"\n"))
	}
}

// Each feature gate gets kube-proxy's verdict. If this test fails with a new version of
// Kubernetes, replace featuregates.txt.
func TestFeatureGatesGetKubeProxysVerdict(t *testing.T) {
	want := map[string]string{}
	for name, spec := range utilfeature.DefaultMutableFeatureGate.GetAll() {
		want[string(name)] = ""
		if spec.LockToDefault {
			want[string(name)] = fmt.Sprint(spec.Default)
		}
	}
	if diff := cmp.Diff(want, kubeproxy.FeatureGates()); diff != "" {
		t.Errorf("feature gates (-want +got):\n%s", diff)
	}
	for name := range want {
		for _, value := range []bool{true, false} {
			compareVerdicts(t, name, file(t, "iptables", []string{"featureGates", name}, value))
		}
	}
}

// file returns a file in which one field has a value.
func file(t *testing.T, mode string, path []string, value any) []byte {
	t.Helper()
	for _, name := range slices.Backward(path) {
		value = map[string]any{name: value}
	}
	tree := map[string]any{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": mode}
	maps.Copy(tree, value.(map[string]any))
	text, err := json.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
