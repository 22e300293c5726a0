#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# images.sh makes $STATE/images.tar, which contains the container images for the pods of the
# cluster. It downloads nothing. The images share one layer, which contains programs of this
# machine and programs that build.sh has built. The images have the names that Kubernetes'
# tests use.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
for file in "${BASH_SOURCE[0]}" "$bin/agnhost" "$bin/coredns" "$bin/pause" "$bin/regression-issue-74839"; do
	[ "$STATE/images.tar" -nt "$file" ] || stale=1
done
[ "${stale:-}" ] || exit 0
say "Making images"
work=$STATE/images root=$STATE/images/root
rm -rf "$work"
mkdir -p "$root"/{bin,sbin,usr/bin,usr/sbin,usr/local/bin,etc,tmp,var/tmp,var/log,root,proc,sys,dev,run,uploads,home,www}
chmod 1777 "$root"/{tmp,var/tmp,uploads}

# libraries FILE copies the shared libraries of a program.
libraries() {
	{ ldd "$1" 2>/dev/null || true; } | { grep -o '/[^ ]*' || true; } | while read -r library; do
		mkdir -p "$root$(dirname "$library")"
		[ -e "$root$library" ] || cp -L "$library" "$root$library"
	done
}
# program NAME [AS] copies a program of this machine. It replaces the program of busybox
# with this name.
program() {
	local path
	path=$(readlink -f "$(command -v "$1")")
	rm -f "$root/bin/${2:-$1}"
	cp "$path" "$root/bin/${2:-$1}"
	libraries "$path"
}
cp "$(command -v busybox)" "$root/bin/busybox"
for name in $(busybox --list); do
	[ "$name" = busybox ] || ln -s busybox "$root/bin/$name"
done
for name in bash curl wget dig nslookup host ip ss iperf conntrack getent; do program "$name"; done
program nc.openbsd nc
program bash sh # the shell of busybox runs the nc and ip of busybox instead of those in PATH
ln -s /bin/iperf "$root/usr/local/bin/iperf"
for name in agnhost coredns pause regression-issue-74839; do
	cp "$bin/$name" "$root/"
	libraries "$bin/$name"
done
ln -s agnhost "$root/agnhost-2"
cp "$(cd "$here/parts/kubernetes" && go list -f '{{.Dir}}' k8s.io/kubernetes/test/images/agnhost)"/porter/localhost.* "$root/" || true
echo tries=1 >"$root/etc/wgetrc" # do not retry, like the wget of busybox
cat >"$root/etc/passwd" <<X
root:x:0:0:root:/root:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/sh
user-defined-in-image:x:1000:1000::/home:/bin/sh
X
printf 'root:x:0:\nnogroup:x:65534:\nuser-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\n' >"$root/etc/group"
printf 'hosts: files dns\npasswd: files\ngroup: files\n' >"$root/etc/nsswitch.conf"
cp /etc/services /etc/protocols "$root/etc/" 2>/dev/null || true
echo welcome >"$root/www/index.html"
tar -C "$root" --numeric-owner --owner=0 --group=0 -cf "$work/layer.tar" .
layer=$(sha256sum "$work/layer.tar" | cut -d' ' -f1)

entries=
# image ENTRYPOINT COMMAND NAME... adds an image with these names. ENTRYPOINT and COMMAND
# are JSON.
image() {
	local entrypoint=$1 command=$2 config hash tags; shift 2
	[ $# -gt 0 ] || return 0
	config=$(jq -nc --argjson e "$entrypoint" --argjson c "$command" --arg l "sha256:$layer" '{architecture: "amd64", os: "linux",
		config: {Env: ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], Entrypoint: $e, Cmd: $c, WorkingDir: "/"},
		rootfs: {type: "layers", diff_ids: [$l]}, history: [{created_by: "test/cluster"}]}')
	hash=$(printf %s "$config" | sha256sum | cut -d' ' -f1)
	printf %s "$config" >"$work/$hash.json"
	tags=$(printf '%s\n' "$@" | jq -Rnc '[inputs]')
	entries+=" {\"Config\":\"$hash.json\",\"RepoTags\":$tags,\"Layers\":[\"layer.tar\"]}"
}
# names NAME prints the full names, with registry and tag, that Kubernetes' tests use for an
# image.
names() { grep -E "/$1:" "$work/names" | grep -v authenticated | sort -u; }
(cd "$here/parts/kubernetes" && go run ./images) >"$work/names"
image '["/agnhost"]' '["pause"]' $(names agnhost)
image null '["sh"]' $(names busybox) $(names distroless-iptables) $(names glibc-dns-testing)
image null '["httpd","-f","-p","80","-h","/www"]' $(names nginx)
image '["/regression-issue-74839"]' null $(names regression-issue-74839)
image '["/pause"]' null $(names pause)
jq -s . <<<"$entries" >"$work/manifest.json"
tar -C "$work" -cf "$STATE/images.tar.new" manifest.json layer.tar $(cd "$work" && ls | grep -E '^[0-9a-f]{64}\.json$')
names pause | head -n 1 >"$STATE/pause-image"
mv "$STATE/images.tar.new" "$STATE/images.tar"
rm -rf "$work"
