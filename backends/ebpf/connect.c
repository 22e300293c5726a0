//go:build ignore

// SPDX-License-Identifier: Apache-2.0
//
// These programs replace addresses of services by addresses of endpoints, when sockets
// connect or send datagrams. docs/ebpf.md describes the maps and who writes them.

#include <linux/bpf.h>
#include <linux/in.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Apache-2.0";

// The backend sets the real sizes of the maps.
#define SOME 1

// If only_netns is not 0, the programs ignore sockets of other network namespaces.
const volatile __u64 only_netns = 0;

// An address and a port, in network byte order. An IPv4 address is stored as an
// IPv4-mapped IPv6 address, also in sockets of family AF_INET.
struct address {
	__u32 ip[4];
	__u16 port;
	__u16 pad;
};

struct frontend {
	__u32 ip[4];
	__u16 port;
	__u8 protocol;
	__u8 pad;
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

// A UDP socket remembers the services that it used last, the latest first.
#define PEERS 8

struct udp_peers {
	struct bpf_spin_lock lock;
	struct peer peers[PEERS];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct frontend);
	__type(value, struct list);
	__uint(max_entries, SOME);
} frontends SEC(".maps");

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

// The peer of each TCP socket, by its cookie.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u64);
	__type(value, struct peer);
	__uint(max_entries, SOME);
} tcp_peers SEC(".maps");

// The peers of each UDP socket. The kernel deletes an element with its socket.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct udp_peers);
} udp_peers SEC(".maps");

// The time at which the backend last ran, in nanoseconds since the boot.
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
	ABANDONED, NO_ENDPOINT, LIST_CHANGED, NO_MEMORY,
	COUNTERS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, COUNTERS);
} counters SEC(".maps");

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
	return !time || (__s64)(now - *time) > (__s64)PATIENCE;
}

static __always_inline int equal(const struct address *a, const struct address *b)
{
	return a->ip[0] == b->ip[0] && a->ip[1] == b->ip[1] && a->ip[2] == b->ip[2] && a->ip[3] == b->ip[3] && a->port == b->port;
}

static __always_inline int is_member(__u64 list, const struct address *endpoint)
{
	struct member member = {.list = list, .endpoint = *endpoint};
	return bpf_map_lookup_elem(&members, &member) != NULL;
}

// recall copies the endpoint that the socket last used in place of a service.
static __always_inline int recall(struct udp_peers *known, const struct address *service, struct address *endpoint)
{
	int found = 0;
	bpf_spin_lock(&known->lock);
#pragma unroll
	for (int i = 0; i < PEERS; i++)
		if (!found && equal(&known->peers[i].service, service)) {
			*endpoint = known->peers[i].endpoint;
			found = 1;
		}
	bpf_spin_unlock(&known->lock);
	return found;
}

// remember makes a peer the first of the socket's peers. If its service is new, the last
// peer is forgotten.
static __always_inline void remember(struct udp_peers *known, const struct peer *peer)
{
	struct peer next = *peer;
	int found = 0;
	bpf_spin_lock(&known->lock);
#pragma unroll
	for (int i = 0; i < PEERS; i++)
		if (!found) {
			struct peer old = known->peers[i];
			known->peers[i] = next;
			found = equal(&old.service, &peer->service);
			next = old;
		}
	bpf_spin_unlock(&known->lock);
}

// choose chooses an endpoint for a connection to a frontend. It returns 0 if the frontend
// does not exist.
//
// The kernel may reuse the memory of a deleted element while choose reads it. But the
// backend deletes a list only after it has replaced the list in the map frontends. So if
// the frontend still has the same list at the end, then all that was read is valid.
static __always_inline int choose(struct bpf_sock_addr *ctx, const struct frontend *frontend, struct udp_peers **known, struct peer *peer)
{
	struct list *found = bpf_map_lookup_elem(&frontends, frontend);
	if (!found)
		return 0;
	struct list list = *found;
	__u64 now = bpf_ktime_get_ns();
	if (abandoned(now))
		return left(ABANDONED);
	struct client client = {.frontend = *frontend};
	int kept = 0;
	if (frontend->protocol == IPPROTO_UDP) {
		// Without the record, the socket would receive answers from the endpoint's address.
		*known = ctx->sk ? bpf_sk_storage_get(&udp_peers, ctx->sk, 0, BPF_SK_STORAGE_GET_F_CREATE) : NULL;
		if (!*known)
			return left(NO_MEMORY);
		kept = recall(*known, &peer->service, &peer->endpoint) && is_member(list.id, &peer->endpoint);
	} else if (list.affinity) {
		client.netns = bpf_get_netns_cookie(ctx);
		struct choice *choice = bpf_map_lookup_elem(&clients, &client);
		// The age is negative if another CPU has written the choice after this one read the time.
		if (choice && (__s64)(now - choice->time) < (__s64)(list.affinity * SECOND)) {
			peer->endpoint = choice->endpoint;
			kept = is_member(list.id, &peer->endpoint);
		}
	}
	if (!kept) {
		if (!list.count)
			return left(NO_ENDPOINT);
		struct slot slot = {.list = list.id, .index = bpf_get_prandom_u32() % list.count};
		struct address *chosen = bpf_map_lookup_elem(&slots, &slot);
		if (!chosen)
			return left(LIST_CHANGED);
		peer->endpoint = *chosen;
	}
	found = bpf_map_lookup_elem(&frontends, frontend);
	if (!found || found->id != list.id)
		return left(LIST_CHANGED);
	if (client.netns) {
		struct choice choice = {.time = now, .endpoint = peer->endpoint};
		bpf_map_update_elem(&clients, &client, &choice, BPF_ANY);
	}
	return 1;
}

// translate replaces the address of a service in address by that of an endpoint. It
// returns 0 if nothing changes. Then the rules of the other sink handle the connection.
static __always_inline int translate(struct bpf_sock_addr *ctx, struct address *address)
{
	if (only_netns && bpf_get_netns_cookie(ctx) != only_netns)
		return 0;
	struct frontend frontend = {.port = address->port, .protocol = ctx->protocol};
	__builtin_memcpy(frontend.ip, address->ip, sizeof(frontend.ip));
	struct peer peer = {.service = *address};
	struct udp_peers *known = NULL;
	if (!choose(ctx, &frontend, &known, &peer))
		return 0;
	if (known)
		remember(known, &peer);
	else {
		__u64 cookie = bpf_get_socket_cookie(ctx);
		bpf_map_update_elem(&tcp_peers, &cookie, &peer, BPF_ANY);
	}
	*address = peer.endpoint;
	return 1;
}

// restore_tcp replaces the address of an endpoint in address by that of the service.
static __always_inline int restore_tcp(struct bpf_sock_addr *ctx, struct address *address)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct peer *peer = bpf_map_lookup_elem(&tcp_peers, &cookie);
	if (!peer || !equal(&peer->endpoint, address))
		return 0;
	*address = peer->service;
	return 1;
}

// restore_udp does the same for the source of a datagram.
static __always_inline int restore_udp(struct bpf_sock_addr *ctx, struct address *address)
{
	struct udp_peers *known = ctx->sk ? bpf_sk_storage_get(&udp_peers, ctx->sk, 0, 0) : NULL;
	if (!known)
		return 0;
	struct address endpoint = *address;
	int found = 0;
	bpf_spin_lock(&known->lock);
#pragma unroll
	for (int i = 0; i < PEERS; i++)
		if (!found && equal(&known->peers[i].endpoint, &endpoint)) {
			*address = known->peers[i].service;
			found = 1;
		}
	bpf_spin_unlock(&known->lock);
	return found;
}

#define MAPPED bpf_htonl(0xffff)

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

// connected reports whether a UDP socket is connected. It receives only datagrams of its
// peer, so answers of an endpoint would not reach it. The kernel runs the program at
// sendmsg for such a socket only if the caller names a destination.
static __always_inline int connected(struct bpf_sock_addr *ctx)
{
	return ctx->sk && ctx->sk->state == BPF_TCP_ESTABLISHED;
}

#define PROGRAM(hook, family, counter, condition, change)     \
	SEC("cgroup/" #hook #family)                          \
	int hook##family(struct bpf_sock_addr *ctx)           \
	{                                                     \
		struct address a = read##family(ctx);         \
		if ((condition) && change(ctx, &a)) {         \
			write##family(ctx, &a);               \
			count(counter);                       \
		}                                             \
		return 1;                                     \
	}

// A connected UDP socket keeps its peer when the endpoint is removed, so connection
// tracking has to move it. Therefore only TCP sockets are translated when they connect.
PROGRAM(connect, 4, CONNECT4, ctx->protocol == IPPROTO_TCP, translate)
PROGRAM(connect, 6, CONNECT6, ctx->protocol == IPPROTO_TCP, translate)
PROGRAM(sendmsg, 4, SENDMSG4, ctx->protocol == IPPROTO_UDP && !connected(ctx), translate)
PROGRAM(sendmsg, 6, SENDMSG6, ctx->protocol == IPPROTO_UDP && !connected(ctx), translate)
PROGRAM(recvmsg, 4, RECVMSG4, ctx->protocol == IPPROTO_UDP, restore_udp)
PROGRAM(recvmsg, 6, RECVMSG6, ctx->protocol == IPPROTO_UDP, restore_udp)
PROGRAM(getpeername, 4, GETPEERNAME4, ctx->protocol == IPPROTO_TCP, restore_tcp)
PROGRAM(getpeername, 6, GETPEERNAME6, ctx->protocol == IPPROTO_TCP, restore_tcp)
