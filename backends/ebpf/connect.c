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

// A client of a frontend is a network namespace, or a UDP socket. The protocol of the
// frontend says which.
struct client {
	__u64 cookie;
	struct frontend frontend;
	__u32 pad;
};

struct choice {
	// Time of the client's last new connection, in nanoseconds since the boot.
	__u64 time;
	struct address endpoint;
	__u32 pad;
};

struct peer {
	__u64 socket;
	struct address endpoint;
	__u32 pad;
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

// The address of the service, for each endpoint that a socket uses instead.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct peer);
	__type(value, struct address);
	__uint(max_entries, SOME);
} peers SEC(".maps");

#define SECOND 1000000000ULL

// keeps reports whether the client may keep its choice, and copies it to endpoint.
static __always_inline int keeps(const struct client *client, const struct list *list, __u64 now, struct address *endpoint)
{
	struct choice *choice = bpf_map_lookup_elem(&clients, client);
	// The age is negative if another CPU has written the choice after this one read the time.
	if (!choice || (list->affinity && (__s64)(now - choice->time) >= (__s64)(list->affinity * SECOND)))
		return 0;
	struct member member = {.list = list->id, .endpoint = choice->endpoint};
	*endpoint = member.endpoint;
	return bpf_map_lookup_elem(&members, &member) != NULL;
}

// choose chooses an endpoint for a connection to a frontend. It returns 0 if the frontend
// does not exist.
//
// The kernel may reuse the memory of a deleted element while choose reads it. But the
// backend deletes a list only after it has replaced the list in the map frontends. So if
// the frontend still has the same list at the end, then all that was read is valid.
static __always_inline int choose(struct bpf_sock_addr *ctx, const struct frontend *frontend, struct address *endpoint)
{
	struct list *found = bpf_map_lookup_elem(&frontends, frontend);
	if (!found)
		return 0;
	struct list list = *found;
	int udp = frontend->protocol == IPPROTO_UDP, sticky = udp || list.affinity;
	struct client client = {.frontend = *frontend};
	__u64 now = 0;
	if (sticky) {
		now = bpf_ktime_get_ns();
		client.cookie = udp ? bpf_get_socket_cookie(ctx) : bpf_get_netns_cookie(ctx);
	}
	int kept = sticky && keeps(&client, &list, now, endpoint);
	if (!kept) {
		if (!list.count)
			return 0;
		struct slot slot = {.list = list.id, .index = bpf_get_prandom_u32() % list.count};
		struct address *chosen = bpf_map_lookup_elem(&slots, &slot);
		if (!chosen)
			return 0;
		*endpoint = *chosen;
	}
	found = bpf_map_lookup_elem(&frontends, frontend);
	if (!found || found->id != list.id)
		return 0;
	// A choice of a UDP socket has no time-out, so it need not be written again.
	if (sticky && !(udp && kept)) {
		struct choice choice = {.time = now, .endpoint = *endpoint};
		bpf_map_update_elem(&clients, &client, &choice, BPF_ANY);
	}
	return 1;
}

static __always_inline int equal(const struct address *a, const struct address *b)
{
	return a->ip[0] == b->ip[0] && a->ip[1] == b->ip[1] && a->ip[2] == b->ip[2] && a->ip[3] == b->ip[3] && a->port == b->port;
}

// translate replaces the address of a service in address by that of an endpoint. It
// returns 0 if nothing changes. Then the rules of the other sink handle the connection.
static __always_inline int translate(struct bpf_sock_addr *ctx, struct address *address)
{
	if (only_netns && bpf_get_netns_cookie(ctx) != only_netns)
		return 0;
	struct frontend frontend = {.port = address->port, .protocol = ctx->protocol};
	__builtin_memcpy(frontend.ip, address->ip, sizeof(frontend.ip));
	struct peer peer = {};
	if (!choose(ctx, &frontend, &peer.endpoint))
		return 0;
	peer.socket = bpf_get_socket_cookie(ctx);
	// Most datagrams follow others of the same socket. A write is slower than a look-up.
	struct address *known = NULL;
	if (frontend.protocol == IPPROTO_UDP)
		known = bpf_map_lookup_elem(&peers, &peer);
	if (!known || !equal(known, address)) {
		long err = bpf_map_update_elem(&peers, &peer, address, BPF_ANY);
		// Without the record, the socket would receive answers from the endpoint's address.
		if (err && frontend.protocol == IPPROTO_UDP)
			return 0;
	}
	*address = peer.endpoint;
	return 1;
}

// restore replaces the address of an endpoint in address by that of the service.
static __always_inline int restore(struct bpf_sock_addr *ctx, struct address *address)
{
	struct peer peer = {.socket = bpf_get_socket_cookie(ctx), .endpoint = *address};
	struct address *service = bpf_map_lookup_elem(&peers, &peer);
	if (!service)
		return 0;
	*address = *service;
	return 1;
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

#define PROGRAM(hook, family, condition, change)              \
	SEC("cgroup/" #hook #family)                          \
	int hook##family(struct bpf_sock_addr *ctx)           \
	{                                                     \
		struct address a = read##family(ctx);         \
		if ((condition) && change(ctx, &a))           \
			write##family(ctx, &a);               \
		return 1;                                     \
	}

// A connected UDP socket keeps its peer when the endpoint is removed, so connection
// tracking has to move it. Therefore only TCP sockets are translated when they connect.
PROGRAM(connect, 4, ctx->protocol == IPPROTO_TCP, translate)
PROGRAM(connect, 6, ctx->protocol == IPPROTO_TCP, translate)
PROGRAM(sendmsg, 4, ctx->protocol == IPPROTO_UDP && !connected(ctx), translate)
PROGRAM(sendmsg, 6, ctx->protocol == IPPROTO_UDP && !connected(ctx), translate)
PROGRAM(recvmsg, 4, ctx->protocol == IPPROTO_UDP, restore)
PROGRAM(recvmsg, 6, ctx->protocol == IPPROTO_UDP, restore)
PROGRAM(getpeername, 4, ctx->protocol == IPPROTO_TCP, restore)
PROGRAM(getpeername, 6, ctx->protocol == IPPROTO_TCP, restore)
