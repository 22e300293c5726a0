// SPDX-License-Identifier: Apache-2.0

// Package kernelspace is a sink for Windows nodes: services become load balancers
// of the Host Networking Service (HNS), which the kernel's virtual switch carries
// out.
//
//	hns, err := winhns.New()
//	…
//	backend, err := kernelspace.New(kernelspace.Options{HNS: hns, Network: "l2bridge"})
//	…
//	err = sink.Run(ctx, source, backend, sink.Options{})
//
// It needs no kube-proxy beside it and disturbs none: what others made is left
// alone, unless it has exactly the frontends of services that are served here.
//
// # How
//
// What this node must have is worked out of the services' views without asking
// HNS, and compared by value with what HNS has: its endpoints and load balancers
// are listed once before the first changes, once after a failure, and once a
// minute when there is nothing else to do (the driver's VerifyInterval). A change
// in between costs the calls that make it and no listing. Endpoints of pods of
// this node are the network plug-in's; those of other addresses are made, named
// for the backend, and removed when no load balancer uses them.
//
// HNS gives a load balancer no name and no owner. Options.StateFile remembers
// which ones are own ones, by their IDs.
//
// # What HNS cannot do
//
//   - Reject or drop: a frontend without endpoints has no load balancer, and
//     packets go where they would without a service.
//   - Tell traffic of this node from others': with externalTrafficPolicy Local, a
//     pod of a node without endpoints does not reach the external addresses.
//   - Source ranges: a load-balancer address with loadBalancerSourceRanges is not
//     served, which is logged.
//   - The time-out of session affinity: it is HNS' own.
//   - SCTP and all-ports services, which are not served, which is logged.
//   - Where endpoints of one service have several numbers for a named target
//     port, those of one number get all traffic: the number that most have. The
//     others are logged as not served.
//   - IPv6 on overlay networks, which is not served, which is logged.
//   - Pods of this node in its host network: they get no traffic, which is logged,
//     unless HNS has an endpoint for the node's address.
//
// What depends on the version of Windows (direct server return of frontends with
// externalTrafficPolicy Local, IPv6, session affinity, changes in place) is asked for once,
// and done without if it is not there.
package kernelspace
