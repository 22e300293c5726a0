#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The equivalent of examples/all-ip as a script for kpng-callout: all traffic to the
# external IPs of services, of any protocol and port, goes to pods on this
# node. It needs jq, iptables and ip6tables.
#
#   CALLOUT=examples/kpng-callout/all-ip.sh \
#       kpng-callout --service-proxy-name kpng-example --all-ports
#
# All rules are in the script's own chains, named $CHAIN… (KPNG-ALL-IP). Each run replaces
# them completely, so they match the input. To other chains, the script only adds a jump
# to its own.
#
#   all-ip.sh cleanup
#
# removes the jumps and the chains.
set -eu
chain=${CHAIN:-KPNG-ALL-IP}

# jumps lists the table, the built-in chain, and our chain to which it jumps.
jumps() {
	cat <<-END
		nat PREROUTING $chain
		nat OUTPUT $chain
		nat POSTROUTING $chain-HAIRPIN
		filter INPUT $chain
		filter FORWARD $chain
		filter OUTPUT $chain
	END
}

# rules FAMILY KEY turns the services on standard input into input for
# iptables-restore.
rules() {
	jq -nr --arg family "$1" --arg key "$2" --arg chain "$chain" '
		# The external IPs to serve, the pods on this node for each, and whether
		# there is a usable one anywhere.
		[ inputs
		| select(.Service.MapIP)
		| select((.Service.IPFamilies // [$family]) | index($family))
		| ([.Lost[]?.IP] + (.Service.IPs.LoadBalancerIPs[$key]? // [])) as $others
		| [.Endpoints[]? | select(.Local and .Scopes.External) | .IPs[$key][0]? // empty] as $pods
		| any(.Unusable[]?; .Family == $family) as $unusable
		| .Service.IPs.ExternalIPs[$key][]?
		| select(. as $ip | $others | index($ip) | not)
		| {ip: ., $pods, $unusable} ] as $all

		| "*nat", ":\($chain) - [0:0]", ":\($chain)-HAIRPIN - [0:0]",
		  ($all[] | .ip as $ip | .pods | length as $n | to_entries[]
			# The first of n pods gets one connection in n, the next one in n-1 of
			# the rest, and the last all remaining ones.
			| ($n - .key) as $left
			| "-A \($chain) -d \($ip)"
				+ (if $left > 1 then " -m statistic --mode random --probability \(1 / $left)" else "" end)
				+ " -j DNAT --to-destination \(.value)"),
		  # A pod does not answer packets from its own address.
		  ([$all[].pods[]] | unique[] | "-A \($chain)-HAIRPIN -s \(.) -d \(.) -j MASQUERADE"),
		  "COMMIT",
		  "*filter", ":\($chain) - [0:0]",
		  ($all[] | select(.pods == [])
			| if .unusable then
				"-A \($chain) -d \(.ip) -p tcp -j REJECT --reject-with tcp-reset",
				"-A \($chain) -d \(.ip) -j REJECT"
			  else
				"-A \($chain) -d \(.ip) -j DROP"
			  end),
		  "COMMIT"'
}

# serve IPTABLES FAMILY KEY
serve() {
	# Not in one pipe with the next command: a failed jq must change nothing.
	restore=$(printf '%s\n' "$services" | rules "$2" "$3")
	printf '%s\n' "$restore" | "$1-restore" -w --noflush
	jumps | while read -r table from to; do
		"$1" -w -t "$table" -C "$from" -j "$to" 2>/dev/null || "$1" -w -t "$table" -I "$from" -j "$to"
	done
}

# cleanup IPTABLES
cleanup() {
	jumps | while read -r table from to; do
		while "$1" -w -t "$table" -D "$from" -j "$to" 2>/dev/null; do :; done
	done
	for rest in "nat $chain" "nat $chain-HAIRPIN" "filter $chain"; do
		table=${rest% *} ours=${rest#* }
		"$1" -w -t "$table" -F "$ours" 2>/dev/null || continue
		"$1" -w -t "$table" -X "$ours"
	done
}

if [ "${1-}" = cleanup ]; then
	cleanup iptables
	cleanup ip6tables
	exit
fi
services=$(cat)
serve iptables IPv4 V4
serve ip6tables IPv6 V6

# Without --all-ports, no service has the field MapIP.
printf '%s\n' "$services" | jq -rn '
	[inputs.Service] as $all | [$all[] | select(.MapIP | not)] as $others
	| select($others != [])
	| "\($others | length) services not served, such as \($others[0] | "\(.Namespace)/\(.Name)"): "
		+ "they are not all-ports services; start kpng-callout, or its kpng server, with --all-ports",
	  if $others == $all then "" | halt_error(1) else empty end' >&2
