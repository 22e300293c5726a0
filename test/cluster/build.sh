#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build.sh [e2e] builds the programs of the cluster from Go modules. With e2e, it also
# builds Kubernetes' tests. It always builds kpng's own programs. It builds another program
# only if the program is older than a file in its module's folder.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

missing=
for tool in go runc busybox:busybox-static nc.openbsd:netcat-openbsd sysctl:procps dig:bind9-dnsutils iperf conntrack nft:nftables iptables ip:iproute2 openssl curl wget python3 jq; do
	command -v "${tool%:*}" >/dev/null || missing+=" ${tool#*:}"
done
[ -x /usr/lib/cni/bridge ] || missing+=" containernetworking-plugins"
[ -z "$missing" ] || die "missing:$missing (Debian: apt-get install$missing)"

kubernetes=$(cd "$here/parts/kubernetes" && GOFLAGS=-mod=mod go list -m -f '{{.Version}}' k8s.io/kubernetes)
minor=${kubernetes#v1.}
# The API server selects its features by its version. A build from modules has no version,
# so set it here.
version=k8s.io/component-base/version
flags="-s -w -X $version.gitVersion=$kubernetes -X $version.gitMajor=1 -X $version.gitMinor=${minor%%.*}"

# build MODULE PACKAGE NAME [COMMAND...] builds a program. The default command is go build.
build() {
	local module=$1 package=$2 name=$3; shift 3
	[ $# -gt 0 ] || set -- go build
	[ ! -x "$bin/$name" ] || [ "$(find "$module" -maxdepth 1 -type f -newer "$bin/$name")" ] || return 0
	say "Building $name"
	(cd "$module" && "$@" -ldflags "$flags" -o "$bin/$name.new" "$package")
	mv "$bin/$name.new" "$bin/$name"
}

(cd "$repo" && CGO_ENABLED=0 go build -o "$bin/" ./cmd/kpng ./examples/all-ip)
(cd "$here" && go build -o "$bin/loadbalancer" ./loadbalancer)
build "$repo/test" go.etcd.io/etcd/server/v3 etcd
for name in kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl kubeadm; do
	build "$here/parts/kubernetes" "k8s.io/kubernetes/cmd/$name" "$name"
done
for name in agnhost regression-issue-74839; do
	build "$here/parts/kubernetes" "k8s.io/kubernetes/test/images/$name" "$name"
done
for name in containerd containerd-shim-runc-v2 ctr; do
	build "$here/parts/containerd" "github.com/containerd/containerd/v2/cmd/$name" "$name"
done
build "$here/parts/helm" helm.sh/helm/v4/cmd/helm helm
build "$here/parts/coredns" . coredns
build "$here/parts/pause" . pause
if [ "${1:-}" = e2e ]; then
	build "$here/parts/kubernetes" github.com/onsi/ginkgo/v2/ginkgo ginkgo
	build "$here/parts/kubernetes" k8s.io/kubernetes/test/e2e e2e.test go test -c -vet=off
fi
