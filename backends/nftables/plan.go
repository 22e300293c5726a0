// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// outline says which lists a view needs, and which of them each frontend uses. It does not
// depend on the addresses of the service.
type outline struct {
	lists []plannedList
	// ports has the lists of each port and family, in the order of nodeview.Frontends, as
	// indexes into the field lists.
	ports []portLists
	index map[listGroup]int
	// perPort is true if service ports must not share a list.
	perPort bool
}

type portLists struct {
	port               *api.PortMapping
	family             api.Family
	internal, external int
}

// plannedList is a list that a view needs.
type plannedList struct {
	listKey
	name     string // of the service port
	traffic  nodeview.Traffic
	affinity uint16 // see timeoutOf
	// numbered is true if the endpoints have numbers: for session affinity, weights, or stable
	// hashing.
	numbered  bool
	algorithm api.Algorithm
	// shortcut is the index of the list for packets of this node, or -1.
	shortcut int
	// number is the number of the list in the table, or 0 until a frontend needs the list.
	number uint32
}

// listGroup has the properties in which two lists must agree so that they are one list.
type listGroup struct {
	family        api.Family
	local         bool
	protocol      api.Protocol
	port          int32 // 0 unless each service port has its own list: for session affinity and counters
	own, shortcut listContent
}

// listContent identifies the endpoints of a list. Two lists without endpoints count as
// equal if their ports have the same target port. So frontends keep their list when they
// lose all endpoints and get endpoints again.
type listContent struct {
	list       nodeview.ListID
	verdict    nodeview.Verdict
	targetPort int32
	targetName string
}

func contentOf(port *api.PortMapping, t *nodeview.Traffic) listContent {
	c := listContent{list: t.List, verdict: t.Verdict}
	if t.Verdict != nodeview.Forward && port != nil {
		c.targetPort, c.targetName = port.TargetPort, port.TargetPortName
	}
	return c
}

func outlineOf(view *api.View, perPort bool) *outline {
	o := &outline{perPort: perPort}
	if view == nil {
		return o
	}
	var affinity uint16
	if seconds := view.Service.AffinitySeconds; seconds != 0 {
		affinity = uint16(timeoutBits(time.Duration(seconds) * time.Second))
	}
	classes := slices.Collect(nodeview.Classes(view))
	for len(classes) > 0 {
		n := slices.IndexFunc(classes, func(c nodeview.Frontend) bool {
			return c.ServicePort != classes[0].ServicePort || c.Family != classes[0].Family
		})
		if n < 0 {
			n = len(classes)
		}
		o.addPort(view.Service, classes[:n], affinity)
		classes = classes[n:]
	}
	return o
}

// addPort adds the lists of a port and family. The port has these classes of frontends.
func (o *outline) addPort(svc *api.Service, classes []nodeview.Frontend, affinity uint16) {
	first, last := &classes[0], &classes[len(classes)-1]
	hasExternal := last.Kind != nodeview.ClusterIP
	internalLocal := first.Kind == nodeview.ClusterIP && svc.InternalTrafficToLocal
	externalLocal := hasExternal && last.Masquerade == nodeview.MasqueradeNode

	l := plannedList{listKey: listKey{family: first.Family}, affinity: affinity, algorithm: first.Algorithm, shortcut: -1}
	if first.ServicePort != nil {
		l.protocol, l.port, l.name = first.ServicePort.Protocol, first.ServicePort.Port, first.ServicePort.Name
	}
	cluster := -1
	if hasExternal || !internalLocal {
		l.traffic = last.Node // frontends with policy Cluster use the list of this node for all traffic
		cluster = o.add(l, first.ServicePort)
	}
	ports := portLists{first.ServicePort, first.Family, cluster, cluster}
	if internalLocal || externalLocal {
		l.local, l.traffic = true, first.Elsewhere
		if externalLocal {
			l.traffic, l.shortcut = last.Elsewhere, cluster
		}
		local := o.add(l, first.ServicePort)
		if internalLocal {
			ports.internal = local
		}
		if externalLocal {
			ports.external = local
		}
	}
	o.ports = append(o.ports, ports)
}

// add adds a list of a service port, unless an earlier port has the same list. It returns
// the index of the list.
func (o *outline) add(l plannedList, port *api.PortMapping) int {
	g := listGroup{family: l.family, local: l.local, protocol: l.protocol, own: contentOf(port, &l.traffic)}
	if l.affinity > 0 || o.perPort {
		g.port = l.port
	}
	if l.shortcut >= 0 {
		g.shortcut = contentOf(port, &o.lists[l.shortcut].traffic)
	}
	l.numbered = l.affinity > 0 || l.algorithm != api.Random || hasWeights(l.traffic.Endpoints)
	if i, ok := o.index[g]; ok {
		return i
	}
	if o.index == nil {
		o.index = map[listGroup]int{}
	}
	i := len(o.lists)
	o.index[g] = i
	o.lists = append(o.lists, l)
	return i
}

// setNumbers sets the numbers of the lists that exist in the table.
func (o *outline) setNumbers(existing *listSet) {
	for i := range o.lists {
		if l := existing.present(&o.lists[i]); l != nil {
			o.lists[i].number = l.number
		}
	}
}

// present returns the list that has the key of p and can have the endpoints of p, or nil.
func (s *listSet) present(p *plannedList) *list {
	if l := s.byKey(p.listKey); l != nil && isNumbered(l.number) == p.numbered {
		return l
	}
	return nil
}

// sameUse reports whether the frontends of two outlines use the same lists.
func (o *outline) sameUse(other *outline) bool {
	return slices.EqualFunc(o.ports, other.ports, func(a, b portLists) bool {
		return a.internal == b.internal && a.external == b.external
	}) && slices.EqualFunc(o.lists, other.lists, func(a, b plannedList) bool {
		return a.listKey == b.listKey && a.shortcut == b.shortcut && a.numbered == b.numbered
	})
}

// plan emits the elements that view needs, without the elements of its lists. If view is
// nil, plan emits nothing. It may emit an element of a shared map more than once. It emits
// all other elements only once. The argument lists is the outline of view. The function
// need is called before the first element of a frontend, with the index of its list. The
// function sources returns the number of a frontend's list of source ranges.
func plan(view *api.View, lists *outline, need func(list int, frontend *elementID) error, sources func(*nodeview.Frontend) uint32, emit func(element)) error {
	if view == nil {
		return nil
	}
	ports := lists.ports
	for f := range nodeview.Frontends(view) {
		for ports[0].port != f.ServicePort || ports[0].family != f.Family {
			ports = ports[1:]
		}
		if err := planFrontend(view, &f, lists, &ports[0], need, emit); err != nil {
			return err
		}
		if f.Sources.Restricted {
			emit(restrictedElement(matchOf(&f), &f, sources(&f)))
		}
	}
	for a := range view.Service.IPs.ClusterIPs.All() {
		emit(addressElement(kindClusterIPs, a))
	}
	return nil
}

func planFrontend(view *api.View, f *nodeview.Frontend, lists *outline, port *portLists, need func(int, *elementID) error, emit func(element)) error {
	i, handling := port.external, handlingOf(f.Masquerade)
	if f.Kind == nodeview.ClusterIP {
		i = port.internal
	}
	e, _ := frontendElement(mapID{kindFrontends, matchOf(f), f.Family}, f)
	if err := need(i, &e.elementID); err != nil {
		return err
	}
	e.value = numberValue(lists.lists[i].number | uint32(handling))
	e.text = comment(view, f)
	emit(e)
	return nil
}

func matchOf(f *nodeview.Frontend) match {
	switch {
	case f.Kind == nodeview.NodePort:
		return matchNodePort
	case f.Port == 0:
		return matchAddress
	default:
		return matchService
	}
}

// maxComment is the length of the longest comment that nft loads.
const maxComment = 127

// comment returns the name of the service port of f, cut off after maxComment octets.
func comment(view *api.View, f *nodeview.Frontend) string {
	s := view.Service.Namespace + "/" + view.Service.Name
	if f.ServicePort != nil && f.ServicePort.Name != "" {
		s += ":" + f.ServicePort.Name
	}
	return s[:min(len(s), maxComment)]
}
