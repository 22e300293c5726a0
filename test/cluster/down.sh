#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ends the processes of the cluster, and removes its namespaces, cgroups and state. The
# programs and images stay.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
for i in $(each_node); do
	stop "proxy-$i"
	# The pid is that of unshare. Its child is the node's PID 1, whose end is that of
	# everything on the node.
	if [ -f "$run/node-$i.pid" ]; then
		pkill -KILL -P "$(cat "$run/node-$i.pid")" || true
		stop "node-$i"
	fi
done
for name in loadbalancer coredns scheduler controller-manager apiserver etcd; do
	stop "$name"
done
for ns in $(ip netns list | awk '{ print $1 }' | grep -E "^$PREFIX-(cp|[0-9]+)$"); do
	ip netns delete "$ns"
done
for _ in $(seq 20); do # processes that were killed leave their cgroups a little later
	find /sys/fs/cgroup -mindepth 2 -depth -type d -path "/sys/fs/cgroup/*/$PREFIX-node-*" -exec rmdir {} + 2>/dev/null && break
	sleep 0.5
done
rm -rf "$run"
