// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/nodeview"
)

// frontendsOf returns a view's frontends as a message. The message contains each list of
// endpoints and each list of sources only once. It returns errTooLarge before it uses
// much more memory than maxObject.
func frontendsOf(v *api.View) (*localv1.ServiceFrontends, error) {
	w := &localv1.ServiceFrontends{Namespace: v.Service.Namespace, Name: v.Service.Name}
	size := 0 // a lower limit of the message's size, in bytes
	lists := map[nodeview.ListID]int32{}
	admitted := map[frontends.SourcesID]int32{}
	// addList returns the index of a new list in w.Lists.
	addList := func(endpoints []nodeview.Target) int32 {
		i := int32(len(w.Lists))
		if size += minTarget * len(endpoints); size <= maxObject {
			w.Lists = append(w.Lists, targetList(endpoints))
		}
		return i
	}
	traffic := func(t nodeview.Traffic) *localv1.Traffic {
		if t.Verdict != nodeview.Forward {
			return &localv1.Traffic{Verdict: localv1.Verdict(t.Verdict) + localv1.Verdict_Forward}
		}
		list, ok := lists[t.List]
		if !ok {
			list = addList(t.Endpoints)
			lists[t.List] = list
		}
		return &localv1.Traffic{Verdict: localv1.Verdict_Forward, List: list}
	}
	type rest struct {
		existing        nodeview.Existing
		elsewhere, node nodeview.ListID
	}
	kept := map[rest]int32{}
	keptContent := map[string]int32{"": 0}
	keep := func(f *nodeview.Frontend) int32 {
		k := rest{f.Existing, f.Elsewhere.List, f.Node.List}
		list, ok := kept[k]
		if !ok {
			all := f.Existing.Without(f.Elsewhere.Endpoints, f.Node.Endpoints)
			content := contentOf(all)
			if list, ok = keptContent[content]; !ok {
				list = addList(all) + 1
				if v.Service.ResetConnections && int(list) <= len(w.Lists) {
					for i, t := range w.Lists[list-1].Targets {
						t.Resets = f.Existing.Resets(all[i].AddrPort())
					}
				}
				keptContent[content] = list
			}
			kept[k] = list
		}
		return list
	}
	sources := func(f *nodeview.Frontend) int32 {
		id := frontends.SourcesOf(f)
		i, ok := admitted[id]
		if !ok {
			i = int32(len(w.Sources))
			admitted[id] = i
			size += minSource * len(f.Sources.Ranges)
			w.Sources = append(w.Sources, &localv1.Sources{
				SourceRanges: texts(f.Sources.Ranges, netip.Prefix.String),
				OwnSources:   texts(f.Sources.Own, netip.Addr.String),
			})
		}
		return i
	}
	for f := range nodeview.Frontends(v) {
		to := &localv1.Frontend{
			Kind:   localv1.FrontendKind(localv1.FrontendKind_value[string(f.Kind)]),
			Family: localv1.Family(f.Family), Protocol: localv1.Protocol(f.Protocol), Port: f.Port,
			Elsewhere: traffic(f.Elsewhere), Node: traffic(f.Node), Keep: keep(&f),
			Restricted:       f.Sources.Restricted,
			Masquerade:       localv1.Masquerade(localv1.Masquerade_value[string(f.Masquerade)]),
			AffinitySeconds:  int32(f.Affinity.Seconds()),
			Algorithm:        localv1.Algorithm(f.Algorithm),
			ResetConnections: v.Service.ResetConnections,
		}
		if f.Sources.Restricted {
			to.Sources = sources(&f)
		}
		if f.Addr.IsValid() {
			to.IP = f.Addr.String()
		}
		if f.ServicePort != nil {
			to.PortName = f.ServicePort.Name
		}
		w.Frontends = append(w.Frontends, to)
		if size += minFrontend; size > maxObject {
			return nil, errTooLarge
		}
	}
	return w, nil
}

// The minimum sizes of marshalled messages, in bytes.
const (
	minFrontend = 16
	minTarget   = 12
	minSource   = 6
)

// contentOf returns the addresses and ports of a list as a map key.
func contentOf(list []nodeview.Target) string {
	var content []byte
	for _, t := range list {
		content, _ = t.AddrPort().AppendBinary(content)
	}
	return string(content)
}

func targetList(list []nodeview.Target) *localv1.TargetList {
	w := &localv1.TargetList{Targets: make([]*localv1.Target, len(list))}
	for i, t := range list {
		w.Targets[i] = &localv1.Target{IP: t.Addr.String(), Port: t.Port, Local: t.Local, NodeName: t.NodeName, Weight: t.Weight}
	}
	return w
}

func texts[T any](list []T, text func(T) string) []string {
	out := make([]string, len(list))
	for i, v := range list {
		out[i] = text(v)
	}
	return out
}
