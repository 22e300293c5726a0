// SPDX-License-Identifier: Apache-2.0

// Package ipvs is a sink that programs services into IPVS, the load balancer of the Linux
// kernel, like kube-proxy's mode ipvs.
//
//	b, err := ipvs.New(ipvs.Options{})
//	if err != nil {
//		return err
//	}
//	return kpng.Run(ctx, opts, b)
//
// IPVS chooses the endpoint of each connection. A table of nftables does the rest:
// masquerading, source ranges, and refusing connections. Routes on an interface of the
// instance make the addresses of services local, because IPVS receives only packets to
// local addresses. Services that IPVS cannot serve exactly, such as those with session
// affinity, are programmed by a dataplane of package nftables.
package ipvs
