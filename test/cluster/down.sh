#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# down.sh ends the processes of the cluster, and removes its namespaces, cgroups and state.
# It keeps the built programs and images.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
for i in $(each_node); do
	stop "proxy-$i"
	# The file has the process ID of unshare. The child of unshare is the node's PID 1.
	# When PID 1 ends, all processes of the node end.
	if [ -f "$run/node-$i.pid" ]; then
		pkill -KILL -P "$(cat "$run/node-$i.pid")" || true
		stop "node-$i"
	fi
	umount "$run/nodes/$i/bpf" 2>/dev/null || true # this also detaches the programs of kpng
done
for name in loadbalancer coredns scheduler controller-manager apiserver etcd; do
	stop "$name"
done
for ns in $(ip netns list | awk '{ print $1 }' | grep -E "^$PREFIX-(cp|[0-9]+)$"); do
	ip netns delete "$ns"
done
for _ in $(seq 20); do # the cgroups are busy until the killed processes have ended
	find /sys/fs/cgroup -mindepth 2 -depth -type d -path "/sys/fs/cgroup/*/$PREFIX-node-*" -exec rmdir {} + 2>/dev/null && break
	sleep 0.5
done
rm -rf "$run"
