//go:build ignore

// SPDX-License-Identifier: Apache-2.0
//
// These programs replace addresses of services by addresses of endpoints, when sockets
// connect or send datagrams. docs/operate/ebpf.md describes the maps.

#include <linux/bpf.h>
#include <linux/in.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Apache-2.0";

// The backend sets the real sizes of the maps.
#define SOME 1

// The network namespace of the node, or 0 before Linux 5.14.
const volatile __u64 node_netns = 0;

// If refuse_binds is not 0, sockets of the node cannot use node ports of services. It needs
// the helper set_retval of Linux 5.18.
const volatile __u64 refuse_binds = 0;

// If node_only is not 0, the programs ignore sockets of other network namespaces.
const volatile __u64 node_only = 0;

// The programs translate connected UDP sockets only in the network namespace with this
// cookie, where the backend can destroy them.
const volatile __u64 connected_udp_netns = 0;

// The largest number of clients of a cluster IP with session affinity.
const volatile __u64 max_clients_of_ip = 0;

// If has_exclusions is not 0, the programs look up the cgroups of processes in the map excluded.
const volatile __u64 has_exclusions = 0;

// If count_connections is not 0, the programs count connections by frontend and endpoint.
const volatile __u64 count_connections = 0;

// An address and a port, in network byte order. An IPv4 address is stored as an
// IPv4-mapped IPv6 address, also in sockets of family AF_INET.
struct address {
	__u32 ip[4];
	__u16 port;
	// In the map slots: the probability of the other endpoint, in 1/65536. Otherwise 0.
	__u16 other;
};

// A frontend is an address and a port. A node port has no address. It is a frontend at all
// addresses in the map node_ips that have its family, 4 or 6.
struct frontend {
	__u32 ip[4];
	__u16 port;
	__u8 protocol;
	__u8 node_port;
};

// A list never changes. A change of a frontend replaces its list by one with another ID,
// and a process of the backend uses each ID only once.
struct list {
	__u64 id;
	__u32 count;
	// Session affinity in seconds, or 0.
	__u32 affinity;
};

struct slot {
	__u64 list;
	__u32 index;
	__u32 pad;
};

struct member {
	__u64 list;
	struct address endpoint;
	__u32 pad;
};

// A client of a frontend with session affinity is a network namespace.
struct client {
	__u64 netns;
	struct frontend frontend;
	__u32 pad;
};

struct choice {
	// Time of the client's last new connection, in nanoseconds since the boot.
	__u64 time;
	struct address endpoint;
	__u32 pad;
};

// What a socket uses in place of a service.
struct peer {
	struct address service;
	struct address endpoint;
};

// The use of a service by a UDP socket.
struct use {
	struct peer peer;
	// Time of the last datagram in either direction, or 0.
	__u64 time;
};

// A UDP socket may use this number of services at the same time. It is a power of two.
#define USES 8

struct udp_peers {
	struct bpf_spin_lock lock;
	__u32 pad;
	// Time of the last datagram that the programs did not translate, or 0.
	__u64 other;
	struct use uses[USES];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct frontend);
	__type(value, struct list);
	__uint(max_entries, SOME);
} frontends SEC(".maps");

// If the weights of endpoints differ, each slot i has another endpoint in slot i+OTHERS.
#define OTHERS (1U << 31)

// The endpoints of each list. A list with n endpoints has the slots 0 to n-1.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct slot);
	__type(value, struct address);
	__uint(max_entries, SOME);
} slots SEC(".maps");

// The endpoints that clients of a list may keep. Only lists of UDP frontends, and lists
// with session affinity, have members.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct member);
	__type(value, __u32);
	__uint(max_entries, SOME);
} members SEC(".maps");

// The last choice of each client.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct client);
	__type(value, struct choice);
	__uint(max_entries, SOME);
} clients SEC(".maps");

struct ip {
	__u32 ip[4];
};

// The values of the map node_ips: at a loopback address, node ports are for sockets of the
// node only, because each pod has this address.
enum node_ip {
	EVERYWHERE, NODE_ONLY,
};

// The addresses of the node at which it has node ports.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ip);
	__type(value, __u32);
	__uint(max_entries, 4096);
} node_ips SEC(".maps");

// The number of elements in the map clients of each cluster IP with session affinity. The
// programs increment it, and the backend counts again from time to time. The map is not
// pinned.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ip);
	__type(value, __u64);
	__uint(max_entries, SOME);
} client_counts SEC(".maps");

// The peer of each TCP socket, by its cookie.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u64);
	__type(value, struct peer);
	__uint(max_entries, SOME);
} tcp_peers SEC(".maps");

// The services that each UDP socket uses. The kernel deletes an element with its socket.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct udp_peers);
} udp_peers SEC(".maps");

// The peer of each connected UDP socket, by its cookie. The program sock_release deletes
// an element with its socket.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct peer);
	__uint(max_entries, SOME);
} udp_conns SEC(".maps");

// The programs leave connections and datagrams of processes in cgroups with these IDs, and in
// cgroups below them.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
	__uint(max_entries, 4096);
} excluded SEC(".maps");

// The time at which the backend last ran, in nanoseconds since the boot. It is 0 before
// the first pass has ended, and after an error of the backend.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1);
} heartbeat SEC(".maps");

// The counters, in the order of hooks in programs.go and leftReasons in counts.go.
enum counter {
	CONNECT4, CONNECT6, SENDMSG4, SENDMSG6, RECVMSG4, RECVMSG6, GETPEERNAME4, GETPEERNAME6,
	// Connections and datagrams to a frontend that are left to the other sink.
	ABANDONED, NO_ENDPOINT, LIST_CHANGED, NO_MEMORY, BOUND_PORT, AMBIGUOUS, EXCLUDED,
	COUNTERS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, COUNTERS);
} counters SEC(".maps");

struct pair {
	struct frontend frontend;
	struct address endpoint;
};

// The number of connections and of new uses by UDP sockets. The map is not pinned.
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pair);
	__type(value, __u64);
	__uint(max_entries, SOME);
} connections SEC(".maps");

// count_connection counts a connection. If the map is full, a new pair is not counted.
static __always_inline void count_connection(const struct frontend *frontend, const struct address *endpoint)
{
	if (!count_connections)
		return;
	struct pair pair = {.frontend = *frontend, .endpoint = *endpoint};
	__u64 *value = bpf_map_lookup_elem(&connections, &pair);
	if (value) {
		__sync_fetch_and_add(value, 1);
	} else {
		__u64 one = 1;
		bpf_map_update_elem(&connections, &pair, &one, BPF_NOEXIST);
	}
}

// count adds 1 to a counter. The addition is atomic, because another program may run on the
// same CPU before this one ends.
static __always_inline void count(__u32 counter)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);
	if (value)
		__sync_fetch_and_add(value, 1);
}

// left counts a connection or datagram that is left to the other sink.
static __always_inline int left(__u32 reason)
{
	count(reason);
	return 0;
}

#define SECOND 1000000000ULL
// If the backend has not run for so long, the programs leave all services to the other
// sink, or to another service proxy.
#define PATIENCE (600 * SECOND)

static __always_inline int abandoned(__u64 now)
{
	__u32 zero = 0;
	__u64 *time = bpf_map_lookup_elem(&heartbeat, &zero);
	// The time may be in the future by less than a second, if another CPU wrote it after this
	// one read the clock.
	return !time || !*time || now + SECOND - *time > PATIENCE + SECOND;
}

// beat writes the present time to the map heartbeat. The backend runs it, because a process
// in a time namespace cannot read the clock of the kernel.
SEC("socket")
int beat(struct __sk_buff *packet)
{
	__u32 zero = 0;
	__u64 *time = bpf_map_lookup_elem(&heartbeat, &zero);
	if (time)
		*time = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int equal(const struct address *a, const struct address *b)
{
	return a->ip[0] == b->ip[0] && a->ip[1] == b->ip[1] && a->ip[2] == b->ip[2] && a->ip[3] == b->ip[3] && a->port == b->port;
}

// is_zero returns 1 if value is 0, and otherwise 0. It has no branch, and the barrier stops
// the compiler from making one. So the verifier does not follow both results.
static __always_inline __u64 is_zero(__u64 value)
{
	value |= -value;
	barrier_var(value);
	return ~value >> 63;
}

// same does the same as equal, without a branch.
static __always_inline __u64 same(const struct address *a, const struct address *b)
{
	return is_zero((a->ip[0] ^ b->ip[0]) | (a->ip[1] ^ b->ip[1]) | (a->ip[2] ^ b->ip[2]) | (a->ip[3] ^ b->ip[3]) | (a->port ^ b->port));
}

static __always_inline struct frontend frontend_of(const struct address *service, __u8 protocol)
{
	struct frontend f = {
		.ip = {service->ip[0], service->ip[1], service->ip[2], service->ip[3]},
		.port = service->port,
		.protocol = protocol,
	};
	return f;
}

static __always_inline struct ip ip_of(const struct address *a)
{
	struct ip ip = {.ip = {a->ip[0], a->ip[1], a->ip[2], a->ip[3]}};
	return ip;
}

#define MAPPED bpf_htonl(0xffff)

// on_node reports whether a socket is in the network namespace of the node, and is free to use
// any of its addresses. A socket with a loopback address cannot reach endpoints.
static __always_inline int on_node(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	if (!node_netns || !sk || sk->bound_dev_if || sk->src_ip4 || sk->src_ip6[0] || sk->src_ip6[1] || sk->src_ip6[2] || sk->src_ip6[3])
		return 0;
	return bpf_get_netns_cookie(ctx) == node_netns;
}

// find returns the list of the frontend at an address and port, and writes its key. It
// returns NULL if there is none.
static __always_inline struct list *find(struct bpf_sock_addr *ctx, const struct address *service, __u8 protocol, struct frontend *key)
{
	*key = frontend_of(service, protocol);
	struct list *list = bpf_map_lookup_elem(&frontends, key);
	if (list)
		return list;
	struct ip ip = ip_of(service);
	__u32 *scope = bpf_map_lookup_elem(&node_ips, &ip);
	if (!scope || (*scope == NODE_ONLY && !on_node(ctx)))
		return NULL;
	struct frontend node_port = {
		.port = service->port,
		.protocol = protocol,
		.node_port = ip.ip[2] == MAPPED && !ip.ip[1] && !ip.ip[0] ? 4 : 6,
	};
	*key = node_port;
	return bpf_map_lookup_elem(&frontends, key);
}

// The largest number of cgroups from the root to an excluded cgroup.
#define CGROUP_LEVELS 16

// in_excluded reports whether the calling process is in an excluded cgroup.
static __always_inline int in_excluded(void)
{
	if (!has_exclusions)
		return 0;
#pragma unroll
	for (int level = 1; level <= CGROUP_LEVELS; level++) {
		__u64 id = bpf_get_current_ancestor_cgroup_id(level);
		if (!id)
			return 0;
		if (bpf_map_lookup_elem(&excluded, &id))
			return 1;
	}
	return 0;
}

static __always_inline int is_member(__u64 list, const struct address *endpoint)
{
	struct member member = {.list = list, .endpoint = *endpoint};
	return bpf_map_lookup_elem(&members, &member) != NULL;
}

// admit counts a new client of a service with session affinity. It returns 0 if the service
// has too many clients. Before the first pass of the backend, clients are not counted.
static __always_inline int admit(const struct address *service)
{
	struct ip key = ip_of(service);
	__u64 *count = bpf_map_lookup_elem(&client_counts, &key);
	if (!count)
		return 1;
	if (*count >= max_clients_of_ip)
		return 0;
	__sync_fetch_and_add(count, 1);
	return 1;
}

// If no datagram passed for so long, a use of a service ends. Connection tracking ends a
// flow of UDP after the same time.
#define IDLE (120 * SECOND)

// live reports whether time is not 0, and less than IDLE has passed since then. The time may
// be in the future, if another CPU wrote it after this one read the clock.
static __always_inline int live(__u64 now, __u64 time)
{
	return time && (__s64)(now - time) < (__s64)IDLE;
}

// recall copies the endpoint that the socket uses in place of a service.
static __always_inline int recall(struct udp_peers *known, __u64 now, const struct address *service, struct address *endpoint)
{
	int found = 0;
	bpf_spin_lock(&known->lock);
#pragma unroll
	for (int i = 0; i < USES; i++)
		if (!found && live(now, known->uses[i].time) && equal(&known->uses[i].peer.service, service)) {
			*endpoint = known->uses[i].peer.endpoint;
			found = 1;
		}
	bpf_spin_unlock(&known->lock);
	return found;
}

// remember records that the socket uses a peer. The peer replaces the endpoint stale,
// which the service no longer has. If another thread has meanwhile recorded an endpoint for
// the same service, remember changes the peer to that endpoint.
//
// It returns 0 if the source of an answer would be ambiguous: the socket uses the endpoint
// for another service, or uses too many services, or has sent datagrams that were not
// translated. One of those may have gone to the endpoint.
static __always_inline int remember(struct udp_peers *known, __u64 now, const struct address *stale, struct peer *peer)
{
	// The number of the element of the service, and of an unused element, from 1 on.
	__u64 own = 0, unused = 0, shared = 0;
	int ok = 0;
	bpf_spin_lock(&known->lock);
	// With branches, the verifier would follow 3^8 paths through the loop.
#pragma unroll
	for (__u32 i = 0; i < USES; i++) {
		struct use *use = &known->uses[i];
		__u64 used = ((now - use->time - IDLE) >> 63) & (is_zero(use->time) ^ 1); // live
		barrier_var(used);
		__u64 found = used & same(&use->peer.service, &peer->service);
		barrier_var(found);
		own |= found * (i + 1);
		unused = used * unused | (used ^ 1) * (i + 1);
		shared |= used & (found ^ 1) & same(&use->peer.endpoint, &peer->endpoint);
	}
	struct use *use = &known->uses[((own ? own : unused) - 1) & (USES - 1)];
	if (own && !equal(&use->peer.endpoint, stale)) {
		peer->endpoint = use->peer.endpoint;
		ok = 1;
	} else if (!shared && !live(now, known->other) && (own || unused)) {
		use->peer = *peer;
		ok = 1;
	}
	if (ok)
		use->time = now;
	bpf_spin_unlock(&known->lock);
	return ok;
}

// has_used reports whether the socket has ever used a service. Then remember has filled the
// last element, because it uses the last free one.
static __always_inline int has_used(const struct udp_peers *known)
{
	return known->uses[USES - 1].peer.service.port != 0;
}

// record_peer records the peer of a connected socket. It returns 0 if the map is full for a
// UDP socket, which the backend would never find.
static __always_inline int record_peer(struct bpf_sock_addr *ctx, __u8 protocol, struct peer *peer)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	if (protocol == IPPROTO_UDP)
		return !bpf_map_update_elem(&udp_conns, &cookie, peer, BPF_ANY);
	bpf_map_update_elem(&tcp_peers, &cookie, peer, BPF_ANY);
	return 1;
}

// choose chooses an endpoint for a connection or datagram to a frontend, and records the
// choice. It returns 0 if the frontend does not exist, or is left to the other sink.
//
// The kernel may reuse the memory of a deleted element while choose reads it. But the
// backend deletes a list only after it has replaced the list in the map frontends. So if
// the frontend still has the same list at the end, then all that was read is valid.
static __always_inline int choose(struct bpf_sock_addr *ctx, __u8 protocol, int connecting, struct peer *peer)
{
	struct frontend frontend;
	struct list *found = find(ctx, &peer->service, protocol, &frontend);
	if (!found)
		return 0;
	struct list list = *found;
	__u64 now = bpf_ktime_get_ns();
	if (abandoned(now))
		return left(ABANDONED);
	if (in_excluded())
		return left(EXCLUDED);
	struct client client = {.frontend = frontend};
	struct udp_peers *known = NULL;
	struct address stale = {};
	int kept = 0;
	if (!connecting) {
		// Without the record, the socket would receive answers from the endpoint's address.
		known = ctx->sk ? bpf_sk_storage_get(&udp_peers, ctx->sk, 0, BPF_SK_STORAGE_GET_F_CREATE) : NULL;
		if (!known)
			return left(NO_MEMORY);
		if (recall(known, now, &peer->service, &peer->endpoint)) {
			kept = is_member(list.id, &peer->endpoint);
			if (!kept)
				stale = peer->endpoint;
		}
	} else if (ctx->sk && ctx->sk->src_port) {
		// Connections from one port to two services with the same endpoint would be the same
		// connection. The other sink can change the port of one of them. Unless the caller has
		// bound the socket, the kernel chooses a port later, and avoids ports that are in use.
		return left(BOUND_PORT);
	} else if (list.affinity) {
		client.netns = bpf_get_netns_cookie(ctx);
		struct choice *choice = bpf_map_lookup_elem(&clients, &client);
		// The age is negative if another CPU has written the choice after this one read the time.
		if (choice && (__s64)(now - choice->time) < (__s64)(list.affinity * SECOND)) {
			peer->endpoint = choice->endpoint;
			kept = is_member(list.id, &peer->endpoint);
		}
		if (!choice && !admit(&peer->service))
			return left(NO_MEMORY);
	}
	if (!kept) {
		if (!list.count)
			return left(NO_ENDPOINT);
		struct slot slot = {.list = list.id, .index = bpf_get_prandom_u32() % list.count};
		struct address *chosen = bpf_map_lookup_elem(&slots, &slot);
		if (chosen && chosen->other && (bpf_get_prandom_u32() & 0xffff) < chosen->other) {
			slot.index += OTHERS;
			chosen = bpf_map_lookup_elem(&slots, &slot);
		}
		if (!chosen)
			return left(LIST_CHANGED);
		peer->endpoint = *chosen;
		peer->endpoint.other = 0;
	}
	found = bpf_map_lookup_elem(&frontends, &frontend);
	if (!found || found->id != list.id)
		return left(LIST_CHANGED);
	if (known) {
		if (!remember(known, now, &stale, peer))
			return left(AMBIGUOUS);
		if (!kept)
			count_connection(&frontend, &peer->endpoint);
		return 1;
	}
	if (client.netns) {
		struct choice choice = {.time = now, .endpoint = peer->endpoint};
		bpf_map_update_elem(&clients, &client, &choice, BPF_ANY);
	}
	if (!record_peer(ctx, protocol, peer))
		return left(NO_MEMORY);
	count_connection(&frontend, &peer->endpoint);
	return 1;
}

// translate replaces the address of a service in address by that of an endpoint. It
// returns 0 if nothing changes. Then the rules of the other sink handle the connection.
static __always_inline int translate(struct bpf_sock_addr *ctx, __u8 protocol, int connecting, struct address *address)
{
	struct peer peer = {.service = *address};
	if (!choose(ctx, protocol, connecting, &peer))
		return 0;
	*address = peer.endpoint;
	return 1;
}

// in_other_netns reports whether the programs leave everything that a socket sends, because
// of its network namespace.
static __always_inline int in_other_netns(struct bpf_sock_addr *ctx)
{
	return node_only && bpf_get_netns_cookie(ctx) != node_netns;
}

// note records that a UDP socket uses a destination that was not translated. From now on,
// datagrams from this destination are not answers of a service.
static __always_inline void note(struct bpf_sock_addr *ctx, const struct address *destination)
{
	struct udp_peers *known = ctx->sk ? bpf_sk_storage_get(&udp_peers, ctx->sk, 0, BPF_SK_STORAGE_GET_F_CREATE) : NULL;
	if (!known)
		return;
	known->other = bpf_ktime_get_ns();
	if (!has_used(known))
		return;
	bpf_spin_lock(&known->lock);
#pragma unroll
	for (int i = 0; i < USES; i++)
		if (equal(&known->uses[i].peer.endpoint, destination))
			known->uses[i].time = 0;
	bpf_spin_unlock(&known->lock);
}

// was_connected reports whether a TCP socket was connected before, perhaps to a service. The
// kernel does not clear the destination of a socket when it is disconnected.
static __always_inline int was_connected(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	return sk && (sk->dst_ip4 || sk->dst_ip6[0] || sk->dst_ip6[1] || sk->dst_ip6[2] || sk->dst_ip6[3]);
}

// on_connect translates TCP sockets, and UDP sockets that the backend can destroy when their
// endpoint is removed. Connection tracking moves other connected UDP sockets.
static __always_inline int on_connect(struct bpf_sock_addr *ctx, struct address *address)
{
	if (in_other_netns(ctx))
		return 0;
	if (ctx->protocol == IPPROTO_TCP) {
		if (translate(ctx, IPPROTO_TCP, 1, address))
			return 1;
		if (was_connected(ctx)) {
			__u64 cookie = bpf_get_socket_cookie(ctx);
			bpf_map_delete_elem(&tcp_peers, &cookie);
		}
	} else if (ctx->protocol == IPPROTO_UDP) {
		if (connected_udp_netns && bpf_get_netns_cookie(ctx) == connected_udp_netns && translate(ctx, IPPROTO_UDP, 1, address))
			return 1;
		__u64 cookie = bpf_get_socket_cookie(ctx);
		bpf_map_delete_elem(&udp_conns, &cookie);
		// Without a port, the socket has not sent a datagram to a service, and loses the port
		// that it gets now when it disconnects.
		if (ctx->sk && ctx->sk->src_port)
			note(ctx, address);
	}
	return 0;
}

// connected reports whether a UDP socket is connected. It receives only datagrams of its
// peer, so answers of an endpoint would not reach it. The kernel runs the program at
// sendmsg for such a socket only if the caller names a destination.
static __always_inline int connected(struct bpf_sock_addr *ctx)
{
	return ctx->sk && ctx->sk->state == BPF_TCP_ESTABLISHED;
}

// connected_peer returns what a connected UDP socket uses in place of a service, or NULL.
static __always_inline struct peer *connected_peer(struct bpf_sock_addr *ctx)
{
	if (!connected(ctx))
		return NULL;
	__u64 cookie = bpf_get_socket_cookie(ctx);
	return bpf_map_lookup_elem(&udp_conns, &cookie);
}

static __always_inline int on_sendmsg(struct bpf_sock_addr *ctx, struct address *address)
{
	if (ctx->protocol != IPPROTO_UDP || in_other_netns(ctx))
		return 0;
	struct peer *peer = connected_peer(ctx);
	if (peer && equal(&peer->service, address)) {
		*address = peer->endpoint;
		return 1;
	}
	if (!connected(ctx) && translate(ctx, IPPROTO_UDP, 0, address))
		return 1;
	note(ctx, address);
	return 0;
}

// has_endpoint reports whether a service still has an endpoint of UDP sockets. The backend
// may replace the list of the service meanwhile, and delete the old list.
static __always_inline int has_endpoint(struct bpf_sock_addr *ctx, const struct peer *peer)
{
	struct frontend frontend;
	struct list *list = find(ctx, &peer->service, IPPROTO_UDP, &frontend);
	__u64 id = 0;
#pragma unroll
	for (int i = 0; i < 3; i++) {
		if (i)
			list = bpf_map_lookup_elem(&frontends, &frontend);
		if (!list || (i && list->id == id))
			return 0;
		id = list->id;
		if (is_member(id, &peer->endpoint))
			return 1;
	}
	return 1;
}

// on_recvmsg replaces the address of an endpoint in address, the source of a datagram, by
// that of the service.
static __always_inline int on_recvmsg(struct bpf_sock_addr *ctx, struct address *address)
{
	if (ctx->protocol != IPPROTO_UDP)
		return 0;
	struct peer *own = connected_peer(ctx);
	if (own && equal(&own->endpoint, address)) {
		*address = own->service;
		return 1;
	}
	struct udp_peers *known = ctx->sk ? bpf_sk_storage_get(&udp_peers, ctx->sk, 0, 0) : NULL;
	if (!known)
		return 0;
	__u64 now = bpf_ktime_get_ns();
	if (!has_used(known)) {
		if (live(now, known->other))
			known->other = now;
		return 0;
	}
	struct peer peer = {.endpoint = *address};
	int found = 0;
	bpf_spin_lock(&known->lock);
#pragma unroll
	for (int i = 0; i < USES; i++)
		if (!found && live(now, known->uses[i].time) && equal(&known->uses[i].peer.endpoint, &peer.endpoint)) {
			peer.service = known->uses[i].peer.service;
			known->uses[i].time = now;
			found = 1;
		}
	if (!found && live(now, known->other))
		known->other = now;
	bpf_spin_unlock(&known->lock);
	if (!found || !has_endpoint(ctx, &peer))
		return 0;
	*address = peer.service;
	return 1;
}

// on_getpeername does the same for the peer of a connected socket. A TCP connection
// continues when the service is deleted, so its name does not change.
static __always_inline int on_getpeername(struct bpf_sock_addr *ctx, struct address *address)
{
	struct peer *peer;
	if (ctx->protocol == IPPROTO_TCP) {
		__u64 cookie = bpf_get_socket_cookie(ctx);
		peer = bpf_map_lookup_elem(&tcp_peers, &cookie);
	} else {
		peer = connected_peer(ctx);
	}
	if (!peer || !equal(&peer->endpoint, address))
		return 0;
	*address = peer->service;
	return 1;
}

// sock_release deletes the record of a connected UDP socket that is closed.
SEC("cgroup/sock_release")
int sock_release(struct bpf_sock *socket)
{
	if (socket->protocol == IPPROTO_UDP) {
		__u64 cookie = bpf_get_socket_cookie(socket);
		bpf_map_delete_elem(&udp_conns, &cookie);
	}
	return 1;
}

static __always_inline int has_node_port(__u16 port, __u8 protocol, __u8 family)
{
	struct frontend key = {.port = port, .protocol = protocol, .node_port = family};
	return bpf_map_lookup_elem(&frontends, &key) != NULL;
}

// on_bind reports whether packets to a socket with an address would reach a service instead,
// because its port is a node port. At loopback addresses, a listener of kpng has the port. A
// socket with the address :: also receives IPv4 packets, unless it has the option IPV6_V6ONLY.
static __always_inline int on_bind(struct bpf_sock_addr *ctx, const struct address *address)
{
	if (!address->port || bpf_get_netns_cookie(ctx) != node_netns || abandoned(bpf_ktime_get_ns()))
		return 0;
	__u8 protocol = ctx->protocol;
	struct ip ip = ip_of(address);
	int is4 = ip.ip[2] == MAPPED && !ip.ip[1] && !ip.ip[0];
	if (!ip.ip[3] && (is4 || (!ip.ip[0] && !ip.ip[1] && !ip.ip[2])))
		return has_node_port(address->port, protocol, 4) || (!is4 && has_node_port(address->port, protocol, 6));
	__u32 *scope = bpf_map_lookup_elem(&node_ips, &ip);
	return scope && *scope == EVERYWHERE && has_node_port(address->port, protocol, is4 ? 4 : 6);
}

static __always_inline struct address read4(struct bpf_sock_addr *ctx)
{
	struct address a = {.ip = {0, 0, MAPPED, ctx->user_ip4}, .port = ctx->user_port};
	return a;
}

static __always_inline void write4(struct bpf_sock_addr *ctx, const struct address *a)
{
	ctx->user_ip4 = a->ip[3];
	ctx->user_port = a->port;
}

static __always_inline struct address read6(struct bpf_sock_addr *ctx)
{
	struct address a = {
		.ip = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]},
		.port = ctx->user_port,
	};
	return a;
}

static __always_inline void write6(struct bpf_sock_addr *ctx, const struct address *a)
{
	ctx->user_ip6[0] = a->ip[0];
	ctx->user_ip6[1] = a->ip[1];
	ctx->user_ip6[2] = a->ip[2];
	ctx->user_ip6[3] = a->ip[3];
	ctx->user_port = a->port;
}

#define PROGRAM(hook, family, counter)                            \
	SEC("cgroup/" #hook #family)                              \
	int hook##family(struct bpf_sock_addr *ctx)               \
	{                                                         \
		struct address a = read##family(ctx);             \
		if (on_##hook(ctx, &a)) {                         \
			write##family(ctx, &a);                   \
			count(counter);                           \
		}                                                 \
		return 1;                                         \
	}

PROGRAM(connect, 4, CONNECT4)
PROGRAM(connect, 6, CONNECT6)
PROGRAM(sendmsg, 4, SENDMSG4)
PROGRAM(sendmsg, 6, SENDMSG6)
PROGRAM(recvmsg, 4, RECVMSG4)
PROGRAM(recvmsg, 6, RECVMSG6)
PROGRAM(getpeername, 4, GETPEERNAME4)
PROGRAM(getpeername, 6, GETPEERNAME6)

#define EADDRINUSE 98

#define BIND(family)                                              \
	SEC("cgroup/bind" #family)                                \
	int bind##family(struct bpf_sock_addr *ctx)               \
	{                                                         \
		struct address a = read##family(ctx);             \
		if (!refuse_binds || !on_bind(ctx, &a))           \
			return 1;                                 \
		bpf_set_retval(-EADDRINUSE);                      \
		return 0;                                         \
	}

BIND(4)
BIND(6)
