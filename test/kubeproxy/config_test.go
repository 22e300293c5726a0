// SPDX-License-Identifier: Apache-2.0

package kubeproxy_test

import (
	"os"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/kubeproxy"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// TestAllFieldsAreKnown fails if KubeProxyConfiguration has a field that kpng does not
// know, such as a field of a new version of Kubernetes.
func TestAllFieldsAreKnown(t *testing.T) {
	config := newConfig()
	fill(reflect.ValueOf(config).Elem())
	makeValid(config)
	for _, mode := range []v1alpha1.ProxyMode{"iptables", "ipvs", "nftables"} {
		config.Mode = mode
		accept := func(flag, value string) error { return nil }
		differences, err := kubeproxy.Apply(pflag.NewFlagSet("", pflag.ContinueOnError), "any", marshal(t, config), accept)
		if err != nil {
			t.Fatal(err)
		}
		if len(differences) < 10 {
			t.Errorf("only %d differences from a file with unusual values", len(differences))
		}
		for _, d := range differences {
			if d.Meaning == kubeproxy.Unknown {
				t.Errorf("kpng does not know %s", d.Field)
			}
		}
	}
}

// makeValid replaces the values of fill that kube-proxy refuses.
func makeValid(c *v1alpha1.KubeProxyConfiguration) {
	c.FeatureGates = map[string]bool{"LoggingAlphaOptions": true}
	c.DetectLocalMode = "ClusterCIDR"
	c.ClusterCIDR = "10.0.0.0/8"
	c.BindAddress, c.HealthzBindAddress, c.MetricsBindAddress = "10.0.0.1", "10.0.0.1:7", "10.0.0.1:8"
	c.ShowHiddenMetricsForVersion = "1.36"
	c.Logging.Format = "text"
	c.IPVS.ExcludeCIDRs, c.NodePortAddresses = []string{"10.0.0.0/8"}, []string{"10.0.0.0/8"}
}

// TestConfigMapsAreReal compares the configuration in the ConfigMaps of kpng's tests with
// what kubeadm writes. kubeadm sets four fields if the user does not. kind sets two more
// fields in the configuration for kubeadm.
func TestConfigMapsAreReal(t *testing.T) {
	kubeadm := newConfig()
	kubeadm.BindAddress = "0.0.0.0"
	kubeadm.ClusterCIDR = "10.244.0.0/16"
	kubeadm.ClientConnection.Kubeconfig = "/var/lib/kube-proxy/kubeconfig.conf"
	kubeadm.Mode = "iptables"
	kind := kubeadm.DeepCopy()
	kind.IPTables.MinSyncPeriod.Duration = 1e9
	kind.Conntrack.MaxPerCore = new(int32)
	for name, config := range map[string]*v1alpha1.KubeProxyConfiguration{"kubeadm": kubeadm, "kind": kind} {
		text, err := os.ReadFile("../../cmd/kpng/testdata/kube-proxy/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		var configMap struct{ Data map[string]string }
		if err := yaml.Unmarshal(text, &configMap); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(marshal(t, config)), configMap.Data["config.conf"]+"\n"); diff != "" {
			t.Errorf("configuration of %s (-want +got):\n%s", name, diff)
		}
	}
}

func newConfig() *v1alpha1.KubeProxyConfiguration {
	return &v1alpha1.KubeProxyConfiguration{TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "KubeProxyConfiguration"}}
}

func marshal(t *testing.T, config *v1alpha1.KubeProxyConfiguration) []byte {
	t.Helper()
	text, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// fill gives all fields of v that have their zero value another value.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i))
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		value := reflect.New(v.Type().Elem()).Elem()
		fill(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("Key"), value)
	case reflect.String:
		if v.IsZero() {
			v.SetString("7")
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int32, reflect.Int64:
		v.SetInt(7)
	case reflect.Uint32:
		v.SetUint(7)
	case reflect.Float32:
		v.SetFloat(7)
	default:
		panic("unknown kind " + v.Kind().String())
	}
}
