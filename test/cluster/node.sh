#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# node.sh I is PID 1 of node I. The node has its own namespaces: network, mount, PID, UTS,
# IPC and cgroup. node.sh runs containerd and kubelet with their default paths. When
# node.sh ends, all processes of the node end.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
i=$1 dir=$run/nodes/$1 group=$PREFIX-node-$1
if [ "${2:-}" != in-cgroups ]; then
	for hierarchy in /sys/fs/cgroup/*/; do
		mkdir -p "$hierarchy$group"
		if [ -f "$hierarchy/cpuset.cpus" ]; then # a new cgroup has no CPUs and no memory nodes
			for file in cpuset.cpus cpuset.mems; do
				cat "$hierarchy/$file" >"$hierarchy$group/$file"
			done
		fi
		echo $$ >"$hierarchy$group/cgroup.procs"
	done
	exec unshare --cgroup "$0" "$i" in-cgroups
fi
for hierarchy in /sys/fs/cgroup/*/; do
	mount --bind "$hierarchy$group" "$hierarchy"
done
hostname "node-$i"
mkdir -p "$dir"/{containerd,kubelet,log,cni,sysctl}
for path in /run /var/lib /var/log; do
	mount -t tmpfs -o mode=755 tmpfs $path
done
mkdir -p /var/lib/{containerd,kubelet,cni} /var/log/{pods,containers} /run/lock
mount --bind "$dir/containerd" /var/lib/containerd
mount --bind "$dir/kubelet" /var/lib/kubelet
mount --make-rshared /
# kubelet requires these values, and would set them for the whole machine. To prevent
# that, replace the files by copies that already contain the values.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
	file=$dir/sysctl/$(tr / _ <<<"${setting%=*}")
	echo "${setting#*=}" >"$file"
	mount --bind "$file" "/proc/sys/${setting%=*}"
done

cat >"$dir/containerd.toml" <<X
version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
disabled_plugins = ['io.containerd.nri.v1.nri', 'io.containerd.tracing.processor.v1.otlp', 'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.devmapper', 'io.containerd.snapshotter.v1.zfs', 'io.containerd.snapshotter.v1.blockfile', 'io.containerd.snapshotter.v1.erofs']
[grpc]
  address = '/run/containerd/containerd.sock'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '$(cat "$STATE/pause-image")'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['/usr/lib/cni']
    conf_dir = '$dir/cni'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = '$(command -v runc)'
      SystemdCgroup = false
X
cat >"$dir/kubelet.yaml" <<X
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
clusterDNS: ["$dns_ip"]
clusterDomain: cluster.local
resolvConf: $dir/resolv.conf
imageGCHighThresholdPercent: 100
evictionHard: {imagefs.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%"}
volumePluginDir: /var/lib/kubelet/volumeplugins
registryPullQPS: 0
eventRecordQPS: 0
X
echo "nameserver $net4.1" >"$dir/resolv.conf"
containerd -c "$dir/containerd.toml" >"$dir/log/containerd.log" 2>&1 &
wait_for 60 containerd ctr version
ctr -n k8s.io images import --local --no-unpack "$STATE/images.tar" >"$dir/log/import.log" 2>&1 ||
	ctr -n k8s.io images import "$STATE/images.tar" >>"$dir/log/import.log" 2>&1
kubelet --config "$dir/kubelet.yaml" --kubeconfig "$run/node-$i.kubeconfig" --hostname-override "node-$i" \
	--node-ip "$net4.$((10 + i)),$net6:$((10 + i))" --node-labels "topology.kubernetes.io/zone=zone-$(((i - 1) % ZONES + 1))" \
	>"$dir/log/kubelet.log" 2>&1 &
while :; do wait || true; sleep 1; done
