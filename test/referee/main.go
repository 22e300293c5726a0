// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command referee runs the conformance kit against a service proxy that reads a real API
// server, and prints the results as one page of Markdown. Run it as root in its folder:
//
//	cd test/referee
//	go run . kube-proxy-nftables
//	go run . kube-proxy-1.34-iptables
//	go run . kpng-nftables
//	go run . -clean 'my-proxy --cleanup' -- my-proxy --kubeconfig={kubeconfig} --node={node}
//
// All proxies are tested with the same cases: the rules of the Kubernetes API, without
// traffic parameters and other features that only kpng has. Nothing is declared as
// unsupported. In the words of a command, {kubeconfig}, {node}, {cluster-cidrs} and
// {node-port-cidrs} are replaced. A proxy of kpng or of Kubernetes is built if needed. The
// status is not zero if a case failed.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	"github.com/kpng-project/kpng/test/internal/publisher"
	"github.com/kpng-project/kpng/test/kubeproxy"
	"golang.org/x/sys/unix"
)

// sections has the sections of the kit about rules of the Kubernetes API.
const sections = "^(Cluster IPs|Ports|Dual stack|External addresses|Source ranges|Endpoints|Topology|Traffic policies|Source addresses|Session affinity|Existing connections|Health checks|Restart, neighbours and clean-up)$"

// notCompared has the features that other proxies than kpng cannot have.
var notCompared = map[conformance.Feature]string{
	conformance.Instances: "several instances beside each other are not a rule of Kubernetes",
	conformance.Claims:    "the Kubernetes API does not say which service owns a contested address",
}

func main() {
	testing.Init()
	clean := flag.String("clean", "", "`command` that removes what the proxy made")
	kpng := flag.String("kpng", "", "`file` of the command kpng; built if empty")
	asJSON := flag.Bool("json", false, "print one line of JSON for results/referee instead of a page")
	cases := flag.String("cases", sections, "regular `expression` of the names of cases or sections")
	patience := flag.Duration("patience", 20*time.Second, "limit of each wait of the kit")
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	pattern, err := regexp.Compile(*cases)
	if err != nil {
		fmt.Fprintln(os.Stderr, "referee:", err)
		os.Exit(2)
	}
	r := referee{name: strings.Join(flag.Args(), " "), words: flag.Args(), clean: strings.Fields(*clean), kpng: *kpng}
	opts := conformance.Options{Cases: pattern, Patience: *patience, Unsupported: notCompared}
	started := time.Now()
	testing.Main(func(_, _ string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "Referee", F: func(t *testing.T) {
		matrix := r.run(t, opts)
		var err error
		if *asJSON {
			err = json.NewEncoder(os.Stdout).Encode(newVerdict(r.name, started, matrix))
		} else {
			fmt.Printf("# Conformance of %s\n\n", r.name)
			err = matrix.WriteMarkdown(os.Stdout)
		}
		if err != nil {
			t.Error(err)
		}
	}}}, nil, nil)
}

// verdict is the result for a proxy. The command nightly makes docs/reference/referee.md
// from it.
type verdict struct {
	Proxy   string    `json:"proxy"`
	Date    time.Time `json:"date"`
	Seconds float64   `json:"seconds"`
	Kernel  string    `json:"kernel"`
	// OK and NotCompared count results. Each family of a case has one.
	OK          int       `json:"ok"`
	NotCompared int       `json:"notCompared"`
	Failed      []failure `json:"failed"`
}

type failure struct {
	Section string `json:"section"`
	Case    string `json:"case"`
	Family  string `json:"family,omitempty"`
	Reason  string `json:"reason"`
}

func newVerdict(proxy string, started time.Time, matrix conformance.Matrix) verdict {
	v := verdict{Proxy: proxy, Date: started.UTC().Truncate(time.Second), Seconds: time.Since(started).Round(time.Second).Seconds(), Failed: []failure{}}
	var system unix.Utsname
	if unix.Uname(&system) == nil {
		v.Kernel = unix.ByteSliceToString(system.Release[:])
	}
	for _, r := range matrix {
		switch r.Outcome {
		case conformance.Passed:
			v.OK++
		case conformance.Failed:
			f := failure{Section: r.Section, Case: r.Case}
			if r.Family != 0 {
				f.Family = r.Family.String()
			}
			f.Reason, _, _ = strings.Cut(r.Reason, "\n")
			v.Failed = append(v.Failed, f)
		default:
			v.NotCompared++
		}
	}
	return v
}

// referee runs the kit against a proxy.
type referee struct {
	name  string
	words []string
	clean []string
	kpng  string
}

// kubeProxy matches the names of kube-proxy's modes, with or without a minor version.
var kubeProxy = regexp.MustCompile(`^kube-proxy-(?:(1\.[0-9]+)-)?(nftables|iptables|ipvs)$`)

// run runs the cases.
func (r referee) run(t *testing.T, opts conformance.Options) conformance.Matrix {
	server := apiserver.Start(t, apiserver.Options{})
	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	subject := &conformance.Command{Publisher: publisher.New(server.Client())}
	if match := kubeProxy.FindStringSubmatch(r.words[0]); match != nil {
		command := func(site conformance.Site, args ...string) *exec.Cmd {
			args = append(kubeproxy.Command(t, kubeproxy.Options{
				Kubeconfig: kubeconfig, Node: site.NodeName, Version: match[1], Mode: match[2], MinSyncPeriod: time.Millisecond,
				ClusterCIDR: join(site.ClusterCIDRs), NodePortAddresses: strings.Split(join(site.NodePortCIDRs), ","),
				MasqueradeAll: site.Masquerade == conformance.MasqueradeAll,
			}), args...)
			return exec.Command(args[0], args[1:]...)
		}
		subject.Proxy = func(site conformance.Site) *exec.Cmd { return command(site) }
		subject.Clean = func(site conformance.Site) *exec.Cmd { return command(site, "--cleanup") }
	} else if backend, ok := strings.CutPrefix(r.words[0], "kpng-"); ok {
		program := r.kpng
		if program == "" {
			program = gotool.BuildOwn(t, "./cmd/kpng")
		}
		var more []string
		if backend == "ebpf" {
			opts.Cgroup, more = true, []string{"--bpffs", mountBPFFS(t)}
		}
		subject.Proxy = func(site conformance.Site) *exec.Cmd {
			args := []string{"kube", "--kubeconfig", kubeconfig, "to-local", backend, "--node-name", site.NodeName, "--node-port-addresses", join(site.NodePortCIDRs)}
			if backend == "userspace" {
				args = append(args, "--pod-cidr", join(site.PodCIDRs))
			} else {
				args = append(args, "--cluster-cidr", join(site.ClusterCIDRs), fmt.Sprintf("--masquerade-all=%t", site.Masquerade == conformance.MasqueradeAll))
			}
			if backend == "ebpf" {
				args = append(args, "--cgroup", site.Cgroup)
			}
			return exec.Command(program, append(args, more...)...)
		}
		subject.Clean = func(conformance.Site) *exec.Cmd {
			return exec.Command(program, append([]string{"cleanup", backend}, more...)...)
		}
	} else {
		command := func(site conformance.Site, words []string) *exec.Cmd {
			var args []string
			for _, word := range words {
				args = append(args, strings.NewReplacer("{kubeconfig}", kubeconfig, "{node}", site.NodeName,
					"{cluster-cidrs}", join(site.ClusterCIDRs), "{node-port-cidrs}", join(site.NodePortCIDRs)).Replace(word))
			}
			return exec.Command(args[0], args[1:]...)
		}
		subject.Proxy = func(site conformance.Site) *exec.Cmd { return command(site, r.words) }
		if len(r.clean) > 0 {
			subject.Clean = func(site conformance.Site) *exec.Cmd { return command(site, r.clean) }
		}
	}
	opts.Setup = func(t *testing.T, site conformance.Site) {
		address, err := url.Parse(server.Config().Host)
		if err != nil {
			t.Fatal(err)
		}
		netnstest.Relay(t, site.Do, address.Host, "tcp", address.Host)
	}
	return conformance.RunSubject(t, subject, opts)
}

// mountBPFFS mounts a BPF file system for one test.
func mountBPFFS(t *testing.T) string {
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		t.Fatalf("mount a BPF file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount the BPF file system: %v", err)
		}
	})
	return dir
}

func join(prefixes []netip.Prefix) string {
	var all []string
	for _, p := range prefixes {
		all = append(all, p.String())
	}
	return strings.Join(all, ",")
}
