#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Programs DNAT rules for the services of a node: dnat.py unix:///run/kpng/kpng.sock NODE"""
import os, queue, subprocess, sys, tempfile

# In Debian 12 the compiler of the messages is older than the library that they use.
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
import grpc

protos = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../api/localv1")
with tempfile.TemporaryDirectory() as made:
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I" + protos, "--python_out=" + made,
                    "--grpc_python_out=" + made, "localv1.proto"], check=True)
    sys.path.insert(0, made)
    import localv1_pb2 as pb, localv1_pb2_grpc as rpc


def rules(services):
    """Yields the lines of a table that replaces the previous one."""
    dnat, guard, snat = {"Elsewhere": [], "Node": []}, {"Elsewhere": [], "Node": []}, []
    for service in services:
        for f in service.Frontends:
            ip, proto = {pb.IPv4: "ip", pb.IPv6: "ip6"}[f.Family], pb.Protocol.Name(f.Protocol).lower()
            to = f"{ip} daddr {f.IP}" if f.IP else f"meta nfproto ipv{f.Family} fib daddr type local"
            match = f"{to} {proto} dport {f.Port}" if f.Port else to
            if f.Restricted:
                ranges = service.Sources[f.Sources].SourceRanges
                but = f"{ip} saddr != {{ {', '.join(ranges)} }} " if ranges else ""
                for chain in guard.values():
                    chain.append(f"{match} {but}drop")
            for origin, t in ("Elsewhere", f.Elsewhere), ("Node", f.Node):
                if t.Verdict != pb.Forward:
                    reject = "reject with tcp reset" if f.Protocol == pb.TCP else "reject"
                    guard[origin].append(f"{match} {'drop' if t.Verdict == pb.Drop else reject}")
                    continue
                targets = service.Lists[t.List].Targets
                for i, e in enumerate(targets):  # the first of n gets one connection in n, the next one in n-1
                    at = (f"[{e.IP}]" if f.Family == pb.IPv6 else e.IP) + (f":{e.Port}" if e.Port else "")
                    dnat[origin].append(f"{match} numgen random mod {len(targets) - i} == 0 dnat {ip} to {at}")
                    snat.append(f"ct status dnat {ip} saddr {e.IP} {ip} daddr {e.IP} masquerade")  # hairpin
            if f.Masquerade in (pb.MasqueradeAll, pb.MasqueradeNode):
                who = "fib saddr type local " if f.Masquerade == pb.MasqueradeNode else ""
                via = f"ct original {ip} daddr {f.IP} " if f.IP else f"meta nfproto ipv{f.Family} "
                port = f"meta l4proto {proto} ct original proto-dst {f.Port} " if f.Port else ""
                snat.append(f"ct status dnat {who}{via}{port}masquerade")
    yield "add table inet python-dnat\ndelete table inet python-dnat\ntable inet python-dnat {"
    for hook, origin in ("prerouting", "Elsewhere"), ("output", "Node"):
        yield f"chain guard-{hook} {{ type filter hook {hook} priority -105;"
        yield from guard[origin] + ["}", f"chain {hook} {{ type nat hook {hook} priority -100;"] + dnat[origin] + ["}"]
    yield from ["chain postrouting { type nat hook postrouting priority 100;"] + snat + ["}", "}\n"]


requests, services = queue.SimpleQueue(), {}
request = pb.WatchReq(NodeName=sys.argv[2], Frontends=True)
requests.put(request)
with grpc.insecure_channel(sys.argv[1]) as channel:
    for item in rpc.SetsStub(channel).Watch(iter(requests.get, None)):
        op = item.WhichOneof("Op")
        if op == "Reset":
            services.clear()
        elif op == "Set" and item.Set.Ref.Set == pb.FrontendsSet:
            services[item.Set.Ref.Path] = pb.ServiceFrontends.FromString(item.Set.Bytes)
        elif op == "Delete":
            services.pop(item.Delete.Path, None)
        elif op == "Sync":
            subprocess.run(["nft", "-f", "-"], input="\n".join(rules(services.values())), text=True, check=True)
            requests.put(request)
