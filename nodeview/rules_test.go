// SPDX-License-Identifier: Apache-2.0

package nodeview

// rule names the code of a rule in docs/reference/semantics.md.
type rule struct {
	// begins has the first words of the rule, without marks of Markdown.
	begins string
	// functions are the functions and types that implement the rule. The first one makes
	// the decision. A name without a package is in this package. If each backend
	// implements the rule, these are the functions of backends/nftables. Differences from
	// kube-proxy have no functions.
	functions string
	// tests are the tests of the rule, in the form "package.Test/case". A case of the
	// conformance kit has the form "conformance/CASE".
	tests []string
}

// rules has the rules of docs/reference/semantics.md by section, in the order of the page.
var rules = []struct {
	section string
	rules   []rule
}{
	{"Services", []rule{
		{"kpng serves services without the label service.kubernetes.io/service-proxy-name, except", "watcher/kube.watch.serviceSource watcher.Converter.WantsService", []string{
			"watcher.TestWantsService",
			"watcher/kube.TestLabelFlipsAreAddsAndDeletes",
		}},
		{"The families are those of spec.ipFamilies. Without these,", "api.Service.Families", []string{
			"nodeview.TestFamilies/ipFamilies determines the families",
			"api.TestFamilies/those of ipFamilies",
			"nodeview.TestFamilies/without ipFamilies, the cluster IPs determine the families",
			"nodeview.TestFamilies/without either, a headless service has the families of its external IPs",
			"nodeview.TestFamilies/without either, a service that is not headless has none",
		}},
		{"Numbers with leading zeros in addresses are decimal,", "watcher.parseAddr api.IPSet.Add", []string{
			"watcher.TestServiceConversion/numbers of addresses may have leading zeros",
			"watcher.TestServiceConversion/mapped IPv4 addresses are IPv4 addresses",
			"watcher.TestServiceConversion/invalid addresses are omitted, empty ones without a report",
			"api.TestIPSet",
		}},
		{"A load-balancer IP or external IP that means", "watcher.Converter.serviceIPs", []string{
			"watcher.TestServiceConversion/addresses that mean the host itself are omitted",
		}},
		{"spec.clusterIPs takes precedence over spec.clusterIP. \"None\" makes the", "watcher.Converter.serviceIPs", []string{
			"watcher.TestServiceConversion/clusterIPs takes precedence over the legacy clusterIP",
			"watcher.TestServiceConversion/the legacy clusterIP is used if clusterIPs is empty",
			"watcher.TestServiceConversion/clusterIP None makes a headless service",
			"nodeview.TestFrontends/no cluster IP is allocated yet",
		}},
		{"A load-balancer ingress entry counts if it has", "watcher.Converter.serviceIPs", []string{
			"watcher.TestServiceConversion/ingress addresses are classified by ipMode, and hostnames are ignored",
		}},
		{"A port is its number and protocol: TCP", "portCheck.portFault watcher.Converter.servicePorts Unserved", []string{
			"nodeview.TestPorts/TCP and UDP ports with the same number are independent",
			"nodeview.TestFrontends/TCP and UDP ports with the same number are two frontends, each with its own target port",
			"nodeview.TestPorts/a port of unknown protocol is not served",
			"nodeview.TestPorts/a port without a number is not served",
			"nodeview.TestFrontends/ports that cannot be served are reported",
		}},
		{"Of two ports with the same identity or", "watcher.Converter.servicePorts portCheck.portFault portCheck.nodePortFault", []string{
			"nodeview.TestPorts/if two ports have the same identity, the first one counts",
			"nodeview.TestFrontends/if two ports have the same node port, the first one keeps it",
		}},
		{"A service of type ExternalName has no view", "View", []string{
			"nodeview.TestNoView/an ExternalName service",
		}},
		{"With IgnoreExternalIPs, spec.externalIPs is ignored (KEP-5707).", "watcher.Converter.serviceIPs", []string{
			"watcher.TestServiceConversion/external IPs are ignored on request, also invalid ones",
		}},
		{"loadBalancerClass and the ports of pods have no", "watcher.Converter.Service", []string{
			"watcher/file.TestKubectlOutputIsRead",
		}},
	}},
	{"Endpoints", []rule{
		{"A slice belongs to the service in its", "watcher.Converter.EndpointSlice", []string{
			"watcher.TestEndpointSliceConversion/a slice without the service label belongs to no service",
			"watcher/kube.TestUnusableObjectsAreOmitted",
		}},
		{"The label of the service decides which proxy", "watcher.Converter.WantsSlice", []string{
			"watcher.TestWantsSlice",
			"watcher/kube.TestUnlabelledServiceKeepsItsEndpoints",
		}},
		{"A proxy with a name takes slices with", "watcher.Converter.WantsSlice watcher/kube.selection.selects", []string{
			"watcher/kube.TestUnlabelledSlicesOfServicesWithoutSelectorAreServed",
			"watcher/kube.TestNewlyLabelledServiceHasItsEndpoints",
		}},
		{"Services and slices may arrive in any order", "cluster.Tx.SetSlice View", []string{
			"cluster.TestServicesAndSlicesAreJoined/a slice whose label changes moves to the other service",
			"cluster.TestServicesAndSlicesAreJoined/a slice may come before its service",
			"nodeview.TestNoView/slices without a service",
		}},
		{"A service port matches the slice port of", "targetPort watcher.Converter.endpointPorts", []string{
			"nodeview.TestPorts/a service port is served by the slice port of the same name",
			"nodeview.TestPorts/a service port is served by the slice port of the same protocol",
		}},
		{"Slices may have different numbers for the same", "targetPort selection.dropUnserved", []string{
			"nodeview.TestPorts/a port name may have different numbers in different slices",
			"nodeview.TestPorts/a slice port without a number serves no port",
		}},
		{"An endpoint that serves no port of its", "selection.gather", []string{
			"nodeview.TestPorts/an endpoint that serves no port of the service is not in the view",
		}},
		{"Missing conditions mean ready, serving, not terminating.", "watcher.conditions", []string{
			"watcher.TestEndpointSliceConversion/absent conditions mean ready, serving and not terminating",
			"watcher.TestEndpointSliceConversion/each condition has its own default",
		}},
		{"A ready endpoint counts as ready even if it", "clusterList localList answers", []string{
			"nodeview.TestConditions/an endpoint that is ready and terminating counts as ready",
			"nodeview.TestConditions/a ready endpoint that does not serve counts as ready",
			"nodeview.TestDraining/ready and not serving, but not hinted for this zone",
		}},
		{"Only the first address of an endpoint counts.", "watcher.Converter.EndpointSlice", []string{
			"watcher.TestEndpointSliceConversion/only the first address is used",
			"watcher.TestEndpointSliceConversion/an endpoint without a usable address is omitted",
			"watcher.TestEndpointSliceConversion/an IPv6 slice accepts no IPv4 addresses, also no mapped ones",
			"watcher.TestEndpointSliceConversion/an FQDN slice is ignored",
		}},
		{"Endpoints of a family that the service does", "selection.gather", []string{
			"nodeview.TestFamilies/endpoints of a family that the service does not have are omitted",
		}},
		{"The same address and port number in several", "selection.dropDuplicates", []string{
			"nodeview.TestDuplicates/the same address and port in two slices is one endpoint",
		}},
		{"Of such duplicates, the ready one counts, then", "selection.preference", []string{
			"nodeview.TestDuplicates/a ready entry is preferred",
			"nodeview.TestDuplicates/then an entry that is not terminating",
			"nodeview.TestDuplicates/an entry that is not terminating is preferred to a usable one that is",
			"nodeview.TestDuplicates/then a serving entry",
			"nodeview.TestDuplicates/then the entry of the smaller slice name",
		}},
		{"The order of arrival never matters, not even", "selection.preference", []string{
			"nodeview.TestDuplicates/an endpoint twice in one slice is one endpoint, in any order",
			"nodeview.FuzzView",
		}},
		{"The preference is decided for each port: if", "selection.dropDuplicates selection.portScopes", []string{
			"nodeview.TestDuplicates/with more ports in one slice, each port is decided separately: the same slice preferred",
			"nodeview.TestDuplicates/with more ports in one slice, each port is decided separately: the other slice preferred",
		}},
		{"One address with two port numbers is two", "selection.dropDuplicates api.Endpoint.Key", []string{
			"nodeview.TestDuplicates/an address with two port numbers is two endpoints",
			"api.TestEndpointKey",
		}},
		{"A dropped duplicate has no effect on topology.", "decide", []string{
			"nodeview.TestDuplicates/a duplicate does not count for topology",
		}},
	}},
	{"Conflicting claims", []rule{
		{"If two services claim the same address, protocol", "cluster.claimsOf cluster.packed.precedence", []string{
			"cluster.TestClaims/a cluster IP wins against the external IP of an older service",
			"cluster.TestClaims/a cluster IP wins against the load-balancer IP of an older service",
			"cluster.TestClaims/a load-balancer IP wins against the external IP of an older service",
			"cluster.TestClaims/a service that names an address twice has the better claim",
		}},
		{"A node port conflicts only with node ports", "nodeview.FrontendKey.Claim", []string{
			"cluster.TestClaims/node ports and unspecified addresses do not conflict",
			"cluster.TestClaims/node ports of different families do not conflict",
		}},
		{"With equal ranks, and for node ports, the", "cluster.packed.precedence", []string{
			"cluster.TestClaims/the older service wins",
			"cluster.TestClaims/among services of the same age, the first name wins",
			"cluster.TestClaims/node ports conflict even if the addresses differ",
		}},
		{"An all-ports service claims whole addresses, with the", "cluster.claimsOf", []string{
			"cluster.TestClaims/a cluster IP wins against an older all-ports service that names it as external IP",
			"cluster.TestClaims/the cluster IP of an all-ports service wins against ports of older external IPs",
			"cluster.TestClaims/an older claim to the whole address wins over all ports",
			"cluster.TestClaims/a younger claim to the whole address is lost completely",
		}},
		{"A service that loses a claim has no", "namer.frontendFault Unserved", []string{
			"nodeview.TestLostFrontends/an address and port",
			"nodeview.TestLostFrontends/a node port, in one family",
			"nodeview.TestLostFrontends/a whole address",
			"nodeview.TestLostFrontends/the same port of another protocol is not lost",
		}},
		{"When the winner is deleted, the loser gets", "cluster.Tx.DeleteService", []string{
			"cluster.TestClaimPassesOnWhenWinnerIsDeleted",
			"feed.TestUpdates/a deleted winner passes its frontend to the next service",
		}},
		{"If a service lists an address twice, it", "namer.portFrontends sourcesByAddress", []string{
			"nodeview.TestFrontends/an address that is both external and load-balancer IP has one frontend",
			"nodeview.TestSourceRanges/ranges apply only to load-balancer IPs, by family, and also to those that are external IPs",
		}},
	}},
	{"Frontends", []rule{
		{"Each address and node port of a service", "namedFrontends namer.portFrontends", []string{
			"nodeview.TestFrontends/every kind of frontend",
		}},
		{"The primary addresses of a node are its", "node/nodeaddr.OfNode", []string{
			"internal/nodeaddrs.TestPrimaryAddressesComeFromNodeOrDefaultRoutes",
		}},
		{"While the Node object is unknown or has", "internal/nodeaddrs.Watcher.publish", []string{
			"internal/nodeaddrs.TestPrimaryAddressesComeFromNodeOrDefaultRoutes",
		}},
		{"Node ports are served at the primary addresses,", "internal/nodeaddrs.parseSelection internal/nodeaddrs.selection.of", []string{
			"internal/nodeaddrs.TestSelection/no selection means primary",
			"internal/nodeaddrs.TestSelection/primary and a CIDR select both",
			"internal/nodeaddrs.TestSelection/a CIDR without addresses selects nothing, also not primary",
		}},
		{"A CIDR selects loopback or link-local addresses only", "internal/nodeaddrs.selection.admits", []string{
			"internal/nodeaddrs.TestSelection/a CIDR of all addresses selects neither loopback nor link-local addresses",
			"internal/nodeaddrs.TestSelection/loopback addresses are selected by a CIDR of them",
		}},
		{"The item localhost selects loopback addresses. Sockets of", "internal/nodesinks.Node.Localhost", []string{
			"backends/userspace.TestLocalhostIgnoresExternalPolicyLocal",
			"app/program.TestLocalhostNodePortsRunBesideBackends",
			"conformance/a node port on localhost leads to every ready endpoint, on this node and elsewhere",
			"conformance/connections to localhost ignore external policy Local",
		}},
		{"A port on localhost that another program uses", "backends/userspace.engine.listen", []string{
			"backends/userspace.TestBusyPortOnLocalhost",
			"conformance/a port on localhost that is in use disturbs no other service and is served when it is free",
		}},
		{"The endpoints of a frontend have its family.", "targets namer.frontendFault", []string{
			"nodeview.TestFrontends/a frontend's endpoints are of its own family",
			"nodeview.TestFrontends/frontends of a family that the service does not have are reported",
		}},
		{"A headless service has no cluster-IP frontend, but", "internal/elements.Addresses", []string{
			"nodeview.TestFrontends/a headless service has external IPs but no cluster IP",
		}},
		{"A service without ports has no frontends. Its", "namedFrontends wholeAddress", []string{
			"nodeview.TestFrontends/a service without ports has no frontends",
			"nodeview.TestPorts/a service without ports lists its addresses",
		}},
	}},
	{"All-ports services", []rule{
		{"Ports of the service and of its slices", "wholeAddress targetPort", []string{
			"nodeview.TestPorts/an all-ports service ignores ports",
			"nodeview.TestDuplicates/an all-ports service lists each address once",
		}},
		{"Each address has one frontend, for all protocols", "namer.portFrontends", []string{
			"nodeview.TestFrontends/an all-ports service has one frontend per address and no node port",
		}},
		{"Verdicts are those of any other service, with", "portFamily", []string{
			"nodeview.TestPorts/an all-ports service may have no endpoints",
		}},
	}},
	{"The Cluster list", []rule{
		{"It contains the ready endpoints that topology admits", "clusterList", []string{
			"nodeview.TestClusterList/the ready endpoints on all nodes",
			"nodeview.TestClusterList/if one is ready, no terminating endpoint",
		}},
		{"If no endpoint is ready anywhere, it contains", "terminatingFallback decide", []string{
			"nodeview.TestClusterList/if none is ready, the serving and terminating endpoints",
			"nodeview.TestClusterList/the fallback ignores topology",
			"nodeview.TestClusterList/the fallback is decided for each port",
			"nodeview.TestClusterList/the fallback is decided for each family",
		}},
	}},
	{"The Local list", []rule{
		{"It contains the ready endpoints on this node", "localList", []string{
			"nodeview.TestLocalList/the ready endpoints on this node",
			"nodeview.TestLocalList/if one on this node is ready, no terminating endpoint",
		}},
		{"If no endpoint on this node is ready,", "terminatingFallback", []string{
			"nodeview.TestLocalList/if none on this node is ready, its serving and terminating endpoints",
		}},
		{"Topology has no effect. Without a node name", "localList location.runs", []string{
			"nodeview.TestLocalList/topology has no effect",
			"nodeview.TestLocalList/without a node name no endpoint is local",
		}},
	}},
	{"Topology", []rule{
		{"If every endpoint has node hints and at", "topology", []string{
			"nodeview.TestTopology/node hints for this node select endpoints",
			"nodeview.TestTopology/node hints that are not on every ready endpoint are ignored",
			"nodeview.TestTopology/node hints take precedence over zone hints",
		}},
		{"Else, if every endpoint has zone hints and", "topology decide", []string{
			"nodeview.TestTopology/zone hints for this zone select endpoints",
			"nodeview.TestTopology/zone hints that are not on every ready endpoint are ignored",
			"nodeview.TestTopology/zone hints apply if all node hints are for other nodes",
			"nodeview.TestTopology/hints are decided for each port",
			"nodeview.TestTopology/hints are decided for each family",
		}},
		{"Else the list has all ready endpoints. Endpoints", "topology endpointCounts.count", []string{
			"nodeview.TestTopology/zone hints are ignored if all are for other zones",
			"nodeview.TestTopology/hints of endpoints that are not ready do not matter",
		}},
		{"The zone is the node's label topology.kubernetes.io/zone. A", "location.hintedZone location.hintedNode", []string{
			"nodeview.TestTopology/a node without a zone matches no zone",
			"nodeview.TestTopology/a node without a name matches no node",
		}},
	}},
	{"Which traffic uses which list", []rule{
		{"Internal traffic, to cluster IPs, uses the Local", "internalPolicyLocal", []string{
			"nodeview.TestPolicies/internalTrafficPolicy Local uses the Local list",
			"nodeview.TestPolicies/policy Cluster uses the Cluster list",
		}},
		{"External traffic does the same with externalTrafficPolicy: Local.", "externalPolicyLocal", []string{
			"nodeview.TestPolicies/externalTrafficPolicy Local applies to NodePort services",
			"nodeview.TestTrafficAndVerdicts/internal policy Local only",
		}},
		{"externalTrafficPolicy applies to services of type NodePort and", "externalPolicyLocal", []string{
			"nodeview.TestPolicies/externalTrafficPolicy Local applies to NodePort services",
			"nodeview.TestPolicies/externalTrafficPolicy Local applies to LoadBalancer services",
			"nodeview.TestPolicies/externalTrafficPolicy Local applies to ClusterIP services with external IPs",
			"nodeview.TestPolicies/externalTrafficPolicy Local applies to headless services with external IPs",
			"nodeview.TestPolicies/for other services externalTrafficPolicy is Cluster",
		}},
		{"Short circuit: traffic from this node to an", "listReasons.shortCircuit", []string{
			"nodeview.TestTrafficAndVerdicts/external policy Local: traffic from this node uses the Cluster list",
			"nodeview.TestTrafficAndVerdicts/both policies Local: only the short circuit uses the Cluster list",
			"nodeview.TestPolicies/the short circuit follows topology",
		}},
		{"Traffic from this node is that of the", "internal/nft.FromPods", []string{
			"conformance/connections of this node's pods ignore external policy Local",
			"conformance/the node's own connections ignore external policy Local",
		}},
	}},
	{"Draining", []rule{
		{"An endpoint that has a port of the", "selection.assignLists answers", []string{
			"nodeview.TestDraining/ready, but excluded by policy and topology",
			"nodeview.TestDraining/serving and terminating while others are ready",
		}},
		{"An endpoint that is neither serving nor ready", "answers", []string{
			"nodeview.TestDraining/an endpoint that does not serve is not draining",
		}},
		{"New connections never go to a draining endpoint.", "selection.list", []string{
			"nodeview.FuzzView",
		}},
		{"Existing connections to it are kept.", "Existing.All Existing.Has", []string{
			"nodeview.FuzzView",
			"conformance/established TCP connections to draining endpoints continue, and new ones use other endpoints",
		}},
	}},
	{"Verdict for an empty list", []rule{
		{"Reject, with a TCP reset or ICMP port", "usable portLists.traffic", []string{
			"nodeview.TestTrafficAndVerdicts/no usable endpoint anywhere: reject",
			"nodeview.TestUnusable/each port and family without an endpoint",
			"nodeview.TestUnusable/serving and terminating is usable",
		}},
		{"Drop silently if usable endpoints exist, but the", "portLists.traffic", []string{
			"nodeview.TestTrafficAndVerdicts/external policy Local, usable endpoints only on other nodes: drop traffic from elsewhere",
			"nodeview.TestTrafficAndVerdicts/internal policy Local, usable endpoints only on other nodes: drop",
			"nodeview.TestUnusable/an endpoint on another node is usable",
			"nodeview.TestTrafficAndVerdicts/the verdict is decided for each port and family separately",
		}},
		{"Drop packets from outside the source ranges before", "backends/nftables.Options.skeletonChains", []string{
			"nodeview.TestSources",
			"backends/nftables.TestFilteringDoesNotDependOnOtherNATChains",
		}},
		{"Reject packets to a cluster IP at a", "backends/nftables.Options.skeletonChains", []string{
			"backends/nftables.TestTheNodeIsRefusedAtItsOwnClusterIPs",
			"conformance/a cluster IP refuses connections to ports that its service does not have",
		}},
	}},
	{"Source ranges", []rule{
		{"White space around spec.loadBalancerSourceRanges is removed. An invalid", "watcher.sourceRanges", []string{
			"watcher.TestServiceConversion/source ranges are trimmed, masked and applied to the load-balancer IPs",
			"watcher.TestServiceConversion/if all source ranges are invalid, no source is admitted",
		}},
		{"Without traffic parameters, ranges apply only at load-balancer", "watcher.sourceRanges sourcesByAddress", []string{
			"nodeview.TestSourceRanges/ranges apply only to load-balancer IPs, by family, and also to those that are external IPs",
			"nodeview.TestSourceRanges/ranges apply to a cluster IP that is also a load-balancer IP",
			"nodeview.TestSourceRanges/without ranges all sources are admitted",
		}},
		{"A range of length 0 admits all sources", "sourcesByAddress", []string{
			"nodeview.TestSourceRanges/a range of length 0 admits all sources of its family",
		}},
		{"If all ranges are of the other family", "sourcesByAddress", []string{
			"nodeview.TestSourceRanges/ranges of only the other family admit no source",
		}},
		{"The model allows several lists for an address.", "sourcesByAddress", []string{
			"nodeview.TestSourceRanges/a source is admitted if one of several filters admits it",
		}},
		{"Ranges also apply to sources on this node.", "Sources.Prefixes", []string{
			"nodeview.TestSources/restricted, with a range for the node: the service's load-balancer IPs are also admitted",
			"nodeview.TestSources/restricted, without a range for the node",
		}},
	}},
	{"Source address", []rule{
		{"A hairpin connection, from an endpoint of this", "Hairpins backends/nftables.list.hairpin backends/nftables.hairpin", []string{
			"nodeview.FuzzView",
			"conformance/an endpoint that connects to itself through its service sees an address of the node",
		}},
		{"At an external frontend with policy Cluster, every", "masquerade", []string{
			"nodeview.TestMasquerade/external policy Cluster: all sources",
		}},
		{"At an external frontend with policy Local, short-circuited", "masquerade", []string{
			"nodeview.TestMasquerade/external policy Local: only the node's own traffic",
		}},
		{"At a cluster IP, the backend's options select", "masquerade", []string{
			"nodeview.TestMasquerade/cluster IPs: only if the backend requests it, with any policy",
		}},
		{"Marks, sets and chains do not conflict with", "backends/nftables.Options.complete", []string{
			"conformance/two instances and kube-proxy's rules coexist",
		}},
	}},
	{"Session affinity", []rule{
		{"With sessionAffinity: ClientIP, a client address keeps its", "affinity", []string{
			"watcher.TestServiceConversion/session affinity has a default timeout",
			"watcher.TestServiceConversion/session affinity keeps its timeout",
			"nodeview.TestAffinity/ClientIP keeps its timeout",
		}},
		{"Affinity never selects an endpoint outside the list", "backends/nftables.class.affinityRules", []string{
			"conformance/affinity never selects an endpoint that the traffic policy excludes",
			"conformance/when an endpoint is removed, only its clients move to other endpoints",
		}},
		{"A change of other endpoints moves no client.", "backends/nftables.class.affinityRules", []string{
			"conformance/clients keep their endpoints while others are added and removed",
			"conformance/disabling and enabling affinity takes effect immediately",
		}},
	}},
	{"Traffic parameters", []rule{
		{"A wrong value is ignored, and reported as", "internal/parameters.read", []string{
			"internal/parameters.TestServiceAnnotations",
			"internal/parameters.TestWeightAnnotations",
		}},
		{"kpng turns refused ranges into admitted ones: all", "internal/parameters.AllExcept", []string{
			"internal/parameters.TestAllExceptContainsTheOtherAddresses",
		}},
		{"With scope all, source ranges apply to all", "watcher.sourceRanges sourcesByAddress", []string{
			"nodeview.TestParametersAreExplained",
			"backends/userspace.TestSourceRangesApplyToNodePorts",
			"backends/nftables.TestSourceRangesApplyToNodePorts",
			"backends/ovs.TestSourceRangesApplyToNodePorts",
		}},
		{"An endpoint of weight zero is on no", "usable", []string{
			"nodeview.TestWeights",
			"backends/ovs.TestWeightsDecideShares",
		}},
		{"A change of weights changes the view, but", "listID", []string{
			"nodeview.TestWeightsChangeNoListIDs",
		}},
		{"Stable hashing: all nodes with the same list", "maglev.Table", []string{
			"maglev.TestTablesDependOnEndpointsAlone",
			"backends/userspace.TestHashedClientsKeepTheirEndpointsOnAllNodes",
			"backends/ovs.TestNodesChooseEqually",
		}},
		{"If one of n endpoints with equal weights", "maglev.Table", []string{
			"maglev.TestChangesMoveFewEntries",
			"backends/nftables.TestChangesMoveFewHashSlots",
		}},
		{"reset ends established TCP connections to endpoints that", "Existing.Resets", []string{
			"nodeview.TestResets",
			"backends/userspace.TestConnectionsToLostEndpoints",
			"conformance/connections to a removed endpoint are reset at the cluster IP",
			"conformance/connections to an endpoint of weight zero are not reset",
			"conformance/connections to a terminating endpoint that still gets new connections are not reset",
			"conformance/connections continue when their service with resets is deleted",
		}},
	}},
	{"Existing connections", []rule{
		{"UDP: the connection-tracking entry of a flow through", "Existing.Has internal/conntrack.verdict.isStale", []string{
			"internal/conntrack.TestStaleConnectionsAreDeleted",
			"internal/conntrack.TestClientsFollowTheirService",
			"conformance/a UDP flow to a removed endpoint moves to another",
		}},
		{"UDP: entries that bypassed a service are deleted", "internal/conntrack.queue.isStale", []string{
			"internal/conntrack.TestStaleConnectionsAreDeleted/a flow bypassed a service that gets its first endpoint",
			"internal/conntrack.TestStaleConnectionsAreDeleted/the service scales to zero",
			"internal/conntrack.TestStaleConnectionsAreDeleted/the service is deleted",
			"internal/conntrack.TestStaleConnectionsAreDeleted/node ports are matched by node address and port",
			"conformance/a UDP flow that bypassed a service moves to its first endpoint",
			"conformance/a UDP flow stops when its service loses its last endpoint, and resumes when the service gets an endpoint",
			"conformance/a UDP flow through a deleted service no longer reaches its endpoints",
		}},
		{"TCP: an entry that bypassed a service and", "internal/conntrack.comparison.makesStale", []string{
			"internal/conntrack.TestStaleConnectionsAreDeleted/a TCP connection started before its service existed",
			"internal/conntrack.TestStaleConnectionsAreDeleted/a TCP connection started before its service had an endpoint",
			"internal/conntrack.TestTCPConnectionStartedBeforeItsServiceIsEstablished",
		}},
		{"TCP: with reset, a connection to a lost", "internal/conntrack.verdict.isStale internal/conntrack.resetter.exchange", []string{
			"internal/conntrack.TestConnectionsToLostEndpointsAreReset",
			"internal/conntrack.TestOnlyServicesWithResetsLoseConnections",
		}},
		{"All other TCP entries, and all SCTP entries", "internal/conntrack.parseFlow", []string{
			"internal/conntrack.TestStaleConnectionsAreDeleted/TCP connections are kept",
			"conformance/established TCP connections continue when their endpoint or service is removed",
		}},
		{"A restart of the proxy checks all services", "internal/conntrack.queue.add internal/conntrack.verdict.isStale", []string{
			"internal/conntrack.TestStaleConnectionsAreDeleted",
			"conformance/flows and connections survive a restart",
		}},
	}},
	{"Health checks", []rule{
		{"For a service of type LoadBalancer with externalTrafficPolicy", "internal/healthport.Of", []string{
			"nodeview.TestHealthCheck/a load balancer with policy Local has a port",
			"nodeview.TestHealthCheck/a load balancer with policy Cluster has none",
			"nodeview.TestHealthCheck/services of other types have none",
		}},
		{"The answer counts the ready endpoints on this", "internal/healthport.Ready", []string{
			"nodeview.TestHealthCheck/distinct addresses of ready endpoints on this node are counted by family",
			"nodeview.TestHealthCheck/serving and terminating endpoints are not counted",
		}},
		{"For every path, the status is 200 if", "internal/healthcheck.answer.writeTo", []string{
			"internal/healthcheck.TestResponses",
			"conformance/a health-check node port reports the number of ready endpoints on this node",
		}},
		{"Of several services with the same health-check node", "internal/healthcheck.byAge", []string{
			"internal/healthcheck.TestOlderServiceKeepsHealthCheckPort",
		}},
		{"Changes and deletions close the old listener. A", "internal/healthcheck.server.arrange", []string{
			"internal/healthcheck.TestPortsFollowTheirServices",
			"internal/healthcheck.TestAddressesAreFollowed",
			"internal/healthcheck.TestFailedPortIsReportedAndRetried",
		}},
		{"The proxy's own /healthz depends on its syncs,", "health.isEligible", []string{
			"health.TestHealthResponses/the node is about to be deleted",
			"health.TestHealthResponses/the node is being deleted",
			"health.TestHealthResponses/the node does not exist",
			"health.TestHealthResponses/the source has not synced",
			"app.TestHealthOfClient",
		}},
	}},
	{"Services that are too large", []rule{
		{"If the last accepted Service object needs fewer", "cluster.State.settle", []string{
			"cluster.TestTooLargeServiceKeepsItsLastAcceptedVersion/ports too many are refused, and the last accepted version stays",
			"cluster.TestTooLargeServiceKeepsItsLastAcceptedVersion/the last accepted version gets the present slices",
		}},
		{"Of too many endpoints, the first ones are", "cluster.fitting", []string{
			"cluster.TestTooLargeServiceKeepsItsLastAcceptedVersion/of too many endpoints, the first ones are used",
		}},
		{"If not even one endpoint fits, and kpng has", "cluster.State.settle", []string{
			"cluster.TestTooLargeServiceKeepsItsLastAcceptedVersion/a service that never was small enough is absent, and others are served",
			"cluster.TestOrderOfListingDoesNotMatter",
		}},
		{"A new object of the same name does", "cluster.State.settle", []string{
			"cluster.TestTooLargeServiceKeepsItsLastAcceptedVersion/a new object of the same name does not get the state of the old one",
		}},
		{"A refused version claims no addresses.", "cluster.State.accept", []string{
			"cluster.TestRefusedVersionsHaveNoClaims",
		}},
		{"A service that is small enough again is", "cluster.State.settle", []string{
			"cluster.TestTooLargeServiceKeepsItsLastAcceptedVersion/a service that becomes small enough is served",
			"cluster.TestRefusedAndAcceptedServicesAgree",
		}},
		{"A client of a server also refuses a", "remote.entry.limit", []string{
			"remote.TestClientKeepsLastAcceptedView",
		}},
	}},
	{"Invalid fields", []rule{
		{"A report ends when the field is corrected", "cluster.State.forgetInvalid cluster.State.reason", []string{
			"cluster.TestInvalidFieldsAreReportedUntilTheyAreCorrected",
			"watcher/kube.TestInvalidFieldsAreInState",
		}},
		{"A report has at most 512 bytes of", "cluster.State.setInvalid", []string{
			"cluster.TestInvalidFieldsAreReportedUntilTheyAreCorrected/a long description is cut",
		}},
	}},
	{"Where kpng differs from kube-proxy", []rule{
		{"loadBalancerSourceRanges that are all of the other family", "", []string{
			"nodeview.TestSourceRanges/ranges of only the other family admit no source",
		}},
		{"Health checks, if slices have ports that the", "", []string{
			"nodeview.TestHealthCheck/distinct addresses of ready endpoints on this node are counted by family",
		}},
		{"One address and port in several slices", "", []string{
			"nodeview.TestDuplicates/then the entry of the smaller slice name",
		}},
		{"Services of more than a million elements", "", []string{
			"cluster.TestRefusingCostsNothing",
		}},
		{"Two services with the same address, protocol and", "", []string{
			"cluster.TestClaims/a cluster IP wins against the external IP of an older service",
		}},
		{"Slices with the label service.kubernetes.io/service-proxy-name", "", []string{
			"watcher.TestWantsSlice",
		}},
		{"The Node object is deleted", "", []string{
			"health.TestHealthResponses/the node does not exist",
		}},
		{"/healthz and /livez before the Node object is", "", []string{
			"app.TestHealthOfClient",
		}},
		{"Body of /healthz and /livez", "", []string{
			"health.TestResponseContainsReport",
		}},
		{"The node's addresses change, or with --node-pod-cidrs its", "", []string{
			"internal/nodeaddrs.TestAddressesAreFollowed",
			"backends/nftables.TestPodCIDRsFollowTheNode",
		}},
		{"Load-balancer IPs 0.0.0.0, :: and loopback addresses", "", []string{
			"watcher.TestServiceConversion/addresses that mean the host itself are omitted",
		}},
		{"Headless services with external IPs", "", []string{
			"nodeview.TestFrontends/a headless service has external IPs but no cluster IP",
		}},
		{"UDP flows to an endpoint that is ready", "", []string{
			"nodeview.TestDraining/ready and not serving, but not hinted for this zone",
		}},
		{"UDP flows through a node port", "", []string{
			"internal/conntrack.TestStaleConnectionsAreDeleted/node ports are matched by node address and port",
		}},
		{"UDP flows that started before their service had", "", []string{
			"internal/conntrack.TestLateReplyDoesNotKeepClientFromService",
		}},
		{"UDP flows through a deleted service", "", []string{
			"internal/conntrack.TestStaleConnectionsAreDeleted/the service is deleted",
		}},
		{"TCP connections that started before their service was", "", []string{
			"internal/conntrack.TestTCPConnectionStartedBeforeItsServiceIsEstablished",
		}},
		{"Forwarded packets that connection tracking cannot assign", "", []string{
			"backends/nftables.TestInvalidPacketsAreDropped",
			"backends/iptables.TestInvalidPacketsAreDropped",
		}},
		{"Forwarded packets that the proxy masquerades, and their", "", []string{
			"cmd/kpng.TestCheckSaysWhatModesDrop",
		}},
		{"Addresses of a ServiceCIDR that no service has", "", []string{
			"backends/nftables.TestUnallocatedClusterIPsAreDropped",
			"watcher/kube.TestServiceCIDRsAreFollowed",
			"conformance/traffic to a deleted service passes unchanged",
		}},
		{"A health-check node port that was in use", "", []string{
			"internal/healthcheck.TestFailedPortIsReportedAndRetried",
		}},
	}},
}
