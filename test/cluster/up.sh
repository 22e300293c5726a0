#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# up.sh [cni] starts the cluster, but no service proxy. With the argument cni, it writes no
# CNI configuration and makes no routes between nodes, because an agent does both.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ ! -f "$run/settings" ] || die "a cluster is up, or its start failed: end it with hack/cluster down"
agent=${1:-}
began=$SECONDS
mkdir -p "$run"/{pki,log,nodes}
printf 'NODES=%s ZONES=%s\n' "$NODES" "$ZONES" >"$run/settings"
echo "$boot" >"$run/boot"

# The network is a bridge in the namespace of the control plane. A veth pair connects each
# node to the bridge.
add_namespace() {
	ip netns add "$1"
	ip -n "$1" link set lo up
	nsenter --net="/run/netns/$1" sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0
}
add_namespace "$cp_ns"
in_cp sysctl -qw net.ipv4.fib_multipath_hash_policy=1 net.ipv6.fib_multipath_hash_policy=1 # a node per connection
ip -n "$cp_ns" link add br0 type bridge
ip -n "$cp_ns" link set br0 up
ip -n "$cp_ns" addr add $net4.1/24 dev br0
ip -n "$cp_ns" addr add $net6:1/64 dev br0 nodad
# The source addresses of clients of load balancers: see loadbalancer/main.go.
ip -n "$cp_ns" addr add 203.0.113.1/32 dev br0
ip -n "$cp_ns" addr add 2001:db8:52::1/128 dev br0 nodad
for i in $(each_node); do
	ns=$(node_ns "$i")
	add_namespace "$ns"
	ip -n "$cp_ns" link add "veth$i" type veth peer name eth0 netns "$ns"
	ip -n "$cp_ns" link set "veth$i" master br0 up
	ip -n "$ns" link set eth0 up
	ip -n "$ns" addr add $net4.$((10 + i))/24 dev eth0
	ip -n "$ns" addr add $net6:$((10 + i))/64 dev eth0 nodad
	ip -n "$ns" route add default via $net4.1
	ip -n "$ns" -6 route add default via $net6:1
done

# Each cluster has new certificates and tokens.
(
	cd "$run/pki"
	openssl ecparam -name prime256v1 -genkey -noout -out ca.key
	openssl req -x509 -new -key ca.key -subj /CN=kpng-cluster -days 365 -out ca.crt
	openssl ecparam -name prime256v1 -genkey -noout -out server.key
	openssl req -new -key server.key -subj /CN=kube-apiserver -out server.csr
	cat >extensions <<X
subjectAltName=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:$net4.1,IP:10.96.0.1,IP:fd00:10:96::1
extendedKeyUsage=serverAuth
X
	openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile extensions -out server.crt
	openssl genrsa -traditional -out accounts.key 2048
	(umask 077; : >tokens.csv)
) 2>"$run/log/openssl.log" || die "cannot make certificates: see $run/log/openssl.log"

# kubeconfig FILE USER [GROUP] makes a token for a user, and the kubeconfig FILE.kubeconfig.
kubeconfig() {
	local token
	token=$(openssl rand -hex 16)
	echo "$token,$2,$2${3:+,\"$3\"}" >>"$run/pki/tokens.csv"
	cat >"$run/$1.kubeconfig" <<X
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://$net4.1:6443", certificate-authority: "$run/pki/ca.crt"}}]
users: [{name: u, user: {token: "$token"}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
X
	chmod 600 "$run/$1.kubeconfig"
}
kubeconfig admin admin system:masters
kubeconfig proxy system:kube-proxy
for i in $(each_node); do
	kubeconfig "node-$i" "system:node:node-$i" system:nodes
done

# Start the control plane.
start etcd "$run/log/etcd.log" "$cp_ns" "$bin/etcd" --data-dir "$run/etcd" --unsafe-no-fsync --log-level warn \
	--listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
start apiserver "$run/log/apiserver.log" "$cp_ns" "$bin/kube-apiserver" \
	--etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=6443 --advertise-address=$net4.1 \
	--tls-cert-file="$run/pki/server.crt" --tls-private-key-file="$run/pki/server.key" \
	--client-ca-file="$run/pki/ca.crt" --token-auth-file="$run/pki/tokens.csv" \
	--authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --service-cluster-ip-range=$service_cidr \
	--service-account-issuer=https://kubernetes.default.svc.cluster.local \
	--service-account-key-file="$run/pki/accounts.key" --service-account-signing-key-file="$run/pki/accounts.key" \
	--kubelet-preferred-address-types=InternalIP --allow-privileged=true --profiling=false
wait_for 120 "kube-apiserver" kubectl get --raw /readyz || { tail "$run/log/apiserver.log" >&2; exit 1; }
start controller-manager "$run/log/controller-manager.log" "$cp_ns" "$bin/kube-controller-manager" \
	--kubeconfig="$run/admin.kubeconfig" --leader-elect=false --root-ca-file="$run/pki/ca.crt" \
	--service-account-private-key-file="$run/pki/accounts.key" --service-cluster-ip-range=$service_cidr \
	--allocate-node-cidrs=true --cluster-cidr=$pod_cidr --node-cidr-mask-size-ipv4=24 --node-cidr-mask-size-ipv6=64
start scheduler "$run/log/scheduler.log" "$cp_ns" "$bin/kube-scheduler" --kubeconfig="$run/admin.kubeconfig" --leader-elect=false

# Start the nodes.
for i in $(each_node); do
	start "node-$i" "$run/log/node-$i.log" "$(node_ns "$i")" \
		unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc --propagation private "$here/node.sh" "$i"
done
pod_cidrs() { kubectl get node "node-$1" -o jsonpath='{.spec.podCIDRs[*]}' | grep .; }
for i in $(each_node); do
	wait_for 120 "registration of node-$i" pod_cidrs "$i" || { tail "$run/nodes/$i/log/kubelet.log" >&2; exit 1; }
	read -r cidr4 cidr6 < <(pod_cidrs "$i")
	for ns in "$cp_ns" $(each_node | grep -vx "$i" | while read -r j; do node_ns "$j"; done); do
		[ "$ns" = "$cp_ns" ] || [ -z "$agent" ] || continue
		ip -n "$ns" route replace "$cidr4" via $net4.$((10 + i))
		ip -n "$ns" -6 route replace "$cidr6" via $net6:$((10 + i))
	done
	[ -z "$agent" ] || continue
	# With the plug-in ptp, packets between two pods of the node are routed. So connection
	# tracking sees both directions.
	cat >"$run/nodes/$i/cni/.new" <<X
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "ptp", "mtu": 1500, "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam",
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}], "ranges": [[{"subnet": "$cidr4"}], [{"subnet": "$cidr6"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
X
	mv "$run/nodes/$i/cni/.new" "$run/nodes/$i/cni/10-pods.conflist"
done

# CoreDNS is a process in the network namespace of the control plane, and the only endpoint
# of the Service kube-dns. So each DNS query of a pod goes through the proxy under test.
cat >"$run/Corefile" <<X
.:53 {
  bind $net4.1 $net6:1
  errors
  kubernetes cluster.local in-addr.arpa ip6.arpa {
    kubeconfig $run/admin.kubeconfig
    pods insecure
    ttl 5
  }
  cache 5
}
X
start coredns "$run/log/coredns.log" "$cp_ns" "$bin/coredns" -conf "$run/Corefile"
kubectl apply -f - >/dev/null <<X
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec: {clusterIP: $dns_ip, ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns, endpointslice.kubernetes.io/managed-by: kpng-cluster}}
addressType: IPv4
endpoints: [{addresses: ["$net4.1"], conditions: {ready: true}}]
ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
X
# Start the implementation of services of type LoadBalancer.
start loadbalancer "$run/log/loadbalancer.log" "$cp_ns" "$bin/loadbalancer" --kubeconfig "$run/admin.kubeconfig"
say "Control plane and $NODES nodes started in $((SECONDS - began)) s"
