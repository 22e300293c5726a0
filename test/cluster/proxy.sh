#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# proxy.sh COMMAND... runs a service proxy or agent on each node, and waits until pods can
# use services. Before that, it ends the earlier proxy and removes its rules.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
require_cluster

# tables I prints the nftables tables of node I, except the tables of iptables.
tables() { in_node "$1" nft list tables | sed 's/^table //' | grep -vE '^(ip|ip6) (nat|filter|mangle|raw)$' || true; }

for i in $(each_node); do
	stop "proxy-$i"
	in_node "$i" kube-proxy --cleanup >/dev/null 2>&1 || true
	for backend in nftables iptables ipvs; do
		in_node "$i" kpng cleanup "$backend" >/dev/null 2>&1 || true
	done
	if mountpoint -q "$run/nodes/$i/bpf"; then
		# shellcheck disable=SC2046 # a list of flags
		in_node "$i" kpng cleanup ebpf $(ebpf_flags "$i") >/dev/null
	fi
	tables "$i" | while read -r table; do in_node "$i" nft delete table $table; done
	in_node "$i" conntrack -F >/dev/null 2>&1 || true
done

for i in $(each_node); do
	start_proxy proxy "$i" "$@"
done
resolves() { in_node "$1" dig +short +tries=1 +time=1 "@$dns_ip" kubernetes.default.svc.cluster.local | grep -q .; }
for i in $(each_node); do
	wait_for 60 "DNS through the proxy of node-$i" resolves "$i" || { tail "$run/log/proxy-$i.log" >&2; exit 1; }
done
all_ready() { [ "$(kubectl get nodes -o json | jq '[.items[].status.conditions[] | select(.type == "Ready" and .status == "True")] | length')" = "$NODES" ]; }
wait_for 180 "nodes to be ready" all_ready || { kubectl get nodes >&2; exit 1; }
say "The proxy serves all nodes"
