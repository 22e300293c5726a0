# SPDX-License-Identifier: Apache-2.0
# lib.sh has settings and functions. The other scripts of the test cluster source it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)

# STATE is the folder for all files of the cluster. The names of the cluster's network
# namespaces and cgroups begin with PREFIX. NODES is the number of nodes. ZONES is the
# number of zones among which the nodes are distributed.
STATE=${CLUSTER_STATE:-$HOME/.cache/kpng/cluster}
PREFIX=${CLUSTER_PREFIX:-kpng}
NODES=${NODES:-3} ZONES=${ZONES:-3}
bin=$STATE/bin run=$STATE/run
boot=$(cat /proc/sys/kernel/random/boot_id)
[ "$(cat "$run/boot" 2>/dev/null || echo "$boot")" = "$boot" ] || rm -rf "$run" # delete the state of a cluster that ran before a reboot
mkdir -p "$bin" "$run"
if [ -f "$run/settings" ]; then . "$run/settings"; fi # the settings of the running cluster

# The address of the control plane ends in 1. The address of node I ends in 10+I.
cp_ns=$PREFIX-cp
net4=10.254.0 net6=fd00:254:
pod_cidr=10.244.0.0/16,fd00:10:244::/56
service_cidr=10.96.0.0/16,fd00:10:96::/112
dns_ip=10.96.0.10
export PATH=$bin:$PATH

die() { echo "hack/cluster: $*" >&2; exit 1; }
say() { echo "$(date +%T) $*" >&2; }

node_ns() { echo "$PREFIX-$1"; }
# in_cp and in_node run a command in a network namespace.
in_cp() { nsenter --net="/run/netns/$cp_ns" "$@"; }
in_node() { local i=$1; shift; nsenter --net="/run/netns/$(node_ns "$i")" "$@"; }
kubectl() { in_cp "$bin/kubectl" --kubeconfig "$run/admin.kubeconfig" "$@"; }

# start NAME LOG NAMESPACE COMMAND... runs a command in a network namespace in the
# background. It writes the process ID to $run/NAME.pid.
start() {
	local name=$1 log=$2 namespace=$3; shift 3
	(nsenter --net="/run/netns/$namespace" "$@" >"$log" 2>&1 </dev/null & echo $! >"$run/$name.pid")
}

# ebpf_flags I prints the flags of the backend ebpf for node I, and mounts its file system.
ebpf_flags() {
	local bpffs=$run/nodes/$1/bpf
	mkdir -p "$bpffs"
	mountpoint -q "$bpffs" || mount -t bpf bpf "$bpffs"
	echo "--bpffs=$bpffs --cgroup=$(findmnt -n -t cgroup2 -o TARGET | head -n 1)/$PREFIX-node-$1"
}

# require_cluster fails unless hack/cluster up has started a cluster.
require_cluster() { [ -f "$run/settings" ] || die "no cluster is up: start one with hack/cluster up"; }

running() { [ -f "$run/$1.pid" ] && kill -0 "$(cat "$run/$1.pid")" 2>/dev/null; }

# stop NAME ends the process that start NAME has started. It sends SIGTERM, and SIGKILL
# after ten seconds.
stop() {
	local file=$run/$1.pid pid
	[ -f "$file" ] || return 0
	pid=$(cat "$file")
	kill "$pid" 2>/dev/null || true
	for _ in $(seq 100); do
		kill -0 "$pid" 2>/dev/null || break
		sleep 0.1
	done
	kill -9 "$pid" 2>/dev/null || true
	rm -f "$file"
}

# wait_for SECONDS WHAT COMMAND... repeats a command until it succeeds. After SECONDS, it
# prints WHAT and fails.
wait_for() {
	local seconds=$1 what=$2; shift 2
	for _ in $(seq $((seconds * 5))); do
		! "$@" >/dev/null 2>&1 || return 0
		sleep 0.2
	done
	say "after $seconds s still waiting: $what"
	return 1
}

each_node() { seq "$NODES"; }

# start_proxy NAME I COMMAND... runs a service proxy or agent on node I. It writes the
# process ID to $run/NAME-I.pid. It replaces the commands kube-proxy, kpng, and kpng with
# the name of a backend by full commands with flags.
start_proxy() {
	local name=$1 i=$2 words=() word flags=; shift 2
	case $* in
	kpng | kpng\ nftables | kpng\ iptables | kpng\ ipvs | kpng\ ebpf)
		[ "$*" != "kpng ebpf" ] || flags=$(ebpf_flags "$i")
		set -- "$bin/kpng" kube --kubeconfig '{{KUBECONFIG}}' to-local "${2:-nftables}" --node-name '{{NODE}}' \
		--cluster-cidr '{{CLUSTER_CIDR}}' --kubeproxy-metrics \
		--healthz-bind-address 0.0.0.0:10256 --metrics-bind-address 127.0.0.1:10249 $flags ;;
	# nf_conntrack_max can be changed only in the machine's first network namespace.
	kube-proxy) set -- "$bin/kube-proxy" --kubeconfig '{{KUBECONFIG}}' --hostname-override '{{NODE}}' \
		--proxy-mode nftables --cluster-cidr '{{CLUSTER_CIDR}}' --conntrack-max-per-core 0 \
		--healthz-bind-address 0.0.0.0:10256 ;;
	esac
	for word in "$@"; do
		word=${word//'{{KUBECONFIG}}'/$run/proxy.kubeconfig}
		word=${word//'{{NODE}}'/node-$i}
		word=${word//'{{NODE_IP}}'/$net4.$((10 + i)),$net6:$((10 + i))}
		word=${word//'{{CLUSTER_CIDR}}'/$pod_cidr}
		word=${word//'{{CNI_DIR}}'/$run/nodes/$i/cni}
		words+=("$word")
	done
	start "$name-$i" "$run/log/$name-$i.log" "$(node_ns "$i")" "${words[@]}"
}

# usage I prints three numbers about the proxy of node I: the CPU seconds of the proxy and
# of its ended child processes, the peak of its resident memory since reset_peak in MB,
# and its current resident memory in MB.
usage() {
	local pid
	pid=$(cat "$run/proxy-$1.pid")
	sed 's/.*) //' "/proc/$pid/stat" | awk -v hz="$(getconf CLK_TCK)" '{ printf "%.2f", ($12 + $13 + $14 + $15) / hz }' # see proc(5)
	awk '/^(VmHWM|VmRSS):/ { printf " %d", $2 / 1024 }' "/proc/$pid/status"
}
# reset_peak I sets the peak of the proxy's resident memory to the current value.
reset_peak() { echo 5 >"/proc/$(cat "$run/proxy-$1.pid")/clear_refs"; }
