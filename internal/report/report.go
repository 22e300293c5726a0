// SPDX-License-Identifier: Apache-2.0

// Package report has the JSON form of the status page. Package status writes it, and the
// command kpng status reads it. docs/reference/json.md has the comments of the fields.
package report

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// Report is the JSON response about the whole program.
type Report struct {
	Program    string    `json:"program,omitempty"` // version of the program, Go version, platform
	Time       time.Time `json:"time"`              // the present time of the program
	Node       string    `json:"node,omitempty"`    // the program's node; missing for a server
	Health     *Health   `json:"health,omitempty"`
	Problems   []string  `json:"problems"` // one sentence for each problem; at most 20 services with the same kind of problem are named
	Source     Source    `json:"source"`
	Sinks      []Sink    `json:"sinks,omitempty"`
	Clients    *Clients  `json:"clients,omitempty"`
	Changes    []Change  `json:"changes,omitempty"`    // at most 50, the latest first
	Services   []Service `json:"services,omitempty"`   // at most 1,000, by namespace and name
	Next       string    `json:"next,omitempty"`       // parameter `after` for the next services
	Stats      bool      `json:"stats,omitempty"`      // the program counts traffic (--stats)
	StatsError string    `json:"statsError,omitempty"` // why the traffic is missing, although the program counts it
}

// Health is the health of the program, see health.Report.
type Health struct {
	Synced       bool `json:"synced"`       // each sink has programmed all services, except failing ones
	Stuck        bool `json:"stuck"`        // a sink with pending work has made no progress for two minutes
	NodeEligible bool `json:"nodeEligible"` // load balancers may use the node
}

// Source is the state of the program's source.
type Source struct {
	Name       string    `json:"name,omitempty"`      // where the state comes from
	Synced     bool      `json:"synced"`              // the source has delivered the whole state once
	Stale      bool      `json:"stale"`               // the source lost its connection more than three minutes ago
	Error      string    `json:"error,omitempty"`     // why the source delivers nothing now, if that is known
	Revision   uint64    `json:"revision"`            // revision of the state; begins again after a restart
	LastChange time.Time `json:"lastChange,omitzero"` // when the state last changed
	Services   int       `json:"services"`            // services
	Slices     int       `json:"slices"`              // EndpointSlices; 0 for clients of a server
	Nodes      int       `json:"nodes"`               // Node objects; 0 for clients of a server
	Refused    int       `json:"refused"`             // services that are too large or have invalid fields
}

// Sink is the state of a sink, as in sink.Status.
type Sink struct {
	Name     string    `json:"name,omitempty"`    // the name of the sink
	Revision uint64    `json:"revision"`          // revision that it has programmed
	Passes   uint64    `json:"passes"`            // passes that delivered all services
	Syncs    uint64    `json:"syncs"`             // acknowledged syncs, also those with failed services
	LastPass time.Time `json:"lastPass,omitzero"` // the end of the last pass
	LastSync time.Time `json:"lastSync,omitzero"` // the end of the last acknowledged sync
	// When the sink last read a service or returned from a sync. While syncs fail as a
	// whole, neither counts.
	LastProgress    time.Time `json:"lastProgress,omitzero"`
	WaitingSince    time.Time `json:"waitingSince,omitzero"`     // the time since which work has waited
	SyncingSince    time.Time `json:"syncingSince,omitzero"`     // start of the running sync
	Error           string    `json:"error,omitempty"`           // error of the last sync that failed as a whole, or of the source
	Failures        int       `json:"failures,omitempty"`        // number of such errors in a row
	NextAttempt     time.Time `json:"nextAttempt,omitzero"`      // next retry
	NodeError       string    `json:"nodeError,omitempty"`       // why the sink refuses the Node object
	Pending         int       `json:"pending"`                   // services not acknowledged
	PendingServices []string  `json:"pendingServices,omitempty"` // the first 100, in the order of delivery
	Failing         int       `json:"failing"`                   // services that the sink fails to program
	FailingServices []Failure `json:"failingServices,omitempty"` // the first 1,000
}

// Failure is the failure of a service in a sink.
type Failure struct {
	Sink      string    `json:"sink,omitempty"` // the name of the sink; only in the report about one service
	Service   string    `json:"service"`        // namespace/name
	Error     string    `json:"error"`          // the error, at most 4 KB
	Failures  int       `json:"failures"`       // failures in a row
	NextRetry time.Time `json:"nextRetry"`      // when the driver tries again
}

// Clients summarizes the clients of a server.
type Clients struct {
	Streams       int      `json:"streams"`           // open streams of the server
	Nodes         int      `json:"nodes"`             // nodes of the clients
	Behind        int      `json:"behind"`            // streams that do not have all changes
	BehindSeconds float64  `json:"behindSeconds"`     // the largest behindSeconds of a stream
	Slowest       []Client `json:"slowest,omitempty"` // at most 50, the lowest revision first
}

// Client is a client of a server.
type Client struct {
	Node          string    `json:"node,omitempty"` // missing if the client reads the whole cluster
	Peer          string    `json:"peer"`           // certificate or address
	Since         time.Time `json:"since"`          // first request
	Revision      uint64    `json:"revision"`       // revision of the client; 0 if it has none
	BehindSeconds float64   `json:"behindSeconds"`  // age of the oldest change that the client lacks
}

// Change is the last change of a service.
type Change struct {
	Service  string    `json:"service"`           // namespace/name
	Revision uint64    `json:"revision"`          // revision of its last change
	Time     time.Time `json:"time,omitzero"`     // missing unless the change is among the last 256 changes
	Deleted  bool      `json:"deleted,omitempty"` // the service was deleted
}

// Service is a service in the node's view.
type Service struct {
	Service string          `json:"service"` // namespace/name
	Type    api.ServiceType `json:"type"`    // type of the Service
	// Cluster IPs, load-balancer IPs and external IPs: at most 100 and, for example, "7 more".
	Addresses []string `json:"addresses,omitempty"`
	Ports     []string `json:"ports,omitempty"`    // port/protocol, or all; at most 100
	Endpoints int      `json:"endpoints"`          // endpoints that the node uses
	Local     int      `json:"local"`              // number of these endpoints on the node
	Draining  int      `json:"draining,omitempty"` // endpoints that only keep existing connections
	Lost      int      `json:"lost,omitempty"`     // addresses and ports that another service owns
	// The present version, or a part of it, is refused. The other fields describe the
	// version that is served.
	Refused bool      `json:"refused,omitempty"`
	Failing bool      `json:"failing,omitempty"` // a sink fails to program it
	Traffic []Traffic `json:"traffic,omitempty"` // the first 100 service ports
}

// Traffic has the numbers of a service port, or of one of its endpoints, see backends.Stats.
type Traffic struct {
	TrafficID
	// New connections. This number and the next three are -1 if the dataplane does not
	// count them. They may begin at 0 again when the service or its endpoints change, and
	// when the program starts.
	Connections int64 `json:"connections"`
	Active      int64 `json:"active"`      // connections that are open
	FromClients int64 `json:"fromClients"` // bytes from clients, with or without headers, depending on the backend
	ToClients   int64 `json:"toClients"`   // bytes to clients
}

// TrafficID names a service port, or one of its endpoints.
type TrafficID struct {
	Port     string `json:"port,omitempty"`     // the name of the service port; missing if the port has no name
	Protocol string `json:"protocol,omitempty"` // TCP, UDP or SCTP; missing for an all-ports service
	// Address and port of the endpoint, in the object of one service. The port is 0 for an
	// all-ports service.
	Endpoint netip.AddrPort `json:"endpoint,omitzero"`
}

// Compare orders by port, protocol and endpoint.
func (id TrafficID) Compare(other TrafficID) int {
	return cmp.Or(cmp.Compare(id.Port, other.Port), cmp.Compare(id.Protocol, other.Protocol), id.Endpoint.Compare(other.Endpoint))
}

// Add adds the numbers of other.
func (t *Traffic) Add(other *Traffic) {
	add := func(to *int64, n int64) {
		if n >= 0 {
			*to = max(*to, 0) + n
		}
	}
	add(&t.Connections, other.Connections)
	add(&t.Active, other.Active)
	add(&t.FromClients, other.FromClients)
	add(&t.ToClients, other.ToClients)
}

// Row returns the port and the four numbers for people.
func (t *Traffic) Row() []string {
	port := t.Protocol
	switch {
	case t.Protocol == "":
		port = "all"
	case t.Port != "":
		port = t.Port + "/" + t.Protocol
	}
	row := []string{port}
	for _, n := range [...]int64{t.Connections, t.Active, t.FromClients, t.ToClients} {
		if n < 0 {
			row = append(row, "-")
		} else {
			row = append(row, strconv.FormatInt(n, 10))
		}
	}
	return row
}

// LocalEndpoints returns the number of endpoints of a view that are on its node.
func LocalEndpoints(view *api.View) int {
	n := 0
	for i := range view.Endpoints {
		if view.Endpoints[i].Local {
			n++
		}
	}
	return n
}

// ServiceReport is the JSON response for one service.
type ServiceReport struct {
	Service string `json:"service"` // namespace/name
	// An [explanation](#explanations), or null. In a client of a kpng server, it has no
	// reasons.
	Explanation *nodeview.Explanation `json:"explanation"`
	Text        string                `json:"text,omitempty"` // the explanation for people, as kpng explain prints it
	// Why the present version of the service, or a part of it, is refused. The
	// explanation describes the version that is served.
	Refused    string    `json:"refused,omitempty"`
	NodeError  string    `json:"nodeError,omitempty"`  // why the name of the node may be wrong
	Failures   []Failure `json:"failures,omitempty"`   // the failure of the service in each sink
	Stats      bool      `json:"stats,omitempty"`      // the program counts traffic (--stats)
	StatsError string    `json:"statsError,omitempty"` // why the traffic is missing, although the program counts it
	Traffic    []Traffic `json:"traffic,omitempty"`    // the traffic of each endpoint of each service port
}

// Number returns a number and the noun in the matching form.
func Number(n int, one, several string) string {
	if n != 1 {
		one = several
	}
	return fmt.Sprintf("%d %s", n, one)
}

// Age describes the time t relative to now in a few words.
func Age(now, t time.Time) string {
	d := now.Sub(t)
	switch {
	case t.IsZero():
		return "–"
	case d <= -time.Second:
		return "in " + (-d).Round(time.Second).String()
	case d < time.Second:
		return "now"
	case d < time.Hour:
		return d.Truncate(time.Second).String() + " ago"
	default:
		return t.UTC().Format(time.DateTime) + " UTC"
	}
}
