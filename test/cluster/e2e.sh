#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# e2e.sh OUT runs Kubernetes' own tests of services against the proxy of the cluster. It
# fails if a test fails, if no test passes, or if a proxy has ended. It writes these files
# to the folder OUT:
#
#   summary.tsv        for each test: name, result, seconds, reason
#   usage.tsv          for each node: name, CPU seconds of the proxy, MB of its resident
#                      memory (peak, and at the end)
#   junit_01.xml       the report of ginkgo
#   e2e.log            the output of ginkgo
#   proxy-I.log        the log of the proxy on node I
#   ruleset-I.txt      the nftables tables of node I after the tests
#
# These variables are settings. FOCUS and SKIP are regular expressions that select tests
# by name. LABELS is a label filter of ginkgo. PROCS is the number of tests that run at
# the same time.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
require_cluster
out=$(mkdir -p "$1" && cd "$1" && pwd)
focus=${FOCUS:-'\[sig-network\] (Services|LoadBalancers|Service CIDRs|ServiceCIDR and IPAddress API|Service endpoints latency|Networking (Granular Checks|should check)|EndpointSlice|Endpoints|Conntrack|KubeProxy|HostPort|Traffic Distribution|Topology Hints|Proxy|DNS|API Server|Ingress(Class)? API|\[Feature:IPv6DualStack\])'}
labels=${LABELS:-'(Feature: isSubsetOf {IPv6DualStack, LoadBalancer}) && !Disruptive'}
# These tests are omitted:
# - SCTPConnectivity: many kernels lack SCTP. The conformance tests of kpng send it in QEMU.
# - Disruptive: they log into nodes with SSH, or restart pods of kube-proxy and of the API server,
#   as TestUpgrades does.
# - "should only target nodes with endpoints": it connects to IPv6 addresses of a service with IPv4
#   only, so it fails with kube-proxy, too.
# - "DNS configMap": they change CoreDNS in pods, but here CoreDNS is a process.
# - the features LocalhostNodePorts and KubeProxyNFAcct: they are for kube-proxy's mode iptables.
skip=${SKIP:-'SCTPConnectivity|DNS configMap|should only target nodes with endpoints'}
clean() { local list; list=$(kubectl get namespaces -o name) && ! grep -qvE '/(default|kube-.*)$' <<<"$list"; }
wait_for 180 "namespaces of the last run" clean
for i in $(each_node); do
	reset_peak "$i"
	before[i]=$(usage "$i")
done
began=$SECONDS code=0
rm -f "$out/usage.tsv"
# The processes of ginkgo connect to each other on loopback. So all of them run in the
# network namespace of the control plane.
in_cp env KUBECONFIG="$run/admin.kubeconfig" ginkgo --procs="${PROCS:-4}" --no-color --silence-skips --timeout=90m \
	--focus="$focus" --skip="$skip" --label-filter="$labels" --output-interceptor-mode=none "$bin/e2e.test" -- \
	--kubeconfig="$run/admin.kubeconfig" --provider=skeleton --num-nodes="$NODES" --kubectl-path="$bin/kubectl" --report-dir="$out" \
	--allowed-not-ready-nodes=0 --dump-logs-on-failure=false --delete-namespace-on-failure=true --node-os-distro=debian >"$out/e2e.log" 2>&1 || code=$?
for i in $(each_node); do
	running "proxy-$i" || { say "The proxy of node-$i has ended"; code=1; }
	usage "$i" | awk -v node="node-$i" -v before="${before[i]}" '{ split(before, b, " "); printf "%s\t%.2f\t%s\t%s\n", node, $1 - b[1], $2, $3 }' >>"$out/usage.tsv" || true
	cp "$run/log/proxy-$i.log" "$out/"
	in_node "$i" nft list ruleset >"$out/ruleset-$i.txt" 2>/dev/null || true
done
python3 "$here/summary.py" "$out/junit_01.xml" >"$out/summary.tsv"
cut -f2 "$out/summary.tsv" | sort | uniq -c >&2
grep -q $'\tpassed\t' "$out/summary.tsv" || { say "No test passed: see $out/e2e.log"; code=1; }
cat "$out/usage.tsv" >&2
say "Tests took $((SECONDS - began)) s"
exit $code
