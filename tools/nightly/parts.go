// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"time"
)

// part is a part of the nightly tests.
type part struct {
	Name string
	// About describes the part in the documentation, as Markdown.
	About string
	Limit time.Duration
	// Needs has the programs that the part needs besides the programs of hack/test.
	Needs []string
	// Command is run by bash in the root of the repository.
	Command string
	// Long parts run only if a pattern names them, because they would not fit into a night.
	Long bool
	// Alone parts run beside no other part, because they measure durations, or because they use
	// names or ports of the host.
	Alone bool
}

// allParts returns all parts. Without the long parts, they take about six hours on two idle
// cores if they run one after the other. The limits allow for a busy machine, and for another
// part at the same time.
func allParts() []part {
	parts := []part{
		{
			Name: "fuzz", About: "each fuzzer for five minutes", Limit: time.Hour,
			Command: "hack/fuzz 5m",
		},
		{
			Name: "platforms", About: "compilation for linux/arm64 and darwin/arm64", Limit: 20 * time.Minute,
			Command: "for t in linux/arm64 darwin/arm64; do GOOS=${t%/*} GOARCH=${t#*/} CGO_ENABLED=0 go build -modfile=hack/release.mod -tags=grpcnotrace -trimpath ./...; done",
		},
		{
			Name: "versions", About: "the root module with the other versions of Kubernetes' modules, and with the oldest Go", Limit: 40 * time.Minute,
			Command: "hack/versions",
		},
		{
			Name: "versions-race", About: "the same, all packages with the race detector", Limit: 3 * time.Hour, Long: true,
			Command: "hack/versions -race v0.34 v0.35 v0.36 v0.37",
		},
		{
			Name: "repeat", About: "all tests of the root module five times with the race detector, without those of packets and of the model", Limit: 2 * time.Hour,
			Command: "go test -race -count=5 -timeout 2h -skip '^Test(Conformance|Kernel|Reference|EveryCaseCanFail)$|^TestModel' ./...",
		},
		{
			Name: "repeat-test", About: "the tests of the module `test` five times with the race detector", Limit: 4 * time.Hour, Long: true,
			Command: "cd test; go list ./... | grep -vE '/(allip|dataplane|calibration|referee|cluster|growth)$' | xargs go test -race -count=5 -timeout 60m",
		},
		{
			Name: "repeat-allip", About: "all-ip five times alone, because it measures durations", Limit: 20 * time.Minute, Alone: true,
			Command: "cd test; go test -race -count=5 -timeout 60m ./allip -within 1s",
		},
		{
			Name: "ended-proxies", About: "1,000 proxies that started and ended keep nothing", Limit: 15 * time.Minute,
			Command: "go test -v -count=1 -timeout 15m -run '^TestEndedProxiesKeepNothing$' . -proxies 1000",
		},
		{
			Name: "old-api-server", About: "watches of kube-apiserver v1.30", Limit: time.Hour,
			Command: "cd test; go test -v -count=1 -timeout 60m -run '^TestWatchFollows' ./internal/apiserver -program kube-apiserver-1.30",
		},
		{
			Name: "release", About: "two releases with different settings of the machine are equal, and their images run in containerd", Limit: 30 * time.Minute,
			Needs:   []string{"skopeo", "ctr"},
			Command: `cd test; go test -v -count=1 -timeout 30m -run '^TestRelease$' ./deploy -arch "$(go env GOARCH)"`,
		},
		{
			Name: "status-page", About: "the status page of 10,000 services in Chromium", Limit: 10 * time.Minute,
			Needs:   []string{"chromium"},
			Command: "cd test; go test -v -count=1 -run Page ./browser",
		},
		{
			Name: "site", About: "the site of the documents: no dead links, and all pages fit a phone and a desktop in Chromium", Limit: 10 * time.Minute,
			Needs:   []string{"chromium", "mkdocs"},
			Command: "cd test; go test -v -count=1 -run Site ./browser",
		},
		{
			Name: "kpdiff", About: "100,000 random clusters, beside kube-proxy's packages", Limit: 30 * time.Minute,
			Command: "cd test; go test -v -count=1 -timeout 30m -skip Histories ./kpdiff -clusters 100000",
		},
		{
			Name: "kpdiff-histories", About: "100,000 random histories, from the watcher to a dataplane, beside kube-proxy's trackers", Limit: 2 * time.Hour,
			Command: "cd test; go test -v -count=1 -timeout 2h -run Histories ./kpdiff -histories 100000",
		},
		{
			Name: "manifests", About: "20,000 random manifests, beside a real API server", Limit: 15 * time.Minute,
			Command: "cd test; go test -v -count=1 -timeout 15m ./manifests -manifests 20000",
		},
		{
			Name: "manager", About: "kpng in programs with older versions of controller-runtime", Limit: 30 * time.Minute,
			Command: "cd test; go test -v -count=1 -timeout 30m ./manager -versions v0.22.5,v0.23.3,v0.24.1,v0.25.2",
		},
		{
			Name: "histories", About: "10,000 random histories of the driver and of the backend for Windows, 100,000 of the reconcile engine", Limit: time.Hour,
			Command: `go test -v -count=1 -timeout 60m -run '^TestHistories' ./sink/sinktest ./backends/windows/kernelspace -histories 10000
go test -v -count=1 -timeout 60m -run 'Histories$' ./reconcile -histories 100000`,
		},
		{
			Name: "histories-kernel", About: "300 random histories of each backend in this kernel, 100 of iptables", Limit: 2 * time.Hour,
			Command: `go test -v -p 1 -count=1 -timeout 2h -run '^TestHistories' ./backends/nftables ./backends/ovs ./backends/ebpf ./backends/ipvs ./backends/userspace -histories 300
go test -v -count=1 -timeout 2h -run '^TestHistories' ./backends/iptables -histories 100`,
		},
		{
			Name: "mutants-nodeview", About: "each [mutant](../../CONTRIBUTING.md#mutants) of nodeview fails a test", Limit: 2 * time.Hour,
			Command: "cd tools; go run ./mutate -skip '^TestCostGrowsWithSize$' ./nodeview",
		},
		{
			Name: "mutants-reconcile", About: "each mutant of the reconcile engine fails a test", Limit: 2 * time.Hour,
			Command: "cd tools; go run ./mutate ./reconcile",
		},
		{
			Name: "mutants-cluster", About: "each mutant of cluster fails a test", Limit: 2 * time.Hour,
			Command: "cd tools; go run ./mutate ./cluster",
		},
		{
			Name: "mutants-sink", About: "each mutant of the driver fails a test", Limit: 2 * time.Hour,
			Command: "cd tools; go run ./mutate ./sink",
		},
		{
			Name: "model", About: "all sequences of up to six actions of a server, a relay and a client keep the promises of the [protocol](../reference/wire.md)", Limit: time.Hour,
			Command: "go test -v -count=1 -timeout 60m -run '^TestModel$' ./remote -model-depth 6",
		},
		{
			Name: "kills", About: "server, clients, relay and API server are killed 50 times in turn; at the end, no change is lost", Limit: 30 * time.Minute,
			Command: "cd test; go test -v -race -count=1 -timeout 30m -run '^TestKilledProcesses' ./integration -kills 50",
		},
		{
			Name: "soak-nftables", About: "the nftables backend under changes and traffic for 20 minutes", Limit: 40 * time.Minute,
			Command: "cd test; go test -v -count=1 -timeout 40m -run Soak ./dataplane -soak 20m",
		},
		{
			Name: "soak-ebpf", About: "the ebpf backend under changes and traffic for 20 minutes", Limit: 40 * time.Minute,
			Command: "cd test; go test -v -count=1 -timeout 40m -run Soak ./dataplane -soak 20m -soak-ebpf",
		},
		{
			Name: "growth", About: "growth of costs with eight times larger objects", Limit: 3 * time.Hour, Long: true, Alone: true,
			Command: "cd test; go test -v -count=1 -timeout 3h ./growth -scale 8",
		},
		{
			Name: "growth-small", About: "growth of costs of all backends; `hack/test` measures nftables", Limit: 20 * time.Minute, Alone: true,
			Command: "cd test; go test -v -count=1 -timeout 20m ./growth",
		},
		{
			Name: "kernel", About: "programs in QEMU, and what backends report on kernels that lack something", Limit: 20 * time.Minute,
			Command: "cd test; go test -v -count=1 -timeout 20m ./kernel",
		},
		{
			Name: "objective", About: "the [network programming objective](benchmarks.md#the-network-programming-objective), for an hour", Limit: 90 * time.Minute, Long: true, Alone: true,
			Command: "cd test; go test -v -count=1 -timeout 90m -run Objective ./growth -objective-for 1h -objective-services 100000 -objective-passes 5m -objective-limit 10ms",
		},
		{
			Name: "calibration", About: "the conformance kit against kube-proxy, mode nftables: fails if a difference is not explained", Limit: 40 * time.Minute,
			Command: "cd test; go test -v -count=1 -timeout 40m ./calibration",
		},
	}
	parts = append(parts, conformanceParts()...)
	parts = append(parts, kernelParts()...)
	parts = append(parts, refereeParts()...)
	parts = append(parts, clusterParts()...)
	return append(parts, benchmarkParts()...)
}

// conformanceParts returns the parts that run the conformance kit on this kernel.
func conformanceParts() []part {
	var parts []part
	for _, dir := range []string{"backends/nftables", "backends/iptables", "backends/ebpf", "backends/ovs", "backends/userspace", "examples/reconcile", "examples/fullstate"} {
		_, name, _ := strings.Cut(dir, "/")
		parts = append(parts, part{
			Name: "conformance-" + name, About: "the conformance kit with " + dir, Limit: 30 * time.Minute,
			Command: "go test -v -count=1 -timeout 30m -run '^TestConformance$' ./" + dir,
		})
	}
	return parts
}

// kernelParts returns the parts that run tests on Debian's kernels in QEMU.
func kernelParts() []part {
	var parts []part
	for _, suite := range []struct {
		name, kernel string
		long         bool
	}{{"bookworm", "6.1", false}, {"bullseye", "5.10", true}} {
		add := func(name, about string, limit time.Duration, arguments string) {
			parts = append(parts, part{
				Name: name + "-" + suite.kernel, About: about + ", on Linux " + suite.kernel, Limit: limit, Long: suite.long,
				Command: fmt.Sprintf(`kernel=$(mktemp -d)
trap 'rm -r "$kernel"' EXIT
CGO_ENABLED=0 go build -C test -o "$kernel/kernel" ./kernel
go build -o "$kernel/kpng" ./cmd/kpng
go test -v -count=1 -timeout %s -p 1 -exec "$kernel/kernel -debian %s" %s -patience 3m`, limit, suite.name, arguments),
			})
		}
		add("conformance-nftables", "all tests of backends/nftables, with the conformance kit", 80*time.Minute, "./backends/nftables")
		add("conformance-ebpf", "all tests of backends/ebpf, with the conformance kit", 80*time.Minute, "./backends/ebpf")
		add("conformance-ipvs", "the conformance kit and TestKernel of backends/ipvs", 80*time.Minute, "-run '^Test(Conformance|Kernel)$' ./backends/ipvs")
		add("conformance-iptables", "the conformance kit and TestKernel of backends/iptables", 2*time.Hour, "-run '^Test(Conformance|Kernel)$' ./backends/iptables")
		add("conformance-ovs", "all tests of backends/ovs with the kernel datapath", 2*time.Hour, "./backends/ovs -datapath system")
		add("conformance-userspace", "the section \"Ports\" of the kit with SCTP and backends/userspace", 10*time.Minute, "-run '^TestConformance$/^Ports$' ./backends/userspace")
	}
	parts = append(parts, part{
		Name: "ports-nftables-5.10", About: "ports, source ranges and all-ports services with backends/nftables, on Linux 5.10", Limit: 20 * time.Minute,
		Command: `kernel=$(mktemp -d)
trap 'rm -r "$kernel"' EXIT
CGO_ENABLED=0 go build -C test -o "$kernel/kernel" ./kernel
go test -v -count=1 -timeout 20m -exec "$kernel/kernel -debian bullseye" -run '^TestConformance$/^(Ports|Source ranges|All-ports services)$' ./backends/nftables -patience 3m`,
	})
	for i := range parts { // these take longest, and CI runs their most important cases
		parts[i].Long = parts[i].Long || strings.HasPrefix(parts[i].Name, "conformance-iptables-") || strings.HasPrefix(parts[i].Name, "conformance-ovs-")
	}
	qemu := func(name, about, build, command string) {
		parts = append(parts, part{
			Name: name + "-6.1", About: about + ", on Linux 6.1", Limit: 30 * time.Minute,
			Command: `kernel=$(mktemp -d)
trap 'rm -r "$kernel"' EXIT
CGO_ENABLED=0 go build -C test -o "$kernel/kernel" ./kernel
` + build + command,
		})
	}
	qemu("all-ip-sctp", "SCTP sockets through all-ip", "",
		`go test -v -count=1 -timeout 30m -exec "$kernel/kernel -debian bookworm" -run '^TestStreams$/^SCTP$' ./examples/all-ip -sctp`)
	qemu("histories-ipvs", "random histories of backends/ipvs", "",
		`go test -v -count=1 -timeout 30m -exec "$kernel/kernel -debian bookworm" -run '^TestKernel$/^random histories$' ./backends/ipvs -kernel-histories 10`)
	qemu("moves", "a node moves between backends under traffic, with ipvs", `go build -o "$kernel/kpng" ./cmd/kpng
`, `cd test; go test -v -count=1 -timeout 30m -exec "$kernel/kernel -debian bookworm" -run '^Test(BackendsReplaceEachOther|MoveFromIPVSWithoutDrainBreaksConnections)$' ./nodeproxy -kpng "$kernel/kpng"`)
	return parts
}

// clusterParts returns the parts that test whole clusters, with kube-proxy, with kpng's
// backends, and with the agent of examples/cni. They run Kubernetes' own tests of services,
// and tests of kpng.
func clusterParts() []part {
	parts := []part{{
		Name: "cluster-smoke", About: "18 of [Kubernetes' own tests](../operate/cluster.md#kubernetes-own-tests) with kpng", Limit: 40 * time.Minute, Alone: true,
		Command: `trap 'hack/cluster down' EXIT
hack/cluster up
hack/cluster smoke /tmp/kpng-nightly/e2e-smoke`,
	}}
	for _, proxy := range []struct{ name, arguments string }{
		{"kube-proxy", "-- kube-proxy"}, {"nftables", ""}, {"iptables", "-- kpng iptables"}, {"ebpf", "-- kpng ebpf"}, {"cni", "--cni examples/cni"},
	} {
		compare := ""
		if proxy.name != "kube-proxy" {
			compare = fmt.Sprintf("\n[ ! -e /tmp/kpng-nightly/e2e-kube-proxy/summary.tsv ] || hack/cluster compare /tmp/kpng-nightly/e2e-kube-proxy /tmp/kpng-nightly/e2e-%s", proxy.name)
		}
		parts = append(parts, part{
			Name: "cluster-" + proxy.name, Long: true, Alone: true, Limit: 2 * time.Hour,
			About: "[Kubernetes' own tests](../operate/cluster.md#kubernetes-own-tests), `TestChurn` and `TestAllIP` with " + proxy.name,
			Command: fmt.Sprintf(`trap 'hack/cluster down' EXIT
hack/cluster up %[1]s
failed=
hack/cluster e2e /tmp/kpng-nightly/e2e-%[2]s || failed=yes
hack/cluster test -test.v -test.run 'Churn|AllIP' || failed=yes
hack/cluster down
NODES=6 hack/cluster up %[1]s
FOCUS='Topology Hints|Traffic Distribution' hack/cluster e2e /tmp/kpng-nightly/e2e-%[2]s-6 || failed=yes%[3]s
[ -z "$failed" ]`, proxy.arguments, proxy.name, compare),
		})
	}
	return append(parts, part{
		Name: "cluster-upgrades", Long: true, Alone: true, Limit: time.Hour, About: "`TestUpgrades` of a [whole cluster](../operate/cluster.md#kpngs-own-tests)",
		Command: `trap 'hack/cluster down' EXIT
hack/cluster up
hack/cluster test -test.v -test.run Upgrades`,
	})
}
