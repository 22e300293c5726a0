// SPDX-License-Identifier: Apache-2.0

package program

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/sysctl"
	"golang.org/x/sys/unix"
)

// check finds rules, devices and settings of other programs on this machine. It is a
// Backend.Check.
func (l *leftovers) check(ctx context.Context) []command.Finding {
	findings := []command.Finding{kernelVersion()}
	found, err := findAll(ctx, l.bpffs())
	for i := range found {
		if f := &found[i]; f.by == (instance{}) {
			findings = append(findings, command.Finding{Level: command.Change, Subject: f.what,
				Text: "rules of kube-proxy, which serve this node after kube-proxy has stopped, too; when kpng is ready, remove them with: " + f.remove})
		} else if !l.isSelf(f.by) {
			findings = append(findings, command.Finding{Level: command.Change, Subject: f.what,
				Text: "rules of another backend or instance of kpng; if it does not run any more, remove them with: " + f.remove})
		}
	}
	others, othersErr := otherPrograms(ctx)
	findings = append(findings, others...)
	if err := errors.Join(err, othersErr); err != nil {
		findings = append(findings, command.Finding{Level: command.Problem, Subject: "rules of this node", Text: err.Error()})
	}
	return findings
}

// kernelVersion compares the version of the kernel with the oldest one that all backends
// support.
func kernelVersion() command.Finding {
	var system unix.Utsname
	if err := unix.Uname(&system); err != nil {
		return command.Finding{Level: command.Problem, Subject: "kernel", Text: err.Error()}
	}
	release := unix.ByteSliceToString(system.Release[:])
	f := command.Finding{Level: command.Note, Subject: "kernel", Text: "Linux " + release}
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err == nil && (major < 5 || major == 5 && minor < 10) {
		f.Level, f.Text = command.Problem, f.Text+" is older than 5.10, the oldest version that kpng supports"
	}
	return f
}

// otherProxies are programs whose rules kpng does not touch. The names of their chains,
// or of one of their files, begin with the prefix.
var otherProxies = []struct{ prefix, name, text string }{
	{"cali-", "Calico", "kpng works beside its policies; turn off its eBPF dataplane, which serves services itself"},
	{"CILIUM_", "Cilium", "kpng works beside it only with kubeProxyReplacement=false and socketLB.enabled=false"},
	{"cil_", "Cilium", "kpng works beside it only with kubeProxyReplacement=false and socketLB.enabled=false"},
	{"FLANNEL-", "flannel", "kpng works beside it"},
	{"ANTREA-", "Antrea", "kpng serves the node and traffic from outside; Antrea's own proxy serves pods unless antreaProxy.enable=false"},
	{"KUBE-ROUTER-", "kube-router", "kpng works beside it only with --run-service-proxy=false"},
	{"KUBE-NWPLCY-", "kube-router", "kpng works beside it only with --run-service-proxy=false"},
	{"WEAVE", "Weave Net", "kpng works beside it"},
	{"CNI-HOSTPORT-", "the CNI plugin portmap", "a host port and a node port with one number exclude each other, as with kube-proxy"},
	{"NODE-LOCAL-DNS", "NodeLocal DNSCache", "check that pods still reach the cache after the change, as with each change of the proxy: kubernetes/dns#682"},
	{"DOCKER", "Docker", "kpng works beside it; Docker may drop forwarded packets"},
}

// otherPrograms finds chains of programs in otherProxies, and base chains that drop
// forwarded packets by their policy.
func otherPrograms(ctx context.Context) (findings []command.Finding, err error) {
	found := make([]bool, len(otherProxies))
	note := func(chain string) (isNew bool) {
		for i := range otherProxies {
			if !found[i] && strings.HasPrefix(chain, otherProxies[i].prefix) {
				found[i], isNew = true, true
			}
		}
		return isNew
	}
	dropping := func(chain string) (isNew bool) {
		f := command.Finding{Level: command.Change, Subject: chain,
			Text: "policy DROP, before which kube-proxy's modes iptables and ipvs accept masqueraded packets; let the firewall accept the traffic of pods before you remove kube-proxy's rules"}
		if isNew = !slices.Contains(findings, f); isNew {
			findings = append(findings, f)
		}
		return isNew
	}
	err = errors.Join(
		eachChain(ctx, func(c chain) bool {
			isNew := note(c.name)
			if c.dropsForwarded {
				isNew = dropping("chain "+c.name+" in table "+c.family+" "+c.table) || isNew
			}
			return isNew
		}),
		eachLegacyTable(func(table string, entries []byte, dropsForwarded bool) {
			if dropsForwarded {
				dropping("chain FORWARD of iptables-legacy in table " + table)
			}
			for i := range otherProxies {
				found[i] = found[i] || bytes.Contains(entries, []byte("\x00"+otherProxies[i].prefix))
			}
		}))
	// Cilium pins its programs and maps even where it makes no chains.
	if _, err := os.Stat("/sys/fs/bpf/cilium"); err == nil {
		note("cil_")
	}
	for i, is := range found {
		o := otherProxies[i]
		f := command.Finding{Level: command.Note, Subject: "rules of " + o.name, Text: o.text}
		if is && !slices.Contains(findings, f) {
			findings = append(findings, f)
		}
	}
	return findings, err
}

// settingsCheck returns a Backend.Check of kernel settings and of the flags about pods. It
// does not load modules, so it skips settings that the kernel does not have yet.
func (f *nodeFlags) settingsCheck(more ...sysctl.Setting) func(context.Context) []command.Finding {
	return func(context.Context) (findings []command.Finding) {
		for _, s := range slices.Concat(sysctl.Forwarding, more, f.conntrackSettings(sysctl.Cores())) {
			value, err := sysctl.Kernel.Read(s.Name)
			switch {
			case errors.Is(err, fs.ErrNotExist):
			case err != nil:
				findings = append(findings, command.Finding{Level: command.Problem, Subject: "sysctl " + s.Name, Text: err.Error()})
			case !s.Accepts(value):
				will := ""
				if f.sysctlMode() == backends.SetSysctls {
					if will = "; kpng sets it at the start"; sysctl.Kernel.CheckWrite(s.Name) != nil {
						will = "; kpng cannot set it here: set it on the node, or use the chart's kernelSettings"
					}
				}
				findings = append(findings, command.Finding{Level: command.Change, Subject: "sysctl " + s.Name,
					Text: fmt.Sprintf("is %d; with %d, %s%s", value, s.Value, s.Reason, will)})
			}
		}
		return append(findings, f.podsCheck()...)
	}
}
